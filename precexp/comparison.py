"""A report as one wandb run, `comparison`: its tables, figures, differences and verdicts.

What wandb has of a run's history cannot be changed, so a curve of differences is logged under a key
that its numbers give: `difference/ARM/DIGEST`. The same numbers are logged once; when they change,
with a further seed, a new curve takes the place of the old one in the workspace.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precexp import __version__
from precexp.record import to_json
from precexp.report import Report
from precexp.report.build import ArmResult, Group
from precexp.report.csvs import ARM_COLUMNS, RUN_COLUMNS, Cell, arm_rows, run_rows
from precexp.report.curves import Floats, Steps, difference_band
from precexp.report.read import ReportedRun
from precexp.report.tables import verdict_of
from precexp.tracking import wandb_ids

if TYPE_CHECKING:
    import wandb

FIGURES = ("loss_curves", "memory")  # the report's, as .png
DIFFERENCES = "differences"  # in the summary: the keys whose curves are there in full
LOCAL_COLUMNS = ("directory",)  # names what is on this machine: not for wandb


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """The differences of one arm to the reference of its group, in nats per token."""

    key: str  # that they are logged under
    label: str  # of the arm
    group: Group
    step: Steps
    values: Floats


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A report, and what places it in wandb."""

    report: Report
    directory: Path  # of the report's files, and of wandb's
    run_id: str  # of the comparison run; the same for the same sweeps of the same project
    sweeps: Sequence[str]  # their names, which are the groups of their runs in wandb
    arm_of: Mapping[str, str]  # id of a wandb run that is shown: its arm's label
    num_untracked: int  # runs to be shown that wandb has nothing of
    series: Sequence[Series]


def compare(report: Report, directory: Path, *, project: str) -> Comparison:
    """The report as it will be shown in the project."""
    shown = _judged(report) if report.tuned else report.runs
    ids = [(run, wandb_ids(run.directory)) for run in shown if run.record is not None]
    names = [str(run.record.config.get("name")) for run in report.runs if run.record is not None]
    sweeps = list(dict.fromkeys(names)) or [report.directories[0].resolve().name]
    return Comparison(
        report=report,
        directory=directory,
        run_id=_digest([project, *sweeps], length=12),
        sweeps=sweeps,
        arm_of={one: str(run.label) for run, found in ids for one in found},
        num_untracked=sum(not found for _, found in ids),
        series=list(_series(report)),
    )


def _judged(report: Report) -> list[ReportedRun]:
    """The runs that a tuned report compares: an arm's mean is not one over all that it tried."""
    return [run for group in report.groups for arm in group.arms for run in arm.judged]


def name_in(group: Group, label: str) -> str:
    """The arm's name among those of all groups."""
    return f"{label} ({group.title})" if group.title else label


def values_of(comparison: Comparison) -> dict[str, object]:
    """The config of the comparison run."""
    report = comparison.report
    return {
        "sweeps": list(comparison.sweeps),
        "references": [group.reference for group in report.groups],
        "margin": report.margin,
        "metric": report.metric,
        "tuned": list(report.tuned),
        "forced": report.forced,
        "filters": dict(report.filters),
        "num_runs": len(report.runs),
        "precexp": __version__,
    }


def log_comparison(run: "wandb.Run", comparison: Comparison) -> None:
    """Logs what the run lacks of the curves, and tables, figures and verdicts anew."""
    import wandb

    run.define_metric("step", hidden=True)
    run.define_metric("difference/*", step_metric="step")
    logged = run.summary.get(DIFFERENCES) or []
    for row in _rows([series for series in comparison.series if series.key not in logged]):
        run.log(row)

    media: dict[str, object] = {
        "arms": _table(arm_rows(comparison.report), ARM_COLUMNS),
        "runs": _table(run_rows(comparison.report), RUN_COLUMNS),
    }
    for name in FIGURES:
        figure = comparison.directory / f"{name}.png"
        if figure.exists():
            media[f"figures/{name}"] = wandb.Image(str(figure))
    page = comparison.directory / "report.html"
    media["report"] = wandb.Html(page, inject=False)  # else it would link to a style sheet
    run.log(media)
    run.summary.update(_summary(comparison))


def _series(report: Report) -> Iterator[Series]:
    for group in report.groups:
        if group.reference is None:
            continue
        reference, *others = group.arms
        for arm in others:
            band = difference_band(arm, reference)
            if len(band.step):
                digest = _digest([band.step.tolist(), band.mean.tolist()], length=6)
                yield Series(
                    key=f"difference/{name_in(group, arm.label)}/{digest}",
                    label=arm.label,
                    group=group,
                    step=band.step,
                    values=band.mean,
                )


def _rows(series: Sequence[Series]) -> list[dict[str, object]]:
    """A row per step that any of the series has, in order."""
    rows: dict[int, dict[str, object]] = {}
    for one in series:
        for step, value in zip(one.step.tolist(), one.values.tolist(), strict=True):
            rows.setdefault(step, {"step": step})[one.key] = value
    return [rows[step] for step in sorted(rows)]


def _table(rows: Sequence[Mapping[str, Cell]], columns: Sequence[str]) -> "wandb.Table":
    import wandb

    kept = [column for column in columns if column not in LOCAL_COLUMNS]
    return wandb.Table(columns=[*kept], data=[[row[column] for column in kept] for row in rows])


def _summary(comparison: Comparison) -> dict[str, object]:
    verdicts = {
        name_in(group, arm.label): _verdict(arm, group)
        for group in comparison.report.groups
        for arm in group.arms
    }
    summary = {"verdicts": verdicts, DIFFERENCES: [series.key for series in comparison.series]}
    return json.loads(to_json(summary))


def _verdict(arm: ArmResult, group: Group) -> dict[str, Cell]:
    against = arm.comparison
    return {
        "verdict": verdict_of(arm, group),
        "num_seeds": arm.num_seeds,
        "difference": against.difference if against else None,
        "ci_low": against.ci_low if against else None,
        "ci_high": against.ci_high if against else None,
        "margin": group.margin,
    }


def _digest(value: object, *, length: int) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:length]
