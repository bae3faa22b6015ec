"""Flows between a standard normal and Gaussians, or mixtures of them, in closed form.

On the rectified-flow path x_t = (1-t) x0 + t eps with x0 ~ N(m, s0^2) in every coordinate, everything that a one-step
method has to learn is known. Tests hold losses and targets against it. Times are numbers, or tensors that broadcast
against x; everything is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Number = float | Tensor


def as_tensor(value: Number) -> Tensor:
    """float64; tensors keep their place in autograd."""
    return value.double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class GaussianBed:
    """x0 ~ N(m, s0^2). `m` may be a tensor that broadcasts against x, for instance the mean that a condition gives."""

    m: Number = 0.7
    s0: float = 0.5

    def mean(self, t: Number) -> Tensor:
        """mu_t = (1-t) m."""
        return (1 - as_tensor(t)) * as_tensor(self.m)

    def std(self, t: Number) -> Tensor:
        """S_t = sqrt((1-t)^2 s0^2 + t^2)."""
        t = as_tensor(t)
        return ((1 - t) ** 2 * self.s0**2 + t**2).sqrt()

    def covariance(self, r: Number, t: Number) -> Tensor:
        """c(r,t) of x_r and x_t that share x0 and eps."""
        r, t = as_tensor(r), as_tensor(t)
        return (1 - r) * (1 - t) * self.s0**2 + r * t

    def slope(self, t: Number) -> Tensor:
        """k_t, the derivative of v* in x."""
        t = as_tensor(t)
        return (t - (1 - t) * self.s0**2) / self.std(t) ** 2

    def velocity(self, x: Tensor, t: Number) -> Tensor:
        """v*(x,t) = E[eps - x0 | x_t = x]."""
        return -as_tensor(self.m) + self.slope(t) * (x - self.mean(t))

    def velocity_variance(self, t: Number) -> Tensor:
        """Var(eps - x0 | x_t)."""
        return self.s0**2 / self.std(t) ** 2

    def flow_map(self, x: Tensor, t: Number, r: Number) -> Tensor:
        """X(x; t->r), where the path through (x, t) is at time r."""
        return self.mean(r) + self.std(r) / self.std(t) * (x - self.mean(t))

    def average_velocity(self, x: Tensor, t: Number, r: Number) -> Tensor:
        """u*(x,r,t) = (x - X(x; t->r)) / (t-r), written so that r = t is no special case."""
        r, t = as_tensor(r), as_tensor(t)
        growth = ((t + r) - (2 - t - r) * self.s0**2) / (self.std(t) + self.std(r))  # (S_t - S_r) / (t - r)
        return -as_tensor(self.m) + growth / self.std(t) * (x - self.mean(t))

    def denoised(self, x: Tensor, t: Number) -> Tensor:
        """E[x0 | x_t = x]."""
        t = as_tensor(t)
        return as_tensor(self.m) + (1 - t) * self.s0**2 / self.std(t) ** 2 * (x - self.mean(t))

    def consistency(self, y: Tensor, sigma: Number) -> Tensor:
        """f(y, sigma) on the variance-exploding path y = x0 + sigma z."""
        sigma = as_tensor(sigma)
        return as_tensor(self.m) + self.s0 * (y - as_tensor(self.m)) / (self.s0**2 + sigma**2).sqrt()

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Data x0 of the given shape."""
        return as_tensor(self.m) + self.s0 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def pair(self, shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Independent (x0, eps)."""
        return self.sample(shape, generator), torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class MixtureBed:
    """x0 from a mixture of K Gaussians N(means[k], stds[k]^2 I) in R^d; the last dimension of x holds the coordinates.

    Args:
        means: K tuples of d numbers.
        stds: K positive numbers.
        weights: K probabilities; equal ones when empty.
    """

    means: tuple[tuple[float, ...], ...] = ((-1.0,), (1.0,))
    stds: tuple[float, ...] = (0.1, 0.1)
    weights: tuple[float, ...] = ()

    @property
    def probabilities(self) -> Tensor:
        k = len(self.means)
        return torch.tensor(self.weights or (1 / k,) * k, dtype=torch.float64)

    def components(self) -> list[GaussianBed]:
        return [
            GaussianBed(torch.tensor(mean, dtype=torch.float64), std)
            for mean, std in zip(self.means, self.stds, strict=True)
        ]

    def log_weighted(self, x: Tensor, t: Number) -> Tensor:
        """log pi_k N(x; mu_t,k, S_t,k^2), [..., K]; t is a number or has x's shape with a last dimension of 1."""
        logs = []
        for probability, bed in zip(self.probabilities, self.components(), strict=True):
            z = (x - bed.mean(t)) / bed.std(t)
            log_normal = -0.5 * z.square() - bed.std(t).log() - 0.5 * math.log(2 * math.pi)
            logs.append(probability.log() + log_normal.sum(-1))
        return torch.stack(logs, dim=-1)

    def log_prob(self, x: Tensor, t: Number = 0.0) -> Tensor:
        """log p_t(x), [...]."""
        return self.log_weighted(x, t).logsumexp(-1)

    def responsibilities(self, x: Tensor, t: Number) -> Tensor:
        """w_k(x), [..., K]."""
        return self.log_weighted(x, t).softmax(-1)

    def velocity(self, x: Tensor, t: Number) -> Tensor:
        """v*(x,t) = sum_k w_k(x) v*_k(x,t)."""
        each = torch.stack([bed.velocity(x, t) for bed in self.components()], dim=-1)  # [..., d, K]
        return (each * self.responsibilities(x, t)[..., None, :]).sum(-1)

    def flow_map(self, x: Tensor, t: float, r: float, steps: int = 200) -> Tensor:
        """X(x; t->r) by Runge-Kutta 4; the error is O(steps^-4)."""
        h = (r - t) / steps
        for i in range(steps):
            now = t + i * h
            k1 = self.velocity(x, now)
            k2 = self.velocity(x + 0.5 * h * k1, now + 0.5 * h)
            k3 = self.velocity(x + 0.5 * h * k2, now + 0.5 * h)
            k4 = self.velocity(x + h * k3, now + h)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Data x0 [n, d]."""
        which = torch.multinomial(self.probabilities, n, replacement=True, generator=generator)
        means = torch.tensor(self.means, dtype=torch.float64)[which]
        stds = torch.tensor(self.stds, dtype=torch.float64)[which][:, None]
        return means + stds * torch.randn(means.shape, generator=generator, dtype=torch.float64)

    def mode_shares(self, x: Tensor, radius: float = 4.0) -> Tensor:
        """Share of the samples x [n, d] within `radius` standard deviations of each component's mean, [K]."""
        means = torch.tensor(self.means, dtype=torch.float64)
        distance = torch.cdist(x.double(), means)  # [n, K]
        nearest = distance == distance.min(1, keepdim=True).values
        return (nearest & (distance <= radius * torch.tensor(self.stds, dtype=torch.float64))).double().mean(0)
