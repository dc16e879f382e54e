"""The sections of report.md on speed and on what the runs ran on."""

from collections import Counter
from collections.abc import Iterator, Mapping

from precexp.report.build import Report, mean_of, named_arms, timing
from precexp.report.tables import NOTHING, as_text, markdown_table, plural, short, whole


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
            for name, runs in named_arms(report)
        ],
    )
    yield ""
    yield "Means over the runs of an arm; they compare only on one machine with nothing else to do."


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
