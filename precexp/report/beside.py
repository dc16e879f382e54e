"""The section of report.md on what stands beside the verdict and decides nothing."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from precexp.report.build import ArmResult, Group, Report, mean_of, metric_of, result
from precexp.report.tables import (
    NOTHING,
    fixed,
    heading,
    link_to,
    markdown_table,
    short,
    spell_interval,
    whole,
)

BESIDE_HEAD = (
    "arm",
    "last 10 %: difference",
    "90 % interval",
    "permutation p",
    "reached the reference's loss",
    "tokens to it",
    "seconds to it",
    "applied steps",
    "skipped steps",
)
BESIDE = (
    "These decide nothing. *Last 10 %*: the difference in the mean over the last 10 % of the "
    "evaluations. *Permutation p*: of the exact paired test that arm and reference are the same. "
    "*Tokens* and *seconds* (of training) until an evaluation is not above the reference's final "
    "eval loss of the same seed, mean over seeds; *never* if one of them does not reach it. A "
    "skipped step is one whose fp16 gradients overflowed; its tokens and its place in the schedule "
    "are used up as in every other recipe."
)


def beside_section(report: Report, output: Path) -> Iterator[str]:
    """Numbers that decide nothing: other ways to look at the same runs."""
    for group in report.groups:
        if group.reference is None or len(group.arms) == 1:
            continue
        yield from heading(group)
        yield from markdown_table(BESIDE_HEAD, [_beside_row(arm) for arm in group.arms])
        yield ""
        yield from _seed_table(group, report, output)
        yield ""
    yield BESIDE


def _beside_row(arm: ArmResult) -> Sequence[str]:
    against, late, reach = arm.comparison, arm.late, arm.reach
    return (
        f"`{arm.label}`",
        fixed(late.mean if late else None, sign=True),
        spell_interval(late.low, late.high) if late else NOTHING,
        fixed(against.permutation_p if against else None, 3),
        f"{reach.num_reached} of {reach.num_seeds}" if reach else NOTHING,
        _amount(reach.tokens if reach else None),
        _amount(reach.seconds if reach else None),
        whole(mean_of(arm.compared.values(), result, "applied_steps")),
        whole(mean_of(arm.compared.values(), result, "skipped_steps")),
    )


def _amount(value: float | None) -> str:
    if value is not None and value < 10:
        return short(value)
    return "never" if value == math.inf else whole(value)


def _seed_table(group: Group, report: Report, output: Path) -> Iterator[str]:
    """What is compared, run by run; each number leads to its record."""
    runs = {(arm.label, run.seed): run for arm in group.arms for run in reversed(arm.judged)}
    seeds = sorted({seed for _, seed in runs if seed is not None})

    def cell(label: str, seed: int) -> str:
        run = runs.get((label, seed))
        if run is None or run.status == "missing":
            return NOTHING
        value = metric_of(run, report.metric) if run.status == "completed" else None
        return link_to(run.directory, output, run.status if value is None else fixed(value))

    yield from markdown_table(
        (f"seed: {report.words}", *(f"`{arm.label}`" for arm in group.arms)),
        [(str(seed), *(cell(arm.label, seed) for arm in group.arms)) for seed in seeds],
    )
