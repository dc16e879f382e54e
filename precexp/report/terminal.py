"""The report on a terminal: readable in 80 columns, and as plain text in a pipe."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precexp.report.build import (
    ArmResult,
    Group,
    Report,
    bytes_per_param,
    mean_of,
    problem,
    timing,
)
from precexp.report.numerics import numerics_lines
from precexp.report.protocol import places_of, tuning_lines
from precexp.report.tables import NOTHING, fixed, percent, plural, short, verdict_of, whole
from precexp.report.verdict import banners

OTHER_COLUMNS = 64  # the width of the verdict table without its first column
VERDICT_STYLES = {"equivalent": "green", "better": "cyan", "worse": "red", "undecided": "yellow"}


def print_report(report: Report, console: Console, output: Path | None = None) -> None:
    """Prints the verdicts, what went wrong and where `write_report` put the files."""
    for line in banners(report):
        console.print(Text(line.replace("**", "").replace("`", ""), style="bold"))
    for group in report.groups:
        width = max(16, console.width - OTHER_COLUMNS)
        console.print(_table(group, report, label_width=width))
        for line in (*_notes(group, report), *tuning_lines(group, report)):
            console.print(Text(line))
        console.print()
    for line in numerics_lines(report):
        console.print(Text(line))
    places = places_of(report)
    failures = [(run, text) for run in report.runs if (text := problem(run)) is not None]
    for run, text in failures:
        name = f"{run.label} seed {run.seed}" if run.label else str(run.directory)
        if (place := places.get(run.directory)) is not None and place.setting is not None:
            name += f" {place.setting}"
        console.print(Text.assemble((f"{name}: ", "bold"), (" ".join(text.split()), "red")))
    num_completed = sum(run.status == "completed" for run in report.runs)
    console.print(Text(f"{num_completed} of {plural(len(report.runs), 'run')} completed."))
    # soft_wrap: a path broken over two lines cannot be copied
    console.print(Text(f"Report: {(output or report.output) / 'report.html'}"), soft_wrap=True)


def _table(group: Group, report: Report, *, label_width: int) -> Table:
    table = Table(
        title=Text(group.title) if group.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("arm", no_wrap=True)
    words = "\n".join(textwrap.wrap(report.words, 12))
    for name in ("seeds", words, "difference\n90 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("bytes/\nparam", "tokens\nper s"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in group.arms:
        label = "\n".join(textwrap.wrap(arm.label, label_width))
        table.add_row(Text(label), *_numbers(arm, group))
    return table


def _numbers(arm: ArmResult, group: Group) -> Sequence[str | Text]:
    against = arm.comparison
    difference = NOTHING
    if against is not None and against.difference is not None:
        difference = fixed(against.difference, sign=True)
        if against.ci_low is not None:
            low, high = fixed(against.ci_low, 3, sign=True), fixed(against.ci_high, 3, sign=True)
            interval = f"[{low}, {high}]"
            difference += "\n" + "\n".join(textwrap.wrap(interval, 16))  # 80 columns have no more
    verdict = verdict_of(arm, group) or NOTHING
    seeds = str(arm.num_seeds) + (f"\n+{len(arm.diverged)} div." if arm.diverged else "")
    loss = fixed(arm.loss_mean) + (f"\n±{fixed(arm.loss_std)}" if arm.loss_std is not None else "")
    return (
        seeds,
        loss,
        Text(difference),
        Text(verdict, style=VERDICT_STYLES.get(verdict, "")),
        short(mean_of(arm.runs, bytes_per_param, "total")),
        _speed(mean_of(arm.runs, timing, "tokens_per_second")),
    )


def _speed(tokens_per_second: float | None) -> str:
    """At most six characters up to 10 M/s."""
    if tokens_per_second is not None and tokens_per_second >= 1e5:
        return f"{tokens_per_second / 1e3:,.0f}k"
    return whole(tokens_per_second)


def _notes(group: Group, report: Report) -> list[str]:
    """What the table cannot hold."""
    if group.reference is None:
        return ["The reference asked for has no run here: nothing is compared."]
    if len(group.arms) == 1:
        return ["Only one arm: there is nothing to compare it with."]
    notes = [
        f"{arm.label}: {arm.comparison.verdict}, {arm.comparison.reason}"
        for arm in group.arms
        if arm.comparison is not None and arm.comparison.verdict == "undecided"
    ]
    if group.margin is not None:
        size = f"{percent(report.margin)} of {group.reference}'s mean"
        notes.insert(0, f"Margin ±{fixed(group.margin)} {report.unit} ({size}).")
    refused = group.evidence.refused
    if refused:
        count = plural(len(refused), "run")
        notes.append(f"{count} left out: the evidence disagrees (see Matched check in the report).")
    return notes
