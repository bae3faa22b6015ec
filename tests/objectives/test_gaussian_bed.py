"""The closed forms that other tests rely on agree with each other, with autograd and with sampling."""

from __future__ import annotations

import pytest
import torch
from gaussian_bed import GaussianBed, MixtureBed

BED = GaussianBed()
X = torch.linspace(-2, 2, 9, dtype=torch.float64)


@pytest.mark.parametrize(("t", "m", "r"), [(1.0, 0.6, 0.0), (0.8, 0.5, 0.15), (0.3, 0.29, 0.01)])
def test_the_flow_map_is_a_semigroup(t, m, r):
    through = BED.flow_map(BED.flow_map(X, t, m), m, r)
    torch.testing.assert_close(through, BED.flow_map(X, t, r), rtol=0, atol=1e-10)


@pytest.mark.parametrize("t", [0.05, 0.4, 1.0])
def test_the_flow_map_moves_with_the_velocity(t):
    r = torch.tensor(t, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda s: BED.flow_map(X, t, s), (r,), (torch.ones_like(r),))
    torch.testing.assert_close(slope, BED.velocity(X, t), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("t", "r"), [(1.0, 0.0), (0.7, 0.2), (0.5, 0.499)])
def test_the_average_velocity_is_the_chord_of_the_flow_map(t, r):
    chord = (X - BED.flow_map(X, t, r)) / (t - r)
    torch.testing.assert_close(BED.average_velocity(X, t, r), chord, rtol=0, atol=1e-10)
    torch.testing.assert_close(BED.average_velocity(X, t, t), BED.velocity(X, t), rtol=0, atol=1e-12)


def test_moments_agree_with_samples():
    generator = torch.Generator().manual_seed(0)
    x0, eps = BED.pair((400_000,), generator)
    x_t, x_r, v = 0.3 * x0 + 0.7 * eps, 0.6 * x0 + 0.4 * eps, eps - x0
    assert float(x_t.mean()) == pytest.approx(float(BED.mean(0.7)), abs=5e-3)
    assert float(x_t.std()) == pytest.approx(float(BED.std(0.7)), rel=5e-3)
    covariance = ((x_t - x_t.mean()) * (x_r - x_r.mean())).mean()
    assert float(covariance) == pytest.approx(float(BED.covariance(0.4, 0.7)), rel=1e-2)
    assert float((v - BED.velocity(x_t, 0.7)).var()) == pytest.approx(float(BED.velocity_variance(0.7)), rel=1e-2)
    assert float((x0 - BED.denoised(x_t, 0.7)).mul(x_t).mean()) == pytest.approx(0, abs=3e-3)  # no correlation is left


def test_a_denoiser_is_a_velocity_in_another_form():
    torch.testing.assert_close(X - 0.6 * BED.velocity(X, 0.6), BED.denoised(X, 0.6), rtol=0, atol=1e-12)
    # sigma = t / (1-t), y = x_t / (1-t): the flow map to t = 0 is the consistency function.
    torch.testing.assert_close(BED.flow_map(X, 0.6, 0.0), BED.consistency(X / 0.4, 1.5), rtol=0, atol=1e-12)


def test_a_mixture_of_one_is_a_gaussian_and_equal_components_are_one():
    x = X[:, None]
    for mixture in (MixtureBed(((0.7,),), (0.5,)), MixtureBed(((0.7,), (0.7,)), (0.5, 0.5), (0.3, 0.7))):
        torch.testing.assert_close(mixture.velocity(x, 0.4), BED.velocity(x, 0.4), rtol=0, atol=1e-12)


def test_the_velocity_of_a_mixture_is_that_of_its_score():
    mixture = MixtureBed(((-1.0, 0.5), (1.0, 0.0)), (0.2, 0.4), (0.25, 0.75))
    x = torch.randn((7, 2), generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    t = 0.6
    (score,) = torch.autograd.grad(mixture.log_prob(x, t).sum(), x)
    # grad log p = -(x + (1-t) v) / t
    torch.testing.assert_close(score, -(x + (1 - t) * mixture.velocity(x, t)) / t, rtol=1e-9, atol=1e-9)


def test_the_flow_map_of_a_mixture_carries_noise_to_its_modes():
    mixture = MixtureBed(((-1.0,), (1.0,)), (0.1, 0.1), (0.3, 0.7))
    eps = torch.randn((4000, 1), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    shares = mixture.mode_shares(mixture.flow_map(eps, 1.0, 0.0))
    assert shares.tolist() == pytest.approx([0.3, 0.7], abs=0.03)
