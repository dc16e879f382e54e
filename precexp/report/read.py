"""Reads what a report is about: every run recorded or planned below some directories."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from precexp.config import UserError
from precexp.record import (
    BLOCKS,
    LISTS,
    RecordError,
    Row,
    RunRecord,
    Status,
    one_line,
    read_run,
    unsealed,
)

SWEEP_SCHEMA = 1
LARGEST = 1e100  # a loss beyond is as good as infinite, and axes cannot hold it

# `missing`: planned, and never started.
ReportedStatus = Status | Literal["missing", "unreadable"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """One probe of a run, at the steps where it was measured; nan where it was not finite."""

    step: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A run's rows as columns, one entry per step; nan where nothing was measured or it is nan."""

    step: NDArray[np.int64]
    tokens: NDArray[np.int64]  # served up to and in this step
    seconds: NDArray[np.float64]  # of training up to and in this step
    loss: NDArray[np.float64]  # nats per token, as is eval_loss
    eval_loss: NDArray[np.float64]
    grad_norm: NDArray[np.float64]
    lr: NDArray[np.float64]
    loss_scale: NDArray[np.float64]
    skipped: NDArray[np.bool_]
    probes: Mapping[str, Points]  # by `probe/kind`

    @property
    def last_step(self) -> int:
        return int(self.step[-1]) if len(self.step) else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportedRun:
    """A run that is planned, recorded, or both. `record` is None if there is none to be read."""

    directory: Path
    planned: bool  # False: found in a sweep that no longer plans it
    label: str | None  # of its arm
    seed: int | None
    config_hash: str | None
    status: ReportedStatus
    error: str | None
    record: RunRecord | None
    curve: Curve | None


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run that sweep.json promises."""

    directory: Path
    arm: str
    seed: int
    config_hash: str


def read_runs(directories: Sequence[Path]) -> list[ReportedRun]:
    """The planned runs of each sweep in its order, then the runs that no sweep plans, by path.

    What cannot be read is a run with status `unreadable` and the reason as its error. Raises
    UserError naming a directory that is not there or that holds neither a run nor a sweep.
    """
    found: dict[Path, ReportedRun] = {}
    for directory in directories:
        if not directory.is_dir():
            problem = "not a directory" if directory.exists() else "no such directory"
            raise UserError(f"{directory}: {problem}; give the folder of a run or a sweep")
        below = list(_runs_below(directory))
        if not below:
            raise UserError(f"{directory}: no run.json and no sweep.json in it or below it")
        for run in below:
            found.setdefault(run.directory.resolve(), run)
    return list(found.values())


def number(values: Mapping[str, object] | None, key: str) -> float | None:
    """The number under the key; None if it was not measured."""
    value = (values or {}).get(key)
    if not isinstance(value, int | float):
        return None
    try:
        float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return value


def block(values: Mapping[str, object] | None, key: str) -> Mapping[str, object]:
    """The block of keys under the key; empty if it was not measured."""
    value = (values or {}).get(key)
    return value if isinstance(value, Mapping) else {}


def _runs_below(directory: Path) -> Iterator[ReportedRun]:
    sweeps = sorted(path.parent for path in directory.rglob("sweep.json"))
    planned = set()
    for sweep in sweeps:
        try:
            plan = read_plan(sweep / "sweep.json")
        except RecordError as error:
            yield _unreadable(sweep / "sweep.json", error, planned=True)
            continue
        for run in plan:
            planned.add(run.directory)
            yield _read(run.directory, plan=run, planned=True)
    for path in sorted(directory.rglob("run.json")):
        if path.parent not in planned:
            yield _read(path.parent, planned=not any(sweep in path.parents for sweep in sweeps))


def read_plan(path: Path) -> list[PlannedRun]:
    """The runs that a sweep.json plans. Raises RecordError if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        schema = values["schema"]
        if not isinstance(schema, int) or schema > SWEEP_SCHEMA:
            raise RecordError(f"{path}: schema {schema!r}; this precexp reads up to {SWEEP_SCHEMA}")
        unsealed(values)
        return [
            PlannedRun(
                directory=path.parent / run["directory"],
                arm=str(run["arm"]),
                seed=int(run["seed"]),
                config_hash=str(run["config_hash"]),
            )
            for run in values["runs"]
        ]
    except RecordError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: not a sweep.json of precexp ({one_line(error)})") from None


def _read(directory: Path, *, planned: bool, plan: PlannedRun | None = None) -> ReportedRun:
    if plan is not None and not (directory / "run.json").exists():
        return ReportedRun(
            directory=directory,
            planned=planned,
            label=plan.arm,
            seed=plan.seed,
            config_hash=plan.config_hash,
            status="missing",
            error="planned, but never started",
            record=None,
            curve=None,
        )
    try:
        recorded = read_run(directory)
        _check_blocks(recorded.record)
        return ReportedRun(
            directory=directory,
            planned=planned,
            label=recorded.label,
            seed=recorded.record.seed,
            config_hash=recorded.record.config_hash,
            status=recorded.record.status,
            error=recorded.record.error,
            record=recorded.record,
            curve=_curve(recorded.rows),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # a broken file
        return _unreadable(directory, error, planned=planned, plan=plan)


def _check_blocks(record: RunRecord) -> None:
    """null reads as empty; a value of no use makes the record unreadable."""
    for name in BLOCKS:
        setattr(record, name, getattr(record, name) or {})
    for name in LISTS:
        setattr(record, name, getattr(record, name) or [])
    if not isinstance(record.seed, int) or not isinstance(record.match_key, str):
        raise RecordError("run.json: seed or match_key is of another type")
    if record.status not in get_args(Status):
        raise RecordError(f"run.json: status {record.status!r} is none of precexp's")


def _unreadable(
    path: Path, error: Exception, *, planned: bool, plan: PlannedRun | None = None
) -> ReportedRun:
    reason = str(error) if isinstance(error, UserError) else f"{path}: {one_line(error)}"
    return ReportedRun(
        directory=path,
        planned=planned,
        label=plan.arm if plan else None,
        seed=plan.seed if plan else None,
        config_hash=plan.config_hash if plan else None,
        status="unreadable",
        error=reason,
        record=None,
        curve=None,
    )


def _curve(rows: Sequence[Row]) -> Curve:
    return Curve(
        step=np.array([row.step for row in rows], dtype=np.int64),
        tokens=np.array([row.tokens for row in rows], dtype=np.int64),
        seconds=np.cumsum(_column([row.step_seconds for row in rows])),
        loss=_column([row.loss for row in rows]),
        eval_loss=_column([row.eval_loss for row in rows]),
        grad_norm=_column([row.grad_norm for row in rows]),
        lr=_column([row.lr for row in rows]),
        loss_scale=_column([row.loss_scale for row in rows]),
        skipped=np.array([bool(row.skipped) for row in rows], dtype=np.bool_),
        probes=_probes(rows),
    )


def _probes(rows: Sequence[Row]) -> dict[str, Points]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for key in block({"probes": row.probes}, "probes"):
            value = number(row.probes, key)
            if value is not None:
                steps, values = found.setdefault(key, ([], []))
                steps.append(row.step)
                values.append(value)
    return {
        key: Points(step=np.array(steps, dtype=np.int64), values=_column(values))
        for key, (steps, values) in found.items()
    }


def _column(values: Sequence[float | None]) -> NDArray[np.float64]:
    column = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    column[np.abs(column) > LARGEST] = np.inf
    return column
