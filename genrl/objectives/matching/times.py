"""Where in time losses are taken: distributions of t, and of the intervals [r, t] of average velocities.

Randomness comes in as uniform numbers p, so that a distribution is its quantile function and any generator serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_EDGE = 2.0**-24  # keeps quantiles of uniform numbers at 0 and 1 finite


class TimeDistribution(Protocol):
    """A distribution on [0, 1]; t = 1 is noise."""

    def quantile(self, p: Tensor) -> Tensor:
        """Times of the shape of p, for p in [0, 1]."""
        ...


@dataclass(frozen=True)
class UniformTimes:
    """Uniform on [low, high]."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"UniformTimes({self.low}, {self.high}) needs 0 <= low < high <= 1")

    def quantile(self, p: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * p


@dataclass(frozen=True)
class LogitNormalTimes:
    """sigmoid(N(mean, std^2)).

    MP1 draws t and r with N(-0.4, 1); py-meanflow on CIFAR-10 draws t with N(-0.6, 1.6^2) and r with N(-4, 1.6^2).
    """

    mean: float = -0.4
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ValueError(f"LogitNormalTimes.std = {self.std} must be positive; 1.0 is the published value")

    def quantile(self, p: Tensor) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(p.clamp(_EDGE, 1 - _EDGE)))


@dataclass(frozen=True)
class BetaTimes:
    """Beta(a, b) with a or b equal to 1, whose quantiles are powers.

    The default Beta(0.8, 1) is that of iSD (arXiv 2601.22679); Beta(1.5, 1) leans to the noise, as OFP's intervals do.
    """

    a: float = 0.8
    b: float = 1.0

    def __post_init__(self) -> None:
        if not (self.a > 0 and self.b > 0):
            raise ValueError(f"BetaTimes({self.a}, {self.b}): both parameters must be positive")
        if 1.0 not in (self.a, self.b):
            raise ValueError(
                f"BetaTimes({self.a}, {self.b}): a or b must be 1; use LogitNormalTimes for a distribution that is low "
                "at both ends"
            )

    def quantile(self, p: Tensor) -> Tensor:
        return p ** (1 / self.a) if self.b == 1 else 1 - (1 - p) ** (1 / self.b)


def time_pair(p: Tensor, times: TimeDistribution, end_times: TimeDistribution | None = None) -> tuple[Tensor, Tensor]:
    """(t, r), the later and the earlier of two independent draws.

    Args:
        p: uniform numbers [B, 2].
        times: of the first draw; end_times: of the second, by default the same.

    Returns:
        t and r, [B] each, r <= t.
    """
    first, second = times.quantile(p[:, 0]), (end_times or times).quantile(p[:, 1])
    return torch.maximum(first, second), torch.minimum(first, second)


def interval_below(t: Tensor, fraction: Tensor, minimum: float = 0.05) -> Tensor:
    """r = t - max(fraction t, minimum), at least 0, [B]: intervals that take a share of what is left below t.

    Args:
        t: [B]. fraction: in [0, 1], [B].
        minimum: length that intervals have at least, except where t itself is shorter.
    """
    return (t - (fraction * t).clamp(min=minimum)).clamp(min=0)


def random_rows(p: Tensor, share: float) -> Tensor:
    """Indices of round(share B) random rows, sorted; their number does not depend on the numbers drawn.

    Args:
        p: uniform numbers [B].
        share: in [0, 1].

    Raises:
        ValueError: for a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"a share of the rows lies in [0, 1], got {share}")
    count = round(share * len(p))
    return p.argsort()[:count].sort().values
