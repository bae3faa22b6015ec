"""Intervals equal scipy's, and say so when there is nothing to measure."""

import math

import pytest
import torch

from genrl.statistics import interval, wilson_interval


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
