"""The base of the shape generator: a closed-form linear autoencoder of grids, and a flow that is trained in it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genrl.diffusion.paths import RectifiedFlow, expand_like
from genrl.generators.recipe import BaseRecipe, seeded
from genrl.generators.shapes_data import KINDS, make_shapes
from genrl.progress import progress_bar

FIRST_BASE_SEED = 1_000_000  # above those of all prompts
T_MIN = 0.05
EMA = 0.995
TIME_WIDTH = 1.1


def velocity_of(x0_hat: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Velocity of the rectified flow from a predicted x0: (x - x0) / t, with t no smaller than .05 in the division."""
    return (x - x0_hat) / expand_like(t.clamp(min=T_MIN), x)


@dataclass(frozen=True)
class Codec:
    """A linear code of grids: distance = mean + basis @ (scale * latent), or the shifted and scaled grid itself.

    Args:
        mean: [M], M = n^3. basis: [M, K] with orthonormal columns, or None for the grid. scale: [K], or [1].
    """

    mean: Tensor
    scale: Tensor
    basis: Tensor | None = None

    def encode(self, distance: Tensor) -> Tensor:
        """[B, n, n, n] -> latents [B, K], or [B, 1, n, n, n] without a basis."""
        centred = distance.flatten(1) - self.mean
        if self.basis is None:
            return (centred / self.scale).reshape(len(distance), 1, *distance.shape[1:])
        return centred @ self.basis / self.scale

    def decode(self, latent: Tensor) -> Tensor:
        """Latents to distances [B, n, n, n], not cut; gradients flow."""
        side = round(len(self.mean) ** (1 / 3))
        scaled = latent.flatten(1) * self.scale
        flat = scaled if self.basis is None else scaled @ self.basis.T
        return (flat + self.mean).reshape(-1, side, side, side)

    def to(self, device: torch.device | str) -> Codec:
        basis = None if self.basis is None else self.basis.to(device)
        return Codec(self.mean.to(device), self.scale.to(device), basis)

    def save(self, file: str | os.PathLike[str]) -> None:
        from safetensors.torch import save_file

        tensors = {"mean": self.mean, "scale": self.scale, "basis": self.basis}
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None}, file)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Codec:
        from safetensors.torch import load_file

        return cls(**load_file(file))


def fit_codec(distance: Tensor, latent_dim: int | None, seed: int = 0) -> Codec:
    """Principal components with half whitening: a component of standard deviation s is divided by a multiple of
    sqrt(s), so that the strong ones stay stronger; all together have variance 1. Whitening whole would give the flow as
    much to do for the last components, which are noise, as for the first.

    Args:
        distance: [N, n, n, n].
        latent_dim: components; None for the grid itself, with unit variance.
        seed: of the randomised decomposition.

    Raises:
        ValueError: for fewer shapes than components.
    """
    flat = distance.flatten(1)
    mean = flat.mean(0)
    centred = flat - mean
    if latent_dim is None:
        return Codec(mean, centred.square().mean().sqrt().reshape(1))
    if latent_dim >= len(flat):
        raise ValueError(f"latent_dim = {latent_dim} components need more than {len(flat)} shapes; raise base_shapes")
    with seeded(seed):
        _, values, basis = torch.svd_lowrank(centred, min(latent_dim + 16, *flat.shape), niter=3)
    std = values[:latent_dim] / (len(flat) - 1) ** 0.5
    return Codec(mean, (std * std.mean()).sqrt(), basis[:, :latent_dim].contiguous())


def base_objects(count: int) -> list[tuple[str, int]]:
    """(kind, seed) of the objects that a base is trained on; none is that of a prompt."""
    return [(KINDS[i % len(KINDS)], FIRST_BASE_SEED + i // len(KINDS)) for i in range(count)]


def base_data(count: int, resolution: int, broken_share: float) -> tuple[Tensor, Tensor]:
    """Distances [N, n, n, n] of the training shapes, partly broken, and of the same shapes whole."""
    return make_shapes(base_objects(count), resolution, broken_share)


def train_base(
    network: nn.Module, latents: Tensor, views: Tensor, recipe: BaseRecipe, progress: bool = True
) -> list[float]:
    """Train `network(x, t, view) -> x0` in place by regression of the flow's velocity; returns the loss of each step.

    The weights end as their moving average. Times are the sigmoid of a normal of width 1.1.
    """
    device = next(network.parameters()).device
    latents, views = latents.to(device), views.to(device)
    path, draw = RectifiedFlow(), torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(network.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.learning_rate_factor)
    average = [p.detach().clone() for p in network.parameters()]
    losses = []
    with progress_bar("training the shapes base", recipe.steps, progress) as advance:
        for step in range(recipe.steps):
            rows = torch.randint(len(latents), (recipe.batch_size,), generator=draw).to(device)
            x0 = latents[rows]
            eps = torch.randn(x0.shape, generator=draw).to(device)
            t = torch.sigmoid(TIME_WIDTH * torch.randn(len(x0), generator=draw)).to(device)  # [B]
            x = path.interpolate(x0, eps, t)
            # Both velocities have the clamp, so that this is the error of x0 over max(t, .05)^2.
            error = velocity_of(network(x, t, views[rows]), x, t) - velocity_of(x0, x, t)
            loss = error.square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), recipe.max_grad_norm)
            optimizer.step()
            scheduler.step()
            decay = min(EMA, (1 + step) / (10 + step))  # a short training has not gone far from its start
            with torch.no_grad():
                torch._foreach_lerp_(average, list(network.parameters()), 1 - decay)
            losses.append(loss.item())
            advance()
    with torch.no_grad():
        for p, value in zip(network.parameters(), average, strict=True):
            p.copy_(value)
    return losses
