"""How many seeds a verdict needs: the power of the tests in hypotheses.py."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import chdtri, ndtr, stdtrit

from precexp.report.hypotheses import least_unequal

POWER = 0.8
MOST_SEEDS = 1000  # a plan of more is no plan
NUM_SPREADS = 400  # of the sample's standard deviation, equally likely ones


def seeds_to_decide(differences: Sequence[float], *, margin: float, level: float) -> int | None:
    """The least number of seeds, beyond those at hand, that decides with a probability of 80 %.

    It takes the mean and the standard deviation of the differences as true and tests at `level`
    (under Holm, that of its strictest step). None if over 1,000 seeds would be needed.
    """
    mean, spread = abs(float(np.mean(differences))), float(np.std(differences, ddof=1))

    def decides(num_seeds: int) -> bool:
        return power(num_seeds, mean=mean, spread=spread, margin=margin, level=level) >= POWER

    low, high = len(differences), len(differences) + 1  # low is not enough, high perhaps
    while not decides(high):
        if high >= MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def power(num_seeds: int, *, mean: float, spread: float, margin: float, level: float) -> float:
    """The probability of the right verdict on normal differences of that mean and spread.

    *Equivalent* is right for a mean inside ± margin, *worse* or *better* beyond. Integrates over
    the sample's standard deviation, which is chi-distributed.
    """
    if spread == 0:
        return float(abs(mean) != margin)
    mean = abs(mean)
    freedom = num_seeds - 1
    quantiles = (np.arange(NUM_SPREADS) + 0.5) / NUM_SPREADS
    true_error = spread / math.sqrt(num_seeds)
    errors = true_error * np.sqrt(chdtri(freedom, quantiles) / freedom)
    if mean < margin:
        reach = margin - stdtrit(freedom, 1 - level) * errors
        inside = ndtr((reach - mean) / true_error) - ndtr((-reach - mean) / true_error)
        return float(inside.clip(min=0).mean())
    reach = least_unequal(errors, margin=margin, freedom=freedom, level=level)
    return float(ndtr((mean - reach) / true_error).mean())
