"""What experiment=rounding answers: its arms, and contrasts between two of them, from the records.

An arm is called by its choice of conf/rounding. A contrast is the seed-paired difference of two
arms, with the interval and the verdict of a report whose only two arms these were; each question is
one of its own, so no correction over them is made. What else is said is what the probes measured.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.markdown import Markdown

from precexp.cli import compose
from precexp.config import UserError, conf_dir
from precexp.report.__main__ import recorded_settings
from precexp.report.build import (
    ArmResult,
    Group,
    Report,
    build_report,
    bytes_per_param,
    losses_of,
    mean_of,
)
from precexp.report.numerics import findings
from precexp.report.probes import ArmProbes, probed_arms
from precexp.report.statistics import compare_arms
from precexp.report.tables import (
    NOTHING,
    fixed,
    markdown_table,
    percent,
    short,
    spell_interval,
    verdict_of,
)

REFERENCE = "master"
BEGIN, END = "<!-- by precexp.bench rounding -->\n", "<!-- end -->\n"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What people ask, and the two arms that differ in nothing else."""

    words: str
    arm: str
    against: str
    probe: str | None = None  # that shows the fault, and is asked for with the code of its finding
    code: str | None = None


QUESTIONS = (
    Question(
        words="Does weight decay vanish in pure bf16, and what does that do to the loss?",
        arm="published",
        against="kahan_nearest",
        probe="decay_kept",
        code="decay_lost",
    ),
    Question(
        words="Does a bf16 variance that is rounded to nearest stall, and does that cost loss?",
        arm="kahan_nearest",
        against="kahan",
        probe="variance_ratio",
        code="variance_stalls",
    ),
    Question(
        words="Is stochastic rounding of the weights as good as Kahan summation?",
        arm="stochastic_weights",
        against="kahan_nearest",
    ),
    Question(
        words="Is a float32 variance needed, once a bf16 one is rounded stochastically?",
        arm="kahan",
        against="fp32_variance",
    ),
    Question(
        words="Is the packed 10 bytes per parameter as good as float32 master weights at 16?",
        arm="packed",
        against="master",
    ),
    Question(
        words="What do plain bf16 weights cost, and do they stop to move?",
        arm="plain",
        against="master",
        probe="update_kept",
        code="updates_lost",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """An arm of one group; losses in nats per token, shares as in metrics.jsonl, over steps."""

    group: str
    rounding: str
    label: str
    bytes_per_param: float | None
    num_seeds: int
    final_eval_loss_mean: float | None
    final_eval_loss_std: float | None
    difference: float | None  # to the reference
    ci_low: float | None
    ci_high: float | None
    verdict: str | None
    moved: float | None
    norm_moved: float | None
    update_kept: float | None
    update_kept_compensated: float | None
    decay_kept: float | None
    variance_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class ContrastRow:
    """A question in one group: arm minus against."""

    question: str
    group: str
    arm: str
    against: str
    num_pairs: int
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    margin: float | None
    verdict: str
    reason: str
    probe: str | None
    arm_probe: float | None
    against_probe: float | None
    finding: str | None  # what the arm's probes say of the fault; None: that it is not there


@dataclass(frozen=True, kw_only=True)
class Answers:
    """All that the matrix comes to."""

    arms: Sequence[ArmRow]
    contrasts: Sequence[ContrastRow]
    unit: str


def bench(directory: Path, *, output: Path | None, docs: Path | None) -> Answers:
    """Reads the sweep, prints its answers; writes CSVs and summary.md, and the page's tables.

    Raises UserError where the directory has no run of an arm.
    """
    answers = answers_of(directory)
    text = "\n".join(_summary(answers)).strip()
    Console().print(Markdown(text))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        _write_csv(output / "arms.csv", answers.arms, ArmRow)
        _write_csv(output / "contrasts.csv", answers.contrasts, ContrastRow)
        (output / "summary.md").write_text(text + "\n", encoding="utf-8")
    if docs is not None:
        page = docs.read_text(encoding="utf-8")
        docs.write_text(fill(page, text, name=str(docs)), encoding="utf-8")
    return answers


def answers_of(directory: Path) -> Answers:
    """The arms and contrasts of the sweep's records. Raises UserError as `bench`."""
    labels = {choice: compose([f"rounding={choice}"]).arm.label for choice in _choices()}
    settings = recorded_settings([directory])
    report = build_report(
        [directory],
        reference=labels[REFERENCE],
        margin=settings.margin,
        metric=settings.metric,
    )
    probes = {(id(found.group), found.arm.label): found for found in probed_arms(report)}
    arms: list[ArmRow] = []
    contrasts: list[ContrastRow] = []
    for group in report.groups:
        found = _arms_of(group, labels, directory)
        probed = {choice: probes.get((id(group), label)) for choice, label in labels.items()}
        arms += [
            _arm_row(choice, arm, group, probed[choice], report) for choice, arm in found.items()
        ]
        contrasts += [_contrast(question, found, group, probed, report) for question in QUESTIONS]
    return Answers(arms=arms, contrasts=contrasts, unit=report.unit)


def fill(page: str, text: str, *, name: str) -> str:
    """The page with the text between its two marks. UserError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{name}: no {BEGIN.strip()} with {END.strip()} after it")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _choices() -> list[str]:
    """The arms of the matrix, in its order."""
    experiment = OmegaConf.load(conf_dir() / "experiment" / "rounding.yaml")
    return str(experiment.hydra.sweeper.params.rounding).split(",")


def _arms_of(group: Group, labels: Mapping[str, str], directory: Path) -> dict[str, ArmResult]:
    by_label = {arm.label: arm for arm in group.arms}
    for choice, label in labels.items():
        if label not in by_label:
            where = f" with {group.title}" if group.title else ""
            raise UserError(
                f"{directory}: no run of rounding={choice} ({label}){where}; it must be a sweep of "
                "python -m precexp experiment=rounding"
            )
    return {choice: by_label[label] for choice, label in labels.items()}


def _arm_row(
    choice: str, arm: ArmResult, group: Group, probed: ArmProbes | None, report: Report
) -> ArmRow:
    against = arm.comparison
    return ArmRow(
        group=group.title,
        rounding=choice,
        label=arm.label,
        bytes_per_param=mean_of(arm.runs, bytes_per_param, "total"),
        num_seeds=arm.num_seeds,
        final_eval_loss_mean=arm.loss_mean,
        final_eval_loss_std=arm.loss_std,
        difference=against.difference if against else None,
        ci_low=against.ci_low if against else None,
        ci_high=against.ci_high if against else None,
        verdict=verdict_of(arm, group),
        moved=_level(probed, "moved"),
        norm_moved=_level(probed, "moved", "norm"),
        update_kept=_level(probed, "update_kept"),
        update_kept_compensated=_level(probed, "update_kept_compensated"),
        decay_kept=_level(probed, "decay_kept"),
        variance_ratio=_level(probed, "variance_ratio"),
    )


def _contrast(
    question: Question,
    arms: Mapping[str, ArmResult],
    group: Group,
    probed: Mapping[str, ArmProbes | None],
    report: Report,
) -> ContrastRow:
    if group.margin is None:
        where = f" at {group.title}" if group.title else ""
        raise UserError(f"no run of rounding={REFERENCE}{where} has completed; nothing to compare")
    found = compare_arms(
        losses_of(arms[question.against], report.metric),
        {question.arm: losses_of(arms[question.arm], report.metric)},
        margin=group.margin,
    )[question.arm]
    own = probed[question.arm]
    told = [each.claim for each in findings(own) if each.code == question.code] if own else []
    return ContrastRow(
        question=question.words,
        group=group.title,
        arm=question.arm,
        against=question.against,
        num_pairs=found.num_pairs,
        difference=found.difference,
        ci_low=found.ci_low,
        ci_high=found.ci_high,
        margin=group.margin,
        verdict=found.verdict,
        reason=found.reason,
        probe=question.probe,
        arm_probe=_level(own, question.probe),
        against_probe=_level(probed[question.against], question.probe),
        finding=told[0] if told else None,
    )


def _level(probed: ArmProbes | None, probe: str | None, kind: str = "all") -> float | None:
    """The median over the steps; of the variance over the last quarter, as in the report."""
    if probed is None or probe is None:
        return None
    return probed.late(probe, kind) if probe == "variance_ratio" else probed.level(probe, kind)


def _summary(answers: Answers) -> Iterator[str]:
    yield from _contrast_table(answers)
    for group in dict.fromkeys(row.group for row in answers.arms):
        yield from _arm_table([row for row in answers.arms if row.group == group], group)


def _contrast_table(answers: Answers) -> Iterator[str]:
    for words in dict.fromkeys(row.question for row in answers.contrasts):
        rows = [row for row in answers.contrasts if row.question == words]
        yield f"**{words}** `{rows[0].arm}` less `{rows[0].against}`:"
        yield ""
        for row in rows:
            where = f"`{row.group}`: " if row.group else ""
            interval = ""
            if row.ci_low is not None:
                interval = f", 90 % {spell_interval(row.ci_low, row.ci_high)}"
            margin = "" if row.margin is None else f" (margin ±{fixed(row.margin)})"
            yield (
                f"- {where}{fixed(row.difference, sign=True)} {answers.unit}{interval}: "
                f"**{row.verdict}**{margin}.{_evidence(row)}"
            )
        yield ""


def _evidence(row: ContrastRow) -> str:
    """What the probes say of the fault that the question is about."""
    if row.probe is None or row.arm_probe is None or row.against_probe is None:
        return ""
    spell = short if row.probe == "variance_ratio" else percent
    both = (
        f" `{row.probe}` is {spell(row.arm_probe)} in `{row.arm}`, {spell(row.against_probe)} in "
        f"`{row.against}`"
    )
    return f"{both}. {row.finding}." if row.finding else f"{both}: no fault is flagged."


ARM_HEAD = (
    "arm",
    "bytes/param",
    "final eval loss",
    f"less {REFERENCE}",
    "90 % interval",
    "verdict",
    "moved",
    "norm moved",
    "update kept",
    "with compensation",
    "decay kept",
    "variance / shadow",
)


def _arm_table(rows: Sequence[ArmRow], group: str) -> Iterator[str]:
    if group:
        yield f"`{group}`:"
        yield ""
    yield from markdown_table(ARM_HEAD, map(_cells, rows))
    yield ""


def _cells(row: ArmRow) -> Sequence[str]:
    shares = (row.moved, row.norm_moved, row.update_kept, row.update_kept_compensated)
    spread = "" if row.final_eval_loss_std is None else f" ± {fixed(row.final_eval_loss_std)}"
    return (
        f"`{row.rounding}`",
        short(row.bytes_per_param),
        fixed(row.final_eval_loss_mean) + spread,
        fixed(row.difference, sign=True),
        spell_interval(row.ci_low, row.ci_high),
        row.verdict or NOTHING,
        *(NOTHING if share is None else percent(share) for share in (*shares, row.decay_kept)),
        short(row.variance_ratio),
    )


def _write_csv(path: Path, rows: Sequence[ArmRow] | Sequence[ContrastRow], kind: type) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        names = [field.name for field in fields(kind)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
