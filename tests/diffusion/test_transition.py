"""Gaussian transitions against torch.distributions, and their closed forms against simulation."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from genrl.diffusion import DeterministicTransitionError, FlowSDE, GaussianTransition, reduce_elements

SHAPES = [(3, 5), (3, 4, 5), (3, 2, 4, 4), (3, 2, 3, 4, 4)]  # [B, D], [B, T, D], [B, C, H, W], [B, C, F, H, W]
STDS = {"number": 0.3, "tensor": torch.tensor(0.3, dtype=torch.float64), "per sample": None, "per element": None}

all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
all_reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def make(shape: tuple[int, ...], kind: str, seed: int = 0):
    """(new, old, x, Normal(new), Normal(old)) in float64; std of the kind asked for."""
    generator = torch.Generator().manual_seed(seed)
    mean, shift, x = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    std = STDS[kind]
    if kind == "per sample":
        std = 0.1 + torch.rand(shape[0], generator=generator, dtype=torch.float64)
    if kind == "per element":
        std = 0.1 + torch.rand(shape, generator=generator, dtype=torch.float64)
    old_mean = mean + 0.1 * shift
    wide = torch.as_tensor(std, dtype=torch.float64)
    wide = wide.reshape(wide.shape + (1,) * (len(shape) - wide.dim())) if wide.dim() else wide
    return (
        GaussianTransition(mean, std),
        GaussianTransition(old_mean, std),
        x,
        Independent(Normal(mean, wide.expand(shape)), len(shape) - 1),
        Independent(Normal(old_mean, wide.expand(shape)), len(shape) - 1),
    )


@all_shapes
@all_reductions
@pytest.mark.parametrize("kind", STDS)
def test_densities_equal_torch_distributions(shape, reduction, kind) -> None:
    new, old, x, normal, normal_old = make(shape, kind)
    per_element = math.prod(shape[1:]) if reduction == "mean" else 1
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(new.log_prob(x, reduction), normal.log_prob(x) / per_element, **close)
    difference = (normal.log_prob(x) - normal_old.log_prob(x)) / per_element
    torch.testing.assert_close(new.log_ratio(old, x, reduction), difference, **close)
    torch.testing.assert_close(new.kl(old, reduction), kl_divergence(normal, normal_old) / per_element, **close)


@all_shapes
def test_sum_is_the_number_of_elements_times_mean(shape) -> None:
    new, old, x, _, _ = make(shape, "per sample")
    size = math.prod(shape[1:])
    for value in (lambda r: new.log_prob(x, r), lambda r: new.log_ratio(old, x, r), lambda r: new.kl(old, r)):
        torch.testing.assert_close(value("sum"), size * value("mean"), rtol=1e-12, atol=1e-12)


def test_std_may_be_given_for_leading_dimensions() -> None:
    mean = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    std = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], dtype=torch.float64)
    new, old = GaussianTransition(mean, std), GaussianTransition(mean + 0.1, std)
    x = new.sample(torch.Generator().manual_seed(2))
    normal = Normal(mean, std[..., None])
    torch.testing.assert_close(new.log_prob(x, "sum"), normal.log_prob(x).sum((1, 2)))
    torch.testing.assert_close(new.kl(old, "sum"), (0.01 / (2 * std**2) * 4).sum(1))


def test_densities_are_float32_and_finite_for_half_precision_near_its_limit() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((2, 4, 8, 8), 6e4, dtype=dtype)
        v = -x
        new = FlowSDE(0.7).transition(x, v, torch.tensor(0.6), torch.tensor(0.5))
        old = FlowSDE(0.7).transition(x, 0.99 * v, torch.tensor(0.6), torch.tensor(0.5))
        point = new.sample(torch.Generator().manual_seed(0))
        assert new.mean.dtype == torch.float32 == point.dtype
        for reduction in ("mean", "sum"):
            for value in (new.log_prob(point, reduction), new.log_ratio(old, point, reduction), new.kl(old, reduction)):
                assert value.dtype == torch.float32 and torch.isfinite(value).all()
        assert GaussianTransition(x, 0.1).mean.dtype == torch.float32
        assert torch.isfinite(GaussianTransition(x, 0.1).log_prob(-x)).all()  # a gap of 1.2e5 in half precision


def test_sum_over_sixteen_thousand_elements_stays_finite() -> None:
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(2, 16, 32, 32, generator=generator)
    new, old = GaussianTransition(mean, 0.1), GaussianTransition(mean + 0.001, 0.1)  # k = 0.82
    x = new.sample(generator)
    log_ratio = new.log_ratio(old, x, "sum")
    assert torch.isfinite(log_ratio.exp()).all() and (log_ratio.abs() < 10).all()
    assert torch.isfinite(new.log_prob(x, "sum")).all()


def test_log_ratio_keeps_the_digits_that_the_difference_of_densities_loses() -> None:
    """Means that differ by 1e-6 s; a float32 log-density of order 1 has no digits left for the difference."""
    generator = torch.Generator().manual_seed(4)
    mean = torch.randn(8, 16, 16, 16, generator=generator)
    x = (mean + 0.1 * torch.randn(mean.shape, generator=generator)).float()
    shifted = mean + 1e-5 * torch.randn(mean.shape, generator=generator)
    exact = GaussianTransition(shifted.double(), 0.1).log_prob(x) - GaussianTransition(mean.double(), 0.1).log_prob(x)
    ours = GaussianTransition(shifted, 0.1).log_ratio(GaussianTransition(mean, 0.1), x)
    naive = GaussianTransition(shifted, 0.1).log_prob(x) - GaussianTransition(mean, 0.1).log_prob(x)
    error, naive_error = (ours - exact).abs().max(), (naive - exact).abs().max()
    # The residue is the rounding of x - (mean + mean_old) / 2, nothing that grows with the density.
    assert error < 1e-3 * exact.abs().max()
    assert naive_error > 10 * error


@all_reductions
def test_equal_means_give_exactly_zero(reduction) -> None:
    generator = torch.Generator().manual_seed(5)
    mean = 100 * torch.randn(4, 3, 7, 5, generator=generator)
    x = 1e3 * torch.randn(mean.shape, generator=generator)
    new, old = GaussianTransition(mean, 1e-3), GaussianTransition(mean.clone(), 1e-3)
    assert (new.log_ratio(old, x, reduction) == 0).all() and (new.kl(old, reduction) == 0).all()


@all_reductions
def test_weights_of_one_change_nothing_and_others_weigh_elements(reduction) -> None:
    new, old, x, normal, normal_old = make((3, 2, 4, 4), "per sample")
    weight = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    log_p, log_q = normal.base_dist.log_prob(x), normal_old.base_dist.log_prob(x)
    kl = kl_divergence(normal.base_dist, normal_old.base_dist)
    cases = [
        (lambda w: new.log_prob(x, reduction, w), log_p),
        (lambda w: new.log_ratio(old, x, reduction, w), log_p - log_q),
        (lambda w: new.kl(old, reduction, w), kl),
    ]
    for value, elements in cases:
        torch.testing.assert_close(value(torch.ones_like(x)), value(None), rtol=1e-12, atol=1e-12)
        weighted = (elements * weight).flatten(1)
        expected = weighted.mean(1) if reduction == "mean" else weighted.sum(1)
        torch.testing.assert_close(value(weight), expected, rtol=1e-10, atol=1e-12)
        assert (value(torch.zeros_like(x)) == 0).all()


def test_log_ratio_has_mean_minus_kl_and_variance_twice_kl_under_the_behaviour() -> None:
    """x ~ old: E[log r] = -k, Var[log r] = 2k, E[r] = 1, with k the summed KL; in the mean reduction Var = 2k/D."""
    n, size, std = 40_000, 6, 0.3
    generator = torch.Generator().manual_seed(7)
    shift = 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)
    old = GaussianTransition(torch.zeros(n, size, dtype=torch.float64), std)
    new = GaussianTransition(shift.expand(n, size), std)
    x = old.sample(generator)
    k = float(new.kl(old, "sum")[0])
    assert k == pytest.approx(float(shift.square().sum()) / (2 * std**2), rel=1e-12)
    log_ratio = new.log_ratio(old, x, "sum")
    deviation = math.sqrt(2 * k / n)
    assert float(log_ratio.mean()) == pytest.approx(-k, abs=4 * deviation)
    assert float(log_ratio.var()) == pytest.approx(2 * k, rel=4 * math.sqrt(2 / n))
    assert float(log_ratio.exp().mean()) == pytest.approx(1, abs=4 * math.sqrt(math.expm1(2 * k) / n))
    mean_reduced = new.log_ratio(old, x, "mean")
    assert float(mean_reduced.var()) == pytest.approx(2 * (k / size) / size, rel=4 * math.sqrt(2 / n))


def test_samples_have_the_mean_and_the_std_asked_for() -> None:
    std = torch.tensor([0.5, 2.0])
    transition = GaussianTransition(torch.tensor([[1.0], [-3.0]]).expand(2, 50_000), std)
    x = transition.sample(torch.Generator().manual_seed(8))
    torch.testing.assert_close(x.mean(1), torch.tensor([1.0, -3.0]), atol=0.04, rtol=0)
    torch.testing.assert_close(x.std(1), std, rtol=0.02, atol=0)
    normalised = ((x - transition.mean) / std[:, None]).square().mean()
    assert float(normalised) == pytest.approx(1, abs=0.02)
    again = transition.sample(torch.Generator().manual_seed(8))
    torch.testing.assert_close(x, again, rtol=0, atol=0)


def test_gradients_of_ratio_kl_and_density_are_the_closed_forms() -> None:
    new, old, x, _, _ = make((3, 2, 4), "number")
    mean = new.mean.clone().requires_grad_()
    transition, variance = GaussianTransition(mean, 0.3), 0.09
    (gradient,) = torch.autograd.grad(transition.log_ratio(old, x, "sum").sum(), mean)
    torch.testing.assert_close(gradient, (x - mean.detach()) / variance)
    (gradient,) = torch.autograd.grad(transition.log_prob(x, "sum").sum(), mean)
    torch.testing.assert_close(gradient, (x - mean.detach()) / variance)
    (gradient,) = torch.autograd.grad(transition.kl(old, "mean").sum(), mean)
    torch.testing.assert_close(gradient, (mean.detach() - old.mean) / variance / 8)


@pytest.mark.parametrize("std", [0, 0.0, torch.tensor(0.0), torch.tensor([0.1, 0.0])])
def test_no_density_without_noise(std) -> None:
    transition = GaussianTransition(torch.zeros(2, 3), std)
    assert transition.is_deterministic
    for density in (
        lambda: transition.log_prob(torch.zeros(2, 3)),
        lambda: transition.log_ratio(transition, torch.zeros(2, 3)),
        lambda: transition.kl(transition),
    ):
        with pytest.raises(DeterministicTransitionError, match="noise_level or eta above 0"):
            density()
    if not isinstance(std, torch.Tensor) or std.dim() == 0:
        assert (transition.sample() == 0).all()


def test_transitions_of_different_steps_are_not_compared() -> None:
    new, old = GaussianTransition(torch.zeros(1, 3), 0.1), GaussianTransition(torch.zeros(1, 3), 0.2)
    for call in (lambda: new.log_ratio(old, torch.zeros(1, 3)), lambda: new.kl(old)):
        with pytest.raises(ValueError, match=r"std 0\.1 and 0\.2"):
            call()


def test_reduction_errors_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*'sum'"):
        reduce_elements(torch.zeros(2, 3), "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank >= 2"):
        reduce_elements(torch.zeros(3))
