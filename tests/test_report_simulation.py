"""The verdict's family-wise error rates on simulated sweeps; the whole table is a benchmark."""

import math

import numpy as np
import pytest

from precexp.bench.verdicts import simulate_all, simulate_tuned

NUM_SWEEPS = 500
# 5 % and three standard errors of a rate of 5 % over that many sweeps: 7.9 %.
MOST = 0.05 + 3 * math.sqrt(0.05 * 0.95 / NUM_SWEEPS)


@pytest.mark.parametrize("num_seeds", range(2, 11))
def test_at_most_5_percent_of_sweeps_have_a_wrong_verdict(num_seeds: int) -> None:
    for rates in simulate_all([num_seeds], [3], [0.3, 10.0], num_sweeps=NUM_SWEEPS):
        assert rates.false_equivalent <= MOST, rates
        assert rates.false_unequal <= MOST, rates
        assert rates.false_unequal_no_gap <= MOST, rates


def test_the_level_is_used_where_it_can_be() -> None:
    """An arm on the margin, little noise: a rule that never decides would pass the other test."""
    (rates,) = simulate_all([5], [1], [0.1], num_sweeps=NUM_SWEEPS)
    least = 0.05 - 3 * math.sqrt(0.05 * 0.95 / NUM_SWEEPS)
    assert rates.false_equivalent >= least
    assert rates.false_unequal >= least


@pytest.mark.parametrize("num_seeds", [4, 7])
@pytest.mark.parametrize("noise", [0.3, 10.0])
def test_tuning_keeps_the_level_and_peeking_would_not(num_seeds: int, noise: float) -> None:
    rates = simulate_tuned(
        num_seeds,
        3,
        noise,
        num_values=8,
        num_sweeps=NUM_SWEEPS,
        generator=np.random.default_rng(1),
    )
    assert rates.false_equivalent <= MOST, rates
    assert rates.false_unequal <= MOST, rates
    assert rates.false_unequal_no_gap <= MOST, rates
    if noise == 10.0:  # with less the margin hides what luck gains
        assert rates.peeking_unequal_no_gap > MOST, rates
