"""report.md: the whole report as one page that GitHub renders."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from precexp.report.build import (
    ArmResult,
    Group,
    Report,
    bytes_per_param,
    mean_of,
    problem,
    result,
    timing,
)
from precexp.report.costs import (
    environment_section,
    speed_section,
    warnings_section,
)
from precexp.report.memory import memory_section
from precexp.report.read import ReportedRun
from precexp.report.statistics import LEVEL
from precexp.report.tables import (
    NOTHING,
    escape,
    fixed,
    markdown_table,
    percent,
    plural,
    short,
    verdict_of,
    whole,
)

VERDICT_HEAD = (
    "arm",
    "seeds",
    "final eval loss",
    "bits per byte",
    "difference",
    "90 % interval",
    "verdict",
    "bytes/param",
    "tokens/s",
)
RUN_HEAD = (
    "arm",
    "seed",
    "status",
    "steps",
    "applied",
    "skipped",
    "tokens",
    "eval loss",
    "train loss",
    "perplexity",
    "init_hash",
    "data_hash",
    "run",
)


def render_markdown(report: Report, output: Path) -> str:
    """The text of report.md; links to runs are relative to `output`, where it will lie."""
    parts = (f"## {title}\n\n{body}\n" for title, body in sections(report, output).items())
    return "\n".join((f"# {title_of(report)}\n", *parts))


def title_of(report: Report) -> str:
    """What the report is about, in a line."""
    names = ", ".join(directory.resolve().name for directory in report.directories)
    return f"{names}: precision report"


def sections(report: Report, output: Path) -> dict[str, str]:
    """The sections of the report that have something to say: {title: Markdown}."""
    found = {
        "Verdict": _verdict(report),
        "Matched check": _matched(report),
        "Loss curves": _curves(),
        "Memory & bytes per parameter": memory_section(report),
        "Speed": speed_section(report),
        "Numerics warnings": warnings_section(report),
        "Runs & failures": _runs(report, output),
        "Environment": environment_section(report),
    }
    bodies = {title: "\n".join(lines).strip() for title, lines in found.items()}
    return {title: body for title, body in bodies.items() if body}


def _verdict(report: Report) -> Iterator[str]:
    not_completed = [run for run in report.runs if run.planned and run.status != "completed"]
    if not_completed:
        yield (
            f"**{plural(len(not_completed), 'planned run')} did not complete** "
            "(see [Runs & failures](#runs--failures))."
        )
        yield ""
    if not report.groups:
        yield "Nothing was recorded that could be compared."
    for group in report.groups:
        yield from _heading(group)
        yield from (f"- {sentence}" for sentence in _sentences(group))
        yield ""
        yield from markdown_table(
            VERDICT_HEAD,
            [_verdict_row(arm, group) for arm in group.arms],
        )
        yield ""
        if group.margin is not None:
            yield (
                f"Margin: ±{fixed(group.margin)} nats per token, {percent(report.margin)} of the "
                "reference's mean."
            )
            yield ""
    yield RULE


def _sentences(group: Group) -> Iterator[str]:
    """What the table says, in words."""
    if group.reference is None:
        yield "The reference asked for has no run here, so nothing is compared."
        return
    reference, *others = group.arms
    if not others:
        yield f"Only one arm, `{reference.label}`: there is nothing to compare it with."
    elif group.margin is None:
        yield f"The reference `{reference.label}` has no completed run to compare with."
    for arm in others:
        against = arm.comparison
        assert against is not None
        gap = ""
        if against.difference is not None:
            gap = f" {fixed(against.difference, sign=True)} nats per token"
            gap += f" over {plural(against.num_pairs, 'seed')};"
        verdict = f"**{against.verdict}**{PREPOSITIONS[against.verdict]} `{reference.label}`"
        yield f"`{arm.label}` is {verdict}:{gap} {against.reason}."


def _verdict_row(arm: ArmResult, group: Group) -> Sequence[str]:
    against = arm.comparison
    interval = NOTHING
    if against is not None and against.ci_low is not None:
        interval = f"{fixed(against.ci_low, sign=True)} to {fixed(against.ci_high, sign=True)}"
    return (
        f"`{arm.label}`",
        _seeds(arm),
        _spread(arm),
        fixed(arm.bits_per_byte),
        fixed(against.difference if against else None, sign=True),
        interval,
        verdict_of(arm, group) or NOTHING,
        short(mean_of(arm.runs, bytes_per_param, "total")),
        whole(mean_of(arm.runs, timing, "tokens_per_second")),
    )


PREPOSITIONS = {
    "equivalent": " to",
    "worse": " than",
    "better": " than",
    "undecided": " against",
}
RULE = (
    "Losses in nats per token: mean ± standard deviation over completed seeds; the difference is "
    "over the seeds that both completed. The verdict is read off the 90 % t-interval of the "
    "seed-paired differences to the reference: wholly inside ± margin is *equivalent*, wholly "
    "above *worse*, wholly below *better*, anything else *undecided*. Holm's correction keeps each "
    f"kind of error at {percent(LEVEL)} over all arms, so that an interval that decides alone may "
    "not decide among several. One seed never decides. An arm with a diverged seed is never "
    "equivalent or better; it is worse if its other seeds say so, or if it completed none and "
    "diverged on two or more seeds that the reference completed."
)


def _matched(report: Report) -> Iterator[str]:
    if len(report.groups) > 1:
        yield (
            f"These runs fall into {len(report.groups)} groups that are not compared with each "
            "other, because values differ that an arm may not change:"
        )
        yield ""
        yield from markdown_table(
            ("key", *(f"group {i + 1}" for i in range(len(report.groups)))),
            [(f"`{key}`", *values) for key, values in report.differing.items()],
        )
        yield ""
    for group in report.groups:
        yield from _heading(group)
        yield from (f"- {line}" for line in _evidence(group))
        yield ""


def _evidence(group: Group) -> Iterator[str]:
    evidence = group.evidence
    seeds = {run.seed for arm in group.arms for run in arm.runs if run.record is not None}
    yield (
        f"{plural(len(group.arms), 'arm')}, {plural(len(seeds), 'seed')}, one `match_key` "
        f"(`{group.match_key[:8]}`): model, data, schedule and every other value are the same."
    )
    if evidence.num_checked:
        yield (
            f"{plural(evidence.num_checked, 'run')} checked against another arm's run of the same "
            "seed: the same initial weights (`init_hash`), and the same tokens served "
            "(`data_hash_at`) up to the last evaluation that both have."
        )
    for reason in evidence.refused.values():
        yield f"**Refused**: {escape(reason)}. It is in no statistic and no curve."
    for line in evidence.unverified:
        yield f"Not verified: {escape(line)}."
    if evidence.dropout:
        yield (
            f"**Dropout is {evidence.dropout:g}**: masks cannot match across dtypes, so the arms "
            "match in distribution only."
        )
    for arm in group.arms:
        repeats = [
            run
            for run in arm.runs
            if run.status == "completed"
            and run.directory not in evidence.refused
            and run.seed is not None
            and arm.compared.get(run.seed, run) is not run
        ]
        for run in repeats:
            yield f"`{arm.label}`, seed {run.seed}, is there more than once; the first one counts."


def _curves() -> Iterator[str]:
    yield "![Loss by arm, and the difference to the reference](loss_curves.svg)"
    yield ""
    yield (
        "Lines are means over the completed seeds, bands reach from the least to the greatest; a "
        "run that did not complete is drawn alone, dashed, to a cross (diverged) or a ring."
    )


def _runs(report: Report, output: Path) -> Iterator[str]:
    names = {
        run.directory: f"`{arm.label}`" + (f" ({group.title})" if group.title else "")
        for group in report.groups
        for arm in group.arms
        for run in arm.runs
    }
    failures = [(run, text) for run in report.runs if (text := problem(run)) is not None]
    for run, text in failures:
        name = names.get(run.directory) or f"`{run.label or run.directory}`"
        seed = "" if run.seed is None else f", seed {run.seed}"
        yield f"- **{name}{seed}**: {escape(text)}"
    if failures:
        yield ""
    else:
        yield f"All {plural(len(report.runs), 'run')} completed."
        yield ""
    yield from markdown_table(
        RUN_HEAD,
        [
            (names.get(run.directory) or f"`{run.label or 'unknown'}`", *_run_cells(run, output))
            for run in report.runs
        ],
    )
    notices = Counter(text for run in report.runs if run.record for text in run.record.notices)
    if notices:
        yield ""
        yield "### Notices"
        yield ""
        yield from (f"- {escape(text)} ({plural(count, 'run')})" for text, count in notices.items())


def _run_cells(run: ReportedRun, output: Path) -> Sequence[str]:
    evidence = run.record.evidence if run.record else {}
    link = Path(os.path.relpath(run.directory.resolve(), output.resolve())).as_posix()
    return (
        NOTHING if run.seed is None else str(run.seed),
        "incomplete" if run.status == "running" else run.status,
        whole(result(run, "steps")),
        whole(result(run, "applied_steps")),
        whole(result(run, "skipped_steps")),
        whole(result(run, "tokens")),
        fixed(result(run, "final_eval_loss")),
        fixed(result(run, "final_train_loss")),
        fixed(result(run, "eval_perplexity"), 2),
        str(evidence.get("init_hash") or NOTHING)[:8],
        str(evidence.get("data_hash") or NOTHING)[:8],
        f"[record]({link.replace(' ', '%20')})" if run.status != "missing" else NOTHING,
    )


def _heading(group: Group) -> Iterator[str]:
    if group.title:
        yield f"### {escape(group.title)}"
        yield ""


def _spread(arm: ArmResult) -> str:
    """The mean final eval loss of the arm, with the standard deviation where there is one."""
    if arm.loss_mean is None or arm.loss_std is None:
        return fixed(arm.loss_mean)
    return f"{fixed(arm.loss_mean)} ± {fixed(arm.loss_std)}"


def _seeds(arm: ArmResult) -> str:
    return str(arm.num_seeds) + (f" (+ {len(arm.diverged)} diverged)" if arm.diverged else "")
