"""Reinforcement learning on the forward process: no SDE, no log-density, no clip range.

DiffusionNFT (arXiv 2509.16117) noises the samples that the model drew, x_t = A x0 + B eps, and asks the velocity to
move toward what good samples say and away from what bad ones say, around the old velocity v_old:

    v+ = beta v + (1 - beta) v_old        v- = (1 + beta) v_old - beta v
    L  = r ||v+ - v*||^2 + (1 - r) ||v- - v*||^2 ,    r = clip(A / (2 A_max) + 1/2, 0, 1)

with v* the velocity from x_t to the sample. Any sampler may draw the samples; here it is the ODE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.algorithms.base import Batch, Metrics, Rollout, Unit, chunked, initial_noise
from genrl.diffusion import Euler, Kernel, Path, Sampler, VelocityFn
from genrl.generators.base import Generator, sampler_for, schedule_for
from genrl.networks.weights import WeightSet
from genrl.objectives import GRPO, AdvantageEstimator, Advantages, nft_loss, optimality

_TIMES, _DRAWS = 10_000, 20_000  # noise streams of the forward process, far above any sampling step


class ForwardProcess:
    """DiffusionNFT.

    Args:
        steps: sampling steps T.
        shift: shift of the sampling grid toward noise; 1 is uniform. None takes the generator's own grid.
        kernel: kernel of the sampler; the default is the ODE.
        advantage: from rewards to advantages.
        draws: times and noises per sample and iteration, each one forward and backward.
        beta: strength of the implicit positive and negative velocities.
        advantage_max: A_max, the advantage at which r reaches 1.
        form: ``"x0"``, the squared error of x0 over its own detached mean error as in the official code, or
            ``"velocity"``, the formula of the paper.
        t_min, t_max: times are drawn uniformly between them.
        old_decay: the old policy is a moving average of the weights with this decay; 0 is the weights of the roll-out.
        kl_weight: weight of ||v - v_ref||^2 to the starting model; 0 needs no reference.
        group_noise: samples of a group start from the same noise.
        inner_epochs: passes over the samples of an iteration; every pass uses the same draws.
        minibatches: optimizer updates in a pass.
        micro_batch: samples per forward and backward; None takes a whole minibatch.
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
    ):
        if not 0 <= t_min < t_max <= 1:
            raise ValueError(f"t_min = {t_min} and t_max = {t_max} must satisfy 0 <= t_min < t_max <= 1")
        if not 0 <= old_decay < 1:
            raise ValueError(f"old_decay = {old_decay} must lie in [0, 1); 0 takes the weights of the roll-out")
        if not (beta > 0 and advantage_max > 0 and kl_weight >= 0):
            raise ValueError(
                f"beta = {beta} and advantage_max = {advantage_max} must be positive, and kl_weight = {kl_weight} "
                "not negative"
            )
        for name, value in [("inner_epochs", inner_epochs), ("minibatches", minibatches), ("draws", draws)]:
            if value < 1:
                raise ValueError(f"algorithm.{name} = {value} must be at least 1")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"algorithm.micro_batch = {micro_batch} must be at least 1; null takes a whole minibatch")
        self.steps, self.shift = steps, shift
        self.kernel = kernel
        self.advantage: AdvantageEstimator = GRPO() if advantage is None else advantage
        self.draws, self.beta, self.advantage_max, self.form = draws, beta, advantage_max, form
        self.t_min, self.t_max, self.old_decay, self.kl_weight = t_min, t_max, old_decay, kl_weight
        self.group_noise = group_noise
        self.inner_epochs, self.minibatches, self.micro_batch = inner_epochs, minibatches, micro_batch
        self.sampler: Sampler | None = None

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

    def _old_policy(self) -> Any:
        from contextlib import nullcontext

        return nullcontext() if self._old is None else self._old.active()

    def advantages(
        self, rewards: dict[str, Tensor], weights: dict[str, float] | None, prompt_ids: Tensor
    ) -> Advantages:
        return self.advantage(rewards, weights, prompt_ids)

    def keep(self, advantages: Tensor) -> Tensor | None:
        return None

    @torch.no_grad()
    def before_update(self, velocity_fn: VelocityFn, generator: Generator, rollout: Rollout, batch: Batch) -> Rollout:
        """Draw times and noises, and evaluate the old (and the reference) velocity there."""
        rows = len(rollout)
        noise = batch.noise.for_rows(rollout.rows)
        extra: dict[str, Any] = {"t": [], "eps": [], "v_old": [], "v_ref": []}
        for draw in range(self.draws):
            t = noise.uniform(_TIMES + draw, (rows, 1))[:, 0].to(rollout.x0.device)
            extra["t"].append(self.t_min + (self.t_max - self.t_min) * t)
            extra["eps"].append(noise(_DRAWS + draw, tuple(rollout.x0.shape)).to(rollout.x0))
        with self._old_policy():
            extra["v_old"] = self._velocities(velocity_fn, rollout, extra)
        evaluations = self.draws * rows
        if self.kl_weight > 0:
            with generator.reference():
                extra["v_ref"] = self._velocities(velocity_fn, rollout, extra)
            evaluations *= 2
        return replace(rollout, extra=extra, evaluations=rollout.evaluations + evaluations)

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

    def loss(
        self, velocity_fn: VelocityFn, rollout: Rollout, unit: Unit, units: list[Unit]
    ) -> tuple[Tensor, Metrics]:
        """The loss of one draw of (t, eps)."""
        if rollout.advantage is None:
            raise ValueError("the roll-out has no advantages yet")
        (draw,) = unit
        t, eps = rollout.extra["t"][draw], rollout.extra["eps"][draw]
        v_old = rollout.extra["v_old"][draw]
        x_t = self.path.interpolate(rollout.x0, eps, t)
        v = velocity_fn(x_t, t, rollout.cond).float()
        r = optimality(rollout.advantage, self.advantage_max)
        loss = nft_loss(v, v_old, x_t, t, rollout.x0, r, beta=self.beta, form=self.form, path=self.path)
        metrics: Metrics = {
            "nft/optimality": r.mean(),
            "nft/optimality_std": r.std(correction=0),
            "nft/at_clip": ((r <= 0) | (r >= 1)).float().mean(),
            "nft/velocity_change": (v.detach() - v_old).square().flatten(1).mean(1).sqrt().mean(),
        }
        if self.kl_weight > 0:
            distance = (v - rollout.extra["v_ref"][draw]).square().flatten(1).mean(1)
            loss = loss + self.kl_weight * distance
            metrics["kl/velocity_reference"] = distance.detach().mean()
        return loss / len(units), metrics

    def after_update(self) -> None:
        if self._old is not None:
            self._old.update(self.old_decay)

    def forwards_per_sample(self, group_size: int = 1) -> dict[str, float]:
        return {
            "sample": float(self.steps),
            "no_grad": float(self.draws * (1 + int(self.kl_weight > 0))),
            "train": float(self.draws * self.inner_epochs),
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"advantage": self.advantage.state_dict()}
        if self._old is not None:
            state["old"] = self._old.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.advantage.load_state_dict(state["advantage"])
        if self._old is not None:
            self._old.load_state_dict(state["old"])
