"""The sections of report.md on what the runs cost, lost and ran on."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from precexp.report.build import Report, bytes_per_param, mean_of, measured_bytes, timing
from precexp.report.read import ReportedRun, block
from precexp.report.tables import NOTHING, markdown_table, mib, plural, short, whole

# The roles of a census that are not optimizer states.
NOT_STATES = ("parameters", "gradients", "buffers", "forward", "loss", "step")
MEASURED = {  # key of memory.measured: its words
    "init_bytes": "allocated after init",
    "peak_bytes": "peak allocated",
    "allocated_bytes": "allocated at the end",
    "reserved_bytes": "reserved",
}


def memory_section(report: Report) -> Iterator[str]:
    """Bytes per parameter by category and what holds them; measured CUDA memory."""
    arms = _named_arms(report)
    yield "Bytes per parameter, counted in the running program (the census), and what holds them:"
    yield ""
    yield from markdown_table(
        ("arm", "weights", "gradients", "states", "total", "dtypes", "dtypes of states"),
        [_bytes_row(name, runs) for name, runs in arms],
    )
    yield ""
    if not any(measured_bytes(run, key) is not None for run in report.runs for key in MEASURED):
        yield "CUDA memory: not measured (no run was on a GPU)."
        return
    yield (
        "CUDA memory of the run as PyTorch's allocator counts it, in MiB = 2^20 bytes, mean over "
        "seeds (nvidia-smi shows the whole process, which is more):"
    )
    yield ""
    yield from markdown_table(
        ("arm", *MEASURED.values()),
        [
            (name, *(mib(mean_of(runs, measured_bytes, key)) for key in MEASURED))
            for name, runs in arms
        ],
    )


def _bytes_row(name: str, runs: Sequence[ReportedRun]) -> Sequence[str]:
    parts = ("weights", "gradients", "states", "total")
    dtypes = _dtypes(runs)
    states = [f"{role} {dtype}" for role, dtype in dtypes.items() if role not in NOT_STATES]
    others = [f"{role} {dtypes[role]}" for role in ("parameters", "gradients") if role in dtypes]
    return (
        name,
        *(short(mean_of(runs, bytes_per_param, part)) for part in parts),
        ", ".join(others) or NOTHING,
        ", ".join(states) or NOTHING,
    )


def _dtypes(runs: Sequence[ReportedRun]) -> dict[str, str]:
    """{role: its dtypes} over the censuses of the runs."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        tensors = block(vars(run.record), "census").get("tensors") if run.record else None
        for row in tensors if isinstance(tensors, list) else []:
            found.setdefault(str(row["role"]), {})[str(row["dtype"])] = None
    return {role: "+".join(dtypes) for role, dtypes in found.items()}


def speed_section(report: Report) -> Iterator[str]:
    """Tokens per second and seconds per step by arm."""
    yield from markdown_table(
        ("arm", "tokens/s", "median step, seconds"),
        [
            (
                name,
                whole(mean_of(runs, timing, "tokens_per_second")),
                short(mean_of(runs, timing, "step_seconds_median")),
            )
            for name, runs in _named_arms(report)
        ],
    )
    yield ""
    yield "Means over the runs of an arm; they compare only on one machine with nothing else to do."


def warnings_section(report: Report) -> Iterator[str]:
    """What precision lost, by arm and kind of warning; nothing if there is none."""
    rows: dict[tuple[str, str], list[Mapping[str, object]]] = {}
    for run in report.runs:
        for warning in run.record.warnings if run.record else []:
            rows.setdefault((run.label or "unknown", str(warning.get("code"))), []).append(warning)
    if rows:
        yield from markdown_table(
            ("arm", "code", "runs", "message", "value", "threshold", "remedy"),
            [
                (
                    f"`{label}`",
                    f"`{code}`",
                    str(len(found)),
                    *(_spelled(found[0].get(key)) for key in ("message", "value", "threshold")),
                    _spelled(found[0].get("remedy")),
                )
                for (label, code), found in rows.items()
            ],
        )


def environment_section(report: Report) -> Iterator[str]:
    """What the runs ran on, and in what they differ."""
    found: dict[str, Counter[str]] = {}
    for record in [run.record for run in report.runs if run.record]:
        for key, value in _flatten(record.environment):
            found.setdefault(key, Counter())[_spelled(value)] += 1
    differing = [key for key, values in found.items() if len(values) > 1]
    if differing:
        yield f"**Runs differ in {', '.join(f'`{key}`' for key in differing)}.**"
        yield ""
    yield from markdown_table(
        ("key", "value"), [(f"`{key}`", _counted(values)) for key, values in found.items()]
    )


def _counted(values: Counter[str]) -> str:
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({plural(count, 'run')})" for value, count in values.items())


def _named_arms(report: Report) -> list[tuple[str, Sequence[ReportedRun]]]:
    """Each arm of each group: its name in a table, and its runs."""
    return [
        (f"`{arm.label}`" + (f" ({group.title})" if group.title else ""), arm.runs)
        for group in report.groups
        for arm in group.arms
    ]


def _spelled(value: object) -> str:
    if value is None:
        return NOTHING
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
