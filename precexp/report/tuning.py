"""A fair protocol: each arm at the values of the tuned keys that suit it, and no arm by luck.

The seeds are halved. On the selection seeds each arm chooses among the same settings, by the mean
of what is compared; on the comparison seeds, which had no say in it, the arms are compared at what
they chose. So the difference there is one of the recipes as tuned: the noise of the choice is
independent of the noise of the comparison, whose error rates are those of any report.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precexp.config import flatten
from precexp.report.match import spelled
from precexp.report.read import ReportedRun

FEWEST_SEEDS = 3  # one to select on, two to compare on

Setting = tuple[object, ...]  # the values of the tuned keys, in their order


@dataclass(frozen=True, kw_only=True)
class Halves:
    """The seeds of a group: what they are is all that decides who is where."""

    selection: Sequence[int]
    comparison: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting of an arm on the selection seeds; less loss is better."""

    setting: Setting
    losses: Mapping[int, float]  # by seed: of the runs that completed
    lost: Sequence[int] = ()  # the seeds on which it diverged or failed
    open: Sequence[int] = ()  # without a run that ended, or with one that cannot be used

    @property
    def mean(self) -> float | None:
        """Over the seeds that completed; None if none did."""
        return float(np.mean(list(self.losses.values()))) if self.losses else None

    @property
    def rank(self) -> tuple[int, float]:
        """The least is the best: one that any seed lost or lacks is behind all that have none."""
        return len(self.lost) + len(self.open), math.inf if self.mean is None else self.mean


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What an arm tried, in the settings' order, and which setting it is compared at."""

    trials: Sequence[Trial]
    chosen: Trial | None  # None without a selection seed
    num_open: int  # selection runs without an end, or that cannot be used

    @property
    def settings(self) -> set[Setting]:
        return {trial.setting for trial in self.trials}


def halve(seeds: Iterable[int]) -> Halves:
    """The lower half of the seeds to select on, the upper to compare on, which gets an odd one."""
    ordered = sorted(set(seeds))
    middle = len(ordered) // 2
    return Halves(selection=ordered[:middle], comparison=ordered[middle:])


def best(trials: Sequence[Trial]) -> Trial | None:
    """The trial of least rank; of equals the first in the settings' order, the smaller value."""
    return min(in_order(trials), key=lambda trial: trial.rank, default=None)


def in_order(trials: Iterable[Trial]) -> list[Trial]:
    """The trials by their settings, numbers by size and before words."""
    return sorted(trials, key=lambda trial: [_order(value) for value in trial.setting])


def setting_of(run: ReportedRun, tuned: Sequence[str]) -> Setting | None:
    """The run's values of the tuned keys; None if it has no record to tell."""
    if run.record is None:
        return None
    values = dict(flatten(run.record.config))
    return tuple(values.get(key, "absent") for key in tuned)


def tune(
    runs: Sequence[ReportedRun],
    *,
    tuned: Sequence[str],
    halves: Halves,
    try_setting: Callable[[Setting, Sequence[ReportedRun]], Trial],
) -> Tuning:
    """What the runs of one arm come to; `try_setting` judges those of one setting."""
    selecting = [run for run in runs if run.seed in halves.selection]
    by_setting: dict[Setting, list[ReportedRun]] = {}
    for run in selecting:
        if (setting := setting_of(run, tuned)) is not None:
            by_setting.setdefault(setting, []).append(run)
    trials = in_order(try_setting(setting, found) for setting, found in by_setting.items())
    num_untold = sum(run.record is None for run in selecting)  # they may be what a trial lacks
    return Tuning(
        trials=trials,
        chosen=best(trials),
        num_open=max(sum(len(trial.open) for trial in trials), num_untold),
    )


def why_withheld(arm: Tuning, reference: Tuning, halves: Halves) -> str | None:
    """Why there is no verdict on the arm whatever its losses say; None if there may be one."""
    if not halves.selection:
        return (
            "its one seed leaves none to select on; at least "
            f"{FEWEST_SEEDS} are needed, 1 to select on and 2 to compare on"
        )
    for who, tuning in (("its", arm), ("the reference's", reference)):
        if tuning.num_open:
            runs = "run is" if tuning.num_open == 1 else "runs are"
            return (
                f"{tuning.num_open} of {who} selection {runs} not finished or cannot be used, so "
                "its choice may not be the best"
            )
    if arm.settings != reference.settings:
        return (
            f"it tried {_listed(arm)} where the reference tried {_listed(reference)}, and unequal "
            "budgets are no fair comparison"
        )
    return None


def edges(tuning: Tuning, tuned: Sequence[str]) -> dict[str, str]:
    """{tuned key: `smallest` or `largest`} where the chosen value is at an end of the grid."""
    found = {}
    for i, key in enumerate(tuned):
        values = {trial.setting[i] for trial in tuning.trials}
        numbers = sorted(number for value in values if (number := _number(value)) is not None)
        if tuning.chosen is None or len(values) < 2 or len(numbers) < len(values):
            continue
        if tuning.chosen.setting[i] == numbers[-1]:
            found[key] = "largest"
        elif tuning.chosen.setting[i] == numbers[0]:
            found[key] = "smallest"
    return found


def spell_setting(setting: Setting, tuned: Sequence[str]) -> str:
    """`train.lr=0.001, train.beta2=0.95`."""
    return ", ".join(f"{key}={spelled(value)}" for key, value in zip(tuned, setting, strict=True))


def seeds_in_all(num_comparison: int) -> int:
    """The least number of seeds whose comparison half has so many."""
    return 2 * num_comparison - 1


def _order(value: object) -> tuple[bool, float, str]:
    number = _number(value)
    return (True, 0.0, spelled(value)) if number is None else (False, number, "")


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _listed(tuning: Tuning) -> str:
    """The settings that were tried, briefly."""
    return " | ".join(", ".join(map(spelled, trial.setting)) for trial in tuning.trials) or "none"
