"""Flow matching and DiffusionNFT against hand computations and each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from genrl.diffusion import Path, RectifiedFlow, VariancePreserving
from genrl.objectives import flow_matching_loss, nft_loss, optimality

ALPHAS = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2, 0)
PATHS: dict[str, Path] = {"rectified": RectifiedFlow(), "vp": VariancePreserving(ALPHAS)}
paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
forms = pytest.mark.parametrize("form", ["x0", "velocity"])
T = torch.tensor([0.1, 0.35, 0.6, 0.85, 1.0])


def normal(seed: int) -> Tensor:
    return torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(seed))


def noised(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """x0, x_t and v* = the path's own velocity."""
    x0, eps = normal(0), normal(1)
    return x0, path.interpolate(x0, eps, T), path.velocity(x0, eps, T)


def test_flow_matching_loss_is_the_mean_square_to_noise_less_data():
    v, x0, eps = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -1.0]]), torch.tensor([[1.0, 1.0]])
    torch.testing.assert_close(flow_matching_loss(v, x0, eps), torch.tensor([(0.5**2 + 0.0) / 2]))
    assert torch.equal(flow_matching_loss(eps - x0, x0, eps), torch.zeros(1))
    assert flow_matching_loss(v.bfloat16(), x0, eps).dtype == torch.float32


# ---- the formula ------------------------------------------------------------------------------------------

# x0 = (1, 0), eps = (0, 2), t = 1/2: x_t = (.5, 1), v* = (-1, 2). v = (0, 2), v_old = (-1, 0), beta = 1/2:
# v+ = (-.5, 1), v- = (-1.5, -1); x+ = x_t - v+/2 = (.75, .5), x- = (1.25, 1.5).
HAND = {
    "x_t": torch.tensor([[0.5, 1.0]]),
    "t": torch.tensor([0.5]),
    "x0": torch.tensor([[1.0, 0.0]]),
    "v": torch.tensor([[0.0, 2.0]]),
    "v_old": torch.tensor([[-1.0, 0.0]]),
}


def test_velocity_form_by_hand():
    # |v+ - v*|^2 = (.25 + 1) / 2, |v- - v*|^2 = (.25 + 9) / 2; r = 3/4.
    loss = nft_loss(**HAND, r=torch.tensor([0.75]), beta=0.5, form="velocity")
    torch.testing.assert_close(loss, torch.tensor([0.75 * 0.625 + 0.25 * 4.625]))


def test_x0_form_by_hand():
    # Errors (-.25, .5) and (.25, 1.5): mean squares 5/32 and 37/32, mean absolute values 3/8 and 7/8.
    loss = nft_loss(**HAND, r=torch.tensor([0.75]), beta=0.5)
    expected = 0.75 * (5 / 32) / (3 / 8 * 0.5) + 0.25 * (37 / 32) / (7 / 8 * 0.5)
    torch.testing.assert_close(loss, torch.tensor([expected]))


def test_positive_samples_of_the_old_policy_give_flow_matching():
    x0, eps, v = normal(0), normal(1), normal(2)
    x_t = PATHS["rectified"].interpolate(x0, eps, T)
    loss = nft_loss(v, v, x_t, T, x0, torch.ones(5), form="velocity")
    torch.testing.assert_close(loss, flow_matching_loss(v, x0, eps), rtol=1e-4, atol=1e-5)


@paths
def test_velocity_form_measures_the_distance_to_the_velocity_of_the_path(path):
    x0, x_t, target = noised(path)
    v, v_old, r, beta = normal(2), normal(3), torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0]), 0.7
    plus = (beta * v + (1 - beta) * v_old - target).square().flatten(1).mean(1)
    minus = ((1 + beta) * v_old - beta * v - target).square().flatten(1).mean(1)
    loss = nft_loss(v, v_old, x_t, T, x0, r, beta, "velocity", path)
    torch.testing.assert_close(loss, r * plus + (1 - r) * minus, rtol=1e-3, atol=1e-4)


@paths
@forms
def test_a_perfect_velocity_costs_nothing(path, form):
    x0, x_t, target = noised(path)
    loss = nft_loss(target, target, x_t, T, x0, torch.full((5,), 0.3), form=form, path=path)
    torch.testing.assert_close(loss, torch.zeros(5), atol=1e-5, rtol=0)


# ---- gradients --------------------------------------------------------------------------------------------


def gradient(form: str, r: float, beta: float = 1.0, path: Path = PATHS["rectified"]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient in v at v = v_old, that v, and v*."""
    x0, x_t, target = noised(path)
    v = normal(2).requires_grad_()
    loss = nft_loss(v, v.detach(), x_t, T, x0, torch.full((5,), r), beta, form, path)  # type: ignore[arg-type]
    return torch.autograd.grad(loss.sum(), v)[0], v.detach(), target


@paths
@forms
def test_half_optimal_samples_do_not_move_the_old_policy(form, path):
    torch.testing.assert_close(gradient(form, 0.5, path=path)[0], torch.zeros(5, 2, 3), atol=1e-6, rtol=0)


@paths
@forms
def test_good_samples_pull_the_velocity_to_theirs_and_bad_ones_push_it_away(form, path):
    for r, sign in ((1.0, 1.0), (0.0, -1.0)):
        g, v, target = gradient(form, r, path=path)
        toward = -(g * (target - v)).flatten(1)  # of a step against the gradient
        torch.testing.assert_close(
            torch.cosine_similarity(-g.flatten(1), (target - v).flatten(1)), sign * torch.ones(5), rtol=1e-4, atol=0
        )
        assert bool((sign * toward.sum(1) > 0).all())


def test_on_policy_gradient_of_the_velocity_form_is_beta_times_the_signed_optimality():
    for r, beta in ((1.0, 1.0), (0.8, 0.5), (0.1, 2.0)):
        g, v, target = gradient("velocity", r, beta)
        torch.testing.assert_close(g, 2 * beta * (2 * r - 1) * (v - target) / 6, rtol=1e-3, atol=1e-5)


def test_on_policy_gradient_of_the_x0_form_does_not_depend_on_beta():
    torch.testing.assert_close(gradient("x0", 0.9, 0.1)[0], gradient("x0", 0.9, 1.0)[0], rtol=1e-4, atol=1e-6)


@forms
def test_no_gradient_reaches_the_old_policy_and_half_precision_is_raised(form):
    x0, x_t, _ = noised(PATHS["rectified"])
    v, v_old = normal(2).bfloat16().requires_grad_(), normal(3).bfloat16().requires_grad_()
    loss = nft_loss(v, v_old, x_t, T, x0, torch.full((5,), 0.3), form=form)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert v_old.grad is None and bool(v.grad.isfinite().all())


def test_the_weights_of_the_x0_form_carry_no_gradient():
    x0, x_t, _ = noised(PATHS["rectified"])
    v = normal(2).requires_grad_()
    (g,) = torch.autograd.grad(nft_loss(v, normal(3), x_t, T, x0, torch.ones(5)).sum(), v)
    t = T[:, None, None]
    error = (x_t - t * v - x0).detach()
    weight = error.abs().mean((1, 2), keepdim=True)
    torch.testing.assert_close(g, -t * 2 * error / 6 / weight, rtol=1e-4, atol=1e-6)


@paths
@forms
@pytest.mark.parametrize("t", [0.0, 1e-8, 1e-5, 1e-3])
def test_times_near_zero_stay_finite(t, form, path):
    x0, time = normal(0), torch.full((5,), t)
    x_t = path.interpolate(x0, normal(1), time)
    v = normal(2).requires_grad_()
    loss = nft_loss(v, normal(3), x_t, time, x0, torch.full((5,), 0.7), form=form, path=path)
    (g,) = torch.autograd.grad(loss.sum(), v)
    assert bool(loss.isfinite().all() and g.isfinite().all())
    assert float(loss.detach().max()) < 100  # rounding of x_t over a vanishing t is not taken for an error


# ---- optimality -------------------------------------------------------------------------------------------


def test_optimality_table():
    advantage = torch.tensor([-10.0, -5.0, -2.5, 0.0, 2.5, 5.0, 10.0])
    torch.testing.assert_close(optimality(advantage), torch.tensor([0, 0, 0.25, 0.5, 0.75, 1, 1]))
    torch.testing.assert_close(optimality(advantage, 2.5), torch.tensor([0, 0, 0, 0.5, 1, 1, 1]))


def test_unknown_forms_and_strengths_are_refused():
    with pytest.raises(ValueError, match=r"form 'eps' is unknown; allowed are 'x0' and 'velocity'"):
        nft_loss(**HAND, r=torch.ones(1), form="eps")  # type: ignore[arg-type]
    for beta in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"beta = {beta} must be positive"):
            nft_loss(**HAND, r=torch.ones(1), beta=beta)
