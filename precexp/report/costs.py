"""The sections of report.md on speed and on what the runs ran on."""

from collections import Counter
from collections.abc import Iterator, Mapping

from precexp.report.build import Report, mean_of, named_arms, timing
from precexp.report.tables import NOTHING, as_text, markdown_table, percent, plural, short, whole


def speed_section(report: Report) -> Iterator[str]:
    """Tokens per second, seconds per step and, where it is known, what part of the peak, by arm."""
    columns = [
        ("tokens/s", "tokens_per_second", whole),
        ("median step, seconds", "step_seconds_median", short),
    ]
    if any(timing(run, "model_flop_utilisation") is not None for run in report.runs):
        columns.append(("of the GPU's peak (MFU)", "model_flop_utilisation", _share))
    yield from markdown_table(
        ("arm", *(title for title, _, _ in columns)),
        [
            (name, *(spell(mean_of(runs, timing, key)) for _, key, spell in columns))
            for name, runs in named_arms(report)
        ],
    )
    yield ""
    yield "Means over the runs of an arm; they compare only on one machine with nothing else to do."


def _share(value: float | None) -> str:
    return NOTHING if value is None else percent(value)


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


def _spelled(value: object) -> str:
    if value is None:
        return NOTHING
    return f"{value:.4g}" if isinstance(value, float) else as_text(str(value))


def _flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
