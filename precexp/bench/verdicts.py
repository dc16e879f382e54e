"""The verdict's error rates on simulated sweeps whose true gaps are known.

A loss is a level, a part that all arms of a seed share, an arm's gap and noise of the run's own.
The margin is a fraction of the reference's observed mean, as in a report. A sweep is in error where
any of its arms gets the verdict that is wrong for its gap.

In a tuned sweep every arm tries several values that are equally good, so that its gap is known
whatever it chooses. The runs of the reference have no noise of their own and those of the arms all
of it: then choosing and comparing on the same seeds, simulated beside it, flatters the arms most.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from precexp.report.hypotheses import LEVEL
from precexp.report.statistics import ArmLosses, decide
from precexp.report.tuning import Trial, best, halve

LOSS = 5.0
MARGIN = 0.005  # of the reference's mean: 0.025
SEED_STD = 0.02  # shared by the arms of a seed
NUM_SEEDS = (2, 3, 4, 5, 6, 7, 8, 9, 10)
NUM_ARMS = (1, 3, 6)
# Of a difference, over the margin: from noise that hides all to noise that hides nothing.
NOISES = (0.1, 1.0, 10.0)
NUM_TUNED_SEEDS = (4, 6, 10)
NUM_VALUES = 4  # that each arm of a tuned sweep tries
UNEQUAL = frozenset({"worse", "better"})


@dataclass(frozen=True, kw_only=True)
class ErrorRates:
    """Shares of the simulated sweeps with at least one wrong verdict."""

    num_seeds: int
    num_arms: int  # beside the reference
    noise: float  # standard deviation of a difference, over the margin
    num_sweeps: int
    false_equivalent: float  # every gap is the margin, above or below
    false_unequal: float  # every gap is the margin, the largest that is not worse or better
    false_unequal_no_gap: float  # every gap is 0


@dataclass(frozen=True, kw_only=True)
class TunedRates(ErrorRates):
    """The same of tuned sweeps; `num_seeds` counts those to select on, too."""

    num_values: int
    peeking_unequal_no_gap: float  # were the choice made on the comparison seeds


def bench(*, num_sweeps: int, output: Path | None) -> list[ErrorRates]:
    """Simulates every combination, prints and, given `output`, writes CSV."""
    found = list(simulate_all(NUM_SEEDS, NUM_ARMS, NOISES, num_sweeps=num_sweeps))
    _tell(found, ErrorRates, output)
    return found


def simulate_all(
    num_seeds: Sequence[int], num_arms: Sequence[int], noises: Sequence[float], *, num_sweeps: int
) -> Iterator[ErrorRates]:
    """The error rates of each combination."""
    generator = np.random.default_rng(0)
    for seeds in num_seeds:
        for arms in num_arms:
            for noise in noises:
                yield simulate(seeds, arms, noise, num_sweeps=num_sweeps, generator=generator)


def simulate(
    num_seeds: int,
    num_arms: int,
    noise: float,
    *,
    num_sweeps: int,
    generator: np.random.Generator,
) -> ErrorRates:
    """The error rates of sweeps of so many seeds and arms; `noise` as in ErrorRates."""

    def rate(gap: float, wrong: frozenset[str]) -> float:
        errors = 0
        for _ in range(num_sweeps):
            errors += bool(wrong & _verdicts(num_seeds, num_arms, noise, gap, generator))
        return errors / num_sweeps

    return ErrorRates(
        num_seeds=num_seeds,
        num_arms=num_arms,
        noise=noise,
        num_sweeps=num_sweeps,
        false_equivalent=rate(1.0, frozenset({"equivalent"})),
        false_unequal=rate(1.0, UNEQUAL),
        false_unequal_no_gap=rate(0.0, UNEQUAL),
    )


def bench_tuned(*, num_sweeps: int, output: Path | None) -> list[TunedRates]:
    """As `bench`, of sweeps whose arms are tuned."""
    generator = np.random.default_rng(0)
    found = [
        simulate_tuned(
            seeds, arms, noise, num_values=NUM_VALUES, num_sweeps=num_sweeps, generator=generator
        )
        for seeds in NUM_TUNED_SEEDS
        for arms in NUM_ARMS
        for noise in NOISES
    ]
    _tell(found, TunedRates, output)
    return found


def simulate_tuned(
    num_seeds: int,
    num_arms: int,
    noise: float,
    *,
    num_values: int,
    num_sweeps: int,
    generator: np.random.Generator,
) -> TunedRates:
    """The error rates of sweeps whose arms choose among so many values; `noise` as in ErrorRates.

    A half of the seeds is what the arms are compared on.
    """

    def rate(gap: float, wrong: frozenset[str], *, peeks: bool = False) -> float:
        errors = 0
        for _ in range(num_sweeps):
            shape = (1 + num_arms, num_values, num_seeds)
            losses = LOSS + SEED_STD * generator.standard_normal(num_seeds) + np.zeros(shape)
            losses[1:] += noise * MARGIN * LOSS * generator.standard_normal(losses[1:].shape)
            losses[1:] += (gap * MARGIN * LOSS * np.resize([1, -1], num_arms))[:, None, None]
            errors += bool(wrong & _tuned_verdicts(losses, peeks=peeks))
        return errors / num_sweeps

    return TunedRates(
        num_seeds=num_seeds,
        num_arms=num_arms,
        noise=noise,
        num_sweeps=num_sweeps,
        num_values=num_values,
        false_equivalent=rate(1.0, frozenset({"equivalent"})),
        false_unequal=rate(1.0, UNEQUAL),
        false_unequal_no_gap=rate(0.0, UNEQUAL),
        peeking_unequal_no_gap=rate(0.0, UNEQUAL, peeks=True),
    )


def _tuned_verdicts(losses: NDArray[np.float64], *, peeks: bool) -> set[str]:
    """Those of one sweep, given the loss of each arm, value and seed, the reference's first."""
    halves = halve(range(losses.shape[-1]))
    selection = halves.comparison if peeks else halves.selection
    reference, *arms = (_at_best(tried, selection, halves.comparison) for tried in losses)
    return _decided(reference, arms)


def _at_best(
    tried: NDArray[np.float64], selection: Sequence[int], comparison: Sequence[int]
) -> ArmLosses:
    """The losses on the comparison seeds of the value that is best on the selection seeds."""
    trials = [
        Trial(setting=(i,), losses={seed: float(row[seed]) for seed in selection})
        for i, row in enumerate(tried)
    ]
    chosen = best(trials)
    assert chosen is not None
    row = tried[trials.index(chosen)]
    return ArmLosses(losses={seed: float(row[seed]) for seed in comparison})


def _verdicts(
    num_seeds: int, num_arms: int, noise: float, gap: float, generator: np.random.Generator
) -> set[str]:
    """Those of one sweep whose arms are `gap` margins above or below the reference by turns."""
    run_std = noise * MARGIN * LOSS / np.sqrt(2)  # a difference has the noise of two runs
    shared = LOSS + SEED_STD * generator.standard_normal(num_seeds)
    losses = shared + run_std * generator.standard_normal((1 + num_arms, num_seeds))
    signs = np.resize([1, -1], num_arms)
    losses[1:] += (gap * MARGIN * LOSS * signs)[:, None]
    reference, *arms = (ArmLosses(losses=dict(enumerate(row.tolist()))) for row in losses)
    return _decided(reference, arms)


def _decided(reference: ArmLosses, arms: Sequence[ArmLosses]) -> set[str]:
    margin = MARGIN * float(np.mean(list(reference.losses.values())))
    return set(
        decide(reference, {str(i): arm for i, arm in enumerate(arms)}, margin=margin).values()
    )


def _tell(found: Sequence[ErrorRates], kind: type[ErrorRates], output: Path | None) -> None:
    Console().print(_table(found))
    if output is not None:
        with output.open("w", encoding="utf-8", newline="") as file:
            names = [field.name for field in fields(kind)]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(each) for each in found)


def _table(found: Sequence[ErrorRates]) -> Table:
    table = Table(title=f"family-wise error rates, stated at most {LEVEL:.0%}")
    rates = ["false equivalent", "false worse or better", "the same, no gap"]
    if any(isinstance(each, TunedRates) for each in found):
        rates.append("the same, peeking")
    for column in ("seeds", "arms", "noise / margin", "sweeps", *rates):
        table.add_column(column, justify="right")
    for each in found:
        numbers = (each.num_seeds, each.num_arms, each.noise, f"{each.num_sweeps:,}")
        shares = [each.false_equivalent, each.false_unequal, each.false_unequal_no_gap]
        if isinstance(each, TunedRates):
            shares.append(each.peeking_unequal_no_gap)
        table.add_row(*map(str, numbers), *(f"{100 * share:.2f} %" for share in shares))
    return table
