"""What methods share that train on noised final samples: no SDE, no log-density, any sampler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.algorithms.base import Batch, Metrics, Rollout, Unit, chunked, initial_noise
from genrl.diffusion import Euler, Kernel, Path, RowNoise, Sampler, VelocityFn
from genrl.generators.base import Generator, sampler_for, schedule_for
from genrl.networks.weights import WeightSet
from genrl.objectives import GRPO, AdvantageEstimator, Advantages

Times = Literal["uniform", "logit_normal"]
TIMES, DRAWS = 10_000, 20_000  # noise streams of the forward process, far above any sampling step


@dataclass(frozen=True)
class Noised:
    """Samples at one draw of (t, eps), and what the network says there.

    Args:
        draw: number of the draw. t: [B]. eps, x_t, v: [B, ...]; v with gradient.
    """

    draw: int
    t: Tensor
    eps: Tensor
    x_t: Tensor
    v: Tensor


class NoisedSamples:
    """A method whose loss is taken at x_t = A(t) x0 + B(t) eps of its own final samples.

    A subclass gives `losses`, and says by `needs_old` whether it compares with the velocity of the roll-out's weights.

    Args:
        steps: sampling steps T.
        shift: shift of the sampling grid toward noise; 1 is uniform. None takes the generator's own grid.
        kernel: kernel of the sampler; the default is the ODE.
        advantage: from rewards to advantages.
        draws: times and noises per sample and iteration, each one forward and backward.
        times: distribution of the times between t_min and t_max: ``"uniform"``, or ``"logit_normal"``, the sigmoid of a
            standard normal number (arXiv 2403.03206).
        t_min, t_max: times are drawn between them.
        old_decay: the old policy is a moving average of the weights with this decay; 0 is the weights of the roll-out.
        kl_weight: weight of ||v - v_ref||^2 to the starting model; 0 needs no reference.
        group_noise: samples of a group start from the same noise.
        inner_epochs: passes over the samples of an iteration; every pass uses the same draws.
        minibatches: optimizer updates in a pass.
        micro_batch: samples per forward and backward; None takes a whole minibatch.
    """

    final_samples_only = True
    """Whatever policy drew a sample, it can be trained on: what asynchronous roll-outs need."""

    def __init__(
        self,
        steps: int = 10,
        shift: float | None = None,
        kernel: Kernel = Euler(),
        advantage: AdvantageEstimator | None = None,
        draws: int = 2,
        times: Times = "uniform",
        t_min: float = 0.0,
        t_max: float = 1.0,
        old_decay: float = 0.0,
        kl_weight: float = 0.0,
        group_noise: bool = False,
        inner_epochs: int = 1,
        minibatches: int = 1,
        micro_batch: int | None = None,
    ):
        if not 0 <= t_min < t_max <= 1:
            raise ValueError(f"t_min = {t_min} and t_max = {t_max} must satisfy 0 <= t_min < t_max <= 1")
        if times not in ("uniform", "logit_normal"):
            raise ValueError(f"algorithm.times = {times!r} is unknown; allowed are 'uniform' and 'logit_normal'")
        if not 0 <= old_decay < 1:
            raise ValueError(f"old_decay = {old_decay} must lie in [0, 1); 0 takes the weights of the roll-out")
        if not kl_weight >= 0:
            raise ValueError(f"kl_weight = {kl_weight} must not be negative; 0 needs no reference")
        for name, value in [("inner_epochs", inner_epochs), ("minibatches", minibatches), ("draws", draws)]:
            if value < 1:
                raise ValueError(f"algorithm.{name} = {value} must be at least 1")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"algorithm.micro_batch = {micro_batch} must be at least 1; null takes a whole minibatch")
        self.steps, self.shift = steps, shift
        self.kernel = kernel
        self.advantage: AdvantageEstimator = GRPO() if advantage is None else advantage
        self.draws, self.times, self.t_min, self.t_max = draws, times, t_min, t_max
        self.old_decay, self.kl_weight = old_decay, kl_weight
        self.group_noise = group_noise
        self.inner_epochs, self.minibatches, self.micro_batch = inner_epochs, minibatches, micro_batch
        self.sampler: Sampler | None = None

    # ------------------------------------------------------------------------------------ what a method fills in

    @property
    def needs_old(self) -> bool:
        """Whether `losses` uses ``rollout.extra["v_old"]``."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether anything uses ``rollout.extra["v_ref"]``."""
        return self.kl_weight > 0

    def losses(self, rollout: Rollout, at: Noised) -> tuple[Tensor, Metrics]:
        """Loss [B] of one draw, and metrics."""
        raise NotImplementedError

    def noise_of(self, rollout: Rollout, batch: Batch) -> RowNoise:
        """The source of (t, eps): every sample has its own."""
        return batch.noise.for_rows(rollout.rows)

    def keep(self, advantages: Tensor) -> Tensor | None:
        """bool [P, G], the samples to train on, or None for all."""
        return None

    # ------------------------------------------------------------------------------------------- what they share

    def configure(self, generator: Generator) -> None:
        self.path: Path = generator.path
        self.sampler = sampler_for(generator, self.kernel, schedule_for(generator, self.steps, self.shift))
        self._old: Any = None
        if self.old_decay > 0:
            self._old = WeightSet(generator.trainable())

    def train_sampler(self) -> Sampler:
        if self.sampler is None:
            raise RuntimeError("configure(generator) must be called first")
        return self.sampler

    def rollout(self, velocity_fn: VelocityFn, generator: Generator, batch: Batch) -> Rollout:
        """Sample from the old policy, keeping the final latents only."""
        x1 = generator.initial_latents(batch.cond, initial_noise(batch, self.group_noise))
        with self._old_policy():
            trajectory = self.train_sampler().rollout(velocity_fn, x1, batch.cond, batch.noise)
        return Rollout(batch.cond, trajectory.x0, batch.rows, evaluations=trajectory.evaluations)

    def _old_policy(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._old is None else self._old.active()

    def advantages(
        self, rewards: dict[str, Tensor], weights: dict[str, float] | None, prompt_ids: Tensor
    ) -> Advantages:
        return self.advantage(rewards, weights, prompt_ids)

    @torch.no_grad()
    def before_update(self, velocity_fn: VelocityFn, generator: Generator, rollout: Rollout, batch: Batch) -> Rollout:
        """Draw times and noises, and evaluate the velocities of the old policy and the reference there."""
        rows = len(rollout)
        noise = self.noise_of(rollout, batch)
        extra: dict[str, Any] = {**rollout.extra, "t": [], "eps": [], "v_old": [], "v_ref": []}
        for draw in range(self.draws):
            if self.times == "uniform":
                t = noise.uniform(TIMES + draw, (rows, 1))[:, 0]
            else:
                t = noise(TIMES + draw, (rows, 1))[:, 0].sigmoid()
            extra["t"].append(self.t_min + (self.t_max - self.t_min) * t.to(rollout.x0.device))
            extra["eps"].append(noise(DRAWS + draw, tuple(rollout.x0.shape)).to(rollout.x0))
        evaluations = rollout.evaluations
        if self.needs_old:
            with self._old_policy():
                extra["v_old"] = self._velocities(velocity_fn, rollout, extra)
            evaluations += self.draws * rows
        if self.needs_reference:
            with generator.reference():
                extra["v_ref"] = self._velocities(velocity_fn, rollout, extra)
            evaluations += self.draws * rows
        return replace(rollout, extra=extra, evaluations=evaluations)

    def _velocities(self, velocity_fn: VelocityFn, rollout: Rollout, extra: dict[str, Any]) -> list[Tensor]:
        found = []
        for t, eps in zip(extra["t"], extra["eps"], strict=True):
            x_t = self.path.interpolate(rollout.x0, eps, t)
            pieces = [
                velocity_fn(x_t[part], t[part], rollout.select(part).cond).float()
                for part in chunked(len(rollout), self.micro_batch)
            ]
            found.append(torch.cat(pieces))
        return found

    def units(self, rollout: Rollout, batch: Batch) -> list[Unit]:
        return [(draw,) for draw in range(self.draws)]

    def loss(self, velocity_fn: VelocityFn, rollout: Rollout, unit: Unit, units: list[Unit]) -> tuple[Tensor, Metrics]:
        """The loss of one draw of (t, eps)."""
        if rollout.advantage is None:
            raise ValueError("the roll-out has no advantages yet")
        (draw,) = unit
        t, eps = rollout.extra["t"][draw], rollout.extra["eps"][draw]
        x_t = self.path.interpolate(rollout.x0, eps, t)
        v = velocity_fn(x_t, t, rollout.cond).float()
        loss, metrics = self.losses(rollout, Noised(draw, t, eps, x_t, v))
        if self.kl_weight > 0:
            distance = (v - rollout.extra["v_ref"][draw]).square().flatten(1).mean(1)
            loss = loss + self.kl_weight * distance
            metrics["kl/velocity_reference"] = distance.detach().mean()
        return loss / len(units), metrics

    def after_update(self) -> None:
        if self._old is not None:
            self._old.update(self.old_decay)

    def forwards_per_sample(self, group_size: int = 1) -> dict[str, float]:
        kept = self.trained_share(group_size)
        return {
            "sample": float(self.steps),
            "no_grad": kept * self.draws * (int(self.needs_old) + int(self.needs_reference)),
            "train": kept * self.draws * self.inner_epochs,
        }

    def trained_share(self, group_size: int) -> float:
        """The share of samples that `keep` keeps, as far as it is known beforehand."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"advantage": self.advantage.state_dict()}
        if self._old is not None:
            state["old"] = self._old.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.advantage.load_state_dict(state["advantage"])
        if self._old is not None:
            self._old.load_state_dict(state["old"])


def groups_of(rollout: Rollout, batch: Batch) -> Tensor:
    """The group of every sample, int64 [B]."""
    place = dict(zip(batch.rows.tolist(), batch.groups.tolist(), strict=True))
    return torch.tensor([place[row] for row in rollout.rows.tolist()], device=rollout.x0.device)
