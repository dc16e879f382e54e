"""The section of report.md with the verdicts: in words, and as a table."""

from collections.abc import Iterator, Sequence

from precexp.report.build import ArmResult, Group, Report, bytes_per_param, mean_of, timing
from precexp.report.hypotheses import LEVEL
from precexp.report.protocol import chosen_cell, chosen_head
from precexp.report.tables import (
    NOTHING,
    escape,
    fixed,
    heading,
    markdown_table,
    percent,
    plural,
    short,
    spell_interval,
    verdict_of,
    whole,
)

VERDICT_HEAD = (  # after arm, seeds and the metric
    "bits per byte",
    "difference",
    "90 % interval",
    "verdict",
    "bytes/param",
    "tokens/s",
)
PREPOSITIONS = {
    "equivalent": " to",
    "worse": " than",
    "better": " than",
    "undecided": " against",
}
RULE = (
    "Mean ± standard deviation over completed seeds; the difference is over the seeds that both "
    "completed. The verdict is read off the 90 % t-interval of the seed-paired differences to the "
    "reference: wholly inside ± margin is *equivalent*, wholly above *worse*, wholly below "
    "*better*, anything else *undecided*. Holm's correction over the arms, and the far tail where "
    f"the margin is small beside the noise, keep each kind of error at {percent(LEVEL)} over all "
    "arms, so that an interval that decides alone may not decide among several. One seed never "
    "decides. A run that diverged where the reference did not counts as a difference of plus "
    "infinity: its arm is never equivalent or better, and two of them on seeds that the reference "
    "completed make it worse."
)


def verdict_section(report: Report) -> Iterator[str]:
    not_completed = [run for run in report.runs if run.planned and run.status != "completed"]
    if not_completed:
        yield (
            f"**{plural(len(not_completed), 'planned run')} did not complete** "
            "(see [Runs & failures](#runs--failures))."
        )
        yield ""
    for line in banners(report):
        yield line
        yield ""
    if not report.groups:
        yield "Nothing was recorded that could be compared."
    if report.tuned:
        keys = ", ".join(f"`{key}`" for key in report.tuned)
        yield (
            f"Each arm is at the {keys} that suits it: chosen on one half of the seeds, compared "
            "on the other (see [Tuning](#tuning))."
        )
        yield ""
    for group in report.groups:
        yield from heading(group)
        yield from (f"- {sentence}" for sentence in _sentences(group, report))
        yield ""
        yield from markdown_table(
            ("arm", *chosen_head(report), "seeds", report.words, *VERDICT_HEAD),
            [_verdict_row(arm, group, report) for arm in group.arms],
        )
        yield ""
        if group.margin is not None:
            yield (
                f"Margin: ±{fixed(group.margin)} {report.unit}, {percent(report.margin)} of the "
                f"reference's mean.{_noise(group, report)}"
            )
            yield ""
    yield RULE


def banners(report: Report) -> Iterator[str]:
    """What a reader must know before any number, a line each."""
    if report.forced:
        keys = [f"`{key}` ({' | '.join(found)})" for key, found in report.differing.items()]
        yield (
            "**Forced: these runs do not match.** They differ in "
            f"{escape(', '.join(keys)) or 'what their match_key covers'}. No verdict below is one "
            "on precision alone."
        )
    if report.filters:
        filters = ", ".join(f"`{key}={value}`" for key, value in report.filters.items())
        without = ""
        if report.num_without_record:
            without = f", {report.num_without_record} of them for want of a record"
        count = len(report.runs)
        yield (
            f"Only runs with {escape(filters)}: {count} of {count + report.num_filtered}; "
            f"{report.num_filtered} are left out{without}."
        )


def _noise(group: Group, report: Report) -> str:
    if group.noise is None:
        return ""
    return (
        f" From seed to seed `{group.reference}` itself varies by {fixed(group.noise)} "
        "(standard deviation)."
    )


def _sentences(group: Group, report: Report) -> Iterator[str]:
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
            gap = f" {fixed(against.difference, sign=True)} {report.unit}"
            gap += f" over {plural(against.num_pairs, 'seed')};"
        verdict = f"**{against.verdict}**{PREPOSITIONS[against.verdict]} `{reference.label}`"
        yield f"`{arm.label}` is {verdict}:{gap} {against.reason}.{_doubts(arm, group)}"
    lost = sorted(reference.diverged.keys() - reference.compared.keys())
    if lost and others:
        seeds = f"{'seed' if len(lost) == 1 else 'seeds'} {', '.join(map(str, lost))}"
        yield f"The reference `{reference.label}` diverged on {seeds}: nothing is compared there."


def _doubts(arm: ArmResult, group: Group) -> str:
    """What the matched check could not see of the arm."""
    unseen = [line for line in group.evidence.unverified if line.startswith(f"{arm.label}, seed ")]
    return " Not all of its runs could be checked to match (see Matched check)." if unseen else ""


def _verdict_row(arm: ArmResult, group: Group, report: Report) -> Sequence[str]:
    against = arm.comparison
    return (
        f"`{arm.label}`",
        *((chosen_cell(arm, report),) if report.tuned else ()),
        _seeds(arm),
        _spread(arm),
        fixed(arm.bits_per_byte),
        fixed(against.difference if against else None, sign=True),
        spell_interval(against.ci_low, against.ci_high) if against else NOTHING,
        verdict_of(arm, group) or NOTHING,
        short(mean_of(arm.runs, bytes_per_param, "total")),
        whole(mean_of(arm.runs, timing, "tokens_per_second")),
    )


def _spread(arm: ArmResult) -> str:
    """The mean final eval loss of the arm, with the standard deviation where there is one."""
    if arm.loss_mean is None or arm.loss_std is None:
        return fixed(arm.loss_mean)
    return f"{fixed(arm.loss_mean)} ± {fixed(arm.loss_std)}"


def _seeds(arm: ArmResult) -> str:
    return str(arm.num_seeds) + (f" (+ {len(arm.diverged)} diverged)" if arm.diverged else "")
