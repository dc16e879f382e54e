"""Which of the recorded runs a report is about: `train.lr=1e-3,3e-4`, `precision=bf16_pure`."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from precexp.config import UserError, flatten
from precexp.record import RunRecord
from precexp.report.read import ReportedRun

ARM_KEYS = ("arm", "precision", "optim")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The runs that every filter lets through. Those without a record have no config to judge."""

    runs: Sequence[ReportedRun]
    num_filtered: int
    num_without_record: int  # of the filtered


def select_runs(runs: Sequence[ReportedRun], filters: Mapping[str, str]) -> Selection:
    """The runs whose config has, under each key, one of the values, which commas set apart.

    `arm` is the label, `precision` and `optim` are the choices, other keys those of the config.
    Raises UserError naming a key that no run has, or a value that none has, with those there are.
    """
    if not filters:
        return Selection(runs=runs, num_filtered=0, num_without_record=0)
    values = {id(run): _values(run.record) for run in runs if run.record is not None}
    kept = [run for run in runs if id(run) in values]
    for key, text in filters.items():
        known = {name for each in values.values() for name in each}
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3) or sorted(known)[:10]
            raise UserError(f"{key}: no run has this key; the nearest: {', '.join(near)}")
        there = {str(values[id(run)].get(key)) for run in kept}
        wanted = [_parsed(part) for part in text.split(",")]
        kept = [run for run in kept if _matches(values[id(run)].get(key), wanted)]
        if not kept:
            raise UserError(f"{key}: no run has {text!r}; there are: {', '.join(sorted(there))}")
    return Selection(
        runs=kept,
        num_filtered=len(runs) - len(kept),
        num_without_record=len(runs) - len(values),
    )


def _values(record: RunRecord) -> dict[str, object]:
    arm = {key: record.arm.get("label" if key == "arm" else key) for key in ARM_KEYS}
    return {**dict(flatten(record.config)), **arm}


def _parsed(text: str) -> object:
    """The text as YAML reads it, or as it is where it is no YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _matches(value: object, wanted: Sequence[object]) -> bool:
    """As text too: YAML reads 1e-3 as text, and a label may look like a number."""
    return any(value == each or _same_number(value, each) for each in wanted)


def _same_number(value: object, text: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value) == str(text)
    try:
        return float(value) == float(str(text))
    except ValueError:
        return False
