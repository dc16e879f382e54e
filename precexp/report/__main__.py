"""python -m precexp.report DIR... [report.reference=LABEL] [report.margin=0.01] [--output DIR]

Rebuilds the report on recorded runs and sweeps from their records alone.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from precexp.config import UserError, conf_dir
from precexp.record import read_record
from precexp.report import build_report, print_report, write_report
from precexp.report.read import block, number

ALLOWED = "DIR, report.reference=LABEL, report.margin=NUMBER, --output DIR"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line; None where it says nothing."""

    directories: Sequence[Path]
    reference: str | None
    margin: float | None
    output: Path | None


def main(argv: Sequence[str]) -> int:
    """Exit status 0 when the report was written, 2 with one line on stderr for a user's mistake."""
    if "--help" in argv or "-h" in argv:
        print(__doc__, end="")
        return 0
    try:
        arguments = parse_arguments(argv)
        reference, margin = recorded_settings(arguments.directories)
        report = build_report(
            arguments.directories,
            reference=arguments.reference or reference,
            margin=margin if arguments.margin is None else arguments.margin,
        )
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
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.partition("=")
        if key in ("--output", "report.reference", "report.margin"):
            if not equals and key == "--output" and rest:
                value = rest.pop(0)
            if not value:
                raise UserError(f"{key}: no value; allowed: {ALLOWED}")
            values[key] = value
        elif argument.startswith("-") or (equals and not Path(argument).exists()):
            raise UserError(f"{argument}: unknown argument; allowed: {ALLOWED}")
        else:
            directories.append(Path(argument))
    if not directories:
        raise UserError(f"no directory given; allowed: {ALLOWED}")
    return Arguments(
        directories=directories,
        reference=values.get("report.reference"),
        margin=_margin(values["report.margin"]) if "report.margin" in values else None,
        output=Path(values["--output"]) if "--output" in values else None,
    )


def recorded_settings(directories: Sequence[Path]) -> tuple[str | None, float]:
    """report.reference and report.margin of the first readable run, else those of config.yaml."""
    for directory in directories:
        for path in sorted(directory.rglob("run.json")):
            try:
                settings = block(read_record(path).config, "report")
            except UserError:
                continue  # build_report says what is wrong with it
            margin, reference = number(settings, "margin"), settings.get("reference")
            if margin is not None:
                return reference if isinstance(reference, str) else None, margin
    defaults = OmegaConf.load(conf_dir() / "config.yaml").report
    return defaults.reference, defaults.margin


def _margin(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"report.margin: {text!r} is not a number") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
