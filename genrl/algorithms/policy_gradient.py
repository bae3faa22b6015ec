"""Policy gradients on denoising transitions.

A sampler's stochastic step is an action with an exact Gaussian density, so every method here is a choice of

    kernel x window x advantage x surrogate x regulariser

and Flow-GRPO, DanceGRPO, Flow-CPS, MixGRPO, Flow-GRPO-Fast, GRPO-Guard, Flow-DPPO, DDPO and CM-GRPO are configs (see
``configs/``), not subclasses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.algorithms.base import Batch, Metrics, Rollout, Unit, chunked, initial_noise
from genrl.algorithms.token_weights import TokenWeights, checked_weights
from genrl.diffusion import (
    AllSteps,
    FlowSDE,
    GaussianTransition,
    Kernel,
    Reduction,
    Sampler,
    VelocityFn,
    Window,
    index_batch,
)
from genrl.diffusion.sampler import of_each
from genrl.generators.base import Generator, sampler_for, schedule_for
from genrl.objectives import (
    GRPO,
    AdvantageEstimator,
    Advantages,
    PPOClip,
    StepTerms,
    Surrogate,
    best_and_worst,
    kl_penalty,
)
from genrl.prompts import Prompt

_OWN_STEPS = -2  # the "step" of the noise that chooses the steps of a sample


class PolicyGradient:
    """The policy-gradient family.

    Args:
        kernel: transition kernel of the trained steps.
        steps: sampling steps T.
        shift: shift of the time grid toward noise; 1 is uniform. None takes the generator's own grid.
        window: which steps are stochastic and trained (default all but the last, which has no density).
        step_fraction: share of the window's steps that is trained, drawn anew each iteration (DanceGRPO: 0.6).
        surrogate: the policy loss of one step.
        advantage: from rewards to advantages.
        keep_per_group: train only on the k best and k worst samples of each group; None trains on all.
        reduction: ``"mean"`` over latent elements as in Flow-GRPO, or ``"sum"``, the true log-density.
        kl_weight: weight of the closed-form KL to the starting model; 0 needs no reference.
        kl_form: ``"exact"``, or ``"flow_grpo"``, its published scaling (the exact mean-KL times the step size).
        group_noise: samples of a group start from the same noise.
        share_prefix: run the ODE steps before the window once per group (needs ``group_noise``).
        inner_epochs: passes over the samples of an iteration.
        minibatches: optimizer updates in a pass.
        micro_batch: samples per forward and backward; None takes a whole minibatch.
        steps_per_forward: trained steps evaluated in one forward; 1 needs the least memory.
        anchor: where the behaviour means come from: ``"rollout"`` as stored, or ``"recompute"`` with the micro-batches
            of the update, which makes the first log-ratios exactly 0 also where a network's result depends on the
            batch it is computed in.
        token_weights: weights of the latent's elements in the log-ratio, made once a roll-out from its media, such as
            credit maps (:class:`genrl.algorithms.VideoCredit`) or weights of chunks
            (:class:`genrl.algorithms.ChunkWeights`). The KL to the starting model is not weighted: elements without
            credit are to stay where they are.
        transitions_per_sample: train each sample on so many of the window's steps, drawn for it alone and without
            replacement from (seed, iteration, row); CM-GRPO takes 1. The loss is the mean over the drawn steps, whose
            expectation is that over all. A forward sees samples at different times. None trains every step.
    """

    def __init__(
        self,
        kernel: Kernel = FlowSDE(),
        steps: int = 10,
        shift: float | None = None,
        window: Window = AllSteps(),
        step_fraction: float = 1.0,
        surrogate: Surrogate = PPOClip(),
        advantage: AdvantageEstimator | None = None,
        keep_per_group: int | None = None,
        reduction: Reduction = "mean",
        kl_weight: float = 0.0,
        kl_form: Literal["exact", "flow_grpo"] = "exact",
        group_noise: bool = False,
        share_prefix: bool = False,
        inner_epochs: int = 1,
        minibatches: int = 2,
        micro_batch: int | None = None,
        steps_per_forward: int = 1,
        anchor: Literal["rollout", "recompute"] = "rollout",
        token_weights: TokenWeights | None = None,
        transitions_per_sample: int | None = None,
    ):
        if share_prefix and not group_noise:
            raise ValueError("share_prefix = true needs group_noise = true: only equal starts have an equal prefix")
        if not 0 < step_fraction <= 1:
            raise ValueError(f"step_fraction = {step_fraction} must lie in (0, 1]; 1.0 trains every step of the window")
        if kl_weight < 0:
            raise ValueError(f"kl_weight = {kl_weight} must not be negative")
        for name, value in [("inner_epochs", inner_epochs), ("minibatches", minibatches), ("steps", steps)]:
            if value < 1:
                raise ValueError(f"algorithm.{name} = {value} must be at least 1")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"algorithm.micro_batch = {micro_batch} must be at least 1; null takes a whole minibatch")
        if transitions_per_sample is not None and transitions_per_sample < 1:
            raise ValueError(
                f"algorithm.transitions_per_sample = {transitions_per_sample} must be at least 1; null trains all steps"
            )
        self.kernel = kernel
        self.steps, self.shift = steps, shift
        self.window = window
        self.step_fraction = step_fraction
        self.surrogate = surrogate
        self.advantage: AdvantageEstimator = GRPO() if advantage is None else advantage
        self.keep_per_group = keep_per_group
        self.reduction: Reduction = reduction
        self.kl_weight, self.kl_form = kl_weight, kl_form
        self.group_noise, self.share_prefix = group_noise, share_prefix
        self.inner_epochs, self.minibatches, self.micro_batch = inner_epochs, minibatches, micro_batch
        self.steps_per_forward, self.anchor = max(1, steps_per_forward), anchor
        if getattr(self.surrogate, "on_policy_only", False) and inner_epochs * minibatches > 1:
            raise ValueError(
                f"{type(self.surrogate).__name__} has no ratio that would correct for weights that have moved, so it "
                f"allows one update a roll-out, but minibatches = {minibatches} and inner_epochs = {inner_epochs}; set "
                "minibatches: 1 and inner_epochs: 1"
            )
        self.token_weights, self.transitions_per_sample = token_weights, transitions_per_sample
        self.sampler: Sampler | None = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load what token weights need."""
        if self.token_weights is not None and hasattr(self.token_weights, "prepare"):
            self.token_weights.prepare(device, progress=progress)

    def configure(self, generator: Generator) -> None:
        schedule = schedule_for(generator, self.steps, self.shift)
        self.sampler = sampler_for(generator, self.kernel, schedule, self.window)
        if hasattr(self.advantage, "configure"):
            self.advantage.configure(schedule.t)
        if not self.sampler.eligible:
            raise ValueError(
                f"{self.kernel} over {self.steps} steps has no step with a density, so there is nothing to train; use "
                "noise_level or eta above 0 and at least 2 steps"
            )
        window = len(self.sampler.steps())  # an impossible window is refused before anything is computed
        if (self.transitions_per_sample or 0) > (count := max(1, round(self.step_fraction * window))):
            raise ValueError(
                f"algorithm.transitions_per_sample = {self.transitions_per_sample} is more than the {count} steps that "
                "an iteration trains; use a smaller number, or null for all of them"
            )
        self.generator = generator
        if self.token_weights is not None and hasattr(self.token_weights, "configure"):
            self.token_weights.configure(generator)

    def train_sampler(self) -> Sampler:
        if self.sampler is None:
            raise RuntimeError("configure(generator) must be called first")
        return self.sampler

    def rollout(self, velocity_fn: VelocityFn, generator: Generator, batch: Batch) -> Rollout:
        """Sample with the window of this iteration."""
        sampler = self.train_sampler()
        steps = sampler.steps(batch.iteration, batch.seed)
        cond, expand, groups = batch.cond, None, batch
        if self.share_prefix:
            unique, expand = batch.groups.unique(return_inverse=True)
            first = torch.stack([(batch.groups == g).nonzero()[0, 0] for g in unique])
            cond = index_batch(batch.cond, first)
            groups = replace(batch, group_noise=batch.group_noise.for_rows(unique))
        x1 = generator.initial_latents(cond, initial_noise(groups, self.group_noise))
        trained = self._chosen(steps, batch)  # of the others no latents are kept
        trajectory = sampler.rollout(velocity_fn, x1, cond, batch.noise, steps, expand, trained)
        extra = {}
        if self.transitions_per_sample is not None:
            order = batch.noise.uniform(_OWN_STEPS, (len(batch.rows), len(trained))).argsort(1)  # [B, n]
            extra["own_steps"] = torch.tensor(trained).to(order.device)[order[:, : self.transitions_per_sample]]
        return Rollout(
            batch.cond, trajectory.x0, batch.rows, None, None, trajectory, extra, evaluations=trajectory.evaluations
        )

    def observe(self, rollout: Rollout, media: Tensor, prompts: Sequence[Prompt]) -> Rollout:
        """Token weights of the samples, from their media."""
        if self.token_weights is None:
            return rollout
        weights = self.token_weights(rollout, media, prompts, self.generator)
        weights = checked_weights(weights, rollout.x0, type(self.token_weights).__name__)
        return replace(rollout, extra={**rollout.extra, "token_weights": weights})

    def show(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor | None:
        """The weight of every pixel [N, (F,) H, W] for pictures, from token weights that depend on the media."""
        shown = getattr(self.token_weights, "shown", None)
        return None if shown is None else shown(media, prompts, self.generator)

    def advantages(
        self, rewards: dict[str, Tensor], weights: dict[str, float] | None, prompt_ids: Tensor
    ) -> Advantages:
        return self.advantage(rewards, weights, prompt_ids)

    def keep(self, advantages: Tensor) -> Tensor | None:
        return None if self.keep_per_group is None else best_and_worst(advantages, self.keep_per_group)

    def _chosen(self, steps: Sequence[int], batch: Batch) -> list[int]:
        """The window's steps, or the share of them that this iteration trains; equal on every process."""
        if self.step_fraction == 1:
            return list(steps)
        count = max(1, round(self.step_fraction * len(steps)))
        return sorted(random.Random(f"steps {batch.seed} {batch.iteration}").sample(list(steps), count))

    def trained_steps(self, rollout: Rollout, batch: Batch) -> list[int]:
        """The steps that were kept to be trained on."""
        return list(_trajectory(rollout).steps)

    def _places(self, rollout: Rollout) -> list[int]:
        """What units are made of: steps k, or with steps of each sample's own the places 0 ... n - 1 in their list."""
        own = rollout.extra.get("own_steps")
        return list(_trajectory(rollout).steps) if own is None else list(range(own.shape[1]))

    @torch.no_grad()
    def before_update(self, velocity_fn: VelocityFn, generator: Generator, rollout: Rollout, batch: Batch) -> Rollout:
        """Reference means, and behaviour means when they are to be recomputed."""
        spent = len(self._places(rollout)) * len(rollout)
        if self.anchor == "recompute":
            means = self._means(velocity_fn, rollout)
            trajectory = replace(_trajectory(rollout), means=_by_step(means, rollout))
            rollout = replace(rollout, trajectory=trajectory, evaluations=rollout.evaluations + spent)
        if self.kl_weight > 0:
            with generator.reference():
                means = self._means(velocity_fn, rollout)
            extra = {**rollout.extra, "reference_means": means}
            rollout = replace(rollout, extra=extra, evaluations=rollout.evaluations + spent)
        return rollout

    def _means(self, velocity_fn: VelocityFn, rollout: Rollout) -> dict[int, Tensor]:
        """Place -> means [B, ...] under the weights in force, in the micro-batches of the update."""
        places = self._places(rollout)
        joined: dict[int, list[Tensor]] = {place: [] for place in places}
        for rows in chunked(len(rollout), self.micro_batch):
            part = rollout.select(rows)
            for unit in self._group(places):
                for place, mean in zip(unit, self._replay(velocity_fn, part, unit), strict=True):
                    joined[place].append(mean)
        return {place: torch.cat(pieces) for place, pieces in joined.items()}

    def _group(self, steps: list[int]) -> list[tuple[int, ...]]:
        size = self.steps_per_forward
        return [tuple(steps[i : i + size]) for i in range(0, len(steps), size)]

    def _replay(self, velocity_fn: VelocityFn, rollout: Rollout, unit: Unit) -> Tensor:
        """Means [K, B, ...] of a unit's K places, with gradient."""
        own, sampler, trajectory = rollout.extra.get("own_steps"), self.train_sampler(), _trajectory(rollout)
        if own is None:
            step = unit[0] if len(unit) == 1 else unit
            mean = sampler.replay(velocity_fn, trajectory, step, rollout.cond).mean
        else:
            repeated = rollout.select(torch.arange(len(rollout)).repeat(len(unit)))
            steps = torch.cat([own[:, place] for place in unit])
            mean = sampler.replay(velocity_fn, _trajectory(repeated), steps, repeated.cond).mean
        return mean.reshape(len(unit), len(rollout), *mean.shape[1:])

    def units(self, rollout: Rollout, batch: Batch) -> list[Unit]:
        return list(self._group(self._places(rollout)))

    def loss(self, velocity_fn: VelocityFn, rollout: Rollout, unit: Unit, units: list[Unit]) -> tuple[Tensor, Metrics]:
        """Surrogate and KL of the unit's steps, averaged over the trained steps."""
        if rollout.advantage is None:
            raise ValueError("the roll-out has no advantages yet")
        weight = rollout.extra.get("token_weights")  # broadcastable to [B, ...]
        means = self._replay(velocity_fn, rollout, unit)  # [K, B, ...]
        total = torch.zeros(len(rollout), device=means.device)
        metrics: Metrics = {}
        for mean, place in zip(means, unit, strict=True):
            step = self._taken(rollout, place)
            transition = GaussianTransition(mean, step.s, deterministic=False)
            behaviour = GaussianTransition(step.old, step.s, deterministic=False)
            terms = StepTerms(
                log_ratio=transition.log_ratio(behaviour, step.sample, self.reduction, weight),
                kl_old=transition.kl(behaviour, self.reduction, weight),
                advantage=step.advantage,
                mean=mean,
                sample=step.sample,
                a=step.a,
                std=step.s,
                dt=step.dt,
                kappa=step.kappa,
                dim=step.sample[0].numel(),
                reduction=self.reduction,
                weight=weight,
            )
            loss, measured = self.surrogate(terms)
            total = total + loss
            metrics.update({f"{step.name}/{name}": value for name, value in measured.items()})
            metrics[f"{step.name}/gap_max"] = terms.log_ratio.detach().abs().max()
            bounds = self.surrogate.clip_bounds(terms)
            if bounds is not None:
                metrics[f"{step.name}/clip_width_min"] = torch.stack([_smallest(edge) for edge in bounds]).min()
            if self.kl_weight > 0:
                reference = rollout.extra["reference_means"][place]
                penalty = kl_penalty(mean, reference, step.s, step.dt, self.kl_form, self.reduction)
                total = total + self.kl_weight * penalty
                metrics[f"{step.name}/kl_reference"] = penalty.detach().mean()
        if weight is not None:
            metrics["token_weights/effective_share"] = 1 / weight.square().flatten(1).mean(1).mean()
        return total / sum(len(u) for u in units), metrics

    def _taken(self, rollout: Rollout, place: int) -> _Taken:
        """What was kept of one step of each sample."""
        assert rollout.advantage is not None
        trajectory, sampler = _trajectory(rollout), self.train_sampler()
        own, by_step = rollout.extra.get("own_steps"), rollout.extra.get("advantage_by_step")  # [B, n], [B, T]
        if own is None:
            step, old, sample = sampler.step(place, True), trajectory.means[place], trajectory.states[place + 1]
            advantage = rollout.advantage if by_step is None else by_step[:, place]
            return _Taken(f"step_{place}", step.s, step.dt, step.a, step.kappa, old, sample, advantage)
        steps = own[:, place]
        old = of_each(trajectory.means, steps, trajectory.steps)
        sample = of_each(trajectory.states, steps, trajectory.steps, later=1)
        advantage = rollout.advantage if by_step is None else by_step.gather(1, steps[:, None])[:, 0]
        s, dt, a, kappa = (sampler.numbers(name, steps, old) for name in ("s", "dt", "a", "kappa"))
        return _Taken("step_own", s, dt, a, kappa, old, sample, advantage)

    def after_update(self) -> None:
        """Nothing to do."""

    def forwards_per_sample(self, group_size: int = 1) -> dict[str, float]:
        steps = self.train_sampler().steps()
        prefix = steps[0] if self.share_prefix else 0
        kept = 1.0 if self.keep_per_group is None else min(1.0, 2 * self.keep_per_group / group_size)
        trained = kept * (self.transitions_per_sample or max(1, round(self.step_fraction * len(steps))))
        return {
            "sample": self.steps - prefix + prefix / group_size,
            "no_grad": trained * (int(self.kl_weight > 0) + int(self.anchor == "recompute")),
            "train": trained * self.inner_epochs,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"advantage": self.advantage.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.advantage.load_state_dict(state["advantage"])


@dataclass(frozen=True)
class _Taken:
    """One step of B samples as the roll-out left it; its numbers are [B] where samples are at steps of their own."""

    name: str
    s: float | Tensor
    dt: float | Tensor
    a: float | Tensor
    kappa: float | Tensor
    old: Tensor
    sample: Tensor
    advantage: Tensor


def _by_step(means: dict[int, Tensor], rollout: Rollout) -> dict[int, Tensor]:
    """Means by place as means by step; of steps that no place is at, those of the roll-out stay."""
    own = rollout.extra.get("own_steps")
    if own is None:
        return means
    found = dict(_trajectory(rollout).means)
    for place, mean in means.items():
        steps = own[:, place].reshape(-1, *(1,) * (mean.dim() - 1))
        found = {k: torch.where(steps == k, mean, old) for k, old in found.items()}
    return found


def _smallest(edge: float | Tensor) -> Tensor:
    return torch.as_tensor(edge, dtype=torch.float32).abs().min()


def _trajectory(rollout: Rollout) -> Any:
    if rollout.trajectory is None:
        raise ValueError("this roll-out stored no transitions; policy gradients need the trajectory of their rollout()")
    return rollout.trajectory
