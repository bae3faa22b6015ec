"""Sampling with exact velocities: one step on a point mass, and whole chains on Gaussian data."""

from __future__ import annotations

import math

import pytest
import torch
from diffusion_members import ALL, PATHS
from torch import Tensor

from genrl.diffusion import Sampler, Schedule

N = 20_000


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("name", ALL)
def test_one_step_from_a_point_mass_has_the_moments_of_the_table(name, path) -> None:
    """Data is the point 2: x_t' must have mean a * 2 and variance b^2 + s^2, for each kernel."""
    generator = torch.Generator().manual_seed(0)
    t, t_next = torch.tensor(0.6, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    x0, eps = torch.full((N, 1), 2.0, dtype=torch.float64), torch.randn(N, 1, generator=generator, dtype=torch.float64)
    x = path.interpolate(x0, eps, t)
    drawn = ALL[name].transition(x, path.velocity(x0, eps, t), t, t_next, path).sample(generator)
    a, b, s = ALL[name].coefficients(t, t_next, path)
    variance = float(b**2 + s**2)
    assert float(drawn.mean()) == pytest.approx(2 * float(a), abs=4 * math.sqrt(variance / N))
    assert float(drawn.var()) == pytest.approx(variance, rel=4 * math.sqrt(2 / N))


# The share of the old noise that one fine step near data keeps, b / t'. Kernels that integrate a differential equation
# keep all of it in the limit; these three replace a fixed share in every step, however short.
KEPT_NOISE = {"cps": math.cos(0.4 * math.pi), "renoise": 0.5, "consistency": 0.0}


@pytest.mark.parametrize("name", ALL)
def test_chains_on_gaussian_data_reach_its_moments(name) -> None:
    """Data N(m, s0^2) with the exact velocity, in 400 steps.

    "Exact marginal" in the table of kernels holds for exact predictions. A network predicts posterior means, and a
    kernel that keeps only a share c of the noise in each step then ends at variance s0^2 (1 + c) / 2: near t = 0 the
    mean contracts by 1 - (1 - c) t^2 / s0^2 a step and the noise adds t^2 (1 - c^2). Half of the variance is lost by
    the consistency kernel, whose network should be a consistency function. All others reach s0^2.
    """
    mean, deviation = 0.7, 0.5

    def velocity(x: Tensor, t: Tensor, cond: None) -> Tensor:
        a, b = 1 - t[0], t[0]
        variance = (a * deviation) ** 2 + b**2
        x0_hat = mean + a * deviation**2 / variance * (x - a * mean)
        eps_hat = b / variance * (x - a * mean)
        return eps_hat - x0_hat

    generator = torch.Generator().manual_seed(1)
    sampler = Sampler(ALL[name], Schedule.uniform(400))
    x0 = sampler.rollout(velocity, torch.randn(N, 1, generator=generator), generator=generator).x0
    expected = deviation**2 * (1 + KEPT_NOISE.get(name, 1.0)) / 2
    assert float(x0.mean()) == pytest.approx(mean, abs=4 * deviation / math.sqrt(N))
    assert float(x0.var()) == pytest.approx(expected, rel=0.06)
