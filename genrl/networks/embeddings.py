"""Embeddings of time and of positions on a grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

LOWEST_FREQUENCY = 0.5


def fourier_features(t: Tensor, dim: int, max_frequency: float = 5.0) -> Tensor:
    """Sines and cosines of t at geometrically spaced angular frequencies.

    Args:
        t: times [B], about [0, 1].
        dim: even number of features.
        max_frequency: highest angular frequency in radians per unit of t; the lowest is 0.5. The default suits networks
            that are differentiated in t (MeanFlow, flow maps), whose targets contain the derivative of this embedding:
            with frequencies in the hundreds such trainings fail on some seeds. Networks that only read t resolve it
            better with 100 or more.

    Returns:
        [B, dim] in t's dtype.

    Raises:
        ValueError: for an odd dim or a max_frequency of 0.5 or less.
    """
    return _waves(t, _frequencies(dim, max_frequency, t.dtype, t.device))


def _frequencies(
    dim: int, max_frequency: float, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """[dim / 2] in radians per unit of t."""
    if dim % 2 or dim < 2:
        raise ValueError(f"a Fourier embedding has pairs of features; got dim={dim}, pass an even number")
    if max_frequency <= LOWEST_FREQUENCY:
        raise ValueError(f"max_frequency={max_frequency} is not above the lowest frequency {LOWEST_FREQUENCY}; try 5.0")
    exponents = torch.linspace(0, 1, dim // 2, device=device, dtype=dtype)
    return LOWEST_FREQUENCY * (max_frequency / LOWEST_FREQUENCY) ** exponents


def _waves(t: Tensor, frequencies: Tensor) -> Tensor:
    angles = t[:, None] * frequencies  # [B, dim / 2]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class TimeEmbedding(nn.Module):
    """Fourier features and a two-layer MLP: t [B] -> [B, dim]."""

    frequencies: Tensor

    def __init__(self, dim: int, features: int = 64, max_frequency: float = 5.0):
        super().__init__()
        self.register_buffer("frequencies", _frequencies(features, max_frequency), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(features, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        if _is_one_number(t):
            return self.mlp(_waves(t[:1], self.frequencies)).expand(t.shape[0], -1)
        return self.mlp(_waves(t, self.frequencies))


def _is_one_number(t: Tensor) -> bool:
    """Whether a sampler has expanded one number to the batch, so that one embedding serves all rows.

    Only in inference mode: under a derivative, rows of one value may have different tangents.
    """
    return t.is_inference() and t.stride(0) == 0


def grid_positions(height: int, width: int, dim: int) -> Tensor:
    """Fixed sin-cos embedding of a grid's cells, a quarter of the features for each of sin and cos of row and column.

    Args:
        height, width: cells.
        dim: features, a multiple of 4.

    Returns:
        [height * width, dim] float32, row by row (Dosovitskiy et al. 2020, as in DiT, Peebles and Xie 2022).

    Raises:
        ValueError: when dim is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"2-d sin-cos positions need a dim that is a multiple of 4, got {dim}")
    quarter = dim // 4
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(quarter) / quarter)  # [quarter]
    rows = torch.arange(height)[:, None] * frequencies  # [height, quarter]
    columns = torch.arange(width)[:, None] * frequencies  # [width, quarter]
    row_part = torch.cat([rows.sin(), rows.cos()], dim=1)[:, None].expand(height, width, 2 * quarter)
    column_part = torch.cat([columns.sin(), columns.cos()], dim=1)[None].expand(height, width, 2 * quarter)
    return torch.cat([row_part, column_part], dim=2).reshape(height * width, dim)


def interval_input(module: nn.Module | None, r: Tensor | None, t: Tensor) -> Tensor | None:
    """The embedding of an interval's end, or None for a network without one.

    A network with `interval=True` that gets no r treats it as r = t: the interval of length zero, whose average
    velocity is the instantaneous one. The interval's length t - r is embedded, so that it is the same at every t.

    Raises:
        ValueError: when r is given to a network that was built without `interval=True`.
    """
    if module is None:
        if r is not None:
            raise ValueError(
                "r (the end of an interval) was given to a network built with interval=False, which has no weights for "
                "it; build it with interval=True or call it without r"
            )
        return None
    if r is None:
        return module(torch.zeros_like(t))
    if _is_one_number(t) and _is_one_number(r):
        return module((t[:1] - r[:1]).expand(t.shape[0]))
    return module(t - r)
