"""The tests behind a verdict, on the seed-paired differences of an arm and the reference.

Student's t throughout; Schuirmann 1987 (two one-sided tests), Holm 1979.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit  # Student's t, without the long import of scipy.stats

Floats = NDArray[np.float64]
LEVEL = 0.05  # of each one-sided test; the interval shown is the two-sided one of 1 - 2 LEVEL
# On two seeds 0.55 is the least that holds the level whatever the noise, on more seeds less is
# (tests/test_report_statistics.py integrates the rate of error).
ENOUGH = 0.6


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The mean of paired differences and its 90 % interval, None with fewer than two."""

    mean: float
    low: float | None
    high: float | None


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
    """p of the test that the mean difference is at most the margin away from 0, on either side."""
    distance, error = abs(float(np.mean(differences))), _standard_error(differences)
    if error == 0:
        return 0.0 if distance > margin else 1.0
    p = unequal_p_at(
        np.array(distance), np.array(error), margin=margin, freedom=len(differences) - 1
    )
    return float(p)


def unequal_p_at(distance: Floats, error: Floats, *, margin: float, freedom: int) -> Floats:
    """`unequal_p` of means so far from 0, with these standard errors.

    The near tail is t's beyond (distance - margin) / error, the far one beyond (distance + margin)
    / error. Their sum holds every level but, as t's tails are heavy, gives away power on few seeds.
    So the near tail alone decides at the levels whose interval has a half-width of at most
    margin / ENOUGH.
    """
    near, far = (stdtr(freedom, (side * margin - distance) / error) for side in (1, -1))
    alone = stdtr(freedom, -margin / (ENOUGH * error))  # the least of those levels
    return np.minimum(np.minimum(near + far, np.maximum(near, alone)), 1.0)


def least_unequal(errors: Floats, *, margin: float, freedom: int, level: float) -> Floats:
    """By standard error, the least mean whose `unequal_p` is below the level; by bisection."""
    low = np.full_like(errors, margin)
    high = margin + stdtrit(freedom, 1 - level / 2) * errors
    for _ in range(50):
        middle = (low + high) / 2
        rejected = unequal_p_at(middle, errors, margin=margin, freedom=freedom) < level
        low, high = np.where(rejected, low, middle), np.where(rejected, middle, high)
    return high


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
