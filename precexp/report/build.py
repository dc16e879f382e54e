"""A report as data: arms, their statistics and verdicts, per group of runs that match."""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from precexp.config import Metric, UserError, check_tuned
from precexp.report.hypotheses import Interval, interval_of
from precexp.report.match import (
    Evidence,
    check_evidence,
    differing_values,
    group_titles,
    match_groups,
    merge_groups,
)
from precexp.report.reach import Reach, last_tenth, late_difference, reach_of
from precexp.report.read import ReportedRun, block, number, read_runs
from precexp.report.select import select_runs
from precexp.report.statistics import (
    ArmLosses,
    Comparison,
    compare_arms,
    mean_and_std,
)
from precexp.report.tuning import (
    Halves,
    Setting,
    Trial,
    Tuning,
    halve,
    seeds_in_all,
    setting_of,
    tune,
    why_withheld,
)

METRICS: Mapping[Metric, tuple[str, str]] = {  # words, unit
    "final_eval_loss": ("final eval loss", "nats per token"),
    "last_tenth_eval_loss": ("eval loss over the last 10 %", "nats per token"),
    "final_train_loss": ("final train loss", "nats per token"),
    "eval_bits_per_byte": ("bits per byte", "bits per byte"),
    "eval_perplexity": ("perplexity", "of perplexity"),
}


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """The runs of one arm in one group, and what they come to; losses in nats per token.

    `comparison` and `late` are None for the reference and where there is nothing to compare with.
    """

    label: str
    precision: str | None  # None: nothing of the arm was recorded
    optim: str | None
    runs: Sequence[ReportedRun]
    judged: Sequence[ReportedRun]  # those on comparison seeds at the chosen setting; else all
    compared: Mapping[int, ReportedRun]  # by seed: judged, completed, matched, with a finite metric
    diverged: Mapping[int, ReportedRun]
    loss_mean: float | None  # of the report's metric, as is loss_std
    loss_std: float | None
    bits_per_byte: float | None
    comparison: Comparison | None
    late: Interval | None  # the paired difference of the loss over the last 10 % of evaluations
    reach: Reach | None  # of the reference's final eval loss
    tuning: Tuning | None  # None where nothing is tuned

    @property
    def num_seeds(self) -> int:
        return len(self.compared)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one match_key: the only ones that are compared and drawn together."""

    match_key: str
    title: str  # the keys that tell it from the other groups; empty for an only group
    reference: str | None  # an arm's label; None if the one asked for is not in this group
    margin: float | None  # in the metric's unit; None while the reference has no completed run
    arms: Sequence[ArmResult]  # the reference first
    evidence: Evidence
    halves: Halves | None  # of its seeds; None where nothing is tuned

    @property
    def noise(self) -> float | None:
        """The reference's standard deviation from seed to seed, the yardstick of every gap."""
        return self.arms[0].loss_std if self.reference is not None else None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the tables, the figures and the terminal say."""

    directories: Sequence[Path]
    runs: Sequence[ReportedRun]
    groups: Sequence[Group]
    differing: Mapping[str, Sequence[str]]  # full key: its value in each group of matched runs
    margin: float  # a fraction of the reference's mean
    metric: Metric
    tuned: Sequence[str]  # the keys whose values each arm chooses
    forced: bool  # the one group is of runs that do not match
    filters: Mapping[str, str]
    num_filtered: int  # runs that the filters left out
    num_without_record: int  # of them, the ones that had no config to judge

    @property
    def output(self) -> Path:
        """Where the files of the report go unless told otherwise."""
        return self.directories[0] / "report"

    @property
    def words(self) -> str:
        """What is compared."""
        return METRICS[self.metric][0]

    @property
    def unit(self) -> str:
        """Of the differences and the margin."""
        return METRICS[self.metric][1]

    @property
    def labels(self) -> list[str]:
        """The arms of all groups, in the order in which they get their colours."""
        return list(dict.fromkeys(arm.label for group in self.groups for arm in group.arms))


def build_report(
    directories: Sequence[Path],
    *,
    reference: str | None,
    margin: float,
    metric: Metric = "final_eval_loss",
    tuned: Sequence[str] = (),
    filters: Mapping[str, str] | None = None,
    force: bool = False,
) -> Report:
    """The report on the runs below the directories that every filter of `select_runs` lets through.

    `reference` is an arm's label, None for the default one; `margin` a fraction of the reference's
    mean of the metric. Each arm is compared at the values of the `tuned` keys that
    suit it (`tuning`). `force` compares runs that do not match, too. Raises UserError for a
    directory without runs, a label that no arm has, a margin that is not positive, a key that
    cannot be tuned, and a filter.
    """
    if not 0 < margin < math.inf:
        raise UserError(f"report.margin: {margin} is not allowed; it must be positive")
    check_tuned(tuned)
    selection = select_runs(read_runs(directories), filters or {})
    groups = match_groups(selection.runs, tuned)
    titles, differing = group_titles(groups, tuned), differing_values(groups, tuned)
    forced = force and len(groups) > 1
    if forced:
        groups = merge_groups(groups, titles)
        titles = dict.fromkeys(groups, "")
    renamed = {run.directory: run for runs in groups.values() for run in runs}
    runs = [renamed.get(run.directory, run) for run in selection.runs]
    labels = list(dict.fromkeys(run.label for run in runs if run.label is not None))
    if reference is not None and reference not in labels:
        raise UserError(f"report.reference: no arm {reference!r}; allowed: {', '.join(labels)}")
    return Report(
        directories=tuple(directories),
        runs=runs,
        groups=[
            _group(
                found,
                match_key=key,
                title=titles[key],
                reference=reference,
                margin=margin,
                metric=metric,
                tuned=tuned,
                forced=forced,
            )
            for key, found in groups.items()
        ],
        differing=differing,
        margin=margin,
        metric=metric,
        tuned=tuple(tuned),
        forced=forced,
        filters=filters or {},
        num_filtered=selection.num_filtered,
        num_without_record=selection.num_without_record,
    )


def all_completed(report: Report) -> bool:
    """Whether every planned run is recorded as completed."""
    return all(run.status == "completed" for run in report.runs if run.planned)


def default_reference(arms: Mapping[str, tuple[str | None, str | None]]) -> str:
    """The arm to compare with, of {label: (precision, optim)} in order of appearance.

    fp32 with adamw if present, else the first fp32 arm, else the first bf16_mixed, else the first.
    """
    for choice in (("fp32", "adamw"), ("fp32", None), ("bf16_mixed", None)):
        for label, (precision, optim) in arms.items():
            if choice in ((precision, optim), (precision, None)):
                return label
    return next(iter(arms))


def problem(run: ReportedRun) -> str | None:
    """What is wrong with a run, in one line; None if it completed with a finite loss."""
    at = f"step {run.curve.last_step}" if run.curve is not None else "an unknown step"
    reason = f": {run.error}" if run.error else ""
    match run.status:
        case "completed":
            loss = result(run, "final_eval_loss")
            if loss is None:
                return "completed without a final eval loss"
            return None if math.isfinite(loss) else f"completed, but its final eval loss is {loss}"
        case "running":
            return f"incomplete after {at}: still running, or killed"
        case "diverged":
            return f"diverged at {at}{reason}"
        case "missing" | "unreadable":
            return f"{run.status}{reason}"
        case status:
            return f"{status} after {at}{reason}"


def result(run: ReportedRun, key: str) -> float | None:
    """A number of the run's results; None if it was not measured."""
    return number(run.record.results, key) if run.record is not None else None


def metric_of(run: ReportedRun, metric: Metric) -> float | None:
    """What a report with this metric compares of the run; None if it was not measured."""
    if metric == "last_tenth_eval_loss":
        return last_tenth(run.curve) if run.curve is not None else None
    return result(run, metric)


def timing(run: ReportedRun, key: str) -> float | None:
    """A number of the run's timing; None if it was not measured."""
    return number(run.record.timing, key) if run.record is not None else None


def bytes_per_param(run: ReportedRun, key: str) -> float | None:
    """`weights`, `gradients`, `states` or `total` of the run's census; None if not measured."""
    census = run.record.census if run.record is not None else None
    return number(block(census, "bytes_per_param"), key)


def measured_bytes(run: ReportedRun, key: str) -> float | None:
    """A number of the run's measured memory; None if it was not measured."""
    memory = run.record.memory if run.record is not None else None
    return number(block(memory, "measured"), key)


def plan_of(runs: Iterable[ReportedRun]) -> Mapping[str, object] | None:
    """The planned memory of an arm, from the first run that has it; None if none was planned."""
    plans = (block(run.record.memory, "planned") for run in runs if run.record is not None)
    return next((plan for plan in plans if plan), None)


def named_arms(
    report: Report, only: Group | None = None
) -> list[tuple[str, Sequence[ReportedRun]]]:
    """Each arm of each group, or of one: its name in a table, and its runs."""
    return [
        (f"`{arm.label}`" + (f" ({group.title})" if group.title else ""), arm.runs)
        for group in report.groups
        for arm in group.arms
        if only is None or group is only
    ]


def mean_of(
    runs: Iterable[ReportedRun], measure: Callable[[ReportedRun, str], float | None], key: str
) -> float | None:
    """The mean of `measure(run, key)` over the runs where it was measured; None if in none."""
    found = [value for run in runs if (value := measure(run, key)) is not None]
    return float(np.mean(found)) if found else None


def losses_of(arm: ArmResult, metric: Metric) -> ArmLosses:
    """What is compared of the arm, by seed."""
    values = {seed: metric_of(run, metric) for seed, run in arm.compared.items()}
    return ArmLosses(
        losses={seed: value for seed, value in values.items() if value is not None},
        diverged=frozenset(arm.diverged),
    )


def _group(
    runs: Sequence[ReportedRun],
    *,
    match_key: str,
    title: str,
    reference: str | None,
    margin: float,
    metric: Metric,
    tuned: Sequence[str],
    forced: bool,
) -> Group:
    by_label: dict[str, list[ReportedRun]] = {}
    for run in runs:
        assert run.label is not None
        by_label.setdefault(run.label, []).append(run)
    if reference is None:
        reference = default_reference({k: _choices(found) for k, found in by_label.items()})
    evidence = check_evidence(runs, reference=reference, forced=forced)
    halves = halve(run.seed for run in runs if run.seed is not None) if tuned else None
    ordered = sorted(by_label, key=lambda label: label != reference)  # stable
    arms = [
        _arm(
            label,
            by_label[label],
            refused=evidence.refused,
            metric=metric,
            tuned=tuned,
            halves=halves,
        )
        for label in ordered
    ]
    first, *others = arms
    in_unit = None
    if first.label == reference:
        in_unit = None if first.loss_mean is None else margin * abs(first.loss_mean)
        comparisons = compare_arms(
            losses_of(first, metric),
            {arm.label: losses_of(arm, metric) for arm in others},
            margin=math.nan if in_unit is None else in_unit,  # nan: nothing will be paired
        )
        compared = (
            replace(
                arm,
                comparison=_as_tuned(comparisons[arm.label], arm, first, halves),
                late=_late(arm, first),
            )
            for arm in others
        )
        arms = [replace(arm, reach=_reach(arm, first)) for arm in (first, *compared)]
    return Group(
        match_key=match_key,
        title=title,
        reference=reference if first.label == reference else None,
        margin=in_unit,
        arms=arms,
        evidence=evidence,
        halves=halves,
    )


def _arm(
    label: str,
    runs: Sequence[ReportedRun],
    *,
    refused: Container[Path],
    metric: Metric,
    tuned: Sequence[str],
    halves: Halves | None,
) -> ArmResult:
    judged, tuning = runs, None
    if halves is not None:

        def try_setting(setting: Setting, tried: Sequence[ReportedRun]) -> Trial:
            return _trial(setting, tried, refused=refused, metric=metric, seeds=halves.selection)

        tuning = tune(runs, tuned=tuned, halves=halves, try_setting=try_setting)
        judged = [
            run
            for run in runs
            if tuning.chosen is not None
            and run.seed in halves.comparison
            and setting_of(run, tuned) == tuning.chosen.setting
        ]
    compared, diverged = _outcomes(judged, refused=refused, metric=metric)
    mean, std = mean_and_std([_value(run, metric) for run in compared.values()])
    precision, optim = _choices(runs)
    return ArmResult(
        label=label,
        precision=precision,
        optim=optim,
        runs=runs,
        judged=judged,
        compared=compared,
        diverged=diverged,
        loss_mean=mean,
        loss_std=std,
        bits_per_byte=mean_of(compared.values(), result, "eval_bits_per_byte"),
        comparison=None,
        late=None,
        reach=None,
        tuning=tuning,
    )


def _outcomes(
    runs: Sequence[ReportedRun], *, refused: Container[Path], metric: Metric
) -> tuple[dict[int, ReportedRun], dict[int, ReportedRun]]:
    """By seed, the runs that count and those that diverged.

    Of an arm's finished runs of one seed the first counts: the others repeat it.
    """
    compared: dict[int, ReportedRun] = {}
    diverged: dict[int, ReportedRun] = {}
    for run in runs:
        if run.seed is None or run.directory in refused or run.seed in (*compared, *diverged):
            continue
        values = [metric_of(run, metric), result(run, "final_eval_loss")]
        is_finite = all(math.isfinite(value) for value in values if value is not None)
        if run.status == "diverged" or (run.status == "completed" and not is_finite):
            diverged[run.seed] = run
        elif run.status == "completed" and values[0] is not None:
            compared[run.seed] = run
    return compared, diverged


def _trial(
    setting: Setting,
    runs: Sequence[ReportedRun],
    *,
    refused: Container[Path],
    metric: Metric,
    seeds: Sequence[int],
) -> Trial:
    compared, diverged = _outcomes(runs, refused=refused, metric=metric)
    failed = {run.seed for run in runs if run.status == "failed"} - compared.keys()
    lost = [seed for seed in seeds if seed in diverged or seed in failed]
    return Trial(
        setting=setting,
        losses={seed: _value(compared[seed], metric) for seed in sorted(compared)},
        lost=lost,
        open=[seed for seed in seeds if seed not in compared and seed not in lost],
    )


def _as_tuned(
    found: Comparison, arm: ArmResult, reference: ArmResult, halves: Halves | None
) -> Comparison:
    """The comparison without a verdict where the choice was not a fair one, and why.

    Where it is undecided for want of seeds, it says how many they are with those to select on.
    """
    if halves is None:
        return found
    assert arm.tuning is not None
    assert reference.tuning is not None
    if withheld := why_withheld(arm.tuning, reference.tuning, halves):
        return replace(found, verdict="undecided", reason=withheld, seeds_needed=None)
    needed = found.seeds_needed
    if found.verdict == "undecided" and len(halves.comparison) < 2:
        needed = 2
    if needed is None:
        return found
    in_all = f"comparison seeds: {seeds_in_all(needed)} in all"
    return replace(found, reason=f"{found.reason} ({in_all})")


def _late(arm: ArmResult, reference: ArmResult) -> Interval | None:
    return interval_of(
        [
            difference
            for seed in sorted(arm.compared.keys() & reference.compared.keys())
            if (mine := arm.compared[seed].curve) is not None
            and (other := reference.compared[seed].curve) is not None
            and (difference := late_difference(mine, other)) is not None
        ]
    )


def _reach(arm: ArmResult, reference: ArmResult) -> Reach | None:
    """A diverged run may have reached the loss before; where it did not, it never does."""
    runs = {**arm.diverged, **arm.compared}
    return reach_of(
        (mine, other)
        for seed in sorted(runs.keys() & reference.compared.keys())
        if (mine := runs[seed].curve) is not None
        and (other := reference.compared[seed].curve) is not None
    )


def _choices(runs: Sequence[ReportedRun]) -> tuple[str | None, str | None]:
    """The precision and optim of the arm's runs; None if none of them is recorded."""
    for run in runs:
        if run.record is not None:
            arm = run.record.arm
            return str(arm.get("precision")), str(arm.get("optim"))
    return None, None


def _value(run: ReportedRun, metric: Metric) -> float:
    value = metric_of(run, metric)
    assert value is not None
    return value
