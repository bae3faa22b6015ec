"""Drifting policies: one network call, trained by moving several particles per state towards the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from genrl.networks import Backbone, EncoderSettings, MLPBackbone
from genrl.objectives.matching.coupling import nearness
from genrl.objectives.matching.drifting import Affinity, Kernel, Shared, drifting_loss, guidance_weight
from genrl.policies.base import Chunking, ChunkPolicy, Draw, Metrics, Noise, Normalization, Start, same_time

Source = Literal["data", "network"]


@dataclass(frozen=True)
class DriftGuidance:
    """Classifier-free guidance of a drifting policy: particles are also repelled from actions of any state.

    It compares how dense actions are in a state and in general, and so needs several positives per state
    (`DriftingPolicy.neighbours`): with one it hardly has an effect.

    Args:
        strength: alpha, see `genrl.objectives.guidance_weight`; 1 is none. Strong guidance costs modes.
        negatives: unconditional actions that each particle sees.
        source: ``"data"`` takes them from other rows of the batch; ``"network"`` from the policy itself under a learned
            null condition, for data that say little about where the policy is.
        dropout: share of rows that train the null condition, with ``"network"`` only; the positives of such a row are
            actions of other rows.

    Raises:
        ValueError: values outside their ranges.
    """

    strength: float = 1.0
    negatives: int = 8
    source: Source = "data"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        guidance_weight(self.strength, 2, self.negatives)  # refuses a strength below 1 and no negatives
        if self.source not in get_args(Source):
            raise ValueError(f"guidance.source = {self.source!r}; allowed are {list(get_args(Source))}")
        if not 0 < self.dropout < 1:
            raise ValueError(f"guidance.dropout = {self.dropout} must lie in (0, 1); 0.1 is usual")

    @property
    def active(self) -> bool:
        return self.strength != 1

    @property
    def needs_null(self) -> bool:
        return self.active and self.source == "network"


class DriftingPolicy(ChunkPolicy):
    """One-step policy trained by drifting (arXiv 2602.04770; as a policy, 2605.07727).

    For every state of a batch the network maps `particles` noises to chunks, a = eps - v(eps, t = 1 | s). They are
    attracted by the chunk that the data have for this state, repelled by each other, and regressed on where that moves
    them. No teacher and no time are needed; the network is only ever called at t = 1. The loss is computed on chunks as
    they are: particles outside [-1, 1] are not clipped, or they would get no gradient.

    A data set has one chunk per state, and with one positive the attraction is a plain regression. What keeps several
    ways of acting apart is `affinity`: with ``"targets"`` and ``"both"`` the pull of a chunk fades for particles that
    have others nearer to them, so that it moves those that are on their way to it (`genrl.objectives.drifting_field`);
    with ``"separate"`` all but one way are lost. `neighbours` adds the chunks of the nearest states of the batch, which
    helps where states lie densely and their actions hardly change with them.

    **What to watch**: the loss is 1 for one temperature, always; ``force`` falls while the policy learns.

    Args:
        network, encoder, chunking, normalization, mask_padding: see `ChunkPolicy`.
        particles: chunks per state and update, at least 2; the cost grows in proportion. 8 as in DFP.
        temperatures: of the kernel, as fractions of the mean distance within a state. Several are summed, each
            normalised; DFP uses 0.1, the image model 0.02, 0.05 and 0.2. Wide ones merge ways of acting: on synthetic
            chunks with two ways, 0.2 lost some and 0.5 all of them with ``"targets"``.
        affinity, kernel: see `genrl.objectives.drifting_field`. Published is ``"both"``; on chunks ``"targets"`` leaves
            fewer stray particles (half the error after 1000 updates).
        shared: ``"state"`` normalises every state by its own scatter, ``"batch"`` all by one, as published code does.
        min_scale: least scatter that states are normalised by, in normalised action units.
        neighbours: positives from other states, 0 for none.
        bandwidth: of their weight exp(-D^2 / (2 bandwidth^2)), D the distance of the encoded states in units of the
            batch's mean distance.
        guidance: see `DriftGuidance`; none by default.

    Raises:
        ValueError: values outside their ranges.
    """

    def __init__(
        self,
        network: Backbone = MLPBackbone(),
        encoder: EncoderSettings = EncoderSettings(),
        chunking: Chunking = Chunking(),
        normalization: Normalization = Normalization(),
        mask_padding: bool = False,
        particles: int = 8,
        temperatures: tuple[float, ...] = (0.05,),
        affinity: Affinity = "targets",
        kernel: Kernel = "laplace",
        shared: Shared = "state",
        min_scale: float = 0.01,
        neighbours: int = 0,
        bandwidth: float = 0.05,
        guidance: DriftGuidance = DriftGuidance(),
    ):
        super().__init__(network, encoder, chunking, normalization, mask_padding)
        if particles < 2:
            raise ValueError(f"particles = {particles}; a particle needs another one to be repelled by: 8 is usual")
        if neighbours < 0:
            raise ValueError(f"neighbours = {neighbours} must not be negative; 0 uses the state's own action alone")
        if guidance.active and not neighbours:
            raise ValueError(
                f"guidance.strength = {guidance.strength} has no effect with a single positive per state; set "
                "neighbours (to 8, say), or guidance.strength: 1"
            )
        self.particles, self.temperatures = particles, tuple(temperatures)
        self.affinity, self.kernel, self.shared, self.min_scale = affinity, kernel, shared, min_scale
        self.neighbours, self.bandwidth, self.guidance = neighbours, bandwidth, guidance
        self.uses_null = guidance.needs_null
        probe = torch.zeros(1, 2, 1)
        self._drift(probe, probe, None, None, None, None)  # refuses unknown names and unusable numbers
        nearness(torch.zeros(1, 1), bandwidth)

    def _loss(
        self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw, progress: float
    ) -> tuple[Tensor, Metrics]:
        batch, horizon, dim = x0.shape
        flat = x0.flatten(1)  # [B, d]
        mask = None if weight is None else weight[:, :, None].expand_as(x0).flatten(1)
        positives, weights = self._positives(flat, cond, mask)
        negatives = negative_weights = None
        if self.guidance.active:
            others = flat[_other_rows(draw.uniform((batch, self.guidance.negatives)))]  # [B, U, d]
            strength = guidance_weight(self.guidance.strength, self.particles, self.guidance.negatives)
            negatives, negative_weights = others, torch.full_like(others[..., 0], strength)
            if self.guidance.needs_null:
                drop = draw.uniform((batch,)) < self.guidance.dropout
                with torch.no_grad():
                    null = self.null_cond(cond)
                    negatives = self._particles(null, draw.normal((batch, others.shape[1], horizon, dim)))
                # Rows without condition: no guidance, and positives from anywhere in place of their own.
                negative_weights = negative_weights * ~drop[:, None]
                positives = torch.cat([positives, others], 1)
                weights = torch.cat([weights * ~drop[:, None], drop[:, None].expand_as(others[..., 0]).to(weights)], 1)
                cond = self.null_cond(cond, drop)
        x = self._particles(cond, draw.normal((batch, self.particles, horizon, dim)))
        loss, gauges = self._drift(x, positives, negatives, weights, negative_weights, mask)
        spread = x.detach().std(1, correction=0).mean()
        return loss, {"force": gauges["force"].mean(), "scale": gauges["scale"].mean(), "spread": spread}

    def _drift(
        self,
        x: Tensor,
        positives: Tensor,
        negatives: Tensor | None,
        weights: Tensor | None,
        negative_weights: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return drifting_loss(
            x,
            positives,
            negatives,
            self.temperatures,
            positive_weights=weights,
            negative_weights=negative_weights,
            mask=mask,
            kernel=self.kernel,
            affinity=self.affinity,
            shared=self.shared,
            min_scale=self.min_scale,
        )

    def _particles(self, cond: Tensor, eps: Tensor) -> Tensor:
        """Chunks [B, N, d] for conditions [B, C] and noise [B, N, H, A]."""
        batch, n = eps.shape[:2]
        x = eps.flatten(0, 1)
        x = x - self.velocity(x, same_time(1.0, x), cond.repeat_interleave(n, 0))
        return x.reshape(batch, n, -1)

    def _positives(self, flat: Tensor, cond: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Own and neighbouring chunks [B, P, d] and their weights [B, P]."""
        own, one = flat[:, None], torch.ones_like(flat[:, :1])
        count = min(self.neighbours, len(flat) - 1)
        if not count:
            return own, one
        near = nearness(cond, self.bandwidth).to(flat).fill_diagonal_(-1.0)  # [B, B]; -1: never oneself
        if mask is not None:  # a neighbour has to have actions wherever this row has
            near = near.masked_fill(mask @ (1 - mask).T > 0, 0.0)
        weights, rows = near.topk(count, dim=1)
        return torch.cat([own, flat[rows]], 1), torch.cat([one, weights.clamp(min=0)], 1)

    def _sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        return self.jump(cond, noise, start)


def _other_rows(u: Tensor) -> Tensor:
    """For each row of u [B, U] in [0, 1), indices of U other rows, [B, U]; a single row has only itself."""
    rows = torch.arange(len(u), device=u.device)[:, None]
    return (rows + 1 + (u * (len(u) - 1)).long()) % len(u)
