"""One-step flow policies (OFP): average velocities that agree with a moving average of themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from genrl.networks import Backbone, EncoderSettings, MLPBackbone
from genrl.objectives.matching.mean_flow import AverageVelocity, adaptive_loss
from genrl.objectives.matching.self_consistency import (
    Contraction,
    contracted_time,
    contraction,
    self_consistency_target,
    self_guidance,
)
from genrl.objectives.matching.times import (
    BetaTimes,
    LogitNormalTimes,
    TimeDistribution,
    UniformTimes,
    interval_below,
)
from genrl.policies.base import Chunking, ChunkPolicy, Draw, Metrics, Noise, Normalization, Start, Teacher
from genrl.policies.meanflow import jump_in_steps

Weighting = Literal["step", "none"]


@dataclass(frozen=True)
class FlowIntervals:
    """Intervals [r, t] of the self-consistency loss.

    Args:
        times: distribution of t; leans to the noise, where acting starts.
        fractions: of (t - r) / t.
        minimum: least t - r.
        full_share: share of the intervals that end at r = 0 instead, as the one that acting uses; self-guidance is
            taken on them.

    Raises:
        ValueError: values outside their ranges.
    """

    times: TimeDistribution = field(default_factory=lambda: BetaTimes(1.5, 1.0))
    fractions: TimeDistribution = field(default_factory=lambda: LogitNormalTimes(-0.2, 1.0))
    minimum: float = 0.05
    full_share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.minimum < 1:
            raise ValueError(f"intervals.minimum = {self.minimum} must lie in (0, 1); 0.05 is usual")
        if not 0 <= self.full_share <= 1:
            raise ValueError(f"intervals.full_share = {self.full_share} must lie in [0, 1]")


class OneStepFlowPolicy(ChunkPolicy):
    """One-step policy from self-consistency with a moving average of its own network (OFP, arXiv 2603.12480).

    ::

        L = L_flow + consistency_weight L_consistency + guidance_weight L_guidance

    The flow anchor regresses u(x_t, t, t | s) on eps - x0. Self-consistency regresses u(x_t, r, t | s) on the chord
    from x_t to the point that the teacher reaches at r from an intermediate time m, which moves towards t as training
    progresses. Self-guidance moves one-step samples towards what the condition makes likely. No derivative of the
    network is taken. See `genrl.objectives.matching.self_consistency`.

    The published loss has a gradient that vanishes with t - m, since the target tends to the teacher's own prediction:
    beside the anchor it is then hardly learned. ``weighting="step"`` multiplies a row by (t-r)/(t-m), which makes its
    gradient that of MeanFlow with a difference in place of the derivative; ``"none"`` is the published form.

    Args:
        network, encoder, chunking, normalization, mask_padding: see `ChunkPolicy`; `chunking.warm_start` (OFP: 0.85)
            starts a prediction from the part of the last chunk that was not executed.
        flow_share: share of rows with r = t, the anchor, in (0, 1].
        consistency_weight, guidance_weight: lambda_c and lambda_g; unpublished. Too much guidance collapses modes, and
            with few demonstrations the difference that it follows is mostly noise, so it is off (0); 0.05 is a start.
        dropout: share of rows whose condition is replaced by the learned null condition; only used with guidance.
        teacher_decay: of the moving average, at update n min(teacher_decay, (1 + n) / (10 + n)). 0.999 suits long
            trainings; in a few thousand updates a slow teacher holds the network back, and 0 (the live weights) is
            fastest.
        contraction: how the share of the interval in which m lies shrinks over training, see
            `genrl.objectives.contraction`.
        minimum: distance that m keeps from t.
        weighting: see above.
        adaptive_power, adaptive_eps: of the weight 1 / (error + eps)^power of a row, as in MeanFlow; 0 is the
            published form.
        times: distribution of t in the anchor. intervals: of the other rows.
        guidance_times: of the noise that self-guidance adds.
        steps: of sampling, on a uniform grid of times; 1 is what the policy is made for.

    Raises:
        ValueError: values outside their ranges.
    """

    interval: ClassVar[bool] = True
    max_frequency: ClassVar[float] = 5.0
    supports_warm_start: ClassVar[bool] = True

    def __init__(
        self,
        network: Backbone = MLPBackbone(),
        encoder: EncoderSettings = EncoderSettings(),
        chunking: Chunking = Chunking(),
        normalization: Normalization = Normalization(),
        mask_padding: bool = False,
        flow_share: float = 0.5,
        consistency_weight: float = 1.0,
        guidance_weight: float = 0.0,
        dropout: float = 0.1,
        teacher_decay: float = 0.9,
        contraction: Contraction = "quadratic",
        minimum: float = 0.05,
        weighting: Weighting = "step",
        adaptive_power: float = 0.5,
        adaptive_eps: float = 1e-3,
        times: TimeDistribution = UniformTimes(),
        intervals: FlowIntervals = FlowIntervals(),
        guidance_times: TimeDistribution = UniformTimes(0.02, 0.98),
        steps: int = 1,
    ):
        super().__init__(network, encoder, chunking, normalization, mask_padding)
        self.flow_share, self.dropout, self.teacher_decay = flow_share, dropout, teacher_decay
        self.consistency_weight, self.guidance_weight = consistency_weight, guidance_weight
        self.contraction, self.minimum, self.weighting = contraction, minimum, weighting
        self.adaptive_power, self.adaptive_eps = adaptive_power, adaptive_eps
        self.times, self.intervals, self.guidance_times, self.steps = times, intervals, guidance_times, steps
        self._check()
        self.uses_null = guidance_weight > 0

    def _check(self) -> None:
        for name, low, high, hint in [
            ("flow_share", 0, 1, "without an anchor constant maps are solutions; try 0.5"),
            ("minimum", 0, 1, "at m = t the target repeats the teacher; try 0.05"),
        ]:
            if not low < getattr(self, name) <= high:
                raise ValueError(f"{name} = {getattr(self, name)} must lie in ({low}, {high}]: {hint}")
        for name in ("consistency_weight", "guidance_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative; 0 is off")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout} must lie in [0, 1); 0.1 is usual")
        if self.guidance_weight and not (self.intervals.full_share and self.dropout and self.flow_share < 1):
            raise ValueError(
                f"guidance_weight = {self.guidance_weight} needs rows to act on and a trained null condition: set "
                f"intervals.full_share > 0 (now {self.intervals.full_share}), dropout > 0 (now {self.dropout}) and "
                f"flow_share < 1 (now {self.flow_share}), or guidance_weight: 0"
            )
        if not 0 <= self.teacher_decay < 1:
            raise ValueError(f"teacher_decay = {self.teacher_decay} must lie in [0, 1); 0 follows the live weights")
        if self.weighting not in get_args(Weighting):
            raise ValueError(f"weighting = {self.weighting!r}; allowed are {list(get_args(Weighting))}")
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}; sampling needs at least 1")
        contraction(0.0, self.contraction)  # these refuse unusable values
        adaptive_loss(torch.zeros(1), self.adaptive_power, self.adaptive_eps)

    def _configured(self) -> None:
        self.teacher = Teacher(self.net)

    @property
    def nfe(self) -> int:
        return self.steps

    def after_update(self, updates: int) -> None:
        self.teacher.update(min(self.teacher_decay, (1 + updates) / (10 + updates)))

    def _loss(
        self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw, progress: float
    ) -> tuple[Tensor, Metrics]:
        batch = len(x0)
        eps, p = draw.normal(tuple(x0.shape)), draw.uniform((batch, 4))
        if self.uses_null:
            cond = self.null_cond(cond, draw.uniform((batch,)) < self.dropout)
        anchors = max(round(self.flow_share * batch), 1)
        anchor, rows = p[:, 0].argsort().tensor_split([anchors])
        full = rows[: round(self.intervals.full_share * len(rows))]
        t, r = self._times(p[:, 1], p[:, 2], rows, full)
        x_t = torch.lerp(x0, eps, t[:, None, None])
        u = self.velocity(x_t, t, cond, r)

        target, scale = eps - x0, torch.ones_like(t)
        if len(rows):
            m = contracted_time(t[rows], r[rows], contraction(progress, self.contraction), p[rows, 3], self.minimum)
            x_m = torch.lerp(x0[rows], eps[rows], m[:, None, None])
            chords = self_consistency_target(self._teacher(cond[rows]), x_t[rows], x_m, t[rows], m, r[rows])
            target = target.index_copy(0, rows, chords)
            if self.weighting == "step":
                scale = scale.index_copy(0, rows, (t - r)[rows] / (t[rows] - m))
        error = self.chunk_mean((u - target).square(), weight)  # [B]
        loss = adaptive_loss(scale * error, self.adaptive_power, self.adaptive_eps)
        total, metrics = loss[anchor].mean(), {"flow_error": error[anchor].mean()}
        if len(rows):
            total = total + self.consistency_weight * loss[rows].mean()
            metrics["consistency_error"] = error[rows].mean()
        if self.guidance_weight and len(full):
            x0_hat = (x_t - t[:, None, None] * u)[full]
            delta = self._guide(x0_hat, cond[full], draw)
            # In value the size of delta; its gradient moves u by +delta.
            pull = (u[full] - (u[full] + delta).detach()).square()
            size = self.chunk_mean(pull, None if weight is None else weight[full]).mean()
            total, metrics["guidance_size"] = total + self.guidance_weight * size, size
        return total, metrics

    def _times(self, p: Tensor, q: Tensor, rows: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        """t and r [B]: r = t but in the given rows, r = 0 in the full ones."""
        t = self.times.quantile(p).index_copy(0, rows, self.intervals.times.quantile(p[rows]))
        t = t.index_copy(0, rows, t[rows].clamp(min=self.minimum))  # room for m below t
        below = interval_below(t, self.intervals.fractions.quantile(q), self.intervals.minimum)
        return t, t.index_copy(0, rows, below[rows]).index_fill(0, full, 0.0)

    def _teacher(self, cond: Tensor) -> AverageVelocity:
        cond = cond.detach()
        return lambda x, t, r: self.teacher(x, t, cond, r).to(x.dtype)

    def _guide(self, x0_hat: Tensor, cond: Tensor, draw: Draw) -> Tensor:
        """Self-guidance's change of u, [N, H, A]."""
        eps = draw.normal(tuple(x0_hat.shape))
        t = self.guidance_times.quantile(draw.uniform((len(x0_hat),)))
        return self_guidance(self._teacher(cond), self._teacher(self.null_cond(cond)), x0_hat, t, eps)

    def _sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        return jump_in_steps(self, cond, noise, start, self.steps)
