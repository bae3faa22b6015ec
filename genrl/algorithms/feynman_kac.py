"""Incremental Feynman-Kac training (iADD, arXiv 2610.01789): sample by steering, keep the best, train a growing set of
steps.

A stage of the method is

    steered sampling -> z-score by prompt -> best and worst particles -> policy gradient on a subset of the steps

and everything in it can be switched off: without steering, selection and a subset it is :class:`PolicyGradient`, to the
last bit. Late steps alone (B2-DiffuRL's baseline) are another subset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from genrl.algorithms.base import Batch, Rollout, initial_noise
from genrl.algorithms.policy_gradient import PolicyGradient
from genrl.algorithms.steering import ParticleSteering
from genrl.diffusion import AllSteps, FlowSDE, Kernel, Reduction, Sampler, VelocityFn, Window, index_batch
from genrl.generators.base import Generator
from genrl.objectives import AdvantageEstimator, Advantages, PPOClip, RecentAdvantage, Surrogate, keep_extreme

Metrics = dict[str, float]


@dataclass(frozen=True)
class NestedSteps:
    """A growing set of trained steps, each containing the one before it, spread over the whole trajectory.

    Args:
        counts: how many steps are trained in each phase, (4, 8, 12, 16) of 20 in iADD; numbers above what there is take
            all.
        every: iterations of a phase, 10 in iADD.

    The first set is spread evenly and has both ends of the steps that have a density; later ones add steps that are
    spread evenly among those left.
    """

    counts: Sequence[int] = (4, 8, 12, 16)
    every: int = 10

    def __post_init__(self) -> None:
        counts = tuple(self.counts)
        if not counts or min(counts) < 1 or list(counts) != sorted(counts) or self.every < 1:
            raise ValueError(
                f"NestedSteps(counts={list(counts)}, every={self.every}): counts must grow from at least 1, and every "
                "must be at least 1"
            )
        object.__setattr__(self, "counts", counts)

    def __call__(self, eligible: Sequence[int], iteration: int = 0, seed: int = 0) -> Sequence[int]:
        phase = min(len(self.counts) - 1, iteration // self.every)
        left: list[int] = list(eligible)
        chosen: list[int] = []
        for count in self.counts[: phase + 1]:
            new = spread(left, min(count, len(eligible)) - len(chosen))
            chosen += new
            left = [k for k in left if k not in new]
        return sorted(chosen)


@dataclass(frozen=True)
class LateSteps:
    """The last steps alone, those nearest to data.

    Args:
        count: how many.
    """

    count: int = 4

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"LateSteps.count = {self.count} must be at least 1")

    def __call__(self, eligible: Sequence[int], iteration: int = 0, seed: int = 0) -> Sequence[int]:
        return list(eligible)[-self.count :]


def spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items, evenly spread, both ends included (one alone is the middle one)."""
    if count <= 0 or not items:
        return []
    if count == 1:
        return [items[len(items) // 2]]
    places = torch.linspace(0, len(items) - 1, min(count, len(items)), dtype=torch.float64).round().int()
    return [items[i] for i in places.tolist()]


class FeynmanKac(PolicyGradient):
    """Steered sampling, selection, and a policy gradient on some steps.

    A group consists of systems of K particles (`trainer.group_size` is a multiple of K). All of a system must be drawn
    in one batch and by one process.

    Args:
        steering: how particles are steered; None samples as :class:`PolicyGradient` does.
        trained: which of the stochastic steps are trained in an iteration; None trains all.
        keep_best: keep the best particle of a system when its advantage is at least this, 0.5 in iADD.
        keep_worst: keep the worst when its advantage is below this, -0.5 in iADD. With None for both, all samples are
            trained on (and `keep_per_group` counts).
        worst_systems: drive every second system of a group towards low rewards, and take the worst particles from
            those; otherwise a system gives its best and its worst one. `trainer.group_size` is then a multiple of 2 K.
        kernel: see :class:`PolicyGradient`.
        steps: see :class:`PolicyGradient`.
        shift: see :class:`PolicyGradient`.
        window: see :class:`PolicyGradient`.
        surrogate: see :class:`PolicyGradient`.
        advantage: from rewards to advantages, on which the selection is made, too; by default the z-score among the
            rewards of the prompt in its last 8 iterations, clipped to +-5 (:class:`genrl.objectives.RecentAdvantage`).
        keep_per_group: see :class:`PolicyGradient`.
        reduction: see :class:`PolicyGradient`.
        kl_weight: see :class:`PolicyGradient`. It stands for iADD's optional mean square of the difference from the
            starting model, of which the KL of a step is a multiple, kappa^2 / (2 s^2).
        kl_form: see :class:`PolicyGradient`.
        group_noise: see :class:`PolicyGradient`.
        inner_epochs: see :class:`PolicyGradient`.
        minibatches: see :class:`PolicyGradient`.
        micro_batch: see :class:`PolicyGradient`.
        steps_per_forward: see :class:`PolicyGradient`.
        anchor: see :class:`PolicyGradient`.
    """

    def __init__(
        self,
        steering: ParticleSteering | None = ParticleSteering(),
        trained: Window | None = NestedSteps(),
        keep_best: float | None = 0.5,
        keep_worst: float | None = -0.5,
        worst_systems: bool = False,
        kernel: Kernel = FlowSDE(),
        steps: int = 20,
        shift: float | None = None,
        window: Window = AllSteps(),
        surrogate: Surrogate = PPOClip(),
        advantage: AdvantageEstimator | None = None,
        keep_per_group: int | None = None,
        reduction: Reduction = "mean",
        kl_weight: float = 0.0,
        kl_form: Literal["exact", "flow_grpo"] = "exact",
        group_noise: bool = False,
        inner_epochs: int = 1,
        minibatches: int = 2,
        micro_batch: int | None = None,
        steps_per_forward: int = 1,
        anchor: Literal["rollout", "recompute"] = "rollout",
    ):
        super().__init__(
            kernel=kernel,
            steps=steps,
            shift=shift,
            window=window,
            surrogate=surrogate,
            advantage=RecentAdvantage() if advantage is None else advantage,
            keep_per_group=keep_per_group,
            reduction=reduction,
            kl_weight=kl_weight,
            kl_form=kl_form,
            group_noise=group_noise,
            inner_epochs=inner_epochs,
            minibatches=minibatches,
            micro_batch=micro_batch,
            steps_per_forward=steps_per_forward,
            anchor=anchor,
        )
        if worst_systems and steering is None:
            raise ValueError("worst_systems = true steers half of the systems to low rewards, but steering is null")
        self.steering, self.trained = steering, trained
        self.keep_best, self.keep_worst, self.worst_systems = keep_best, keep_worst, worst_systems
        self._seen: list[Metrics] = []  # of this iteration's roll-outs

    @property
    def particles(self) -> int:
        return 1 if self.steering is None else self.steering.particles

    def configure(self, generator: Generator) -> None:
        super().configure(generator)
        sampler = self.train_sampler()
        if self.steering is not None:
            check_steerable(sampler)
            self.steering.moments(sampler)  # impossible ones are refused before anything is computed
        if self.trained is not None and not set(found := self.trained(sampler.steps(), 0, 0)) <= set(sampler.steps()):
            raise ValueError(
                f"the trained steps {sorted(found)} are not among the stochastic ones, {list(sampler.steps())}; choose "
                "trained steps from those"
            )

    def rollout(self, velocity_fn: VelocityFn, generator: Generator, batch: Batch) -> Rollout:
        """Steered samples, with the trained steps of their lineages."""
        if self.steering is None or self.steering.particles == 1:
            return super().rollout(velocity_fn, generator, batch)
        score = batch.score
        if score is None:
            raise ValueError(
                "steering needs a reward of predicted data, which this batch has no way to ask for (score)"
            )
        sampler, order = self.train_sampler(), self._systems(batch)
        steps = sampler.steps(batch.iteration, batch.seed)
        ordered = _ordered(batch, order)

        def reward(x0: Tensor, rows: Tensor) -> Tensor:
            chosen = [ordered.prompts[i] for i in rows.tolist()]
            return score(generator.decode(x0).float(), chosen).to(x0.device)

        steered = self.steering.rollout(
            sampler,
            velocity_fn,
            generator.initial_latents(ordered.cond, initial_noise(ordered, self.group_noise)),
            ordered.cond,
            ordered.noise,
            reward,
            steps,
            self._chosen(steps, batch),
            self._signs(ordered),
        )
        self._seen.append(steered.metrics)
        trajectory = steered.trajectory.select(
            order.argsort().to(steered.trajectory.x0.device)
        )  # as the batch has them
        return Rollout(
            batch.cond, trajectory.x0, batch.rows, None, None, trajectory, {}, evaluations=trajectory.evaluations
        )

    def _systems(self, batch: Batch) -> Tensor:
        """Order [B] in which the rows of the batch are whole systems, one after another.

        Raises:
            ValueError: when a system is cut, or lies in two groups.
        """
        size, rows = self.particles, batch.rows.cpu()
        order = rows.argsort()
        if len(rows) % size == 0:
            systems, groups = rows[order].reshape(-1, size), batch.groups.cpu()[order].reshape(-1, size)
            whole = (systems == systems[:, :1] + torch.arange(size)).all() and (systems[:, 0] % size == 0).all()
            if bool(whole) and bool((groups == groups[:, :1]).all()):
                return order
        raise ValueError(
            f"a batch of {len(rows)} samples cuts systems of {size} particles, which must be drawn together; make "
            f"trainer.group_size a multiple of {size}, trainer.rollout_batch null or such a multiple, and with several "
            f"processes or a rollout_batch trainer.group_size / algorithm.minibatches a multiple of {size} as well"
        )

    def _signs(self, ordered: Batch) -> Tensor | None:
        if not self.worst_systems:
            return None
        system = ordered.rows[:: self.particles] // self.particles  # [S], even in a group's first place
        return (1 - 2 * (system % 2)).to(ordered.rows.device)

    def _chosen(self, steps: Sequence[int], batch: Batch) -> list[int]:
        if self.trained is None:
            return super()._chosen(steps, batch)
        return sorted(self.trained(steps, batch.iteration, batch.seed))

    def advantages(
        self, rewards: dict[str, Tensor], weights: dict[str, float] | None, prompt_ids: Tensor
    ) -> Advantages:
        found = super().advantages(rewards, weights, prompt_ids)
        seen, self._seen = self._seen, []
        metrics = {f"steering/{k}": sum(m[k] for m in seen) / len(seen) for k in (seen[0] if seen else ())}
        return Advantages(found.values, found.metrics | metrics, found.by_step)

    def keep(self, advantages: Tensor) -> Tensor | None:
        """Best and worst particles of each system, where they stand out."""
        if self.keep_best is None and self.keep_worst is None:
            return super().keep(advantages)
        return keep_extreme(advantages, self.particles, self.keep_best, self.keep_worst, self.worst_systems)

    def forwards_per_sample(self, group_size: int = 1) -> dict[str, float]:
        costs = super().forwards_per_sample(group_size)
        steps = self.train_sampler().steps()
        if self.steering is not None:
            costs["sample"] = self.steering.sampled_steps(self.steps)
        share = 1.0 if self.trained is None else len(self.trained(steps, 0, 0)) / len(steps)
        if self.keep_best is not None or self.keep_worst is not None:  # at most so many
            roles = int(self.keep_best is not None) + int(self.keep_worst is not None)
            share *= min(1.0, (1 if self.worst_systems else roles) / self.particles)
        return {**costs, "no_grad": share * costs["no_grad"], "train": share * costs["train"]}


def check_steerable(sampler: Sampler) -> None:
    """Refuse samplers that do not move all of a latent at once, and those without noise.

    Raises:
        ValueError: naming the sampler.
    """
    if type(sampler).rollout is not Sampler.rollout:
        raise ValueError(
            f"{type(sampler).__name__} moves a latent piece by piece, and steering weighs whole latents; use a "
            "generator that samples all of a latent at once, or steering: null"
        )
    if not sampler.eligible:
        raise ValueError(
            f"{sampler.kernel} has no noise, so that copies of a particle would stay copies; steer with a stochastic "
            "kernel such as DDIM(eta=1)"
        )


def _ordered(batch: Batch, order: Tensor) -> Batch:
    """The batch in another order of its rows."""
    return replace(
        batch,
        cond=index_batch(batch.cond, order),
        rows=batch.rows[order.to(batch.rows.device)],
        groups=batch.groups[order.to(batch.groups.device)],
        noise=batch.noise.for_rows([batch.noise.rows[i] for i in order.tolist()]),
        group_noise=batch.group_noise.for_rows([batch.group_noise.rows[i] for i in order.tolist()]),
        prompts=[batch.prompts[i] for i in order.tolist()],
    )
