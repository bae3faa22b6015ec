"""Divergences against torch.distributions and Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from genrl.objectives import gaussian_kl, kl_penalty, ratio_ess
from genrl.objectives.divergences import expand

SHAPES = [(3, 5), (3, 4, 5), (3, 2, 4, 4), (3, 2, 2, 4, 4)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=[f"rank {len(s)}" for s in SHAPES])


def means(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def library_kl(mean: Tensor, other: Tensor, std: Tensor) -> Tensor:
    scale = std.reshape(-1, *(1,) * (mean.dim() - 1)).expand_as(mean)
    first, second = (Independent(Normal(m.double(), scale.double()), m.dim() - 1) for m in (mean, other))
    return kl_divergence(first, second).float()


@shapes
def test_kl_of_every_rank_equals_torch_distributions(shape):
    mean, other = means(shape)
    std = torch.tensor([0.3, 1.0, 2.5])
    expected = library_kl(mean, other, std)  # [B]
    torch.testing.assert_close(gaussian_kl(mean, other, std, "sum"), expected)
    torch.testing.assert_close(gaussian_kl(mean, other, std), expected / mean[0].numel())
    torch.testing.assert_close(gaussian_kl(mean, other, 0.3, "sum")[0], expected[0])
    torch.testing.assert_close(gaussian_kl(mean, other, torch.tensor(0.3), "sum")[0], expected[0])


def test_gradient_of_the_kl_is_the_shift_over_the_variance():
    mean, other = means((3, 5))
    mean.requires_grad_()
    gaussian_kl(mean, other, 0.4, "sum").sum().backward()
    torch.testing.assert_close(mean.grad, (mean - other).detach() / 0.16)


@shapes
def test_flow_grpo_form_is_the_exact_one_times_the_step(shape):
    mean, other = means(shape)
    std, dt = torch.tensor([0.3, 1.0, 2.5]), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    exact = kl_penalty(mean, other, std, dt)
    true = library_kl(mean, other, std)
    torch.testing.assert_close(exact, true / mean[0].numel())
    torch.testing.assert_close(kl_penalty(mean, other, std, dt, "flow_grpo"), exact * dt.float())
    torch.testing.assert_close(kl_penalty(mean, other, std, 0.1, "flow_grpo", "sum"), 0.1 * true)


def test_weights_select_elements():
    mean, other = means((3, 6))
    weight = torch.tensor([1.0, 1, 1, 0, 0, 0])
    expected = gaussian_kl(mean[:, :3], other[:, :3], 0.5, "sum")
    torch.testing.assert_close(gaussian_kl(mean, other, 0.5, "sum", weight), expected)
    torch.testing.assert_close(gaussian_kl(mean, other, 0.5, "mean", weight), expected / 6)
    torch.testing.assert_close(gaussian_kl(mean, other, 0.5, "mean", torch.ones(6)), gaussian_kl(mean, other, 0.5))


def test_results_are_float32_whatever_the_inputs_are():
    mean, other = means((3, 5))
    std = torch.full((3,), 0.5, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert gaussian_kl(mean.to(dtype), other.to(dtype), std).dtype == torch.float32
    big = torch.full((1, 4), 6e4, dtype=torch.float16)  # its square is beyond half precision
    assert float(gaussian_kl(big, torch.zeros_like(big), 1.0)) == pytest.approx(1.8e9)


def test_expand_broadcasts_numbers_scalars_and_one_value_a_sample():
    like = torch.zeros(2, 3, 4)
    assert expand(0.5, like) == 0.5
    assert expand(torch.tensor([1.0, 2.0]), like).shape == (2, 1, 1)
    assert expand(torch.tensor(1.0), like).shape == ()


@pytest.mark.parametrize("kl", [0.02, 0.1, 0.3])
def test_effective_sample_size_matches_monte_carlo(kl):
    # The ratio r of N(delta, 1) and N(0, 1), delta^2 = 2 KL, is exp(delta z - KL); its ESS share is E[r]^2 / E[r^2].
    # E[r^4] = e^{12 KL} gives the standard error of the second moment.
    n = 200_000
    z = torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ratio = torch.exp(math.sqrt(2 * kl) * z - kl)
    expected = float(ratio_ess(torch.tensor(kl, dtype=torch.float64)))
    second = float(ratio.square().mean())
    standard_error = math.sqrt((math.exp(12 * kl) - math.exp(4 * kl)) / n)
    assert abs(second - 1 / expected) < 4 * standard_error
    assert float(ratio.mean() ** 2 / ratio.square().mean()) == pytest.approx(expected, rel=0.05)


def test_unknown_forms_reductions_and_steps_without_noise_are_refused():
    mean, other = means((3, 5))
    with pytest.raises(ValueError, match=r"'k3'.*'exact' and 'flow_grpo'"):
        kl_penalty(mean, other, 1.0, 0.1, "k3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'max'.*'mean'.*'sum'"):
        gaussian_kl(mean, other, 1.0, "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"std = 0.0.*positive.*deterministic"):
        gaussian_kl(mean, other, 0.0)
