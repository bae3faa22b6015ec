"""Policy gradients on denoising transitions.

A sampler's stochastic step is an action with an exact Gaussian density, so every method here is a choice of

    kernel x window x advantage x surrogate x regulariser

and Flow-GRPO, DanceGRPO, Flow-CPS, MixGRPO, Flow-GRPO-Fast, GRPO-Guard, Flow-DPPO, DDPO and CM-GRPO are configs (see
``configs/``), not subclasses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.algorithms.base import Batch, Metrics, Rollout, Unit, chunked, initial_noise
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
        self.sampler: Sampler | None = None

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
        self.sampler.steps()  # an impossible window is refused before anything is computed

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
        return Rollout(batch.cond, trajectory.x0, batch.rows, trajectory=trajectory, evaluations=trajectory.evaluations)

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

    @torch.no_grad()
    def before_update(self, velocity_fn: VelocityFn, generator: Generator, rollout: Rollout, batch: Batch) -> Rollout:
        """Reference means, and behaviour means when they are to be recomputed."""
        steps = self.trained_steps(rollout, batch)
        if self.anchor == "recompute":
            means = self._means(velocity_fn, rollout, steps)
            trajectory = replace(_trajectory(rollout), means=means)
            evaluations = rollout.evaluations + len(steps) * len(rollout)
            rollout = replace(rollout, trajectory=trajectory, evaluations=evaluations)
        if self.kl_weight > 0:
            with generator.reference():
                means = self._means(velocity_fn, rollout, steps)
            evaluations = rollout.evaluations + len(steps) * len(rollout)
            rollout = replace(rollout, extra={**rollout.extra, "reference_means": means}, evaluations=evaluations)
        return rollout

    def _means(self, velocity_fn: VelocityFn, rollout: Rollout, steps: list[int]) -> dict[int, Tensor]:
        """Means [B, ...] of the given steps under the weights in force, in the micro-batches of the update."""
        parts = []
        for rows in chunked(len(rollout), self.micro_batch):
            part = rollout.select(rows)
            for unit in self._group(steps):
                mean = self._replay(velocity_fn, part, unit).mean
                parts.append((unit, mean.reshape(len(unit), len(part), *mean.shape[1:])))
        joined: dict[int, list[Tensor]] = {k: [] for k in steps}
        for unit, mean in parts:
            for position, k in enumerate(unit):
                joined[k].append(mean[position])
        return {k: torch.cat(pieces) for k, pieces in joined.items()}

    def _group(self, steps: list[int]) -> list[tuple[int, ...]]:
        size = self.steps_per_forward
        return [tuple(steps[i : i + size]) for i in range(0, len(steps), size)]

    def _replay(self, velocity_fn: VelocityFn, rollout: Rollout, unit: tuple[int, ...]) -> GaussianTransition:
        step = unit[0] if len(unit) == 1 else unit
        return self.train_sampler().replay(velocity_fn, _trajectory(rollout), step, rollout.cond)

    def units(self, rollout: Rollout, batch: Batch) -> list[Unit]:
        return list(self._group(self.trained_steps(rollout, batch)))

    def loss(self, velocity_fn: VelocityFn, rollout: Rollout, unit: Unit, units: list[Unit]) -> tuple[Tensor, Metrics]:
        """Surrogate and KL of the unit's steps, averaged over the trained steps."""
        if rollout.advantage is None:
            raise ValueError("the roll-out has no advantages yet")
        trajectory, sampler = _trajectory(rollout), self.train_sampler()
        by_step = rollout.extra.get("advantage_by_step")  # [B, T]
        now = self._replay(velocity_fn, rollout, unit)
        means = now.mean.reshape(len(unit), len(rollout), *now.mean.shape[1:])  # [K, B, ...]
        total = torch.zeros(len(rollout), device=now.mean.device)
        metrics: Metrics = {}
        for mean, k in zip(means, unit, strict=True):
            step, old, sample = sampler.step(k, True), trajectory.means[k], trajectory.states[k + 1]
            transition = GaussianTransition(mean, step.s)
            behaviour = GaussianTransition(old, step.s)
            terms = StepTerms(
                log_ratio=transition.log_ratio(behaviour, sample, self.reduction),
                kl_old=transition.kl(behaviour, self.reduction),
                advantage=rollout.advantage if by_step is None else by_step[:, k],
                mean=mean,
                sample=sample,
                a=step.a,
                std=step.s,
                dt=step.dt,
                kappa=step.kappa,
                dim=sample[0].numel(),
                reduction=self.reduction,
            )
            loss, measured = self.surrogate(terms)
            total = total + loss
            metrics.update({f"step_{k}/{name}": value for name, value in measured.items()})
            metrics[f"step_{k}/gap_max"] = terms.log_ratio.detach().abs().max()
            bounds = self.surrogate.clip_bounds(terms)
            if bounds is not None:
                metrics[f"step_{k}/clip_width_min"] = torch.as_tensor(min(abs(float(edge)) for edge in bounds))
            if self.kl_weight > 0:
                reference = rollout.extra["reference_means"][k]
                penalty = kl_penalty(mean, reference, step.s, step.dt, self.kl_form, self.reduction)
                total = total + self.kl_weight * penalty
                metrics[f"step_{k}/kl_reference"] = penalty.detach().mean()
        return total / sum(len(u) for u in units), metrics

    def after_update(self) -> None:
        """Nothing to do."""

    def forwards_per_sample(self, group_size: int = 1) -> dict[str, float]:
        steps = self.train_sampler().steps()
        prefix = steps[0] if self.share_prefix else 0
        kept = 1.0 if self.keep_per_group is None else min(1.0, 2 * self.keep_per_group / group_size)
        trained = kept * max(1, round(self.step_fraction * len(steps)))
        return {
            "sample": self.steps - prefix + prefix / group_size,
            "no_grad": trained * (int(self.kl_weight > 0) + int(self.anchor == "recompute")),
            "train": trained * self.inner_epochs,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"advantage": self.advantage.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.advantage.load_state_dict(state["advantage"])


def _trajectory(rollout: Rollout) -> Any:
    if rollout.trajectory is None:
        raise ValueError("this roll-out stored no transitions; policy gradients need the trajectory of their rollout()")
    return rollout.trajectory
