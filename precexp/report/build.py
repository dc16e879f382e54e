"""A report as data: arms, their statistics and verdicts, per group of runs that match."""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from precexp.config import UserError
from precexp.report.match import (
    Evidence,
    check_evidence,
    differing_values,
    group_titles,
    match_groups,
)
from precexp.report.read import ReportedRun, block, number, read_runs
from precexp.report.statistics import ArmLosses, Comparison, compare_arms, mean_and_std


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """The runs of one arm in one group, and what they come to; losses in nats per token.

    `comparison` is None for the reference and where there is nothing to compare with.
    """

    label: str
    precision: str | None  # None: nothing of the arm was recorded
    optim: str | None
    runs: Sequence[ReportedRun]
    compared: Mapping[int, ReportedRun]  # by seed: completed, matched, with a finite eval loss
    diverged: Mapping[int, ReportedRun]
    loss_mean: float | None
    loss_std: float | None
    bits_per_byte: float | None
    comparison: Comparison | None

    @property
    def num_seeds(self) -> int:
        return len(self.compared)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one match_key: the only ones that are compared and drawn together."""

    match_key: str
    title: str  # the keys that tell it from the other groups; empty for an only group
    reference: str | None  # an arm's label; None if the one asked for is not in this group
    margin: float | None  # nats per token; None while the reference has no completed run
    arms: Sequence[ArmResult]  # the reference first
    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the tables, the figure and the terminal say."""

    directories: Sequence[Path]
    runs: Sequence[ReportedRun]
    groups: Sequence[Group]
    differing: Mapping[str, Sequence[str]]  # full key: its value in each group
    margin: float  # a fraction of the reference's mean

    @property
    def output(self) -> Path:
        """Where the files of the report go unless told otherwise."""
        return self.directories[0] / "report"

    @property
    def labels(self) -> list[str]:
        """The arms of all groups, in the order in which they get their colours."""
        return list(dict.fromkeys(arm.label for group in self.groups for arm in group.arms))


def build_report(directories: Sequence[Path], *, reference: str | None, margin: float) -> Report:
    """The report on all runs below the directories; `margin` is a fraction of the reference's mean.

    `reference` is an arm's label, None for the default one. Raises UserError for a directory
    without runs, a label that no arm has and a margin that is not positive.
    """
    if not 0 < margin < math.inf:
        raise UserError(f"report.margin: {margin} is not allowed; it must be positive")
    runs = read_runs(directories)
    labels = list(dict.fromkeys(run.label for run in runs if run.label is not None))
    if reference is not None and reference not in labels:
        raise UserError(f"report.reference: no arm {reference!r}; allowed: {', '.join(labels)}")
    groups = match_groups(runs)
    titles = group_titles(groups)
    return Report(
        directories=tuple(directories),
        runs=runs,
        groups=[
            _group(found, match_key=key, title=titles[key], reference=reference, margin=margin)
            for key, found in groups.items()
        ],
        differing=differing_values(groups),
        margin=margin,
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


def _group(
    runs: Sequence[ReportedRun], *, match_key: str, title: str, reference: str | None, margin: float
) -> Group:
    by_label: dict[str, list[ReportedRun]] = {}
    for run in runs:
        assert run.label is not None
        by_label.setdefault(run.label, []).append(run)
    if reference is None:
        reference = default_reference({k: _choices(found) for k, found in by_label.items()})
    evidence = check_evidence(runs, reference=reference)
    ordered = sorted(by_label, key=lambda label: label != reference)  # stable
    arms = [_arm(label, by_label[label], refused=evidence.refused) for label in ordered]
    first, *others = arms
    in_nats = None
    if first.label == reference:
        in_nats = None if first.loss_mean is None else margin * first.loss_mean
        comparisons = compare_arms(
            _losses(first),
            {arm.label: _losses(arm) for arm in others},
            margin=math.nan if in_nats is None else in_nats,  # nan: nothing will be paired
        )
        arms = [first, *(replace(arm, comparison=comparisons[arm.label]) for arm in others)]
    return Group(
        match_key=match_key,
        title=title,
        reference=reference if first.label == reference else None,
        margin=in_nats,
        arms=arms,
        evidence=evidence,
    )


def _arm(label: str, runs: Sequence[ReportedRun], *, refused: Container[Path]) -> ArmResult:
    """Of an arm's completed runs of one seed the first counts: the others repeat it."""
    compared: dict[int, ReportedRun] = {}
    diverged: dict[int, ReportedRun] = {}
    for run in runs:
        loss = result(run, "final_eval_loss")
        if run.seed is None or run.directory in refused:
            continue
        if run.status == "completed" and loss is not None and math.isfinite(loss):
            compared.setdefault(run.seed, run)
        elif run.status == "diverged" or (run.status == "completed" and loss is not None):
            diverged.setdefault(run.seed, run)
    mean, std = mean_and_std([_final_loss(run) for run in compared.values()])
    precision, optim = _choices(runs)
    return ArmResult(
        label=label,
        precision=precision,
        optim=optim,
        runs=runs,
        compared=compared,
        diverged=diverged,
        loss_mean=mean,
        loss_std=std,
        bits_per_byte=mean_of(compared.values(), result, "eval_bits_per_byte"),
        comparison=None,
    )


def _choices(runs: Sequence[ReportedRun]) -> tuple[str | None, str | None]:
    """The precision and optim of the arm's runs; None if none of them is recorded."""
    for run in runs:
        if run.record is not None:
            arm = run.record.arm
            return str(arm.get("precision")), str(arm.get("optim"))
    return None, None


def _losses(arm: ArmResult) -> ArmLosses:
    return ArmLosses(
        losses={seed: _final_loss(run) for seed, run in arm.compared.items()},
        diverged=frozenset(arm.diverged),
    )


def _final_loss(run: ReportedRun) -> float:
    loss = result(run, "final_eval_loss")
    assert loss is not None
    return loss
