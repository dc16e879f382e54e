"""The verdict's arithmetic against scipy and against hand computations."""

import math

import numpy as np
import pytest
from scipy import stats

from precexp.report.hypotheses import (
    equivalence_p,
    holm,
    least_unequal,
    p_above,
    p_below,
    paired_interval,
    permutation_p,
    unequal_p,
    unequal_p_at,
)
from precexp.report.power import power, seeds_to_decide
from precexp.report.statistics import ArmLosses, Verdict, compare_arms, mean_and_std

RTOL = 1e-9  # two libraries' t distributions; worst seen 3e-13
DIFFERENCES = [0.011, 0.004, -0.002, 0.008, 0.006]
REFERENCE = ArmLosses(losses={1: 3.40, 2: 3.41, 3: 3.43, 4: 3.42, 5: 3.44})
MARGIN = 0.017


def arm_of(*differences: float, diverged: tuple[int, ...] = ()) -> ArmLosses:
    losses = {seed: REFERENCE.losses[seed] + d for seed, d in enumerate(differences, start=1)}
    return ArmLosses(losses=losses, diverged=frozenset(diverged))


def verdict_of(arm: ArmLosses) -> Verdict:
    return compare_arms(REFERENCE, {"arm": arm}, margin=MARGIN)["arm"].verdict


def test_interval_is_scipys_90_percent_t_interval() -> None:
    expected = stats.ttest_1samp(DIFFERENCES, 0).confidence_interval(0.90)
    assert paired_interval(DIFFERENCES) == pytest.approx((expected.low, expected.high), rel=RTOL)


def test_interval_by_hand() -> None:
    # mean 0.02, s = 0.01, standard error 0.01 / sqrt(3); t(0.95, 2) = 2.919986
    half = 2.919986 * 0.01 / math.sqrt(3)
    assert paired_interval([0.01, 0.02, 0.03]) == pytest.approx(
        (0.02 - half, 0.02 + half), abs=1e-8
    )


@pytest.mark.parametrize("bound", [-0.02, 0.0, 0.005, 0.02])
def test_one_sided_p_values_are_scipys(bound: float) -> None:
    _, above = stats.ttest_1samp(DIFFERENCES, bound, alternative="greater")
    _, below = stats.ttest_1samp(DIFFERENCES, bound, alternative="less")
    assert p_above(DIFFERENCES, bound) == pytest.approx(above, rel=RTOL)
    assert p_below(DIFFERENCES, bound) == pytest.approx(below, rel=RTOL)


def test_tests_at_5_percent_say_what_the_90_percent_interval_says() -> None:
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        sample = generator.normal(generator.uniform(-0.04, 0.04), 0.01, size=4).tolist()
        low, high = paired_interval(sample)
        inside, above, below = low > -MARGIN and high < MARGIN, low > MARGIN, high < -MARGIN
        assert (equivalence_p(sample, MARGIN) < 0.05) == inside
        assert (p_above(sample, MARGIN) < 0.05) == above
        assert (p_below(sample, -MARGIN) < 0.05) == below
        seen.add((inside, above, below))
    assert len(seen) == 4  # each of the verdicts was among them


def test_identical_differences_leave_no_doubt() -> None:
    assert p_above([0.1, 0.1], 0.05) == 0
    assert p_above([0.1, 0.1], 0.1) == 1


def test_holm_of_three_arms_by_hand() -> None:
    # sorted 0.01, 0.03, 0.04 -> 3 * 0.01 = 0.03; 2 * 0.03 = 0.06; max(0.06, 1 * 0.04) = 0.06
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("arm", "verdict"),
    [
        (arm_of(0.001, 0.002, 0.003), "equivalent"),
        (arm_of(0.090, 0.092, 0.094), "worse"),
        (arm_of(-0.090, -0.092, -0.094), "better"),
        (arm_of(0.010, 0.020, 0.030), "undecided"),
    ],
)
def test_verdict_is_read_off_the_interval(arm: ArmLosses, verdict: Verdict) -> None:
    assert verdict_of(arm) == verdict


def test_holm_withholds_a_verdict_that_an_arm_would_get_alone() -> None:
    # p of the one-sided tests: 0.020 alone, 3 * 0.020 = 0.061 among three arms.
    arm = arm_of(0.0000, 0.0090, 0.0045)
    assert 0.05 / 3 < equivalence_p([0.0, 0.009, 0.0045], MARGIN) < 0.05
    assert verdict_of(arm) == "equivalent"
    among = compare_arms(REFERENCE, {"a": arm, "b": arm, "c": arm}, margin=MARGIN)
    assert {comparison.verdict for comparison in among.values()} == {"undecided"}
    assert "Holm" in among["a"].reason


def test_one_seed_never_decides() -> None:
    comparison = compare_arms(REFERENCE, {"arm": arm_of(0.5)}, margin=MARGIN)["arm"]
    assert comparison.verdict == "undecided"
    assert comparison.difference == pytest.approx(0.5)
    assert (comparison.ci_low, comparison.ci_high) == (None, None)
    assert "one seed" in comparison.reason


def test_only_common_seeds_are_paired() -> None:
    arm = ArmLosses(losses={2: 3.42, 3: 3.44, 9: 100.0})
    comparison = compare_arms(REFERENCE, {"arm": arm}, margin=MARGIN)["arm"]
    assert comparison.num_pairs == 2
    assert comparison.difference == pytest.approx(0.01)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_diverged_seed_forbids_equivalent_and_better(sign: int) -> None:
    size = 0.001 if sign > 0 else -0.09
    arm = arm_of(size, size * 1.1, size * 0.9)
    diverged = arm_of(size, size * 1.1, size * 0.9, diverged=(4,))
    assert verdict_of(arm) == ("equivalent" if sign > 0 else "better")
    assert verdict_of(diverged) == "undecided"


def test_a_diverged_seed_leaves_worse_standing() -> None:
    assert verdict_of(arm_of(0.090, 0.092, 0.094, diverged=(4,))) == "worse"


def test_an_arm_that_diverged_on_all_of_two_seeds_is_worse_and_on_one_undecided() -> None:
    assert verdict_of(arm_of(diverged=(1, 2))) == "worse"
    assert verdict_of(arm_of(diverged=(1,))) == "undecided"
    assert verdict_of(arm_of(diverged=(8, 9))) == "undecided"  # the reference did not run these


def test_two_diverged_seeds_are_worse_beside_completed_ones() -> None:
    assert verdict_of(arm_of(0.001, 0.002, diverged=(3, 4))) == "worse"


def test_a_seed_that_the_reference_diverged_on_too_is_not_counted_against_the_arm() -> None:
    reference = ArmLosses(losses=REFERENCE.losses, diverged=frozenset({6, 7}))
    arm = arm_of(0.001, 0.002, 0.003, diverged=(6, 7))
    assert compare_arms(reference, {"arm": arm}, margin=MARGIN)["arm"].verdict == "equivalent"


@pytest.mark.parametrize("margin", [0.0, 1e-6])
def test_without_a_margin_the_p_value_is_that_of_the_two_sided_test(margin: float) -> None:
    _, expected = stats.ttest_1samp(DIFFERENCES, 0)
    assert unequal_p(DIFFERENCES, margin) == pytest.approx(expected, rel=1e-5 if margin else RTOL)


def test_a_wide_margin_leaves_the_one_sided_p_value() -> None:
    differences = [1.011, 1.004, 0.998, 1.008, 1.006]
    _, expected = stats.ttest_1samp(differences, 1.0, alternative="greater")
    assert unequal_p(differences, 1.0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("level", [0.05, 0.05 / 6])
def test_false_worse_and_false_better_together_hold_the_level(num_seeds: int, level: float) -> None:
    """By integration, for a true gap of just the margin: no Monte Carlo error hides an excess."""
    freedom = num_seeds - 1
    quantiles = (np.arange(4000) + 0.5) / 4000
    errors = np.sqrt(stats.chi2.ppf(quantiles, freedom) / freedom)  # in true standard errors
    for margin in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0):
        least = least_unequal(errors, margin=margin, freedom=freedom, level=level)
        wrong = stats.norm.sf(least - margin) + stats.norm.sf(least + margin)
        assert wrong.mean() <= level * 1.005, margin  # 4,000 quantiles stand for all


def test_an_interval_outside_a_margin_below_the_noise_is_not_yet_worse() -> None:
    # t = 2.5 on 3 degrees of freedom: 0.044 of one tail, 0.088 of both
    sample = [0.002, 0.010, 0.018, 0.006]
    low, _ = paired_interval(sample)
    assert low > 1e-4
    comparison = compare_arms(REFERENCE, {"arm": arm_of(*sample)}, margin=1e-4)["arm"]
    assert comparison.verdict == "undecided"
    assert "either side" in comparison.reason


def test_permutation_p_is_scipys_exact_one() -> None:
    for sample in (DIFFERENCES, [0.1, 0.2], [0.1, -0.1, 0.1], [0.0, 0.0]):
        found = stats.permutation_test(
            (sample,), lambda x, axis: np.abs(np.mean(x, axis=axis)),
            permutation_type="samples", vectorized=True, alternative="greater",
            n_resamples=2**5,  # exact: there are no more signs than that
        )  # fmt: skip
        assert permutation_p(sample) == pytest.approx(found.pvalue)


def test_permutation_p_by_hand() -> None:
    # of the 8 sums ±1 ±2 ±4, only 7 and -7 are as far from 0 as 7; at least 5: also 5 and -5
    assert permutation_p([1.0, 2.0, 4.0]) == 2 / 8
    assert permutation_p([-1.0, 2.0, 4.0]) == 4 / 8


@pytest.mark.parametrize(
    ("mean", "spread", "num_seeds"),
    [(0.0, 0.01, 4), (0.005, 0.01, 8), (0.03, 0.01, 3), (0.03, 0.01, 6), (0.02, 0.2, 10)],
)
def test_power_is_the_share_of_simulated_sweeps_with_the_right_verdict(
    mean: float, spread: float, num_seeds: int
) -> None:
    samples = np.random.default_rng(0).normal(mean, spread, size=(20_000, num_seeds))
    means, errors = samples.mean(1), samples.std(1, ddof=1) / math.sqrt(num_seeds)
    unequal = unequal_p_at(np.abs(means), errors, margin=MARGIN, freedom=num_seeds - 1)
    inside = stats.t.sf((MARGIN - np.abs(means)) / errors, num_seeds - 1) < 0.05
    right = inside if mean < MARGIN else (unequal < 0.05) & (means > 0)
    found = power(num_seeds, mean=mean, spread=spread, margin=MARGIN, level=0.05)
    assert found == pytest.approx(right.mean(), abs=0.01)  # Monte Carlo: sd at most 0.0035


def test_power_of_a_clear_gap_is_that_of_the_noncentral_t() -> None:
    size = (0.03 - MARGIN) / 0.01 * math.sqrt(6)
    expected = stats.nct.sf(stats.t.ppf(0.95, 5), 5, size)
    found = power(6, mean=0.03, spread=0.01, margin=MARGIN, level=0.05)
    assert found == pytest.approx(expected, abs=2e-3)  # 400 spreads stand for all


def test_seeds_to_decide_is_the_first_number_with_80_percent_power() -> None:
    sample = [0.005, 0.025, 0.0]
    found = seeds_to_decide(sample, margin=MARGIN, level=0.05)
    assert found is not None

    def power_of(num_seeds: int) -> float:
        spread = float(np.std(sample, ddof=1))
        return power(num_seeds, mean=0.01, spread=spread, margin=MARGIN, level=0.05)

    assert power_of(found - 1) < 0.8 <= power_of(found)
    stricter = seeds_to_decide(sample, margin=MARGIN, level=0.05 / 3)
    assert stricter is not None
    assert stricter > found


def test_no_number_of_seeds_decides_a_gap_right_on_the_margin() -> None:
    sample = [MARGIN - 0.01, MARGIN + 0.01]
    assert seeds_to_decide(sample, margin=MARGIN, level=0.05) is None
    comparison = compare_arms(REFERENCE, {"arm": arm_of(*sample)}, margin=MARGIN)["arm"]
    assert comparison.seeds_needed is None
    assert "over 1000 seeds" in comparison.reason


def test_spread_of_one_value_is_unknown() -> None:
    assert mean_and_std([]) == (None, None)
    assert mean_and_std([3.0]) == (3.0, None)
    assert mean_and_std([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
