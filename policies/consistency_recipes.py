"""What the variants of consistency training are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from genrl.objectives.matching import noise_levels

Variant = Literal["ct", "ict", "slct", "ect", "sct", "flow_map"]
Spacing = Literal["original", "doubling", "easy", "smooth"]
Density = Literal["uniform", "lognormal"]
Distance = Literal["squared", "pseudo_huber", "cauchy"]


@dataclass(frozen=True)
class NoiseLevels:
    """Noise levels of consistency policies on actions normalised to [-1, 1].

    Args:
        sigma_min, sigma_max: ends of the range; f is the identity at sigma_min, acting starts at sigma_max.
        sigma_data: spread of the data that the parameterisation assumes.
        rho: of the Karras grid.
        mean, std: of ln sigma where levels are drawn log-normally. Data of little spread are told apart at small levels
            only: a higher mean learns faster at first and blurs what it learns.
    """

    sigma_min: float = noise_levels.SIGMA_MIN
    sigma_max: float = noise_levels.SIGMA_MAX
    sigma_data: float = 0.5
    rho: float = noise_levels.RHO
    mean: float = -1.1
    std: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max:
            raise ValueError(
                f"levels.sigma_min = {self.sigma_min} and sigma_max = {self.sigma_max}; 0 < sigma_min < sigma_max is "
                "required, 0.002 and 80 are usual"
            )
        for name in ("sigma_data", "rho", "std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"levels.{name} = {getattr(self, name)} must be positive")


@dataclass(frozen=True)
class ConsistencyRecipe:
    """One way of consistency training, see :data:`RECIPES`.

    Args:
        spacing: of the two levels of a pair. ``"original"`` and ``"doubling"``: neighbours on a Karras grid whose size
            grows from `first` to `last` intervals; ``"easy"``: r(sigma) of easy consistency tuning, in whole stages;
            ``"smooth"``: the same with a stage that grows evenly.
        first, last: of the grid; published values (2 and 150, 10 and 1280) are for 10^5 updates and more.
        pretraining: share of training with target level 0, which trains a diffusion model, as easy tuning starts from.
        stages: of ``"easy"`` and ``"smooth"``, which halve the gap between the levels each.
        density: of levels: ``"lognormal"`` as published, or ``"uniform"`` over the grid, without one in sigma^(1/rho).
            That trains the highest levels, where acting starts, ten times as often: in a short training without grid it
            halves the error of one step.
        distance: of the pair's images.
        cauchy_factor: times the published scale of the Cauchy distance. Chunks of a few dozen numbers in [-1, 1] have
            larger residuals, and few updates leave them large; with 1, gradients follow their smallest entries.
        weighted: by 1 / (sigma - r). Without it the large levels, whose images are blurred, crowd out the small ones.
        teacher_decay: of a moving average that makes the targets; None uses the network itself.
        denoising: share of the lowest levels on which the squared distance to the clean chunk is added.
        coupling: noises are exchanged by optimal transport among states within this radius, see
            `genrl.objectives.optimal_coupling`; 0 among equal states only, None not at all.
        references: bandwidth of the states whose chunks serve as references of a variance-reduced target, see
            `genrl.objectives.posterior_mean`, in units of the batch's mean distance; None uses the sampled successor.
        norm_gains: whether normalisation layers have a trained gain.
        edge: share by which the later levels of a sampler lie below their nominal value.

    Raises:
        ValueError: values outside their ranges.
    """

    spacing: Spacing = "doubling"
    first: int = 10
    last: int = 80
    pretraining: float = 0.0
    stages: int = 4
    density: Density = "lognormal"
    distance: Distance = "pseudo_huber"
    cauchy_factor: float = 10.0
    weighted: bool = True
    teacher_decay: float | None = None
    denoising: float = 0.0
    coupling: float | None = None
    references: float | None = None
    norm_gains: bool = True
    edge: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in [("spacing", Spacing), ("density", Density), ("distance", Distance)]:
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"recipe.{name} = {getattr(self, name)!r}; allowed are {list(get_args(kind))}")
        if not 2 <= self.first <= self.last:
            raise ValueError(f"recipe.first = {self.first} and last = {self.last}; 2 <= first <= last is required")
        if not self.on_grid and (self.distance == "cauchy" or self.denoising):
            raise ValueError(
                f"recipe.spacing = {self.spacing!r} has no grid of levels, which the cauchy distance and a denoising "
                "share refer to; use pseudo_huber, lognormal and 0, or the spacing 'doubling'"
            )
        for name in ("pretraining", "denoising", "edge"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} = {getattr(self, name)} must lie in [0, 1)")
        for name in ("stages", "cauchy_factor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"recipe.{name} = {getattr(self, name)} must be positive")
        if self.teacher_decay is not None and not 0 <= self.teacher_decay < 1:
            raise ValueError(f"recipe.teacher_decay = {self.teacher_decay} must lie in [0, 1); null is no teacher")
        if self.coupling is not None and self.coupling < 0:
            raise ValueError(f"recipe.coupling = {self.coupling} must not be negative; null is none")
        if self.references is not None and not self.references > 0:
            raise ValueError(f"recipe.references = {self.references} must be positive; null is none")

    @property
    def on_grid(self) -> bool:
        """Whether pairs are neighbours on a grid."""
        return self.spacing in ("original", "doubling")

    def pairs(self, u: Tensor, progress: float, levels: NoiseLevels) -> LevelPairs:
        """Levels for uniform numbers u [B] at a share `progress` of training."""
        trained = max(0.0, (progress - self.pretraining) / (1 - self.pretraining))
        early = torch.zeros_like(u, dtype=torch.bool)
        if self.on_grid:
            count = noise_levels.original_count if self.spacing == "original" else noise_levels.doubling_count
            n = count(trained, self.first, self.last)
            grid = noise_levels.karras_grid(n, levels.sigma_min, levels.sigma_max, levels.rho).to(u)
            if self.density == "lognormal":
                index = noise_levels.pick(noise_levels.lognormal_probabilities(grid, levels.mean, levels.std), u)
            else:
                index = (u * (n - 1)).long()
            sigma, r, early = grid[index + 1], grid[index], index < round(self.denoising * (n - 1))
        else:
            n, stage = None, min(trained, 1.0) * self.stages
            if self.density == "lognormal":
                sigma = noise_levels.lognormal_levels(u, levels.mean, levels.std)
            else:
                sigma = noise_levels.karras_levels(u, levels.sigma_min, levels.sigma_max, levels.rho)
            sigma = sigma.clamp(2 * levels.sigma_min, levels.sigma_max)
            r = noise_levels.easy_successor(sigma, stage if self.spacing == "smooth" else math.floor(stage))
        if progress < self.pretraining:
            r, early = torch.zeros_like(r), torch.zeros_like(early)
        return LevelPairs(sigma, r, n, early)


@dataclass(frozen=True)
class LevelPairs:
    """Upper and lower levels of a batch.

    Args:
        sigma, r: [B] each, r < sigma; r = 0 is the clean chunk.
        n: levels of the grid, if there is one.
        early: bool [B], rows among the lowest levels.
    """

    sigma: Tensor
    r: Tensor
    n: int | None
    early: Tensor


RECIPES: dict[str, ConsistencyRecipe] = {
    "ct": ConsistencyRecipe("original", first=2, last=40, density="uniform", distance="squared", teacher_decay=0.95),
    "ict": ConsistencyRecipe(),
    "slct": ConsistencyRecipe(distance="cauchy", denoising=0.25, coupling=0.0, norm_gains=False),
    "ect": ConsistencyRecipe("easy", pretraining=0.1, density="uniform"),
    "sct": ConsistencyRecipe("smooth", pretraining=0.1, density="uniform", references=0.05, edge=0.1),
}
"""The published variants, with numbers for one to two thousand updates of small networks:

| name | method | pairs of levels | distance | target |
|---|---|---|---|---|
| ``ct`` | consistency training (2303.01469, 2309.16984) | grid of 2 to 40 | squared | teacher |
| ``ict`` | improved (2310.14189) | grid of 10 to 80, doubling, log-normal | pseudo-Huber | itself |
| ``slct`` | improved latent (2502.01441) | as ict | Cauchy; denoising at low levels | itself, coupled noise |
| ``ect`` | easy tuning (2406.14548) | r(sigma) in stages, diffusion first | pseudo-Huber | itself |
| ``sct`` | stable tuning (2410.18958) | r(sigma), smooth | pseudo-Huber | itself, of less variance |
"""
