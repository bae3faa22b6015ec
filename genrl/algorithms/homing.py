"""DHO: bad samples are led to good ones instead of being pushed away (arXiv 2610.01233).

See :mod:`genrl.objectives.homing` for the formulas, which are our derivation from the abstract, and for why the loss is
taken in data space by default: with the diverging corrective velocity of the velocity space the samples of a prompt
became identical in our experiments, while the same loss weighted by t^2 worked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from genrl.algorithms.base import Batch, Metrics, Rollout
from genrl.algorithms.forward_process import check_weighting
from genrl.algorithms.noised_samples import Noised, NoisedSamples, Times, groups_of
from genrl.diffusion import Euler, Kernel, VelocityFn
from genrl.generators.base import Generator
from genrl.objectives import AdvantageEstimator
from genrl.objectives.homing import (
    DISTANCES,
    Space,
    corrective_velocity,
    homing_loss,
    match,
    split,
    without_surplus,
)


class Homing(NoisedSamples):
    """Flow matching on the good samples of a group, and of the bad ones toward distinct good ones.

    The groups are split by the sign of the advantage, every negative is matched with a positive at the least total
    cost, and the loss is, averaged over the samples that are used (our choice; written per set in our derivation)::

        positives   positive_weight  || v - (eps - x+) ||^2
        negatives   negative_weight  || v - own velocity - strength (x- - x+) / max(t, t_clamp) ||^2

    in velocity space, or the regression of x0_hat on x+ in data space. Groups are matched within a minibatch, so with
    ``minibatches`` above 1 a negative only sees the positives in its part of the group; negatives that are then left
    over weigh nothing.

    Args:
        steps, shift, kernel, advantage, draws: see `NoisedSamples`.
        space: ``"x0"``, || x0_hat - x+ ||^2, or ``"velocity"``, the form that follows from the remaining time, which
            collapsed the samples of a prompt in our experiments.
        strength: in [0, 1]; below 1 a negative is led to (1 - strength) x- + strength x+ only, and 0 is plain flow
            matching on both sets.
        t_clamp: remaining time below which the corrective velocity no longer grows; velocity space only.
        dead_band: samples with |A| up to it are left out and cost nothing.
        top: only the best and the worst of each group, so many of each; None takes all.
        surplus: where a group has more negatives than positives: ``"drop"`` keeps the worst, ``"replicate"`` lets every
            positive take ceil(|N| / |P|).
        distance: of the matching, mean squared: ``"l2"``, or ``"chamfer"`` for latents that are sets of vectors.
        features: latents [n, ...] -> [n, ...], in which distances are taken instead.
        quality: lambda of the cost C_ij - lambda A_j; above 0 better positives are preferred, where there is a choice.
        weighting: of a sample: ``"one"``, or ``"advantage"``, its |A|.
        positive_weight, negative_weight: of the two parts.
        beta: b of v+ = b v + (1 - b) v_old, which takes the place of v as in DiffusionNFT; 1 needs no old velocity.
        t_min, t_max, old_decay, kl_weight, group_noise, inner_epochs, minibatches, micro_batch, times: see
            `NoisedSamples`.
    """

    def __init__(
        self,
        steps: int = 10,
        shift: float | None = None,
        kernel: Kernel = Euler(),
        advantage: AdvantageEstimator | None = None,
        draws: int = 2,
        space: Space = "x0",
        strength: float = 1.0,
        t_clamp: float = 0.05,
        dead_band: float = 0.0,
        top: int | None = None,
        surplus: Literal["drop", "replicate"] = "drop",
        distance: Literal["l2", "chamfer"] = "l2",
        features: Callable[[Tensor], Tensor] | None = None,
        quality: float = 0.0,
        weighting: Literal["one", "advantage"] = "one",
        positive_weight: float = 1.0,
        negative_weight: float = 1.0,
        beta: float = 1.0,
        t_min: float = 0.0,
        t_max: float = 1.0,
        old_decay: float = 0.0,
        kl_weight: float = 0.01,
        group_noise: bool = False,
        inner_epochs: int = 1,
        minibatches: int = 1,
        micro_batch: int | None = None,
        times: Times = "uniform",
    ):
        super().__init__(
            steps, shift, kernel, advantage, draws, times, t_min, t_max, old_decay, kl_weight, group_noise,
            inner_epochs, minibatches, micro_batch,
        )  # fmt: skip
        check_weighting(weighting)
        for name, value, allowed in [
            ("space", space, ("x0", "velocity")),
            ("surplus", surplus, ("drop", "replicate")),
            ("distance", distance, tuple(DISTANCES)),
        ]:
            if value not in allowed:
                raise ValueError(f"{name} = {value!r} is unknown; allowed are {', '.join(map(repr, allowed))}")
        if not 0 <= strength <= 1:
            raise ValueError(f"strength = {strength} must lie in [0, 1]; 1 leads all the way to the positive")
        if not 0 < t_clamp <= 1:
            raise ValueError(f"t_clamp = {t_clamp} must lie in (0, 1]; .05 is the default")
        if not 0 < beta <= 1:
            raise ValueError(f"beta = {beta} must lie in (0, 1]; 1 trains the velocity itself")
        if not (positive_weight >= 0 and negative_weight >= 0):
            raise ValueError(
                f"positive_weight = {positive_weight} and negative_weight = {negative_weight} must not be negative"
            )
        split(torch.zeros(2), dead_band)  # refuses a negative one
        self.space, self.strength, self.t_clamp = space, strength, t_clamp
        self.dead_band, self.top, self.surplus = dead_band, top, surplus
        self.distance, self.features, self.quality = distance, features, quality
        self.weighting, self.beta = weighting, beta
        self.positive_weight, self.negative_weight = positive_weight, negative_weight

    @property
    def needs_old(self) -> bool:
        return self.beta < 1

    def keep(self, advantages: Tensor) -> Tensor:
        return self._signs(advantages) != 0

    def _signs(self, advantages: Tensor) -> Tensor:
        """1, -1 and 0 of whole groups [..., G], without negatives that would find no positive."""
        sign = split(advantages, self.dead_band, self.top)
        if self.surplus == "drop":
            return without_surplus(sign, advantages)
        alone = (sign < 0) & ~(sign > 0).any(-1, keepdim=True)
        return sign.masked_fill(alone, 0)

    def before_update(self, velocity_fn: VelocityFn, generator: Generator, rollout: Rollout, batch: Batch) -> Rollout:
        """Match the negatives of each group, then draw times and noises."""
        sign, target, cost = self.targets(rollout, groups_of(rollout, batch))
        rollout = super().before_update(velocity_fn, generator, rollout, batch)
        found = {"sign": sign, "target": target, "cost": cost}
        return replace(rollout, extra={**rollout.extra, **found})

    @torch.no_grad()
    def targets(self, rollout: Rollout, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each sample is led to.

        Args:
            rollout: B samples with their advantages, of which `keep` has kept all.
            groups: int64 [B].

        Returns:
            Signs int64 [B] (0 for a negative that is left over), targets [B, ...] (a positive's own x0), and the mean
            squared distance of each pair [B], 0 for positives.
        """
        if rollout.advantage is None:
            raise ValueError("the roll-out has no advantages yet")
        advantage, x0 = rollout.advantage, rollout.x0
        sign = advantage.sign().long()
        target, cost = x0.clone(), torch.zeros(len(x0), device=x0.device)
        if rollout.weight is not None:  # copies of a sample that only keep processes in step are no pairs
            sign = sign * (rollout.weight > 0)
        features = x0 if self.features is None else self.features(x0)
        for group in groups.unique():
            members = (groups == group).nonzero()[:, 0]
            if self.surplus == "drop":
                sign[members] = without_surplus(sign[members], advantage[members])
            positives, negatives = members[sign[members] > 0], members[sign[members] < 0]
            if not len(positives):
                sign[negatives] = 0
            if not len(positives) or not len(negatives):
                continue
            apart = DISTANCES[self.distance](features[negatives], features[positives])
            prize = self.quality * advantage[positives].double()
            chosen = match(apart - prize[None, :], -(-len(negatives) // len(positives)))
            target[negatives] = x0[positives[chosen]]
            cost[negatives] = apart.gather(1, chosen[:, None])[:, 0].float()
        return sign, target, cost

    def losses(self, rollout: Rollout, at: Noised) -> tuple[Tensor, Metrics]:
        assert rollout.advantage is not None
        extra, v = rollout.extra, at.v
        sign, target = extra["sign"], extra["target"]
        if self.needs_old:
            v = self.beta * v + (1 - self.beta) * extra["v_old"][at.draw]
        loss = homing_loss(
            v, at.x_t, at.t, rollout.x0, target, at.eps, self.strength, self.space, self.t_clamp, self.path
        )
        weight = self.positive_weight * (sign > 0) + self.negative_weight * (sign < 0)
        if self.weighting == "advantage":
            weight = weight * rollout.advantage.abs()
        negatives = (sign < 0).float()
        count = negatives.sum().clamp(min=1)
        pull = corrective_velocity(rollout.x0, target, at.t, self.t_clamp, self.path).square().flatten(1).mean(1)
        return weight * loss, {
            "homing/negatives": negatives.mean(),
            "homing/left_over": (sign == 0).float().mean(),
            "homing/pair_distance": (extra["cost"].sqrt() * negatives).sum() / count,
            "homing/correction": (self.strength * pull.sqrt() * negatives).sum() / count,
        }

    def trained_share(self, group_size: int) -> float:
        return 1.0 if self.top is None else min(1.0, 2 * self.top / group_size)
