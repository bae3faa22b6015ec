"""Networks over action chunks as parts of a configuration: `network: {class_path: genrl.networks.UNetBackbone}`.

A backbone holds sizes; `build` makes the module once horizon, action and condition are known. Every module is called as
module(x [B, H, A], t [B], cond [B, C] or None, r [B] or None) -> [B, H, A], starts at zero output, has no dropout and
no batch statistics, and has `features(x, t, cond, r) -> (out, [feature maps [B, ...]])` for losses on hidden layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from genrl.networks.dit import VelocityDiT
from genrl.networks.mlp import VelocityMLP
from genrl.networks.unet1d import VelocityUNet1d


class Backbone(Protocol):
    """What a policy needs of its `network`."""

    def build(
        self, horizon: int, action_dim: int, cond_dim: int, interval: bool = False, max_frequency: float = 100.0
    ) -> nn.Module:
        """The network.

        Args:
            horizon: H. action_dim: A. cond_dim: C, 0 for none.
            interval: whether the network takes an interval's end r.
            max_frequency: of the time embedding: 5 where the network is differentiated in t, 100 elsewhere.
        """
        ...


@dataclass(frozen=True)
class MLPBackbone:
    """Residual MLP over the flattened chunk: the fastest, for short chunks of low dimension.

    Args:
        width: hidden units.
        depth: residual blocks.
    """

    width: int = 256
    depth: int = 3

    def __post_init__(self) -> None:
        _positive("MLPBackbone", width=self.width, depth=self.depth)

    def build(
        self, horizon: int, action_dim: int, cond_dim: int, interval: bool = False, max_frequency: float = 100.0
    ) -> nn.Module:
        return VelocityMLP(horizon * action_dim, cond_dim, self.width, self.depth, interval, max_frequency)


@dataclass(frozen=True)
class UNetBackbone:
    """Diffusion Policy's 1-d U-Net (`VelocityUNet1d`); the horizon must be a multiple of 2^(number of widths - 1).

    Args:
        widths: channels of each level (Diffusion Policy: 256, 512, 1024; MP1 and DP3: 512, 1024, 2048).
        kernel: size of the convolutions, odd.
        groups: of GroupNorm.
        time_dim: features of the time embedding.
    """

    widths: tuple[int, ...] = (256, 512, 1024)
    kernel: int = 5
    groups: int = 8
    time_dim: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        _positive("UNetBackbone", kernel=self.kernel, groups=self.groups, time_dim=self.time_dim)

    def build(
        self, horizon: int, action_dim: int, cond_dim: int, interval: bool = False, max_frequency: float = 100.0
    ) -> nn.Module:
        return VelocityUNet1d(
            horizon,
            action_dim,
            cond_dim,
            self.widths,
            self.kernel,
            self.groups,
            self.time_dim,
            interval,
            max_frequency,
        )


@dataclass(frozen=True)
class DiTBackbone:
    """Transformer with one token per action of the chunk, modulated by time and condition (adaLN-zero).

    Args:
        dim: width, a multiple of `heads` and of 4.
        depth: blocks.
        heads: attention heads.
        mlp_ratio: hidden units of a block's MLP per unit of `dim`.
    """

    dim: int = 256
    depth: int = 4
    heads: int = 4
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        _positive("DiTBackbone", dim=self.dim, depth=self.depth, heads=self.heads)

    def build(
        self, horizon: int, action_dim: int, cond_dim: int, interval: bool = False, max_frequency: float = 100.0
    ) -> nn.Module:
        return ChunkDiT(
            VelocityDiT(
                action_dim,
                (horizon, 1),
                patch=1,
                dim=self.dim,
                depth=self.depth,
                heads=self.heads,
                mlp_ratio=self.mlp_ratio,
                cond_dim=cond_dim or None,
                interval=interval,
                max_frequency=max_frequency,
                guidance=False,
            )
        )


class ChunkDiT(nn.Module):
    """A `VelocityDiT` over chunks [B, H, A], which are pictures of H x 1 pixels and A channels to it."""

    def __init__(self, dit: VelocityDiT):
        super().__init__()
        self.dit = dit

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        return self.features(x, t, cond, r)[0]

    def features(
        self, x: Tensor, t: Tensor, cond: Tensor | None = None, r: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """See the module's docstring; the maps are tokens [B, H, dim]."""
        out, maps = self.dit.features(x.transpose(1, 2)[..., None], t, cond, r)
        return out[..., 0].transpose(1, 2), maps


def _positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{owner}.{name} = {value} must be at least 1")
