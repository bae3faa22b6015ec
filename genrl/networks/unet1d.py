"""A conditional 1-d U-Net over action chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from genrl.networks.embeddings import TimeEmbedding, interval_input


class VelocityUNet1d(nn.Module):
    """Velocity v(x, t, cond, r) of chunks [B, H, A] by convolutions over time, with an output that starts at zero.

    The network of Diffusion Policy (Chi et al. 2023): residual blocks of two convolutions with GroupNorm and Mish,
    modulated in scale and bias (FiLM, Perez et al. 2018) by the embedding of t (and of the interval t - r) joined with
    the condition. Every level but the last halves the horizon.

    Args:
        horizon: H, a multiple of 2^(levels - 1).
        action_dim: A.
        cond_dim: size of the condition vector; 0 for none.
        widths: channels of each level.
        kernel: size of the convolutions, odd.
        groups: of GroupNorm, a divisor of every width.
        time_dim: features of the embedding of t and of the interval.
        interval: build the embedding of an interval's end r, see `forward`.
        max_frequency: see `genrl.networks.fourier_features`.

    Raises:
        ValueError: for a horizon that cannot be halved often enough, an even kernel, widths that groups do not divide.

    Example:
        >>> net = VelocityUNet1d(horizon=8, action_dim=4, cond_dim=3, widths=(16, 32), groups=4)
        >>> net(torch.zeros(2, 8, 4), torch.rand(2), torch.zeros(2, 3)).shape
        torch.Size([2, 8, 4])
    """

    def __init__(
        self,
        horizon: int,
        action_dim: int,
        cond_dim: int = 0,
        widths: Sequence[int] = (256, 512, 1024),
        kernel: int = 5,
        groups: int = 8,
        time_dim: int = 128,
        interval: bool = False,
        max_frequency: float = 100.0,
    ):
        super().__init__()
        _check(horizon, tuple(widths), kernel, groups)
        self.horizon, self.action_dim, self.cond_dim = horizon, action_dim, cond_dim
        self.time = TimeEmbedding(time_dim, max_frequency=max_frequency)
        self.interval = TimeEmbedding(time_dim, max_frequency=max_frequency) if interval else None
        size = time_dim + cond_dim

        def pair(channels: int, width: int) -> _Pair:
            return _Pair(*(_Block(c, width, size, kernel, groups) for c in (channels, width)))

        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        channels = action_dim
        for level, width in enumerate(widths):
            self.down.append(pair(channels, width))
            if level < len(widths) - 1:
                self.shrink.append(nn.Conv1d(width, width, 3, stride=2, padding=1))
            channels = width
        self.middle = pair(channels, channels)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for width in reversed(widths[:-1]):
            self.grow.append(nn.ConvTranspose1d(channels, channels, 4, stride=2, padding=1))
            self.up.append(pair(channels + width, width))
            channels = width
        self.head = _convolution(channels, channels, kernel, groups)
        self.output = nn.Conv1d(channels, action_dim, 1)
        for parameter in self.output.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        """Velocity of x.

        Args:
            x: [B, H, A].
            t: [B] in [0, 1].
            cond: [B, cond_dim], or None when cond_dim is 0.
            r: [B] end of the interval, r <= t; only with interval=True, where None means r = t.

        Returns:
            [B, H, A].

        Raises:
            ValueError: for a wrong shape of x or cond, and for r without interval=True.
        """
        return self.features(x, t, cond, r)[0]

    def features(
        self, x: Tensor, t: Tensor, cond: Tensor | None = None, r: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """`forward` and the feature maps [B, width, H / 2^level] of all down-sampling levels but the last.

        Of a network with a single level, its map.
        """
        if tuple(x.shape[1:]) != (self.horizon, self.action_dim):
            raise ValueError(
                f"x has shape {list(x.shape)}; this network takes [B, {self.horizon}, {self.action_dim}] "
                "(batch, horizon, action)"
            )
        given = 0 if cond is None else cond.shape[-1]
        if given != self.cond_dim:
            raise ValueError(f"cond has {given} elements per row; this network was built with cond_dim={self.cond_dim}")
        time = self.time(t)  # [B, time_dim]
        span = interval_input(self.interval, r, t)
        time = time if span is None else time + span
        c = nn.functional.mish(time if cond is None else torch.cat([time, cond], 1))
        h = x.transpose(1, 2)  # [B, A, H]
        skips = []
        for level, blocks in enumerate(self.down):
            h = blocks(h, c)
            skips.append(h)
            if level < len(self.shrink):
                h = self.shrink[level](h)
        h = self.middle(h, c)
        maps = skips[:-1] or skips
        for grow, blocks, skip in zip(self.grow, self.up, reversed(skips[:-1]), strict=True):
            h = blocks(torch.cat([grow(h), skip], 1), c)
        return self.output(self.head(h)).transpose(1, 2), maps


def _convolution(channels: int, width: int, kernel: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(channels, width, kernel, padding=kernel // 2), nn.GroupNorm(groups, width), nn.Mish()
    )


class _Block(nn.Module):
    """Two convolutions around a modulation, and a short cut."""

    def __init__(self, channels: int, width: int, cond_dim: int, kernel: int, groups: int):
        super().__init__()
        self.first = _convolution(channels, width, kernel, groups)
        self.film = nn.Linear(cond_dim, 2 * width)
        self.second = _convolution(width, width, kernel, groups)
        self.short = nn.Conv1d(channels, width, 1) if channels != width else nn.Identity()

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        scale, bias = self.film(c)[..., None].chunk(2, 1)  # [B, width, 1] each
        modulated = torch.addcmul(bias, self.first(h), 1 + scale)
        return self.second(modulated) + self.short(h)


class _Pair(nn.ModuleList):
    """Residual blocks in a row, all under one condition."""

    def __init__(self, *blocks: _Block):
        super().__init__(blocks)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        for block in self:
            h = block(h, c)
        return h


def _check(horizon: int, widths: tuple[int, ...], kernel: int, groups: int) -> None:
    if not widths or min(widths) < 1:
        raise ValueError(f"widths = {list(widths)} needs at least one positive width")
    stride = 2 ** (len(widths) - 1)
    if horizon < 1 or horizon % stride:
        near = max(horizon + stride - 1, stride) // stride * stride
        levels = 1 + max(k for k in range(len(widths)) if horizon % 2**k == 0)
        raise ValueError(
            f"a horizon of {horizon} cannot be halved {len(widths) - 1} times, which a U-Net of {len(widths)} levels "
            f"(widths = {list(widths)}) does; set chunking.horizon to a multiple of {stride} such as {near}, or give "
            f"at most {levels} widths"
        )
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel = {kernel} must be odd, so that convolutions keep the horizon; try {kernel + 1}")
    wrong = [width for width in widths if groups < 1 or width % groups]
    if wrong:
        raise ValueError(f"groups = {groups} does not divide the width {wrong[0]}; choose a divisor of all widths")
    if horizon // stride * min(widths[-1:]) // groups < 2:
        raise ValueError(
            f"GroupNorm with {groups} groups over {widths[-1]} channels and {horizon // stride} time steps has one "
            "number a group, which it maps to 0; choose fewer groups"
        )
