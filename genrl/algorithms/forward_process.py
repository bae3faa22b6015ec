"""Reinforcement learning on the forward process: no SDE, no log-density.

DiffusionNFT (arXiv 2509.16117) noises the samples that the model drew, x_t = A x0 + B eps, and asks the velocity to
move toward what good samples say and away from what bad ones say, around the old velocity v_old:

    v+ = beta v + (1 - beta) v_old        v- = (1 + beta) v_old - beta v
    L  = r ||v+ - v*||^2 + (1 - r) ||v- - v*||^2 ,    r = clip(A / (2 A_max) + 1/2, 0, 1)

with v* the velocity from x_t to the sample. Any sampler may draw the samples; here it is the ODE.

Two simpler ones are its controls: regression on the good samples alone, and the matching loss weighted by the
advantage, whose gradient is that of a policy gradient with the matching loss in the place of -log pi.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from genrl.algorithms.base import Metrics, Rollout
from genrl.algorithms.noised_samples import DRAWS as _DRAWS  # noqa: F401
from genrl.algorithms.noised_samples import TIMES as _TIMES  # noqa: F401
from genrl.algorithms.noised_samples import Noised, NoisedSamples, Times
from genrl.diffusion import Euler, Kernel
from genrl.objectives import AdvantageEstimator, nft_loss, optimality
from genrl.objectives.homing import Space, homing_loss, split
from genrl.objectives.surrogates import clipped

Matching = Literal["velocity", "t", "x0"]


class ForwardProcess(NoisedSamples):
    """DiffusionNFT.

    Args:
        steps, shift, kernel, advantage, draws: see `NoisedSamples`.
        beta: strength of the implicit positive and negative velocities.
        advantage_max: A_max, the advantage at which r reaches 1.
        form: ``"x0"``, the squared error of x0 over its own detached mean error as in the official code, or
            ``"velocity"``, the formula of the paper.
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
        beta: float = 1.0,
        advantage_max: float = 5.0,
        form: Literal["x0", "velocity"] = "x0",
        t_min: float = 0.0,
        t_max: float = 1.0,
        old_decay: float = 0.0,
        kl_weight: float = 0.0,
        group_noise: bool = False,
        inner_epochs: int = 1,
        minibatches: int = 2,
        micro_batch: int | None = None,
        times: Times = "uniform",
    ):
        if not (beta > 0 and advantage_max > 0):
            raise ValueError(f"beta = {beta} and advantage_max = {advantage_max} must be positive")
        super().__init__(
            steps, shift, kernel, advantage, draws, times, t_min, t_max, old_decay, kl_weight, group_noise,
            inner_epochs, minibatches, micro_batch,
        )  # fmt: skip
        self.beta, self.advantage_max, self.form = beta, advantage_max, form

    @property
    def needs_old(self) -> bool:
        return True

    def losses(self, rollout: Rollout, at: Noised) -> tuple[Tensor, Metrics]:
        assert rollout.advantage is not None
        v_old = rollout.extra["v_old"][at.draw]
        r = optimality(rollout.advantage, self.advantage_max)
        loss = nft_loss(at.v, v_old, at.x_t, at.t, rollout.x0, r, beta=self.beta, form=self.form, path=self.path)
        return loss, {
            "nft/optimality": r.mean(),
            "nft/optimality_std": r.std(correction=0),
            "nft/at_clip": ((r <= 0) | (r >= 1)).float().mean(),
            "nft/velocity_change": (at.v.detach() - v_old).square().flatten(1).mean(1).sqrt().mean(),
        }


class PositivesOnly(NoisedSamples):
    """Flow matching on the good samples of each group: rejection-sampling fine-tuning, the control of homing.

    Samples with A <= dead_band are left out and cost nothing.

    Args:
        steps, shift, kernel, advantage, draws: see `NoisedSamples`.
        space: ``"x0"``, || x0_hat - x0 ||^2, or ``"velocity"``, || v - v* ||^2.
        dead_band: advantage that a sample must exceed.
        top: only the best samples of each group, so many; None takes all above the dead band.
        weighting: of a sample: ``"one"``, or its ``"advantage"``.
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
        dead_band: float = 0.0,
        top: int | None = None,
        weighting: Literal["one", "advantage"] = "one",
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
        check_weighting(weighting)
        split(torch.zeros(2), dead_band)  # refuses a negative one
        self.space, self.dead_band, self.top, self.weighting = space, dead_band, top, weighting

    def keep(self, advantages: Tensor) -> Tensor:
        return split(advantages, self.dead_band, self.top) > 0

    def losses(self, rollout: Rollout, at: Noised) -> tuple[Tensor, Metrics]:
        assert rollout.advantage is not None
        x0 = rollout.x0
        loss = homing_loss(at.v, at.x_t, at.t, x0, x0, at.eps, 0.0, self.space, path=self.path)
        weight = rollout.advantage.abs() if self.weighting == "advantage" else torch.ones_like(loss)
        return weight * loss, {"matching/error": loss.detach().mean()}

    def trained_share(self, group_size: int) -> float:
        return 0.5 if self.top is None else min(1.0, self.top / group_size)


class AdvantageWeightedMatching(NoisedSamples):
    """AWM (arXiv 2509.25050): the matching loss of every sample, weighted by its advantage.

    With l = -w(t) mean (v - v*)^2 in the place of a log-probability, the loss is PPO's clipped -A exp(l - l_old), as in
    the official code; without a clip range it is -A l, which has the same gradient at the weights of the roll-out but
    lets bad samples be pushed away without limit.

    Args:
        steps, shift, kernel, advantage, draws: see `NoisedSamples`.
        clip_range: c of ratios exp(l - l_old) in [1 - c, 1 + c]; null takes -A l. 0.2 is our choice.
        matching: w(t): ``"velocity"`` 1, ``"t"``, or ``"x0"``, the squared error of x0_hat, t^2 on the straight
            path.
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
        clip_range: float | None = 0.2,
        matching: Matching = "velocity",
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
        if clip_range is not None and not 0 < clip_range < 1:
            raise ValueError(f"clip_range = {clip_range} must lie in (0, 1); null weights the plain loss")
        if matching not in ("velocity", "t", "x0"):
            raise ValueError(f"matching = {matching!r} is unknown; allowed are 'velocity', 't' and 'x0'")
        self.clip_range, self.matching = clip_range, matching

    @property
    def needs_old(self) -> bool:
        return self.clip_range is not None

    def error(self, v: Tensor, rollout: Rollout, at: Noised) -> Tensor:
        """-l: the weighted matching error of the samples, [B]."""
        space: Space = "x0" if self.matching == "x0" else "velocity"
        x0 = rollout.x0
        error = homing_loss(v, at.x_t, at.t, x0, x0, at.eps, 0.0, space, path=self.path)
        return error * at.t if self.matching == "t" else error

    def losses(self, rollout: Rollout, at: Noised) -> tuple[Tensor, Metrics]:
        assert rollout.advantage is not None
        error = self.error(at.v, rollout, at)
        metrics: Metrics = {"matching/error": error.detach().mean()}
        if self.clip_range is None:
            return rollout.advantage * error, metrics
        log_ratio = self.error(rollout.extra["v_old"][at.draw], rollout, at) - error
        low, high = math.log1p(-self.clip_range), math.log1p(self.clip_range)
        loss, cut = clipped(log_ratio, rollout.advantage, low, high)
        metrics["awm/clip_fraction"] = cut.float().mean()
        metrics["awm/log_ratio_std"] = log_ratio.detach().std(correction=0)
        return loss, metrics


def check_weighting(weighting: str) -> None:
    """Refuse an unknown weighting of samples.

    Raises:
        ValueError: naming it.
    """
    if weighting not in ("one", "advantage"):
        raise ValueError(f"weighting = {weighting!r} is unknown; allowed are 'one' and 'advantage'")
