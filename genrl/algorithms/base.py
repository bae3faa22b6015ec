"""What the loop and an algorithm say to each other.

An algorithm samples (:meth:`Algorithm.rollout`), turns rewards into advantages, prepares what is to be computed before
the weights move (:meth:`Algorithm.before_update`), and gives the loss of one unit of work at a time. A unit is a few
denoising steps, or one draw of noise; the loop runs one backward a unit, so that memory does not grow with their
number. The loop owns everything else: rewards, micro-batches, optimizer, averages, checkpoints, logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from genrl.diffusion import RowNoise, Sampler, Trajectory, VelocityFn, index_batch
from genrl.generators.base import Generator
from genrl.objectives import Advantages
from genrl.prompts import Prompt

Unit = tuple[int, ...]
Metrics = dict[str, Tensor]
"""Detached scalars. Names that end in ``_min`` or ``_max`` are reduced that way, all others are averaged."""


@dataclass(frozen=True)
class Batch:
    """The samples to draw.

    Args:
        cond: conditioning of the B samples.
        rows: int64 [B], the number p G + g of each sample in the iteration, over all processes.
        groups: int64 [B], the number p of its group.
        noise: noise of these rows.
        group_noise: noise that samples of a group share.
        seed, iteration: of the run.
        prompts: the B prompts.
        score: (media [B, ...], prompts) -> float32 [B], the trained reward of media that are not final, for methods
            that steer; NaN where not scored. None outside a run.
    """

    cond: Any
    rows: Tensor
    groups: Tensor
    noise: RowNoise
    group_noise: RowNoise
    seed: int
    iteration: int
    prompts: Sequence[Prompt] = ()
    score: Callable[[Tensor, Sequence[Prompt]], Tensor] | None = None


@dataclass(frozen=True)
class Rollout:
    """Samples with what an algorithm keeps of them; every tensor has the samples as its first dimension.

    Args:
        cond: conditioning.
        x0: [B, ...] final latents.
        rows: int64 [B] sample numbers.
        advantage: [B], once the rewards are known.
        weight: [B], 1 for samples that are trained on and 0 for those left out.
        trajectory: stored transitions of methods that need densities.
        extra: what :meth:`Algorithm.before_update` computed.
        evaluations: network evaluations without gradient so far, counted per sample.
    """

    cond: Any
    x0: Tensor
    rows: Tensor
    advantage: Tensor | None = None
    weight: Tensor | None = None
    trajectory: Trajectory | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    evaluations: int = 0

    def __len__(self) -> int:
        return len(self.x0)

    def select(self, index: Tensor | slice) -> Rollout:
        """The same for some of its samples."""
        return replace(
            self,
            cond=index_batch(self.cond, index),
            x0=index_batch(self.x0, index),
            rows=index_batch(self.rows, index),
            advantage=index_batch(self.advantage, index),
            weight=index_batch(self.weight, index),
            trajectory=None if self.trajectory is None else self.trajectory.select(index),
            extra=index_batch(dict(self.extra), index),
        )

    @staticmethod
    def concatenate(parts: Sequence[Rollout]) -> Rollout:
        if len(parts) == 1:
            return parts[0]
        trajectories = [p.trajectory for p in parts if p.trajectory is not None]
        return Rollout(
            cond=concatenate_tree([p.cond for p in parts]),
            x0=torch.cat([p.x0 for p in parts]),
            rows=torch.cat([p.rows for p in parts]),
            trajectory=Trajectory.concatenate(trajectories) if trajectories else None,
            extra=concatenate_tree([dict(p.extra) for p in parts]),
            evaluations=sum(p.evaluations for p in parts),
        )


def concatenate_tree(trees: Sequence[Any]) -> Any:
    """Join nests of tensors row by row; what is not a tensor is taken from the first."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(list(trees))
    if isinstance(first, dict):
        return {key: concatenate_tree([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(concatenate_tree(list(rows)) for rows in zip(*trees, strict=True))
    return first


class Algorithm(Protocol):
    """A method, as the loop sees it.

    Attributes:
        inner_epochs: passes over the samples of an iteration.
        minibatches: optimizer updates in a pass.
        micro_batch: samples per forward and backward, or None for a whole minibatch.
        steps: sampling steps, hence network evaluations a sample costs at least.
        shift: of the sampling grid, None for the generator's own; evaluation uses the same.

    A method ``observe(rollout, media, prompts) -> Rollout`` is optional: it sees the decoded media of a roll-out,
    before they are scored, and may keep something in ``rollout.extra`` (credit maps, features).

    ``final_samples_only = True`` promises that any final sample can be trained on, whatever weights drew it, so that
    other processes may sample (`trainer.asynchronous`); ``needs_reference = True``, that the starting model is asked.

    A method ``show(media, prompts) -> Tensor | None`` is optional: values [N, (F,) H, W] that the previews of samples
    are also shown with. So is ``prepare(device, progress)``, which loads what the algorithm itself needs.
    """

    inner_epochs: int
    minibatches: int
    micro_batch: int | None
    steps: int
    shift: float | None

    def configure(self, generator: Generator) -> None:
        """Learn the generator's path; called once before anything else."""
        ...

    def train_sampler(self) -> Sampler:
        """The sampler whose samples are trained on."""
        ...

    def rollout(self, velocity_fn: VelocityFn, generator: Generator, batch: Batch) -> Rollout: ...

    def advantages(
        self, rewards: dict[str, Tensor], weights: dict[str, float] | None, prompt_ids: Tensor
    ) -> Advantages:
        """Advantages [P, G] of rewards {name: [P, G]}; NaN rewards get 0."""
        ...

    def keep(self, advantages: Tensor) -> Tensor | None:
        """bool [P, G], the samples to train on, or None for all."""
        ...

    def before_update(self, velocity_fn: VelocityFn, generator: Generator, rollout: Rollout, batch: Batch) -> Rollout:
        """Evaluate what belongs to the weights of the roll-out, before the first optimizer step moves them.

        Called for each minibatch with exactly the samples that its update will see.
        """
        ...

    def units(self, rollout: Rollout, batch: Batch) -> list[Unit]:
        """The units of work whose losses add up to the loss of a micro-batch."""
        ...

    def loss(self, velocity_fn: VelocityFn, rollout: Rollout, unit: Unit, units: list[Unit]) -> tuple[Tensor, Metrics]:
        """Loss [B] of one unit, as its share of the average over all ``units``."""
        ...

    def after_update(self) -> None:
        """Called at the end of an iteration."""
        ...

    def forwards_per_sample(self, group_size: int = 1) -> dict[str, float]:
        """{"sample": ..., "no_grad": ..., "train": ...} network evaluations a sample costs in the first iteration."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def chunked(rows: int, size: int | None) -> list[slice]:
    """Slices of at most ``size`` rows."""
    size = rows if size is None else size
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]


def initial_noise(batch: Batch, shared: bool) -> Callable[[tuple[int, ...]], Tensor]:
    """Noise for the start latents: one per sample, or one per group."""
    return batch.group_noise.initial if shared else batch.noise.initial
