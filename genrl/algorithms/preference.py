"""Online Diffusion-DPO: pairs from the groups that the model itself drew (arXiv 2311.12908, trained online)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from genrl.algorithms.base import Batch, Metrics, Rollout
from genrl.algorithms.noised_samples import Noised, NoisedSamples, Times, groups_of
from genrl.diffusion import Euler, Kernel, RowNoise, VelocityFn
from genrl.generators.base import Generator
from genrl.objectives import AdvantageEstimator, best_and_worst
from genrl.objectives.preference import dpo_loss, dpo_margin, matching_error, pairs_of


class OnlineDPO(NoisedSamples):
    """-log sigmoid( -(beta/2) [(e_w - e_w_ref) - (e_l - e_l_ref)] ) of a better and a worse sample of a group.

    e is the matching error of a sample at (t, eps), and the reference is the starting model. The samples of a group
    share their (t, eps), as the two of a pair do in the published code. The loss of a pair is carried by both of its
    samples, so that every sample costs one forward and backward however many pairs it is in; the mean over samples is
    then the mean over pairs.

    Args:
        steps, shift, kernel, advantage, draws: see `NoisedSamples`.
        beta: strength. 2000 to 5000 is published for images of 4 x 64 x 64 latents.
        pairs: ``"best_worst"``, one pair a group, of which the other samples cost nothing, or ``"all"`` pairs with
            different advantages.
        t_min, t_max, old_decay, kl_weight, group_noise, inner_epochs: see `NoisedSamples`.
        minibatches: 1 for ``"best_worst"``; with ``"all"``, pairs are made within a minibatch.
        micro_batch: must not separate the samples of a pair: an even number for ``"best_worst"``, and a multiple of the
            samples of a group in a minibatch for ``"all"``; None takes a whole minibatch.
        times: see `NoisedSamples`.
    """

    def __init__(
        self,
        steps: int = 10,
        shift: float | None = None,
        kernel: Kernel = Euler(),
        advantage: AdvantageEstimator | None = None,
        draws: int = 2,
        beta: float = 2000.0,
        pairs: Literal["best_worst", "all"] = "best_worst",
        t_min: float = 0.0,
        t_max: float = 1.0,
        old_decay: float = 0.0,
        kl_weight: float = 0.0,
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
        if not beta > 0:
            raise ValueError(f"beta = {beta} must be positive; 2000 to 5000 is published")
        if pairs not in ("best_worst", "all"):
            raise ValueError(f"pairs = {pairs!r} is unknown; allowed are 'best_worst' and 'all'")
        if pairs == "best_worst" and minibatches > 1:
            raise ValueError(
                f"minibatches = {minibatches} would separate the best and the worst of a group; use 1, or pairs: all"
            )
        if pairs == "best_worst" and micro_batch is not None and micro_batch % 2:
            raise ValueError(f"micro_batch = {micro_batch} would separate pairs; use an even number")
        self.beta, self.pairs = beta, pairs

    @property
    def needs_reference(self) -> bool:
        return True

    def keep(self, advantages: Tensor) -> Tensor:
        """The best and the worst of groups in which they differ; for ``"all"``, the groups in which any differ."""
        low = advantages.nan_to_num(math.inf).amin(1, keepdim=True)
        high = advantages.nan_to_num(-math.inf).amax(1, keepdim=True)
        kept = best_and_worst(advantages, 1) if self.pairs == "best_worst" else ~torch.isnan(advantages)
        return kept & (high > low)

    def noise_of(self, rollout: Rollout, batch: Batch) -> RowNoise:
        return batch.group_noise.for_rows(groups_of(rollout, batch))

    def before_update(self, velocity_fn: VelocityFn, generator: Generator, rollout: Rollout, batch: Batch) -> Rollout:
        """Draw times and noises of the groups, evaluate the reference, and count the partners of every sample."""
        groups = groups_of(rollout, batch)
        rollout = super().before_update(velocity_fn, generator, rollout, batch)
        partners = self._partners(self._pairs(rollout, groups), len(rollout), rollout.x0.device)
        return replace(rollout, extra={**rollout.extra, "group": groups, "partners": partners})

    def _pairs(self, rollout: Rollout, groups: Tensor) -> tuple[Tensor, Tensor]:
        if rollout.advantage is None:
            raise ValueError("the roll-out has no advantages yet")
        return pairs_of(rollout.rows, groups, rollout.advantage, self.pairs == "best_worst")

    @staticmethod
    def _partners(pairs: tuple[Tensor, Tensor], rows: int, device: torch.device) -> Tensor:
        """Number of pairs of every sample, int64 [B]."""
        return torch.bincount(torch.cat(pairs).to(device), minlength=rows)

    def losses(self, rollout: Rollout, at: Noised) -> tuple[Tensor, Metrics]:
        extra = rollout.extra
        better, worse = pairs = self._pairs(rollout, extra["group"])
        partners = self._partners(pairs, len(rollout), at.v.device)
        counted = torch.ones(len(rollout), dtype=torch.bool, device=at.v.device)
        if rollout.weight is not None:  # copies of a sample that keep processes in step have no pairs
            counted = rollout.weight > 0
        if bool((partners < extra["partners"])[counted].any()):
            raise ValueError(
                f"algorithm.micro_batch = {self.micro_batch} separates the samples of a pair; use a multiple of "
                f"{2 if self.pairs == 'best_worst' else 'the samples of a group in a minibatch'}, or null"
            )
        error = matching_error(at.v, rollout.x0, at.eps, at.t, self.path)
        with torch.no_grad():
            reference = matching_error(extra["v_ref"][at.draw], rollout.x0, at.eps, at.t, self.path)
        arms = error[better], reference[better], error[worse], reference[worse]
        loss = dpo_loss(*arms, self.beta)
        margin = dpo_margin(*arms, self.beta).detach()
        total = torch.zeros_like(error).index_add(0, better, loss).index_add(0, worse, loss)
        # A sample without a pair keeps its place in the graph, so that every process has a backward to take part in.
        total = total / partners.clamp(min=1) + 0.0 * error
        count = max(len(better), 1)
        return total, {
            "dpo/margin": margin.sum() / count,
            "dpo/accuracy": (margin > 0).float().sum() / count,
            "dpo/better_change": (arms[0] - arms[1]).detach().sum() / count,
            "dpo/worse_change": (arms[2] - arms[3]).detach().sum() / count,
        }

    def trained_share(self, group_size: int) -> float:
        return min(1.0, 2 / group_size) if self.pairs == "best_worst" else 1.0
