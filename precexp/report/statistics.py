"""The verdict: seed-paired t-intervals against a margin, with Holm's correction over the arms.

Three one-sided hypotheses are tested per arm at 5 %: that its gap to the reference is at least the
margin (rejected: equivalent), at most + margin (rejected: worse), at least - margin (rejected:
better). At 5 % each says what the 90 % interval says: wholly inside, wholly above, wholly below.
Schuirmann 1987 (two one-sided tests), Holm 1979.

Each of the three kinds of error has a family-wise rate of at most 5 %. False `worse` and false
`better` taken together can exceed it, by up to 2x, where the margin is below half the differences'
standard deviation.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t, without the long import of scipy.stats

LEVEL = 0.05  # of each one-sided test; the interval shown is the two-sided one of 1 - 2 LEVEL
MOST_SEEDS = 1000  # a plan of more is no plan

Verdict = Literal["equivalent", "worse", "better", "undecided"]


@dataclass(frozen=True, kw_only=True)
class ArmLosses:
    """Final eval losses of an arm by seed, in nats per token, and the seeds it diverged on."""

    losses: Mapping[int, float]
    diverged: Set[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm against the reference: the mean of the seed-paired differences and the verdict.

    `difference` is None without a common seed, the interval's ends with fewer than two.
    """

    verdict: Verdict
    reason: str
    num_pairs: int
    difference: float | None
    ci_low: float | None
    ci_high: float | None


def compare_arms(
    reference: ArmLosses, arms: Mapping[str, ArmLosses], *, margin: float
) -> dict[str, Comparison]:
    """Each arm's comparison with the reference; `margin` in nats per token.

    Holm's family is the arms with two pairs or more: the others are not tested.
    """
    pairs = {label: paired_differences(reference, arm) for label, arm in arms.items()}
    tested = [label for label, differences in pairs.items() if len(differences) >= 2]
    equivalent = holm(
        [1.0 if arms[label].diverged else equivalence_p(pairs[label], margin) for label in tested]
    )
    above = [p_above(pairs[label], margin) for label in tested]
    below = [1.0 if arms[label].diverged else p_below(pairs[label], -margin) for label in tested]
    unequal = holm([min(both) for both in zip(above, below, strict=True)])
    verdicts: dict[str, Verdict] = dict.fromkeys(arms, "undecided")
    for i, label in enumerate(tested):
        if equivalent[i] < LEVEL:
            verdicts[label] = "equivalent"
        elif unequal[i] < LEVEL:
            verdicts[label] = "worse" if above[i] < below[i] else "better"
    for label, arm in arms.items():
        if not pairs[label] and len(arm.diverged & reference.losses.keys()) >= 2:
            verdicts[label] = "worse"
    return {
        label: _comparison(
            pairs[label], arm, verdict=verdicts[label], margin=margin, num_tested=len(tested)
        )
        for label, arm in arms.items()
    }


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


def p_above(differences: Sequence[float], bound: float) -> float:
    """p of the one-sided t-test that the mean difference is at most `bound`."""
    distance, error = float(np.mean(differences)) - bound, _standard_error(differences)
    if error == 0:  # identical differences: no noise to hide behind
        return 0.0 if distance > 0 else 1.0
    return float(stdtr(len(differences) - 1, -distance / error))


def p_below(differences: Sequence[float], bound: float) -> float:
    """p of the one-sided t-test that the mean difference is at least `bound`."""
    return p_above([-difference for difference in differences], -bound)


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


def seeds_to_decide(
    differences: Sequence[float], margin: float, *, num_tested: int = 1
) -> int | None:
    """How many seeds would decide if mean and spread stayed as they are; None: over MOST_SEEDS.

    Holm's strictest step is assumed. It is a projection, not a power calculation.
    """
    spread = _standard_error(differences) * math.sqrt(len(differences))
    to_margin = abs(abs(float(np.mean(differences))) - margin)
    for num_seeds in range(len(differences) + 1, MOST_SEEDS + 1):
        half = float(stdtrit(num_seeds - 1, 1 - LEVEL / num_tested)) * spread
        if half / math.sqrt(num_seeds) < to_margin:
            return num_seeds
    return None


def _standard_error(differences: Sequence[float]) -> float:
    return float(np.std(differences, ddof=1)) / math.sqrt(len(differences))


def _comparison(
    differences: Sequence[float],
    arm: ArmLosses,
    *,
    verdict: Verdict,
    margin: float,
    num_tested: int,
) -> Comparison:
    low, high = paired_interval(differences) if len(differences) >= 2 else (None, None)
    return Comparison(
        verdict=verdict,
        reason=_reason(differences, arm, verdict=verdict, margin=margin, num_tested=num_tested),
        num_pairs=len(differences),
        difference=float(np.mean(differences)) if differences else None,
        ci_low=low,
        ci_high=high,
    )


def _reason(
    differences: Sequence[float],
    arm: ArmLosses,
    *,
    verdict: Verdict,
    margin: float,
    num_tested: int,
) -> str:
    """Why the verdict is what it is, in a clause."""
    if arm.diverged and verdict in ("worse", "undecided"):
        seeds = ", ".join(map(str, sorted(arm.diverged)))
        word = "seed" if len(arm.diverged) == 1 else "seeds"
        return f"diverged on {word} {seeds}, so it cannot be equivalent or better"
    if verdict != "undecided":
        side = {"equivalent": "inside ±", "worse": "above +", "better": "below -"}[verdict]
        return f"the interval is wholly {side}margin"
    if not differences:
        return "no seed with a completed, matched run of both"
    if len(differences) == 1:
        return "one seed shows no spread; at least 2 are needed"
    low, high = paired_interval(differences)
    alone = (-margin < low and high < margin) or low > margin or high < -margin
    why = f"alone it would decide, but not among {num_tested} arms (Holm)"
    needed = seeds_to_decide(differences, margin, num_tested=num_tested)
    return (
        f"{why if alone else 'the interval reaches across the margin'}; "
        f"{f'over {MOST_SEEDS}' if needed is None else f'about {needed}'} seeds would decide if "
        "mean and spread stayed"
    )
