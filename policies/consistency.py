"""Consistency policies: every noised chunk is mapped to its clean end in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from genrl.networks import Backbone, EncoderSettings, MLPBackbone
from genrl.networks.norms import fix_norm_gains
from genrl.objectives.matching.consistency import (
    boundary_coefficients,
    cauchy,
    cauchy_scale,
    consistency_sample,
    expand,
    posterior_mean,
    pseudo_huber,
    successor,
)
from genrl.objectives.matching.coupling import nearness, optimal_coupling
from genrl.objectives.matching.mean_flow import Derivative, adaptive_loss, check_derivative, flow_map_sample
from genrl.objectives.matching.noise_levels import log_time, sampling_levels
from genrl.objectives.matching.self_consistency import self_distillation_target
from genrl.objectives.matching.times import LogitNormalTimes, TimeDistribution, time_pair
from genrl.policies.base import Chunking, ChunkPolicy, Draw, Metrics, Noise, Normalization, Start, Teacher, same_time
from genrl.policies.consistency_recipes import RECIPES, ConsistencyRecipe, NoiseLevels, Variant

Network = Callable[[Tensor, Tensor, Tensor], Tensor]
FLOW_MAP = "flow_map"


class ConsistencyPolicy(ChunkPolicy):
    """One-step policy that maps noised chunks to clean ones (consistency models, arXiv 2303.01469).

    Five of the variants train f(y, sigma | s) = c_skip y + c_out F(c_in y, sigma | s) on y = x0 + sigma z, see
    `genrl.objectives.matching.consistency`: the images of one chunk at two noise levels are made equal. What tells the
    variants apart is a `ConsistencyRecipe`; `genrl.policies.RECIPES` lists them. ``"flow_map"`` trains the average
    velocity of a flow on its own derivative (iSD, arXiv 2601.22679), with flow matching at intervals of length zero.

    The network gets ln sigma as a time in [0, 1], 0 at sigma_min and 1 at sigma_max, with embedding frequencies up to
    20 rad per unit (5 in ``"flow_map"``, whose target contains the derivative in t): neighbouring levels of a grid have
    to be told apart, but their images nearly agree, and higher frequencies roughen f.

    Which to take: ``"ict"`` is a sound start; ``"ct"`` is the most accurate where the data have one way of acting and
    blurs several.

    Args:
        network, encoder, chunking, normalization, mask_padding: see `ChunkPolicy`; actions should be normalised to
            [-1, 1] for the default levels. `chunking.warm_start` starts from the level t / (1 - t).
        variant: ``"ct"``, ``"ict"``, ``"slct"``, ``"ect"``, ``"sct"`` or ``"flow_map"``.
        recipe: replaces the variant's; not with ``"flow_map"``.
        levels: noise levels; not used by ``"flow_map"``.
        pairs: of noise levels that each chunk of a batch is trained at in an update, with noises of their own; the cost
            of the network, not of the encoder, grows in proportion. One pair learns half as fast as a flow does.
            Not used by ``"flow_map"``.
        steps: network calls per chunk. From the second on, the sample is noised again to a lower level and mapped anew
            (``"flow_map"``: the interval is divided, without new noise).
        last_level: level of the last of several steps.
        guidance: w of ``"flow_map"``: the target velocity is v_null + w (v - v_null). 1 is none.
        dropout: share of rows whose condition is replaced by the learned null condition, with guidance.
        times: of both ends of an interval in ``"flow_map"``. Published is `BetaTimes` (0.8, 1); short trainings lose a
            mode with it on some seeds.
        derivative: in ``"flow_map"``, ``"jvp"`` or ``"difference"``.

    Raises:
        ValueError: values outside their ranges, or settings that the variant does not use.
    """

    supports_warm_start = True

    def __init__(
        self,
        network: Backbone = MLPBackbone(),
        encoder: EncoderSettings = EncoderSettings(),
        chunking: Chunking = Chunking(),
        normalization: Normalization = Normalization(),
        mask_padding: bool = False,
        variant: Variant = "ict",
        recipe: ConsistencyRecipe | None = None,
        levels: NoiseLevels = NoiseLevels(),
        pairs: int = 4,
        steps: int = 1,
        last_level: float = 1.0,
        guidance: float = 1.0,
        dropout: float = 0.1,
        times: TimeDistribution = LogitNormalTimes(),
        derivative: Derivative = "jvp",
    ):
        super().__init__(network, encoder, chunking, normalization, mask_padding)
        if variant not in get_args(Variant):
            raise ValueError(f"variant = {variant!r}; allowed are {list(get_args(Variant))}")
        self.variant, self.recipe, self.levels, self.pairs = variant, recipe, levels, pairs
        self.steps, self.last_level = steps, last_level
        self.guidance, self.dropout, self.times, self.derivative = guidance, dropout, times, derivative
        is_flow = variant == FLOW_MAP
        self.interval = is_flow  # type: ignore[misc]  # depends on the variant
        self.max_frequency = 5.0 if is_flow else 20.0  # type: ignore[misc]
        self.uses_null = is_flow and guidance != 1
        self._check(is_flow)
        self.rules = ConsistencyRecipe() if is_flow else recipe or RECIPES[variant]
        edge = self.rules.edge
        self._sampling = sampling_levels(steps, levels.sigma_max, min(last_level, levels.sigma_max / 2), edge=edge)
        self._numbers = {level: _numbers(level, levels) for level in self._sampling}

    def _check(self, is_flow: bool) -> None:
        if self.pairs < 1:
            raise ValueError(f"pairs = {self.pairs}; a chunk needs at least 1 pair of levels, 4 is the default")
        if is_flow and self.recipe is not None:
            raise ValueError("variant 'flow_map' has no recipe; set recipe: null, or another variant")
        if not is_flow and self.guidance != 1:
            raise ValueError(
                f"guidance = {self.guidance} is for the variant 'flow_map'; set guidance: 1 with {self.variant!r}"
            )
        if not self.guidance >= 1 or not 0 < self.dropout < 1:
            raise ValueError(
                f"guidance = {self.guidance} must be at least 1 and dropout = {self.dropout} lie in (0, 1)"
            )
        if not self.levels.sigma_min < self.last_level < self.levels.sigma_max:
            raise ValueError(
                f"last_level = {self.last_level} must lie between levels.sigma_min = {self.levels.sigma_min} and "
                f"sigma_max = {self.levels.sigma_max}; about twice the spread of the data is a start"
            )
        check_derivative(self.derivative, 0.005)

    def _configured(self) -> None:
        if not self.rules.norm_gains:
            fix_norm_gains(self.net)
        self.teacher = None if self.rules.teacher_decay is None else Teacher(self.net)

    @property
    def nfe(self) -> int:
        return self.steps

    def after_update(self, updates: int) -> None:
        decay = self.rules.teacher_decay
        if self.teacher is not None and decay is not None:
            self.teacher.update(min(decay, (1 + updates) / (10 + updates)))

    # ------------------------------------------------------------------------------ losses

    def _loss(
        self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw, progress: float
    ) -> tuple[Tensor, Metrics]:
        if self.variant == FLOW_MAP:
            return self._flow_map_loss(x0, cond, weight, draw)
        rules, k = self.rules, self.pairs
        z = self._noises(x0, cond, weight, draw).flatten(0, 1)  # [B k, H, A], the k of a chunk are neighbours
        levels = rules.pairs(draw.uniform((len(x0), k)).flatten(), progress, self.levels)
        near = None if rules.references is None else self._near(cond, weight)
        references, mask = x0, None if weight is None else weight[:, :, None].expand_as(x0)
        if k > 1:
            x0, cond = x0.repeat_interleave(k, 0), cond.repeat_interleave(k, 0)
            weight = None if weight is None else weight.repeat_interleave(k, 0)
            near = None if near is None else near.repeat_interleave(k, 0)
            mask = None if mask is None else mask.repeat_interleave(k, 0)
        y = x0 + expand(levels.sigma, x0) * z
        image = self._map(self.velocity, y, levels.sigma, cond)
        with torch.no_grad():
            x0_hat = x0 if near is None else posterior_mean(y, levels.sigma, references, near.log(), mask)
            lower = successor(y, levels.sigma, levels.r, x0_hat)
            target = self._map(self._target_network(), lower, levels.r.clamp(min=self.levels.sigma_min), cond)
        distance = self._distance(image, target, weight, levels.n)
        metrics = {"distance": distance.mean(), "rms": self.chunk_mean((image - target).square(), weight).mean().sqrt()}
        loss = distance / (levels.sigma - levels.r) if rules.weighted else distance
        if rules.denoising:
            denoising = self.chunk_mean((image - x0).square(), weight) * levels.early
            loss, metrics["denoising_loss"] = loss + denoising, denoising.mean()
        return loss, metrics

    def _noises(self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw) -> Tensor:
        """Standard noise [B, pairs, H, A], exchanged between rows where the recipe says so."""
        z = draw.normal((len(x0), self.pairs, *x0.shape[1:]))
        radius = self.rules.coupling
        if radius is None:
            return z
        counted = x0 if weight is None else x0 * weight[:, :, None]  # zeros cost the same with any noise
        orders = [optimal_coupling(z[:, k], counted, cond, radius) for k in range(self.pairs)]
        return torch.stack([z[order, k] for k, order in enumerate(orders)], dim=1)

    def _near(self, cond: Tensor, weight: Tensor | None) -> Tensor:
        """How much each chunk of the batch counts as a reference for each row, [B, B]."""
        assert self.rules.references is not None
        near = nearness(cond, self.rules.references)
        # A reference has to have actions wherever the row has.
        return near if weight is None else near.masked_fill(weight @ (1 - weight).T > 0, 0.0)

    def _map(self, network: Network, y: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        """f(y, sigma | s); sigma [B]."""
        c_skip, c_out, c_in = boundary_coefficients(sigma, self.levels.sigma_data, self.levels.sigma_min)
        time = log_time(sigma, self.levels.sigma_min, self.levels.sigma_max)
        return expand(c_skip, y) * y + expand(c_out, y) * network(expand(c_in, y) * y, time, cond)

    def _target_network(self) -> Network:
        teacher = self.teacher
        return self.velocity if teacher is None else lambda x, t, cond: teacher(x, t, cond).to(x.dtype)

    def _distance(self, image: Tensor, target: Tensor, weight: Tensor | None, n: int | None) -> Tensor:
        """[B]; actions that are left out count as equal."""
        kind = self.rules.distance
        if kind == "squared":
            return self.chunk_mean((image - target).square(), weight)
        if weight is not None:
            image, target = image * weight[:, :, None], target * weight[:, :, None]
        if kind == "cauchy" and n is not None:
            return cauchy(image, target, self.rules.cauchy_factor * cauchy_scale(n))
        return pseudo_huber(image, target)

    def _flow_map_loss(self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw) -> tuple[Tensor, Metrics]:
        eps = draw.normal(tuple(x0.shape))
        t, r = time_pair(draw.uniform((len(x0), 2)), self.times)
        x, v = torch.lerp(x0, eps, t[:, None, None]), eps - x0
        if self.uses_null:
            drop = draw.uniform((len(x0),)) < self.dropout
            with torch.no_grad():
                null = self.velocity(x, t, self.null_cond(cond), t)
            v = torch.where(drop[:, None, None], v, null + self.guidance * (v - null))
            cond = self.null_cond(cond, drop)
        fixed = cond.detach()
        target = self_distillation_target(
            lambda x, t, r: self.velocity(x, t, fixed, r), x, t, r, derivative=self.derivative
        )
        both = torch.cat([t, t]), torch.cat([t, r])
        u_flow, u = self.velocity(torch.cat([x, x]), both[0], torch.cat([cond, cond]), both[1]).chunk(2)
        flow = self.chunk_mean((u_flow - v).square(), weight)
        distillation = self.chunk_mean((u - target).square(), weight)
        metrics = {"flow_loss": flow.mean(), "distillation_loss": distillation.mean()}
        return adaptive_loss(flow + distillation, 1.0, 0.01), metrics

    # ------------------------------------------------------------------------------ sampling

    def _sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        if self.variant == FLOW_MAP:
            return self._flow_map_sample(cond, noise, start)
        x, t = self.start_of(cond, noise, start)
        if t == 1:
            y, levels = self._sampling[0] * x, self._sampling
        else:
            sigma = min(t / (1 - t), self.levels.sigma_max)
            y, levels = x / (1 - t), [sigma, *(level for level in self._sampling[1:] if level < sigma)]
        in_turn = iter(levels)
        return consistency_sample(
            lambda y, sigma: self._map_at(y, next(in_turn), cond), y, levels, noise, self.levels.sigma_min
        )

    def _map_at(self, y: Tensor, level: float, cond: Tensor) -> Tensor:
        """`_map` at one level for all rows, whose numbers are computed once and which networks embed once."""
        c_skip, c_out, c_in, time = self._numbers.get(level) or _numbers(level, self.levels)
        return c_skip * y + c_out * self.velocity(c_in * y, same_time(time, y), cond)

    def _flow_map_sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        if self.steps == 1:
            return self.jump(cond, noise, start)
        x, t = self.start_of(cond, noise, start)
        grid = [t * (1 - k / self.steps) for k in range(self.steps + 1)]
        return flow_map_sample(lambda x, t, r: self.velocity(x, t, cond, r), x, grid)


def _numbers(level: float, levels: NoiseLevels) -> tuple[float, float, float, float]:
    """c_skip, c_out, c_in and the network's time of one level."""
    sigma = torch.tensor(level, dtype=torch.float64)
    numbers = boundary_coefficients(sigma, levels.sigma_data, levels.sigma_min)
    c_skip, c_out, c_in = (float(number) for number in numbers)
    return c_skip, c_out, c_in, float(log_time(sigma, levels.sigma_min, levels.sigma_max))
