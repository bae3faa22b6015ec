"""Noise levels of consistency models: grids, how many, which, and how far apart.

Levels belong to the variance-exploding path y = x0 + sigma z. Its point y is the rectified flow's x_t / (1 - t) at
sigma = t / (1 - t), so every formula here has a twin in t; :func:`sigma_of` and :func:`time_of` convert.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0  # Karras et al. 2022, kept by all consistency models


def sigma_of(t: Tensor) -> Tensor:
    """sigma = t / (1 - t) of rectified-flow times t in [0, 1); infinite at 1."""
    return t / (1 - t)


def time_of(sigma: Tensor) -> Tensor:
    """t = sigma / (1 + sigma), in [0, 1)."""
    return sigma / (1 + sigma)


def log_time(sigma: Tensor, sigma_min: float = SIGMA_MIN, sigma_max: float = SIGMA_MAX) -> Tensor:
    """ln(sigma / sigma_min) / ln(sigma_max / sigma_min): 0 at sigma_min, 1 at sigma_max; what networks get as time.

    Raw sigma, up to 80, would turn hundreds of times through a time embedding's period; t = sigma / (1 + sigma) would
    squeeze half of all levels into its first and last per cent.
    """
    return (sigma / sigma_min).log() / math.log(sigma_max / sigma_min)


def karras_grid(
    n: int, sigma_min: float = SIGMA_MIN, sigma_max: float = SIGMA_MAX, rho: float = RHO, dtype=torch.float32
) -> Tensor:
    """sigma_i = (a + i / (n - 1) (b - a))^rho with a = sigma_min^(1/rho), b = sigma_max^(1/rho); ascending, [n].

    Raises:
        ValueError: for fewer than 2 levels, or 0 < sigma_min < sigma_max violated.
    """
    if n < 2 or not 0 < sigma_min < sigma_max:
        raise ValueError(
            f"a grid of n = {n} levels from {sigma_min} to {sigma_max}; it needs n >= 2 and 0 < sigma_min < sigma_max"
        )
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    grid = (low + torch.linspace(0, 1, n, dtype=torch.float64) * (high - low)) ** rho
    grid[0], grid[-1] = sigma_min, sigma_max
    return grid.to(dtype)


def karras_levels(u: Tensor, sigma_min: float = SIGMA_MIN, sigma_max: float = SIGMA_MAX, rho: float = RHO) -> Tensor:
    """Continuous levels that are uniform in sigma^(1/rho), from uniform numbers u in [0, 1], like u."""
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    return (low + u * (high - low)) ** rho


def original_count(progress: float, first: int = 2, last: int = 150) -> int:
    """Number of levels at k/K = progress of training (arXiv 2303.01469).

    N(k) = ceil(sqrt(k/K (last^2 - first^2) + first^2) - 1) + 1, from `first` to `last`.
    """
    value = math.sqrt(min(max(progress, 0.0), 1.0) * (last**2 - first**2) + first**2) - 1
    return math.ceil(round(value, 9)) + 1  # the rounding keeps N(1) = last


def doubling_count(progress: float, first: int = 10, last: int = 1280) -> int:
    """Number of levels at k/K = progress of improved consistency training (arXiv 2310.14189).

    N(k) = min(first 2^floor(k/K'), last) + 1 with K' = K / (log2 floor(last/first) + 1): for K = 400,000 the intervals
    N - 1 are 10, 20, ..., 1280 for 50,000 updates each.
    """
    stages = math.log2(last // first) + 1
    stage = math.floor(round(min(max(progress, 0.0), 1.0) * stages, 9))
    return min(first * 2**stage, last) + 1


def lognormal_probabilities(grid: Tensor, mean: float = -1.1, std: float = 2.0) -> Tensor:
    """Probability of every interval [sigma_n, sigma_n+1] of a grid [N] when ln sigma ~ N(mean, std^2), [N - 1]."""
    z = ((grid.double().log() - mean) / (math.sqrt(2) * std)).erf()
    p = z.diff()
    return (p / p.sum()).to(grid.dtype)


def pick(probabilities: Tensor, u: Tensor) -> Tensor:
    """Indices drawn with the given probabilities [K] by uniform numbers u in [0, 1), like u."""
    cumulative = probabilities.double().cumsum(0)
    return torch.searchsorted(cumulative / cumulative[-1], u.double(), right=True).clamp(max=len(probabilities) - 1)


def lognormal_levels(u: Tensor, mean: float = -1.1, std: float = 2.0) -> Tensor:
    """Continuous levels sigma = exp(N(mean, std^2)) from uniform numbers u in [0, 1), like u."""
    return (mean + std * torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))).exp()


def easy_successor(sigma: Tensor, stage: float, q: float = 2.0, k: float = 8.0, b: float = 1.0) -> Tensor:
    """The lower level r(sigma) of easy consistency tuning (arXiv 2406.14548), like sigma.

        r = sigma (1 - q^-(stage + 1) n(sigma)) ,   n(sigma) = 1 + k sigmoid(-b sigma) ,   at least 0

    In the first stages r = 0 at small levels, where the target is the clean sample: training starts as a diffusion
    model. The ratio r / sigma approaches 1 as the stage grows.

    Args:
        sigma: levels > 0.
        stage: any number >= 0; the published stages are integers, fractions shrink the gap smoothly.
        q: 2 (CIFAR-10) or 4 (EDM2). k, b: of n; k = 0 is the constant map n = 1.
    """
    n = 1 + k * torch.sigmoid(-b * sigma)
    return (sigma * (1 - q ** -(stage + 1) * n)).clamp(min=0)


def sampling_levels(
    steps: int, sigma_max: float = SIGMA_MAX, last: float = 2.0, spacing: str = "log", edge: float = 0.0
) -> list[float]:
    """Descending levels of a sampler of consistency functions, from sigma_max to `last`.

    Args:
        steps: network calls, >= 1; one step is [sigma_max].
        last: level of the last call; a few times the data's spread.
        spacing: ``"log"``, or ``"linear"`` as in Consistency-AC, whose levels are linspace(2, 80, steps).
        edge: share by which later levels lie below their nominal value ("edge skipping" of stable consistency tuning,
            arXiv 2410.18958, as far as its captions tell).

    Raises:
        ValueError: fewer than one step, `last` outside (0, sigma_max), an unknown spacing, or edge outside [0, 1).
    """
    if steps < 1:
        raise ValueError(f"steps = {steps}; sampling needs at least 1")
    if not 0 < last < sigma_max or not 0 <= edge < 1:
        raise ValueError(f"last = {last} must lie in (0, sigma_max = {sigma_max}) and edge = {edge} in [0, 1)")
    if spacing not in ("log", "linear"):
        raise ValueError(f"spacing = {spacing!r} is unknown; allowed are 'log' and 'linear'")
    if steps == 1:
        return [sigma_max]
    shares = [i / (steps - 1) for i in range(steps)]
    if spacing == "linear":
        levels = [sigma_max + s * (last - sigma_max) for s in shares]
    else:
        levels = [sigma_max * (last / sigma_max) ** s for s in shares]
    return levels[:1] + [level * (1 - edge) for level in levels[1:]]
