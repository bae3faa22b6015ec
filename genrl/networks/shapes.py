"""Networks of the shape generator: both read a noised latent, its time and a picture, and predict the clean latent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from genrl.networks.dit import _Block, _modulate
from genrl.networks.embeddings import TimeEmbedding


class ViewEncoder(nn.Module):
    """Two convolutions and a linear layer: pictures [B, size, size] -> [B, dim]. `size` is a multiple of 4."""

    def __init__(self, size: int, dim: int, channels: int = 16):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(),
        )  # fmt: skip
        self.linear = nn.Linear(2 * channels * (size // 4) ** 2, dim)

    def forward(self, view: Tensor) -> Tensor:
        return self.linear(self.convolutions(view[:, None] * 2 - 1))


class LatentMLP(nn.Module):
    """Residual MLP with adaLN-zero whose output starts at zero: x [B, latent_dim], t [B], view [B, s, s] -> x0.

    Args:
        latent_dim: size of x.
        view_size: side of the picture.
        dim: width. hidden: units inside a block. depth: blocks.
    """

    def __init__(self, latent_dim: int, view_size: int, dim: int = 256, hidden: int = 512, depth: int = 4):
        super().__init__()
        self.depth = depth
        self.input = nn.Linear(latent_dim, dim)
        self.time = TimeEmbedding(dim, max_frequency=100.0)
        self.view = ViewEncoder(view_size, dim)
        self.modulation = nn.Linear(dim, (3 * depth + 2) * dim)
        self.rise = nn.ModuleList(nn.Linear(dim, hidden) for _ in range(depth))
        self.fall = nn.ModuleList(nn.Linear(hidden, dim) for _ in range(depth))
        self.output = nn.Linear(dim, latent_dim)
        for layer in (self.modulation, self.output):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor, view: Tensor) -> Tensor:
        h = self.input(x)
        parts = self.modulation(F.silu(self.time(t) + self.view(view))).chunk(3 * self.depth + 2, -1)
        for i, (rise, fall) in enumerate(zip(self.rise, self.fall, strict=True)):
            shift, scale, gate = parts[3 * i : 3 * i + 3]
            h = torch.addcmul(h, gate, fall(F.silu(rise(_modulate(h, shift, scale)))))
        return self.output(_modulate(h, parts[-2], parts[-1]))


class VoxelDiT(nn.Module):
    """Diffusion transformer on cubes of a grid: x [B, 1, n, n, n], t [B], view [B, s, s] -> x0 of x's shape.

    Args:
        resolution: n, a multiple of `patch`.
        view_size: side of the picture.
        patch: side of a cube. dim: width, a multiple of `heads`. depth: blocks.

    Raises:
        ValueError: for sizes that do not divide.
    """

    def __init__(self, resolution: int, view_size: int, patch: int = 4, dim: int = 256, depth: int = 6, heads: int = 4):
        super().__init__()
        if resolution % patch or dim % heads:
            raise ValueError(
                f"resolution {resolution} must be a multiple of patch {patch}, and dim {dim} of heads {heads}"
            )
        self.patch, self.side = patch, resolution // patch
        self.input = nn.Linear(patch**3, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(self.side**3, dim))
        self.time = TimeEmbedding(dim, max_frequency=100.0)
        self.view = ViewEncoder(view_size, dim)
        self.modulation = nn.Linear(dim, (6 * depth + 2) * dim)
        self.blocks = nn.ModuleList(_Block(dim, heads, 4 * dim, fused=True) for _ in range(depth))
        self.output = nn.Linear(dim, patch**3)
        for layer in (self.modulation, self.output):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor, view: Tensor) -> Tensor:
        h = self.input(self.patches(x)) + self.positions
        c = F.silu(self.time(t) + self.view(view))
        parts = self.modulation(c)[:, None].chunk(6 * len(self.blocks) + 2, -1)
        for i, block in enumerate(self.blocks):
            h = block(h, parts[6 * i : 6 * i + 6], None)
        return self.voxels(self.output(_modulate(h, parts[-2], parts[-1])))

    def patches(self, x: Tensor) -> Tensor:
        """[B, 1, n, n, n] -> [B, (n / patch)^3, patch^3]."""
        s, p = self.side, self.patch
        return x.reshape(-1, s, p, s, p, s, p).permute(0, 1, 3, 5, 2, 4, 6).reshape(len(x), s**3, p**3)

    def voxels(self, tokens: Tensor) -> Tensor:
        """The inverse of `patches`."""
        s, p = self.side, self.patch
        x = tokens.reshape(-1, s, s, s, p, p, p).permute(0, 1, 4, 2, 5, 3, 6)
        return x.reshape(-1, 1, s * p, s * p, s * p)
