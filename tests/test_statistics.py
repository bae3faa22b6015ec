"""Intervals and paired tests equal scipy's, and say so when there is nothing to measure."""

import math

import pytest
import torch

from genrl.statistics import interval, mcnemar_p_value, paired_means, paired_shares, wilson_interval


@pytest.mark.parametrize("k, n", [(0, 10), (1, 10), (5, 10), (98, 100), (500, 500)])
def test_wilson_interval_equals_scipy(k, n):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(k / n, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_shares_get_wilsons_interval_and_other_values_the_normal_one():
    shares = interval("a", torch.tensor([1.0, 0, 1, 1, float("nan")]))
    assert shares["a"] == 0.75
    assert (shares["a_low"], shares["a_high"]) == pytest.approx(wilson_interval(0.75, 4))
    values = torch.tensor([0.5, 1.5, 2.5, 3.5])
    found = interval("b", values)
    half = 1.959964 * float(values.double().std()) / 2
    assert (found["b"], found["b_low"], found["b_high"]) == pytest.approx((2.0, 2 - half, 2 + half))


def test_without_scored_values_there_is_no_mean_and_with_one_no_interval():
    assert all(math.isnan(v) for v in interval("a", torch.tensor([float("nan")])).values())
    single = interval("a", torch.tensor([0.3]))
    assert single["a"] == pytest.approx(0.3) and math.isnan(single["a_low"])


def test_the_interval_covers_the_truth_19_times_out_of_20():
    generator = torch.Generator().manual_seed(0)
    for p in (None, 0.9):
        hits = 0
        for _ in range(400):
            values = torch.rand(50, generator=generator)
            truth = 0.5 if p is None else p
            values = values if p is None else (values < p).float()
            found = interval("a", values)
            hits += found["a_low"] <= truth <= found["a_high"]
        assert 0.92 < hits / 400 < 0.99


def test_an_interval_stays_within_the_range_that_a_reward_declares():
    values = torch.tensor([0.9, 1.0, 1.0, 0.95])
    free, bounded = interval("x", values), interval("x", values, (0.0, 1.0))
    assert free["x_high"] > 1 and bounded["x_high"] == 1.0 and bounded["x_low"] == free["x_low"]


@pytest.mark.parametrize("only_a, only_b", [(0, 0), (0, 1), (0, 6), (3, 5), (5, 3), (7, 7), (20, 41), (300, 900)])
def test_mcnemars_p_value_equals_the_binomial_test_of_the_cases_that_differ(only_a, only_b):
    stats = pytest.importorskip("scipy.stats")
    n = only_a + only_b
    expected = stats.binomtest(only_a, n, 0.5).pvalue if n else 1.0
    assert mcnemar_p_value(only_a, only_b) == pytest.approx(expected, rel=1e-9)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="-1"):
        mcnemar_p_value(-1, 3)


def outcomes(both, only_a, only_b, neither):
    a = [True] * (both + only_a) + [False] * (only_b + neither)
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return a, b


def test_paired_shares_reproduce_a_published_example():
    """Altman et al., Statistics with Confidence (2000), p. 52: 14, 5, 0, 22 gives 0.122 (0.011 to 0.226)."""
    b, a = outcomes(14, 5, 0, 22)
    found = paired_shares(a, b)
    assert (found.difference, found.low, found.high) == pytest.approx((0.122, 0.011, 0.226), abs=6e-4)
    mirrored = paired_shares(b, a)
    assert (mirrored.difference, mirrored.low, mirrored.high) == pytest.approx(
        (-found.difference, -found.high, -found.low)
    )
    assert found.p_value == mirrored.p_value == pytest.approx(2 * 0.5**5)


def test_two_perfect_scores_differ_by_nothing_with_an_interval_that_depends_on_the_number_of_cases():
    widths = []
    for n in (10, 100):
        found = paired_shares([True] * n, [True] * n)
        assert found.difference == 0 and found.low < 0 < found.high and found.p_value == 1
        widths.append(found.high - found.low)
    assert widths[0] > 5 * widths[1]


def test_the_interval_of_paired_shares_covers_the_truth_19_times_out_of_20():
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([0.5, 0.1, 0.25, 0.15])  # both, only a, only b, neither
    hits = 0
    for _ in range(600):
        counts = torch.multinomial(table, 50, replacement=True, generator=generator).bincount(minlength=4).tolist()
        found = paired_shares(*outcomes(*counts))
        hits += found.low <= 0.15 <= found.high
    assert 0.925 < hits / 600 < 0.99


def test_paired_means_equal_scipys_paired_t_test():
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(17, generator=generator, dtype=torch.float64)
    b = a + 0.3 + 0.5 * torch.randn(17, generator=generator, dtype=torch.float64)
    found, expected = paired_means(a.tolist(), b.tolist()), stats.ttest_rel(b.numpy(), a.numpy())
    interval = expected.confidence_interval(0.95)
    assert found.difference == pytest.approx(float((b - a).mean()))
    assert (found.p_value, found.low, found.high) == pytest.approx((expected.pvalue, interval.low, interval.high))


def test_paired_means_of_degenerate_cases():
    same = paired_means([1.0, 2.0], [1.0, 2.0])
    assert (same.difference, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)
    shifted = paired_means([1.0, 2.0], [2.0, 3.0])
    assert (shifted.difference, shifted.p_value) == (1.0, 0.0)
    assert math.isnan(paired_means([1.0], [2.0]).p_value)
    with pytest.raises(ValueError, match="2 and 1 cases"):
        paired_means([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="0 and 0 cases"):
        paired_shares([], [])
    with pytest.raises(ValueError, match="NaN"):
        paired_means([1.0, math.nan], [1.0, 2.0])
