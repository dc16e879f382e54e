"""The verdict: seed-paired t-intervals against a margin, with Holm's correction over the arms.

Per arm two hypotheses are tested at 5 %. That its gap to the reference is at least the margin is
rejected by two one-sided t-tests (Schuirmann 1987), which is to say where the 90 % interval is
wholly inside ± margin: *equivalent*. That the gap is at most the margin is rejected where the
interval is wholly outside and the p-value of |t| at the margin, both tails counted, is below 5 %:
*worse* or *better*. The far tail matters only where the margin is small beside the noise; without
it, false `worse` and false `better` together would reach 10 % there. Holm 1979 over the arms for
each of the two. `python -m precexp.bench verdicts` measures the family-wise error rates.

A run that diverged where the reference did not is a difference of plus infinity: it forbids
*equivalent* and *better*, and two of them on seeds that the reference completed are *worse*.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t, without the long import of scipy.stats

from precexp.report.power import MOST_SEEDS, POWER, seeds_to_decide

LEVEL = 0.05  # of each one-sided test; the interval shown is the two-sided one of 1 - 2 LEVEL
MOST_PERMUTED = 20  # pairs whose 2^n signs are enumerated

Verdict = Literal["equivalent", "worse", "better", "undecided"]


@dataclass(frozen=True, kw_only=True)
class ArmLosses:
    """What is compared of an arm, by seed, and the seeds it diverged on; less is better."""

    losses: Mapping[int, float]
    diverged: Set[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The mean of paired differences and its 90 % interval, None with fewer than two."""

    mean: float
    low: float | None
    high: float | None


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


def paired_interval(differences: Sequence[float], *, level: float = LEVEL) -> tuple[float, float]:
    """The two-sided t-interval of 1 - 2 level for the mean of two or more differences."""
    half = float(stdtrit(len(differences) - 1, 1 - level)) * _standard_error(differences)
    mean = float(np.mean(differences))
    return mean - half, mean + half


def interval_of(differences: Sequence[float]) -> Interval | None:
    """The mean of the differences and its interval; None of nothing."""
    if not differences:
        return None
    low, high = paired_interval(differences) if len(differences) >= 2 else (None, None)
    return Interval(mean=float(np.mean(differences)), low=low, high=high)


def p_above(differences: Sequence[float], bound: float) -> float:
    """p of the one-sided t-test that the mean difference is at most `bound`."""
    distance, error = float(np.mean(differences)) - bound, _standard_error(differences)
    if error == 0:  # identical differences: no noise to hide behind
        return 0.0 if distance > 0 else 1.0
    return float(stdtr(len(differences) - 1, -distance / error))


def p_below(differences: Sequence[float], bound: float) -> float:
    """p of the one-sided t-test that the mean difference is at least `bound`."""
    return p_above([-difference for difference in differences], -bound)


def unequal_p(differences: Sequence[float], margin: float) -> float:
    """p of the test that the mean difference is at most the margin away from 0, on either side.

    The probability, were it just the margin away, of a mean as far from 0 as this one: of the near
    tail, and of the far one.
    """
    distance = abs(float(np.mean(differences)))
    error = _standard_error(differences)
    if error == 0:
        return 0.0 if distance > margin else 1.0
    tails = stdtr(len(differences) - 1, [(margin - distance) / error, (-margin - distance) / error])
    return min(1.0, float(tails.sum()))


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """p of the two one-sided tests that the mean difference is at least the margin away from 0."""
    return max(p_below(differences, margin), p_above(differences, -margin))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: reject those below the family-wise level."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def permutation_p(differences: Sequence[float]) -> float:
    """p of the exact paired permutation test that arm and reference are interchangeable.

    The share of the 2^n ways to sign n differences whose mean is as far from 0 as the one found.
    """
    count = len(differences)
    signs = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1).astype(np.int8)
    sums = np.abs(signs @ np.asarray(differences))
    # The slack keeps the rounding of the sums from breaking a tie.
    return float(np.mean(sums >= sums[0] * (1 - 1e-12)))


def _standard_error(differences: Sequence[float]) -> float:
    return float(np.std(differences, ddof=1)) / math.sqrt(len(differences))


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
        return "no seed with a completed, matched run of both"
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
