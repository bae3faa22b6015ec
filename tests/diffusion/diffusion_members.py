"""Every kernel and path there is, for tests that run over all of them: a new kernel is tested by existing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from genrl.diffusion import (
    CPS,
    DDIM,
    KERNELS,
    SAGE,
    DanceSDE,
    FlowSDE,
    GaussianTransition,
    Path,
    PathKernel,
    RectifiedFlow,
    Renoise,
    Sampler,
    Schedule,
    Trajectory,
)
from genrl.diffusion import VariancePreserving as VP

# The table of Stable Diffusion 1.5 ("scaled_linear").
ALPHAS_CUMPROD = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2, 0)

ALL: dict[str, PathKernel] = {name: kernel() for name, kernel in KERNELS.items()} | {
    "flow_sde_exact": FlowSDE(0.7, integrator="exact"),
    "dance_sde_exact": DanceSDE(0.3, integrator="exact"),
    "ddim_half": DDIM(0.5),
}
DETERMINISTIC = ("euler",)
NOISY = {name: kernel for name, kernel in ALL.items() if name not in DETERMINISTIC}
INEXACT = ("flow_sde", "dance_sde", "sage")
"""Kernels whose marginal has an O(D^2) excess; all others must preserve it."""

PATHS: dict[str, Path] = {"rectified_flow": RectifiedFlow(), "variance_preserving": VP(ALPHAS_CUMPROD)}

WITHOUT_NOISE: dict[str, PathKernel] = {
    "flow_sde": FlowSDE(0.0),
    "flow_sde_exact": FlowSDE(0.0, integrator="exact"),
    "dance_sde": DanceSDE(0.0),
    "dance_sde_exact": DanceSDE(0.0, integrator="exact"),
    "sage": SAGE(0.0),
    "cps": CPS(0.0),
    "ddim": DDIM(0.0),
    "renoise": Renoise(0.0),
}


def random_steps(n: int, seed: int = 0, low: float = 0.02, high: float = 0.98) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs t > t' inside (low, high), float64 [n] each."""
    generator = torch.Generator().manual_seed(seed)
    pairs = low + (high - low) * torch.rand(n, 2, generator=generator, dtype=torch.float64)
    return pairs.max(1).values, pairs.min(1).values


SHAPE = (8, 3, 5, 7)  # an odd number of elements, so that rows are not aligned to vector registers


def elementwise(x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
    """A velocity whose every element depends on its own sample alone, bit for bit."""
    shape = (-1,) + (1,) * (x.dim() - 1)
    return 0.7 * x + t.to(x).reshape(shape) - cond.to(x).reshape(shape)


def start(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x1 [8, ...] and a condition [8]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator, dtype=dtype), torch.randn(8, generator=generator, dtype=dtype)


def sampler_of(name: str, path: Path | None = None, n: int = 5, steps: Any = "all") -> Sampler:
    """A sampler of a kernel of ALL over n equal steps."""
    return Sampler(ALL[name], Schedule.uniform(n), steps, path)


def old_transition(sampler: Sampler, trajectory: Trajectory, k: int) -> GaussianTransition:
    """The behaviour's transition of step k."""
    return GaussianTransition(trajectory.means[k], sampler.step(k, True).s)
