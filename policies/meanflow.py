"""MeanFlow policies (MP1): one network call from noise to a chunk, trained from scratch without a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from genrl.networks import Backbone, EncoderSettings, MLPBackbone
from genrl.objectives.matching.mean_flow import (
    Derivative,
    adaptive_loss,
    check_derivative,
    dispersive_loss,
    flow_map_sample,
    guided_velocity,
    mean_flow_target,
)
from genrl.objectives.matching.times import TimeDistribution, UniformTimes, time_pair
from genrl.policies.base import Chunking, ChunkPolicy, Draw, Metrics, Noise, Normalization, Start

Branch = Literal["null", "mp1"]
Tangent = Literal["sampled", "model"]


@dataclass(frozen=True)
class MeanFlowGuidance:
    """Classifier-free guidance that is learned into the network, so that acting costs nothing more.

    Args:
        scale: w; with a mix of 0 the strength of guidance, 1 is none. Strong guidance costs modes.
        mix: kappa in [0, 1), share of the network's own guided velocity in the target; the strength becomes
            scale / (1 - mix).
        dropout: share of training rows whose condition is replaced by the learned null condition.
        branch: ``"null"``, guidance against the null condition; or ``"mp1"``, the rule of MP1's published code, which
            subtracts the conditional velocity itself: it guides nothing and multiplies the target's noise by scale (its
            value is 2), and is here to reproduce that code.

    Raises:
        ValueError: values outside their ranges.
    """

    scale: float = 1.0
    mix: float = 0.0
    dropout: float = 0.1
    branch: Branch = "null"

    def __post_init__(self) -> None:
        if self.branch not in get_args(Branch):
            raise ValueError(f"guidance.branch = {self.branch!r}; allowed are {list(get_args(Branch))}")
        if not self.scale > 0:
            raise ValueError(f"guidance.scale = {self.scale} must be positive; 1 is no guidance")
        if not 0 <= self.mix < 1:
            raise ValueError(f"guidance.mix = {self.mix} must lie in [0, 1)")
        if self.branch == "mp1" and self.mix:
            raise ValueError(f"guidance.mix = {self.mix}: the mp1 branch has no mix; set it to 0, or branch to 'null'")
        if not 0 <= self.dropout < 1 or (self.needs_null and self.dropout == 0):
            raise ValueError(
                f"guidance.dropout = {self.dropout} must lie in (0, 1), or the null condition is never trained; 0.1 is "
                "usual"
            )

    @property
    def active(self) -> bool:
        """Whether targets differ from the sampled velocity."""
        return self.scale != 1 or self.mix != 0

    @property
    def needs_null(self) -> bool:
        return self.active and self.branch == "null"


class MeanFlowPolicy(ChunkPolicy):
    """One-step policy that learns the average velocity of a flow (MeanFlow, arXiv 2505.13447; MP1, arXiv 2507.10543).

    The network u(x, r, t | s) is regressed on v - (t-r) du/dt, see `genrl.objectives.matching.mean_flow`; a chunk is
    eps - u(eps, 0, 1 | s). A part of every batch has r = t and is plain flow matching.

    The derivative in t enters the target, so the time embedding has low frequencies (at most 5 rad per unit of time):
    with frequencies in the hundreds some seeds never learn.

    Args:
        network, encoder, chunking, normalization, mask_padding: see `ChunkPolicy`.
        flow_share: share of rows with r = t, in [0, 1] (MP1: 0.5; py-meanflow: 0.25).
        times: distribution of both ends of an interval. MP1's `LogitNormalTimes(-0.4, 1)` hardly ever draws what acting
            uses, [0, 1]: in small trainings its samples spread less than the data (0.11 where 0.3 is right, 0.17 with
            uniform times) and lie between modes more often (25 against 21 %).
        end_times: another one for the second draw, as in py-meanflow; null for the same.
        guidance: see `MeanFlowGuidance`; none by default.
        dispersive_weight: of the dispersive loss on the network's feature maps (MP1: 0.5 on a U-Net; 0 is off).
        adaptive_power, adaptive_eps: of the weight 1 / (error + eps)^power of a row (MP1: 0.5 and 1e-3). It steadies
            training and favours frequent actions over rare ones, the more so the fewer dimensions a chunk has: in one
            dimension a mode of 30 % of the data got 8 to 17 %. 0 weighs all rows alike.
        tangent: velocity along which the network is differentiated: the ``"sampled"`` one, as published, or the
            ``"model"``'s own, which has no sampling noise and costs one more forward pass on the rows with r < t.
        derivative: ``"jvp"`` (exact) or ``"difference"`` (central, about a third of the additional cost).
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
        times: TimeDistribution = UniformTimes(),
        end_times: TimeDistribution | None = None,
        guidance: MeanFlowGuidance = MeanFlowGuidance(),
        dispersive_weight: float = 0.0,
        adaptive_power: float = 0.5,
        adaptive_eps: float = 1e-3,
        tangent: Tangent = "sampled",
        derivative: Derivative = "jvp",
        steps: int = 1,
    ):
        super().__init__(network, encoder, chunking, normalization, mask_padding)
        if not 0 <= flow_share <= 1:
            raise ValueError(f"flow_share = {flow_share} must lie in [0, 1]; MP1 uses 0.5")
        if dispersive_weight < 0:
            raise ValueError(f"dispersive_weight = {dispersive_weight} must not be negative; MP1 uses 0.5, 0 is off")
        if tangent not in get_args(Tangent):
            raise ValueError(f"tangent = {tangent!r}; allowed are {list(get_args(Tangent))}")
        if steps < 1:
            raise ValueError(f"steps = {steps}; sampling needs at least 1")
        adaptive_loss(torch.zeros(1), adaptive_power, adaptive_eps)  # refuses unusable values
        check_derivative(derivative, 0.005)
        self.flow_share, self.times, self.end_times = flow_share, times, end_times
        self.guidance, self.dispersive_weight = guidance, dispersive_weight
        self.adaptive_power, self.adaptive_eps = adaptive_power, adaptive_eps
        self.tangent, self.derivative, self.steps = tangent, derivative, steps
        self.uses_null = guidance.needs_null

    @property
    def nfe(self) -> int:
        return self.steps

    def _loss(
        self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw, progress: float
    ) -> tuple[Tensor, Metrics]:
        batch = len(x0)
        eps = draw.normal(tuple(x0.shape))
        t, r = time_pair(draw.uniform((batch, 2)), self.times, self.end_times)
        rows = draw.rows(batch, 1 - self.flow_share)  # those with r < t
        r = torch.scatter(t, 0, rows, r[rows])
        x_t = torch.lerp(x0, eps, t[:, None, None])
        if self.guidance.needs_null:
            drop = draw.uniform((batch,)) < self.guidance.dropout
            cond = self.null_cond(cond, drop)
        else:
            drop = None
        v = self._target_velocity(x_t, t, eps - x0, cond, drop)
        target = self._target(x_t, t, r, v, cond.detach(), rows)
        if self.dispersive_weight:
            u, maps = self.net.features(x_t, t, cond, r)
            u, dispersion = u.to(x_t.dtype), dispersive_loss(maps)
        else:
            u, dispersion = self.velocity(x_t, t, cond, r), x0.new_zeros(())
        error = self.chunk_mean((u - target).square(), weight)  # [B]
        loss = adaptive_loss(error, self.adaptive_power, self.adaptive_eps) + self.dispersive_weight * dispersion
        metrics = {"squared_error": error.mean()}
        if self.dispersive_weight:
            metrics["dispersive_loss"] = dispersion
        return loss, metrics

    def _target_velocity(self, x: Tensor, t: Tensor, v: Tensor, cond: Tensor, drop: Tensor | None) -> Tensor:
        """The sampled velocity with guidance; rows without condition keep the sampled one."""
        guidance = self.guidance
        if not guidance.active:
            return v
        with torch.no_grad():
            own = guidance.branch == "mp1" or guidance.mix != 0
            conditional = self.velocity(x, t, cond, t) if own else None
            if guidance.branch == "mp1":
                return guided_velocity(v, None, conditional, guidance.scale)
            other = guidance.scale + guidance.mix != 1
            unconditional = self.velocity(x, t, self.null_cond(cond), t) if other else None
            guided = guided_velocity(v, conditional, unconditional, guidance.scale, guidance.mix)
            return guided if drop is None else torch.where(drop[:, None, None], v, guided)

    def _target(self, x: Tensor, t: Tensor, r: Tensor, v: Tensor, cond: Tensor, rows: Tensor) -> Tensor:
        """v, and in the given rows v - (t-r) du/dt."""
        if not len(rows):
            return v
        x, t, r, own, cond = x[rows], t[rows], r[rows], v[rows], cond[rows]
        with torch.no_grad():
            tangent = self.velocity(x, t, cond, t) if self.tangent == "model" else own
        target = mean_flow_target(
            lambda x, t, r: self.velocity(x, t, cond, r), x, t, r, own, tangent, derivative=self.derivative
        )
        return v.index_copy(0, rows, target.to(v.dtype))

    def _sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        return jump_in_steps(self, cond, noise, start, self.steps)


def jump_in_steps(policy: ChunkPolicy, cond: Tensor, noise: Noise, start: Start | None, steps: int) -> Tensor:
    """Chunks by the flow map x - (t-r) u(x, r, t | s), from the start to t = 0 in equal steps of time, [B, H, A]."""
    if steps == 1:
        return policy.jump(cond, noise, start)
    x, t = policy.start_of(cond, noise, start)
    grid = [t * (1 - k / steps) for k in range(steps + 1)]
    return flow_map_sample(lambda x, t, r: policy.velocity(x, t, cond, r), x, grid)
