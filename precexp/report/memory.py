"""The section of report.md on memory: planned, measured, and what it is made of."""

from collections.abc import Iterator, Mapping, Sequence

from precexp.report.build import (
    Report,
    bytes_per_param,
    mean_of,
    measured_bytes,
    named_arms,
    plan_of,
)
from precexp.report.read import ReportedRun, block, number
from precexp.report.tables import NOTHING, markdown_table, mib, short

# The roles of a census that are not optimizer states.
NOT_STATES = ("parameters", "gradients", "buffers", "forward", "loss", "step")
CATEGORIES = {  # key of memory.planned and memory.measured: its words
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "saved activations",
    "autocast_copies": "autocast copies",
    "loss": "loss and logits",
    "inputs": "inputs",
    "temporaries": "temporaries",
    "buffers": "buffers",
    "unattributed": "unattributed",
}
MOMENTS = {  # key of memory.measured: its words
    "init_bytes": "init",
    "train_alloc_delta_bytes": "train alloc delta",
    "train_peaked_delta_bytes": "train peaked delta",
    "peak_bytes": "total (peak)",
    "run_peak_bytes": "peak of the whole run",
    "reserved_bytes": "reserved",
    "process_bytes": "process",
}


def memory_section(report: Report) -> Iterator[str]:
    """Bytes per parameter, planned and measured peaks, and what they are made of."""
    arms = named_arms(report)
    yield "Bytes per parameter, counted in the running program (the census), and what holds them:"
    yield ""
    yield from markdown_table(
        ("arm", "weights", "gradients", "states", "total", "dtypes", "dtypes of states"),
        [_bytes_row(name, runs) for name, runs in arms],
    )
    yield ""
    if not any(plan_of(runs) or _measured(runs, "peak_bytes") for _, runs in arms):
        yield "Memory of a training step: not measured."
        return
    yield "Peak of a training step, allocated, in MiB = 2^20 bytes:"
    yield ""
    yield from markdown_table(
        ("arm", "planned", "measured", "measured - planned", "against the reference"),
        list(_peak_rows(report)),
    )
    yield ""
    yield (
        "*Planned*: the step on tensors without memory, for the run's own device. *Measured*: "
        "what torch's allocator handed out in a step after the last one, outside every timing, "
        "mean over seeds."
    )
    yield ""
    yield from _advice(arms)
    if any(_categories(runs) for _, runs in arms):
        yield "![memory](memory.svg)"
        yield ""
        yield "What the peak is made of, in MiB (measured where it was, else planned):"
        yield ""
        yield from markdown_table(
            ("arm", *CATEGORIES.values()),
            [
                (name, *(_cell((_categories(runs) or {}).get(key)) for key in CATEGORIES))
                for name, runs in arms
            ],
        )
        yield ""
    yield "In the words of the experiment that began this, in MiB:"
    yield ""
    yield from markdown_table(
        ("arm", *MOMENTS.values()),
        [(name, *(_cell(_measured(runs, key)) for key in MOMENTS)) for name, runs in arms],
    )
    yield ""
    yield (
        "*Allocated* is what the allocator handed out: *init* the model as placed, *alloc delta* "
        "what stays allocated between steps beyond that (the optimizer's states), *peaked delta* "
        "how far a step rises above. *Reserved* is what the caching allocator holds, *process* "
        "what nvidia-smi shows; both are measured on CUDA alone."
    )


def peak_categories(report: Report) -> dict[str, Mapping[str, float]]:
    """What the figure shows: by arm, bytes by category at the peak."""
    return {
        name.replace("`", ""): found
        for name, runs in named_arms(report)
        if (found := _categories(runs))
    }


def _peak_rows(report: Report) -> Iterator[Sequence[str]]:
    for group in report.groups:
        reference = next((arm.runs for arm in group.arms if arm.label == group.reference), ())
        for name, runs in named_arms(report, group):
            planned, measured = _planned(runs, "peak_bytes"), _measured(runs, "peak_bytes")
            residual = NOTHING
            if planned and measured:
                residual = f"{100 * (measured / planned - 1):+.2f} %"
            saving = NOTHING
            for peak_of in (_measured, _planned):
                own, other = peak_of(runs, "peak_bytes"), peak_of(reference, "peak_bytes")
                if own and other:
                    saving = f"{100 * (own / other - 1):+.1f} %"
                    break
            yield name, _cell(planned), _cell(measured), residual, saving


def _advice(arms: Sequence[tuple[str, Sequence[ReportedRun]]]) -> Iterator[str]:
    """What dominates each arm's peak, and what would lower it."""
    for name, runs in arms:
        found = _categories(runs)
        if found is None:
            continue
        largest, num_bytes = max(found.items(), key=lambda item: item[1])
        share = num_bytes / sum(found.values())
        text = f"- {name}: {CATEGORIES[largest]} are {100 * share:.0f} % of the peak"
        ways = (plan_of(runs) or {}).get("ways_out")
        for way in ways if isinstance(ways, list) else []:
            text += f"; `{way['overrides']}` would take {mib(way['saved_bytes'])} MiB off it"
        yield f"{text}."
    yield ""


def _categories(runs: Sequence[ReportedRun]) -> dict[str, float] | None:
    """Bytes by category at the peak: measured, else planned."""
    for run in runs:
        memory = run.record.memory if run.record is not None else None
        found = block(block(memory, "measured"), "categories")
        if found:
            return {key: number(found, key) or 0 for key in CATEGORIES if key in found}
    planned = plan_of(runs)
    found = block(planned, "categories") if planned else {}
    return {key: number(found, key) or 0 for key in CATEGORIES if key in found} or None


def _planned(runs: Sequence[ReportedRun], key: str) -> float | None:
    planned = plan_of(runs)
    return number(planned, key) if planned else None


def _measured(runs: Sequence[ReportedRun], key: str) -> float | None:
    return mean_of(runs, measured_bytes, key)


def _cell(num_bytes: float | None) -> str:
    return NOTHING if num_bytes is None else mib(num_bytes)


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
