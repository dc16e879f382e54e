"""The verdict on each arm, from its seed-paired differences to the reference and a margin.

Per arm two hypotheses are tested at 5 %. That its gap to the reference is at least the margin is
rejected where the 90 % interval is wholly inside ± margin: *equivalent*. That the gap is at most
the margin is rejected where the interval is wholly outside: *worse* or *better*. Where the margin
is small beside the noise, the interval could be outside on either side, and false *worse* and false
*better* together would come to 10 %: there both tails count (`hypotheses.unequal_p`). Holm's
correction over the arms holds each of the two kinds of error at 5 %, as `python -m precexp.bench
verdicts` measures.

A run that diverged where the reference did not is a difference of plus infinity: it forbids
*equivalent* and *better*, and two of them on seeds that the reference completed are *worse*.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np

from precexp.report.hypotheses import (
    LEVEL,
    equivalence_p,
    holm,
    interval_of,
    paired_interval,
    permutation_p,
    unequal_p,
)
from precexp.report.power import MOST_SEEDS, POWER, seeds_to_decide

MOST_PERMUTED = 20  # pairs whose 2^n signs are enumerated

Verdict = Literal["equivalent", "worse", "better", "undecided"]


@dataclass(frozen=True, kw_only=True)
class ArmLosses:
    """What is compared of an arm, by seed, and the seeds it diverged on; less is better."""

    losses: Mapping[int, float]
    diverged: Set[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm against the reference: the mean of the seed-paired differences and the verdict.

    `difference` is None without a common seed, the interval's ends with fewer than two,
    `permutation_p` also with more than 20; `seeds_needed` with a verdict and where no number helps.
    """

    verdict: Verdict
    reason: str
    num_pairs: int
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    permutation_p: float | None
    seeds_needed: int | None  # to decide at 80 % power if mean and spread stayed


def compare_arms(
    reference: ArmLosses, arms: Mapping[str, ArmLosses], *, margin: float
) -> dict[str, Comparison]:
    """Each arm's comparison with the reference; `margin` in the unit of the losses."""
    verdicts = decide(reference, arms, margin=margin)
    pairs = {label: paired_differences(reference, arm) for label, arm in arms.items()}
    num_tested = sum(len(differences) >= 2 for differences in pairs.values())
    return {
        label: _comparison(
            pairs[label],
            arm.diverged - reference.diverged,
            verdict=verdicts[label],
            margin=margin,
            num_tested=num_tested,
        )
        for label, arm in arms.items()
    }


def decide(
    reference: ArmLosses, arms: Mapping[str, ArmLosses], *, margin: float
) -> dict[str, Verdict]:
    """The verdict on each arm.

    Holm's family is the arms with two pairs or more: the others are not tested.
    """
    pairs = {label: paired_differences(reference, arm) for label, arm in arms.items()}
    against = {label: arm.diverged - reference.diverged for label, arm in arms.items()}
    tested = [label for label, differences in pairs.items() if len(differences) >= 2]
    means = {label: float(np.mean(pairs[label])) for label in tested}
    equivalent = holm(
        [1.0 if against[label] else equivalence_p(pairs[label], margin) for label in tested]
    )
    unequal = holm(
        [
            1.0 if against[label] and means[label] < 0 else unequal_p(pairs[label], margin)
            for label in tested
        ]
    )
    verdicts: dict[str, Verdict] = dict.fromkeys(arms, "undecided")
    for i, label in enumerate(tested):
        if equivalent[i] < LEVEL:
            verdicts[label] = "equivalent"
        elif unequal[i] < LEVEL:
            verdicts[label] = "worse" if means[label] > 0 else "better"
    for label in arms:
        if len(against[label] & reference.losses.keys()) >= 2:
            verdicts[label] = "worse"
    return verdicts


def paired_differences(reference: ArmLosses, arm: ArmLosses) -> list[float]:
    """Arm minus reference on each seed that both completed, in the seeds' order."""
    common = sorted(reference.losses.keys() & arm.losses.keys())
    return [arm.losses[seed] - reference.losses[seed] for seed in common]


def mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean, None of nothing, and the sample standard deviation, None of fewer than two."""
    mean = float(np.mean(values)) if values else None
    return mean, float(np.std(values, ddof=1)) if len(values) >= 2 else None


def _comparison(
    differences: Sequence[float],
    against: Set[int],
    *,
    verdict: Verdict,
    margin: float,
    num_tested: int,
) -> Comparison:
    count = len(differences)
    interval = interval_of(differences)
    needed = None
    if verdict == "undecided" and not against and count >= 2:
        needed = seeds_to_decide(differences, margin=margin, level=LEVEL / num_tested)
    return Comparison(
        verdict=verdict,
        reason=_reason(
            differences,
            against,
            verdict=verdict,
            margin=margin,
            num_tested=num_tested,
            needed=needed,
        ),
        num_pairs=count,
        difference=interval.mean if interval else None,
        ci_low=interval.low if interval else None,
        ci_high=interval.high if interval else None,
        permutation_p=permutation_p(differences) if 2 <= count <= MOST_PERMUTED else None,
        seeds_needed=needed,
    )


def _reason(
    differences: Sequence[float],
    against: Set[int],
    *,
    verdict: Verdict,
    margin: float,
    num_tested: int,
    needed: int | None,
) -> str:
    """Why the verdict is what it is, in a clause."""
    if against and verdict in ("worse", "undecided"):
        seeds = ", ".join(map(str, sorted(against)))
        word = "seed" if len(against) == 1 else "seeds"
        return f"diverged on {word} {seeds}, so it cannot be equivalent or better"
    if verdict != "undecided":
        side = {"equivalent": "inside ±", "worse": "above +", "better": "below -"}[verdict]
        return f"the interval is wholly {side}margin"
    if not differences:
        return "no seed with a completed, matched run of both in which this was measured"
    if len(differences) == 1:
        return "one seed shows no spread; at least 2 are needed"
    low, high = paired_interval(differences)
    if equivalence_p(differences, margin) < LEVEL or unequal_p(differences, margin) < LEVEL:
        why = f"alone it would decide, but not among {num_tested} arms (Holm)"
    elif low > margin or high < -margin:
        why = "the interval is outside the margin, but the noise could put it on either side"
    else:
        why = "the interval reaches across the margin"
    seeds = f"over {MOST_SEEDS}" if needed is None else f"about {needed}"
    return f"{why}; {seeds} seeds would decide at {POWER:.0%} power if mean and spread stayed"
