"""A velocity network for vectors: toy problems, actions, small states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genrl.networks.embeddings import TimeEmbedding, interval_input


class VelocityMLP(nn.Module):
    """Residual MLP v(x, t, cond, r) with an output layer that starts at zero.

    Args:
        x_dim: number of elements of one x; inputs [B, ...] are flattened and the output has the input's shape.
        cond_dim: size of the condition vector [B, cond_dim]; 0 for none.
        width: hidden units.
        depth: residual blocks.
        interval: build the embedding of an interval's end r, see `forward`.
        max_frequency: see `fourier_features`; the low default is for networks that are differentiated in t.

    Example:
        >>> net = VelocityMLP(x_dim=2, width=32, depth=1)
        >>> net(torch.zeros(4, 2), torch.rand(4)).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        x_dim: int,
        cond_dim: int = 0,
        width: int = 256,
        depth: int = 3,
        interval: bool = False,
        max_frequency: float = 5.0,
    ):
        super().__init__()
        self.x_dim, self.cond_dim = x_dim, cond_dim
        self.time = TimeEmbedding(width, max_frequency=max_frequency)
        self.interval = TimeEmbedding(width, max_frequency=max_frequency) if interval else None
        self.input = nn.Linear(x_dim + cond_dim, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        last = nn.Linear(width, x_dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.output = nn.Sequential(nn.LayerNorm(width), nn.SiLU(), last)

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        """Velocity of x.

        Args:
            x: [B, ...] with x_dim elements each.
            t: [B] in [0, 1].
            cond: [B, cond_dim], or None when cond_dim is 0.
            r: [B] end of the interval, r <= t; only with interval=True, where None means r = t.

        Returns:
            [B, ...] like x.

        Raises:
            ValueError: for a wrong size of x or cond, and for r without interval=True.
        """
        return self.features(x, t, cond, r)[0]

    def features(
        self, x: Tensor, t: Tensor, cond: Tensor | None = None, r: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """`forward` and the hidden vectors [B, width] after every block but the last (of a single block: after it)."""
        h = x.flatten(1)  # [B, x_dim]
        if h.shape[1] != self.x_dim:
            raise ValueError(f"x has {h.shape[1]} elements per row (shape {tuple(x.shape)}); x_dim is {self.x_dim}")
        given = 0 if cond is None else cond.shape[-1]
        if given != self.cond_dim:
            raise ValueError(f"cond has {given} elements per row; this network was built with cond_dim={self.cond_dim}")
        if cond is not None:
            h = torch.cat([h, cond], dim=1)
        time = self.time(t)  # [B, width]
        span = interval_input(self.interval, r, t)
        time = time if span is None else time + span
        h = self.input(h) + time
        hidden = []
        for block in self.blocks:
            h = h + block(h + time)
            hidden.append(h)
        return self.output(h).reshape(x.shape), hidden[:-1] or hidden
