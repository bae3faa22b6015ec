"""StepRS: limits, closed forms of binary rewards, matched controls."""

import math

import pytest
import torch

from genrl.objectives import group_relative
from genrl.objectives.step_risk import (
    StepRisk,
    binary_factor,
    group_ranks,
    matched,
    neutral_rate,
    risk_advantage,
    risk_for_rate,
    risk_schedule,
)


def rewards(seed=0, shape=(4, 8)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def binary(rates=(1, 3, 4, 7), size=8):
    return torch.stack([(torch.arange(size) < k).double() for k in rates])


GRID = torch.linspace(1, 0, 6)


def estimator(**settings):
    made = StepRisk(unit="none", **settings)
    made.configure(GRID)
    return made


def test_no_risk_is_the_centred_reward_and_the_limit_is_continuous():
    r = rewards()
    centred = r - r.mean(1, keepdim=True)
    torch.testing.assert_close(risk_advantage(r, 0.0), centred, atol=1e-15, rtol=0)
    for beta in (1e-6, 0.99e-6, 1.01e-6, -1e-6, 1e-7):
        torch.testing.assert_close(risk_advantage(r, beta), centred, atol=1e-6, rtol=0)


@pytest.mark.parametrize("beta", [-3.0, -0.5, 1e-5, 0.5, 2.0, 8.0])
def test_advantages_have_mean_zero_and_the_form_of_the_objective(beta):
    r = rewards()
    found = risk_advantage(r, beta)
    weight = (beta * r).exp()
    torch.testing.assert_close(found, (weight / weight.mean(1, keepdim=True) - 1) / beta, atol=1e-9, rtol=0)
    assert float(found.mean(1).abs().max()) < 1e-9


def test_large_risk_sees_the_best_alone_and_nothing_overflows():
    r = torch.tensor([[0.0, 1.0, 500.0, 499.0]])
    found = risk_advantage(r, 1.0)
    assert bool(torch.isfinite(risk_advantage(r, torch.tensor([500.0, -500.0]))).all())
    assert float(found[0, 2]) == pytest.approx(4 / (1 + math.exp(-1)) - 1)
    torch.testing.assert_close(
        risk_advantage(r, 500.0)[0], torch.tensor([-1.0, -1.0, 3.0, -1.0]).double() / 500, atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("beta", [-4.0, -1.0, 0.0, 0.5, 1.0, 2.0, 4.0])
def test_binary_rewards_are_rescaled_exactly(beta):
    r = binary()
    p = r.mean(1, keepdim=True)
    torch.testing.assert_close(risk_advantage(r, beta), binary_factor(p, beta) * (r - p), atol=1e-12, rtol=0)
    by_hand = 1.0 if beta == 0 else math.expm1(beta) / (beta * (1 + 0.3 * math.expm1(beta)))
    assert float(binary_factor(0.3, beta)) == pytest.approx(by_hand, rel=1e-12)


def test_the_neutral_rate_leaves_the_centred_reward():
    for beta, expected in [(0.5, 0.459), (1.0, 0.418), (2.0, 0.343), (4.0, 0.231)]:  # published forms of the inverse
        assert neutral_rate(beta) == pytest.approx(expected, abs=5e-4)
    for beta in (-30.0, -2.0, 1e-5, 0.3, 2.0, 30.0):
        p = neutral_rate(beta)
        assert float(binary_factor(p, beta)) == pytest.approx(1.0, abs=1e-9)
    for beta in (-5.0, -0.2, 0.0, 0.7, 6.0):
        assert risk_for_rate(neutral_rate(beta)) == pytest.approx(beta, abs=1e-6)
    assert risk_for_rate(0.0) == pytest.approx(10) and risk_for_rate(1.0) == pytest.approx(-10)


def test_a_constant_schedule_is_rs_grpo_and_zero_is_grpo_without_division():
    r = rewards()
    constant = estimator(beta_early=2.0, beta_late=2.0)(r)
    assert constant.by_step.shape == (4, 8, 5)
    for k in range(5):
        torch.testing.assert_close(constant.by_step[:, :, k], risk_advantage(r, 2.0).float())
    torch.testing.assert_close(constant.values, risk_advantage(r, 2.0).float())
    none = estimator(beta_early=0.0, beta_late=0.0)(r)
    torch.testing.assert_close(none.by_step[:, :, 3], group_relative(r, std_scope="none", clip=None))


def test_every_step_has_the_risk_of_its_noise_level():
    r = rewards()
    found = estimator(beta_early=2.0, beta_late=-1.0)(r).by_step
    for k in range(5):
        torch.testing.assert_close(found[:, :, k], risk_advantage(r, -1 + 3 * float(GRID[k].double())).float())
    assert not torch.allclose(found, found.flip(2))  # another order of the states is another loss


def test_schedules_have_the_ends_that_were_asked_for():
    t = torch.tensor([1.0, 0.5, 0.0])
    assert risk_schedule(t, 2, 0).tolist() == [2, 1, 0]
    torch.testing.assert_close(risk_schedule(t, 2, 0, "cosine"), torch.tensor([2.0, 1.0, 0.0]).double())
    assert risk_schedule(t, 2, 1, "power", 3.0).tolist() == [2, 1.125, 1]


def test_division_by_the_groups_deviation_would_undo_it_for_binary_rewards():
    r = binary()
    found = risk_advantage(r, torch.tensor([2.0, 0.5]))
    plain = group_relative(r, std_scope="group", eps=0, clip=None).double()
    for k in range(2):
        column = found[:, :, k]
        torch.testing.assert_close(column / column.std(1, correction=0, keepdim=True), plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm", ["rms", "mass"])
def test_matching_is_one_number_for_all(norm):
    r = binary()
    plain, result = estimator()(r).by_step, estimator(match=norm)(r).by_step
    ratio = (result / plain)[plain != 0]
    assert float(ratio.max() - ratio.min()) < 1e-5 and abs(float(ratio[0]) - 1) > 0.01
    centred = r - r.mean(1, keepdim=True)
    size = {"rms": lambda x: x.double().square().mean().sqrt(), "mass": lambda x: x.double().abs().mean()}[norm]
    assert float(size(result)) == pytest.approx(float(size(centred)), rel=1e-5)
    zero = torch.zeros(2, 3, 4)
    assert torch.equal(matched(zero, zero, norm), zero)


def test_calibration_is_neutral_at_the_mean_success():
    made = estimator(beta_early=2.0, beta_late=1.0, calibrate=True)
    r = binary((2, 2), 8)
    found = made(r)
    beta = risk_for_rate(0.25)
    torch.testing.assert_close(found.by_step[:, :, 0], (r - 0.25).float(), atol=1e-5, rtol=0)
    assert found.metrics["advantage/risk_first"] == pytest.approx(beta)
    # At t = 0.2 the schedule is 1.2 of 2.
    assert found.metrics["advantage/risk_last"] == pytest.approx(beta * 1.2 / 2)


def test_rewards_of_any_scale_come_to_the_unit_interval():
    r = rewards()
    made = StepRisk(window=2)
    made.configure(GRID)
    low, high = 100 * r.min(), 100 * r.max()
    torch.testing.assert_close(
        made(100 * r).by_step[:, :, 0], risk_advantage((100 * r - low) / (high - low), 2.0).float()
    )
    made(50 + 0 * r)  # the range of the window stays
    assert made.ranges[0] == (float(low), float(high))
    again = StepRisk(window=2)
    again.load_state_dict(made.state_dict())
    assert again.ranges == made.ranges
    made(50 + 0 * r)
    assert made.ranges == [(50.0, 50.0)] * 2
    ranks = group_ranks(torch.tensor([[5.0, 5.0, 9.0, math.nan, 1.0]]))
    torch.testing.assert_close(ranks, torch.tensor([[0.5, 0.5, 1.0, math.nan, 0.0]]).double(), equal_nan=True)


def test_unscored_and_flat_groups_get_nothing():
    r = rewards(shape=(3, 4))
    r[0, 1] = math.nan
    r[1] = 0.1 + 0.2
    r[2] = math.nan
    for unit in ("none", "minmax", "rank"):
        made = StepRisk(unit=unit)
        made.configure(GRID)
        found = made(r).by_step
        assert (
            bool(torch.isfinite(found).all())
            and float(found[1:].abs().max()) == 0
            and float(found[0, 1].abs().max()) == 0
        )
    kept = torch.tensor([True, False, True, True])
    torch.testing.assert_close(risk_advantage(r, 2.0)[0, kept], risk_advantage(r[:1, kept], 2.0)[0])


def test_wrong_settings_are_named():
    for settings, message in [
        ({"unit": "x"}, "unit = 'x'"),
        ({"form": "x"}, "form = 'x'"),
        ({"match": "x"}, "match = 'x'"),
        ({"window": 0}, "window = 0"),
        ({"calibrate": True, "beta_early": 0.0, "beta_late": 0.0}, "both its ends are 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            StepRisk(**settings)
