"""python -m precexp.report DIR... [report.reference=LABEL] [report.margin=0.01]
       [report.metric=METRIC] [report.tuned=[KEY,...]] [KEY=VALUE[,VALUE...]] [--force]
       [--output DIR]

Rebuilds the report on recorded runs and sweeps, of one machine or several, from the records alone.

KEY=VALUE keeps the runs whose config has one of the values (train.lr=1e-3,3e-4), or that are of an
arm, precision or optim (precision=bf16_pure). --force compares runs that do not match, too, under a
banner that says so. METRIC is final_eval_loss, last_tenth_eval_loss, final_train_loss,
eval_bits_per_byte or eval_perplexity. report.tuned names keys, as [train.lr], whose values were
tried by every arm: each arm chooses on the lower half of the seeds and is compared on the upper.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from precexp.config import Metric, UserError, check_tuned, conf_dir
from precexp.record import read_record
from precexp.report import Report, build_report, print_report, write_report
from precexp.report.build import METRICS
from precexp.report.read import block, number

SETTINGS = ("report.reference", "report.margin", "report.metric", "report.tuned")
ALLOWED = "DIR, report.reference=LABEL, report.margin=NUMBER, report.metric=METRIC, "
ALLOWED += "report.tuned=[KEY,...], KEY=VALUE, --force, --output DIR"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a report compares, and how; as in the config."""

    reference: str | None
    margin: float
    metric: Metric
    tuned: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line; None where it says nothing."""

    directories: Sequence[Path]
    reference: str | None
    margin: float | None
    metric: Metric | None
    tuned: Sequence[str] | None
    filters: Mapping[str, str]
    force: bool
    output: Path | None


def main(argv: Sequence[str]) -> int:
    """Exit status 0 when the report was written, 2 with one line on stderr for a user's mistake."""
    if "--help" in argv or "-h" in argv:
        print(__doc__, end="")
        return 0
    try:
        arguments = parse_arguments(argv)
        report = report_for(arguments)
        write_report(report, arguments.output)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(report, Console(), arguments.output)
    return 0


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Raises UserError naming the first argument that is not allowed."""
    directories: list[Path] = []
    values: dict[str, str] = {}
    filters: dict[str, str] = {}
    force = False
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.partition("=")
        if key == "--output" or key in SETTINGS:
            if not equals and key == "--output" and rest:
                value = rest.pop(0)
            if not value:
                raise UserError(f"{key}: no value; allowed: {ALLOWED}")
            values[key] = value
        elif argument == "--force":
            force = True
        elif argument.startswith(("-", "report.")):
            raise UserError(f"{argument}: unknown argument; allowed: {ALLOWED}")
        elif equals and not Path(argument).exists():
            if key in filters:
                raise UserError(f"{key}: given twice; write {key}={filters[key]},{value}")
            filters[key] = value
        else:
            directories.append(Path(argument))
    if not directories:
        raise UserError(f"no directory given; allowed: {ALLOWED}")
    return Arguments(
        directories=directories,
        reference=values.get("report.reference"),
        margin=_margin(values["report.margin"]) if "report.margin" in values else None,
        metric=_metric(values["report.metric"]) if "report.metric" in values else None,
        tuned=_tuned(values["report.tuned"]) if "report.tuned" in values else None,
        filters=filters,
        force=force,
        output=Path(values["--output"]) if "--output" in values else None,
    )


def report_for(arguments: Arguments) -> Report:
    """The report asked for; what is not given is taken from the records. UserError as there."""
    recorded = recorded_settings(arguments.directories)
    return build_report(
        arguments.directories,
        reference=arguments.reference or recorded.reference,
        margin=recorded.margin if arguments.margin is None else arguments.margin,
        metric=arguments.metric or recorded.metric,
        tuned=recorded.tuned if arguments.tuned is None else arguments.tuned,
        filters=arguments.filters,
        force=arguments.force,
    )


def recorded_settings(directories: Sequence[Path]) -> Settings:
    """The `report` block of the first readable run, with what it lacks from config.yaml."""
    defaults = OmegaConf.load(conf_dir() / "config.yaml").report
    for settings in recorded_blocks(directories, "report"):
        margin, reference = number(settings, "margin"), settings.get("reference")
        if margin is not None:
            return Settings(
                reference=reference if isinstance(reference, str) else None,
                margin=margin,
                metric=_metric(str(settings.get("metric", defaults.metric))),
                tuned=_keys(settings.get("tuned", list(defaults.tuned))),
            )
    return Settings(
        reference=defaults.reference,
        margin=defaults.margin,
        metric=_metric(defaults.metric),
        tuned=_keys(list(defaults.tuned)),
    )


def recorded_blocks(directories: Sequence[Path], name: str) -> Iterator[Mapping[str, object]]:
    """The config's block of that name in each readable record; empty where it has none."""
    for directory in directories:
        for path in sorted(directory.rglob("run.json")):
            with suppress(UserError):  # build_report says what is wrong with it
                yield block(read_record(path).config, name)


def _metric(text: str) -> Metric:
    for metric in METRICS:
        if text == metric:
            return metric
    raise UserError(f"report.metric: {text!r} is not allowed; allowed: {', '.join(METRICS)}")


def _tuned(text: str) -> Sequence[str]:
    """`[train.lr,train.beta2]`, or the keys without the brackets."""
    return _keys([key.strip() for key in text.strip().strip("[]").split(",") if key.strip()])


def _keys(value: object) -> Sequence[str]:
    """Raises UserError naming the first key that cannot be tuned."""
    keys = tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    check_tuned(keys)
    return keys


def _margin(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"report.margin: {text!r} is not a number") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
