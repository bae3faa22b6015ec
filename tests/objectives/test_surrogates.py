"""What every surrogate promises, and PPO-clip, Flow-DPPO and the ratio-free losses against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from objective_steps import MEMBERS, NUMBERS, WITH_RATIO, normal, plain_terms, step_terms
from torch.distributions import Normal

from genrl.objectives import (
    SURROGATES,
    ConsistencyRegression,
    FlowDPPO,
    Guard,
    PPOClip,
    Reinforce,
    Surrogate,
)
from genrl.objectives.surrogates import clipped

members = pytest.mark.parametrize("name", MEMBERS)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])
STD, ADVANTAGE = 0.3, torch.tensor([1.5, -0.5, 2.0, -3.0])
DELTA = {"inv_dt": 10.0, "beta_over_dt": 12.5, "inv_kappa": 8.0, "none": 1.0}  # of dt = 0.1 and kappa = 0.125


def on_policy_coefficient(surrogate: Surrogate) -> float:
    """-dL / dl at unchanged weights for A = 1, as documented."""
    return surrogate.reference * DELTA[surrogate.delta_form] * STD if isinstance(surrogate, Guard) else 1.0


# ---- every surrogate --------------------------------------------------------------------------------------


@reductions
@members
def test_unchanged_weights_give_the_on_policy_gradient_in_the_mean(name, reduction):
    z, shift = normal(4, 2, 3), torch.zeros(4, 2, 3, requires_grad=True)
    loss, _ = MEMBERS[name](step_terms(shift, z, ADVANTAGE, STD, reduction, start=1.7))
    loss.sum().backward()
    # d l / d mu = z / s, over D for the mean reduction.
    expected = -on_policy_coefficient(MEMBERS[name]) * ADVANTAGE[:, None, None] * z / STD
    torch.testing.assert_close(shift.grad, expected / (6 if reduction == "mean" else 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in MEMBERS if n != "consistency_regression"])
def test_unchanged_weights_give_the_documented_coefficient_of_the_log_ratio(name):
    log_ratio = torch.zeros(4, requires_grad=True)
    loss, _ = MEMBERS[name](plain_terms(log_ratio, torch.zeros(4), ADVANTAGE, STD))
    loss.sum().backward()
    torch.testing.assert_close(log_ratio.grad, -on_policy_coefficient(MEMBERS[name]) * ADVANTAGE)


@pytest.mark.parametrize("name", WITH_RATIO)
def test_the_ratio_is_exactly_one_at_unchanged_weights(name):
    loss, metrics = MEMBERS[name](step_terms(torch.zeros(4, 50), normal(4, 50), ADVANTAGE, start=-3.3))
    weight = on_policy_coefficient(MEMBERS[name]) / STD if isinstance(MEMBERS[name], Guard) else 1.0
    assert torch.equal(loss, -torch.tensor(weight) * ADVANTAGE)
    assert float(metrics["ratio_min"]) == float(metrics["ratio_max"]) == 1.0
    assert float(metrics["clip_fraction"]) == float(metrics["normalized_std"]) == float(metrics["kl_old"]) == 0.0


EXTREMES = torch.tensor([0.0, 30.0, -30.0, 1e3, -1e3, 1e-8])


@members
def test_an_advantage_of_zero_gives_exactly_no_loss_and_no_gradient(name):
    log_ratio, kl = EXTREMES.clone().requires_grad_(), EXTREMES.abs().requires_grad_()
    mean = (100 * normal(6, 4)).requires_grad_()
    loss, _ = MEMBERS[name](plain_terms(log_ratio, kl, torch.zeros(6), mean=mean))
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros(6))
    assert all(x.grad is None or not x.grad.any() for x in (log_ratio, kl, mean))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@members
def test_extreme_log_ratios_stay_finite(name, sign):
    log_ratio, kl = EXTREMES.clone().requires_grad_(), EXTREMES.abs().requires_grad_()
    loss, metrics = MEMBERS[name](plain_terms(log_ratio, kl, torch.full((6,), sign), std=1.0))
    assert bool(loss.isfinite().all()) and all(bool(v.isfinite()) for v in metrics.values())
    if loss.requires_grad:
        loss.sum().backward()
        assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in (log_ratio, kl))


@members
def test_true_densities_over_16k_elements_stay_finite(name):
    shift = (0.1 * normal(2, 16384, seed=1)).requires_grad_()
    loss, _ = MEMBERS[name](step_terms(shift, normal(2, 16384), torch.tensor([1.0, -1.0]), 0.05, "sum"))
    loss.sum().backward()
    assert bool(loss.isfinite().all() and shift.grad.isfinite().all())


@reductions
@members
def test_numbers_and_one_value_a_sample_agree_and_the_loss_is_float32(name, reduction):
    shift, z = 1e-3 * normal(4, 5, seed=1), normal(4, 5)
    expected, metrics = MEMBERS[name](step_terms(shift, z, ADVANTAGE, STD, reduction))
    for dtype in (torch.float32, torch.float64):
        rows = {k: torch.full((4,), v, dtype=dtype) for k, v in NUMBERS.items()}
        std = torch.full((4,), STD, dtype=dtype)
        loss, measured = MEMBERS[name](step_terms(shift, z, ADVANTAGE, std, reduction, **rows))
        assert loss.dtype == torch.float32 and loss.shape == (4,)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(measured, metrics)


@members
def test_metrics_are_scalar_tensors_without_gradient_and_the_same_for_all(name):
    shift = (1e-3 * normal(4, 5)).requires_grad_()
    _, metrics = MEMBERS[name](step_terms(shift, normal(4, 5, seed=1), ADVANTAGE))
    assert set(metrics) == {
        *("clip_fraction", "outside_fraction", "ratio_mean", "ratio_min", "ratio_max", "log_ratio_mean"),
        *("log_ratio_std", "normalized_mean", "normalized_std", "kl_old"),
    }
    assert all(isinstance(v, torch.Tensor) and v.shape == () and not v.requires_grad for v in metrics.values())


def test_metrics_by_hand():
    log_ratio, kl = torch.tensor([0.1, -0.3]), torch.tensor([0.02, 0.04])
    _, metrics = PPOClip(0.2)(plain_terms(log_ratio, kl, torch.tensor([1.0, 1.0]), std=0.5))
    expected = {
        "clip_fraction": 0.0,  # -0.3 is below log(0.8), but A > 0 lets it come back
        "outside_fraction": 0.5,
        "ratio_mean": (math.exp(0.1) + math.exp(-0.3)) / 2,
        "ratio_min": math.exp(-0.3),
        "ratio_max": math.exp(0.1),
        "log_ratio_mean": -0.1,
        "log_ratio_std": 0.2,
        "normalized_mean": 0.5 * (0.12 - 0.26) / 2,
        "normalized_std": 0.5 * (0.12 + 0.26) / 2,
        "kl_old": 0.03,
    }
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(expected, rel=1e-5)


@members
def test_a_gradient_step_raises_the_expected_reward(name):
    # Reward -|x - c|^2 has the expectation -|mu - c|^2 - const, known without sampling.
    centre, z = torch.tensor([1.0, -1.0, 0.5]), normal(512, 3)
    mu = torch.zeros(3, requires_grad=True)
    reward = -(STD * z - centre).square().sum(1)
    loss, _ = MEMBERS[name](step_terms(mu.expand(512, 3), z, (reward - reward.mean()) / reward.std(), STD))
    loss.mean().backward()
    after = -0.05 * mu.grad / mu.grad.norm()
    assert float((after - centre).square().sum()) < float(centre.square().sum()) - 0.1


def test_losses_without_a_ratio_say_so():
    assert {name for name, member in SURROGATES.items() if member.on_policy_only} == {
        "reinforce",
        "consistency_regression",
    }


# ---- PPO-clip -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_range", [0.2, [0.1, 0.3], [0.3, 0.05], (0.2, 0.28)])
def test_ppo_clip_equals_the_minimum_of_its_definition(clip_range):
    low, high = (clip_range, clip_range) if isinstance(clip_range, float) else clip_range
    log_ratio = (0.3 * normal(500, dtype=torch.float64)).requires_grad_()
    advantage = normal(500, seed=1, dtype=torch.float64)
    loss, metrics = PPOClip(clip_range)(plain_terms(log_ratio, log_ratio.detach() ** 2, advantage))
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    ratio = log_ratio.exp()
    definition = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    (expected,) = torch.autograd.grad(definition.sum(), log_ratio)
    torch.testing.assert_close(loss, definition)
    torch.testing.assert_close(gradient, expected)
    assert float(metrics["clip_fraction"]) == pytest.approx(float((expected == 0).double().mean()))
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    assert float(metrics["outside_fraction"]) == pytest.approx(float(outside.double().mean()))


def test_a_clip_below_the_resolution_of_float32_ratios_is_decided_correctly():
    c = 2e-6
    log_ratio = torch.tensor([c * 0.999, c * 1.001, -c * 0.999, -c * 1.001])
    ratio = log_ratio.exp()
    assert ratio[0] == ratio[1] and ratio[2] == ratio[3]  # as ratios they cannot be told apart
    for surrogate in (PPOClip(c), Guard(c, delta_form="none")):
        terms = plain_terms(log_ratio, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), std=1.0)
        _, metrics = surrogate(terms)
        assert float(metrics["clip_fraction"]) == 0.5
    _, cut = clipped(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), math.log1p(-c), math.log1p(c))
    assert cut.tolist() == [False, True, False, True]


def test_clipped_samples_keep_the_value_of_the_edge_and_lose_their_gradient():
    log_ratio = torch.tensor([0.5, -0.5], requires_grad=True)
    loss, _ = PPOClip(0.2)(plain_terms(log_ratio, torch.zeros(2), torch.tensor([2.0, -2.0])))
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([-2.4, 1.6]))
    assert torch.equal(log_ratio.grad, torch.zeros(2))


@pytest.mark.parametrize(
    "value", ["atuo", 0, 0.0, 1.0, -0.1, math.nan, [0.1], [], [0.1, 0.2, 0.3], [0.1, 2], None, "0.1"]
)
@pytest.mark.parametrize("surrogate", [PPOClip, Guard])
def test_impossible_clip_ranges_are_refused_with_what_to_use(surrogate, value):
    with pytest.raises(ValueError) as error:
        surrogate(clip_range=value)
    assert f"clip_range = {value!r}" in str(error.value) and "[low, high]; use 'auto'" in str(error.value)


def test_other_settings_are_refused_with_value_and_remedy():
    with pytest.raises(ValueError, match=r"trust_region = 0 must be positive; 0.02"):
        PPOClip(trust_region=0)
    with pytest.raises(ValueError, match=r"trust_region = -1"):
        Guard(trust_region=-1)
    with pytest.raises(ValueError, match=r"delta_form = 'dt'.*inv_dt, beta_over_dt, inv_kappa, none"):
        Guard(delta_form="dt")  # type: ignore[arg-type]
    for threshold in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"kl_threshold = {threshold} must be positive; 1e-5"):
            FlowDPPO(threshold)


# ---- Flow-DPPO ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "advantage, log_ratio, kl, masked",
    [
        (1.0, 0.1, 2e-5, True),  # outward and far
        (-1.0, -0.1, 2e-5, True),
        (1.0, 0.1, 0.5e-5, False),  # outward and near
        (-1.0, -0.1, 0.5e-5, False),
        (1.0, -0.1, 1.0, False),  # corrections pass at any distance
        (-1.0, 0.1, 1.0, False),
        (1.0, 0.0, 1.0, False),  # a ratio of 1 is not outward
        (-1.0, 0.0, 1.0, False),
        (1.0, 0.1, 1e-5, False),  # the threshold itself is inside
    ],
)
@reductions
def test_the_mask_of_flow_dppo(advantage, log_ratio, kl, masked, reduction):
    dim = 64
    value = torch.tensor([log_ratio], requires_grad=True)
    kl_old = torch.tensor([kl * (1 if reduction == "mean" else dim)])
    terms = plain_terms(value, kl_old, torch.tensor([advantage]), dim=dim, reduction=reduction)
    loss, metrics = FlowDPPO(1e-5)(terms)
    loss.sum().backward()
    assert float(metrics["clip_fraction"]) == float(masked)
    coefficient = 0.0 if masked else -math.exp(log_ratio) * advantage
    assert float(loss.detach()) == pytest.approx(coefficient) and float(value.grad) == pytest.approx(coefficient)


def test_without_a_threshold_flow_dppo_is_the_importance_weighted_policy_gradient():
    log_ratio, advantage = normal(50).requires_grad_(), normal(50, seed=1)
    loss, _ = FlowDPPO(math.inf)(plain_terms(log_ratio, torch.full((50,), 1e6), advantage))
    loss.sum().backward()
    torch.testing.assert_close(loss, -log_ratio.exp() * advantage)
    torch.testing.assert_close(log_ratio.grad, -log_ratio.detach().exp() * advantage)


# ---- losses without a ratio -------------------------------------------------------------------------------


def log_density(sample, mean, std, reduction):
    """From torch.distributions, [B] in the precision of the inputs."""
    terms = Normal(mean, std.reshape(-1, *(1,) * (mean.dim() - 1)).expand_as(mean)).log_prob(sample).flatten(1)
    return terms.mean(1) if reduction == "mean" else terms.sum(1)


@reductions
def test_reinforce_has_the_gradient_of_the_log_density(reduction):
    z, std = normal(4, 2, 3), torch.tensor([0.1, 0.3, 0.7, 2.0])
    shift = (0.2 * normal(4, 2, 3, seed=1)).requires_grad_()
    terms = step_terms(shift, z, ADVANTAGE, std, reduction)
    (gradient,) = torch.autograd.grad(Reinforce()(terms)[0].sum(), shift, retain_graph=True)
    definition = -(ADVANTAGE * log_density(terms.sample, terms.mean, std, reduction)).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(definition, shift)[0])


@reductions
def test_consistency_regression_has_the_gradient_of_the_log_density_in_x0_hat(reduction):
    x0_hat, sample = normal(4, 2, 3).requires_grad_(), normal(4, 2, 3, seed=1)
    std, a = torch.tensor([0.1, 0.3, 0.7, 2.0]), torch.tensor([0.9, 0.7, 0.3, 0.05])
    mean = a[:, None, None] * x0_hat  # alpha x0_hat
    zeros = torch.zeros(4)
    terms = plain_terms(zeros, zeros, ADVANTAGE, std, mean=mean, sample=sample, a=a, reduction=reduction)
    (gradient,) = torch.autograd.grad(ConsistencyRegression()(terms)[0].sum(), x0_hat, retain_graph=True)
    definition = -(ADVANTAGE * log_density(sample, mean, std, reduction)).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(definition, x0_hat, retain_graph=True)[0])
    (scaled,) = torch.autograd.grad(ConsistencyRegression(scale=100)(terms)[0].sum(), x0_hat)
    torch.testing.assert_close(scaled, 100 * gradient)


@reductions
def test_consistency_regression_is_the_squared_pull_in_value(reduction):
    z = normal(2, 5)
    loss, _ = ConsistencyRegression()(step_terms(torch.zeros(2, 5), z, 3.0, 0.2, reduction, a=0.8))
    pull = (3.0 * 0.8 / (2 * 0.2) * z).square()
    torch.testing.assert_close(loss, pull.mean(1) if reduction == "mean" else pull.sum(1))


def test_a_large_x0_hat_does_not_round_the_pull_away():
    # Early steps have a small a, hence a large x0_hat: 1e4 has a resolution of 1e-3 in float32.
    z = normal(1, 100)
    shift = torch.zeros(1, 100, requires_grad=True)
    loss, _ = ConsistencyRegression()(step_terms(shift, z, 0.01, 1.0, "sum", start=100.0, a=0.01))
    loss.sum().backward()
    torch.testing.assert_close(shift.grad, -0.01 * z, rtol=1e-3, atol=1e-6)
