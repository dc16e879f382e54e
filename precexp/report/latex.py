"""arms.tex: the verdicts as a table to put in a paper; it needs the booktabs package."""

import re
from collections.abc import Iterator

from precexp.report.build import ArmResult, Group, Report, bytes_per_param, mean_of
from precexp.report.protocol import chosen_cell, chosen_head
from precexp.report.tables import NOTHING, fixed, percent, short, verdict_of
from precexp.report.verdict import banners

SPECIAL = re.compile(r"[&%$#_{}\\^~]")
NAMED = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
}


def render_latex(report: Report) -> str:
    """A tabular per group of matched runs."""
    head = [f"% {' '.join(line.split())}" for line in banners(report)]
    lines = [line for group in report.groups for line in _tabular(group, report)]
    return "\n".join([*head, *lines])


def _tabular(group: Group, report: Report) -> Iterator[str]:
    if group.title:
        yield f"% {group.title}"
    yield rf"\begin{{tabular}}{{l{'r' * len(chosen_head(report))}rrrrl}}"
    yield r"\toprule"
    head = ("arm", *chosen_head(report), "bytes/param", report.words, "difference")
    head += ("90 % interval", "verdict")
    yield " & ".join(map(_escape, head)) + r" \\"
    yield r"\midrule"
    for arm in group.arms:
        yield " & ".join(_cells(arm, group, report)) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"
    if group.margin is not None:
        margin = f"{fixed(group.margin)} {report.unit} ({percent(report.margin)})"
        yield f"% margin: {margin}, {max(arm.num_seeds for arm in group.arms)} seeds"
    yield ""


def _cells(arm: ArmResult, group: Group, report: Report) -> Iterator[str]:
    against = arm.comparison
    yield rf"\texttt{{{_escape(arm.label)}}}"
    if report.tuned:
        chosen = chosen_cell(arm, report)
        yield "--" if chosen == NOTHING else _escape(chosen)
    yield _number(short(mean_of(arm.runs, bytes_per_param, "total")))
    spread = "" if arm.loss_std is None else rf" $\pm$ {fixed(arm.loss_std)}"
    yield _number(fixed(arm.loss_mean)) + spread
    yield _number(fixed(against.difference if against else None, sign=True))
    if against is None or against.ci_low is None:
        yield "--"
    else:
        low, high = (fixed(end, sign=True) for end in (against.ci_low, against.ci_high))
        yield rf"$[{low}, {high}]$"
    yield _escape(verdict_of(arm, group) or "--")


def _number(text: str) -> str:
    return "--" if text == NOTHING else f"${text}$"


def _escape(text: str) -> str:
    return SPECIAL.sub(lambda found: NAMED.get(found[0], f"\\{found[0]}"), text)
