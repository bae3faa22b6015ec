"""Feynman-Kac steering: a sampler whose particles are resampled by the reward of what they are about to become.

Needs no gradient of the reward and no training; it costs K samples for each system of K particles. What the particles
represent is in :mod:`genrl.objectives.particles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from genrl.diffusion import GaussianTransition, Sampler, Trajectory, VelocityFn, index_batch
from genrl.objectives.particles import (
    Particles,
    Potential,
    ancestors_of,
    effective_sample_size,
    flat_index,
    follow,
)


class Randomness(Protocol):
    """Noise of the S K particles, as :class:`genrl.diffusion.RowNoise` gives it."""

    def __call__(self, step: int, shape: tuple[int, ...]) -> Tensor: ...

    def uniform(self, step: int, shape: tuple[int, ...]) -> Tensor: ...

    def for_rows(self, rows: Sequence[int]) -> Randomness: ...

    @property
    def rows(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Steered:
    """What a steered roll-out gave.

    Args:
        trajectory: of the S K survivors, one system after another; every lineage is complete.
        rewards: float32 [S, K] final rewards of the survivors, NaN where not scored.
        drawn: float32 [S, K], those before the last resampling.
        metrics: ``ess`` (mean effective sample size over K when weights were looked at), ``resampled`` (share of
            systems), ``unscored`` (rewards of NaN), ``ancestors`` (share of different particles that are left of those
            that were there at the end of the shared part).
    """

    trajectory: Trajectory
    rewards: Tensor
    drawn: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class ParticleSteering:
    """Settings of Feynman-Kac steering; the defaults are iADD's for 20 steps (arXiv 2610.01789).

    Args:
        particles: K, particles of a system. 1 leaves the sampler as it is.
        strength: lam of the target p(x0) exp(lam r(x0)).
        potential: ``"diff"``, ``"max"``, ``"add"`` or ``"rt"``, see :mod:`genrl.objectives.particles`.
        resample_at: steps at whose beginning the reward of the predicted data is asked for and particles may be
            resampled; None takes three, spread over the steps after `branch_at`. The end always counts, too.
        branch_at: steps that one particle runs alone before it is split into K; all of a lineage's noise up to there is
            shared, and a system costs so many steps once.
        ess_threshold: resample a system when its effective sample size is below this share of K (at the end always,
            unless all weights are equal).
        scheme: ``"systematic"`` (our default: least noise), ``"multinomial"`` (iADD), ``"stratified"``, ``"residual"``.
        legacy_reset: see :class:`genrl.objectives.Potential`.

    Raises:
        ValueError: for numbers that cannot be.
    """

    particles: int = 4
    strength: float = 2.0
    potential: str = "diff"
    resample_at: Sequence[int] | None = None
    branch_at: int = 0
    ess_threshold: float = 0.5
    scheme: str = "systematic"
    legacy_reset: bool = False
    _potential: Potential = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.particles < 1:
            raise ValueError(f"particles = {self.particles} must be at least 1; 1 leaves the sampler as it is")
        if self.branch_at < 0:
            raise ValueError(f"branch_at = {self.branch_at} must not be negative; 0 splits at the start")
        if self.scheme not in ("multinomial", "systematic", "stratified", "residual"):
            raise ValueError(
                f"scheme = {self.scheme!r} is unknown; allowed are 'systematic', 'multinomial', 'stratified' and "
                "'residual'"
            )
        if self.resample_at is not None:
            object.__setattr__(self, "resample_at", tuple(self.resample_at))
        made = Potential(self.potential, self.strength, self.legacy_reset)  # type: ignore[arg-type]
        object.__setattr__(self, "_potential", made)

    @staticmethod
    def tiny_arguments(arguments: dict[str, Any], folder: Any) -> dict[str, Any]:
        """Two particles, so that a group of two samples is a system."""
        return {**arguments, "particles": min(2, arguments.get("particles", 4))}

    def moments(self, sampler: Sampler) -> tuple[int, ...]:
        """Steps at whose beginning particles may be resampled.

        Raises:
            ValueError: for a step that the sampler does not have, or one before the particles are split.
        """
        count, first = sampler.n_steps, self.branch_at
        if first >= count:
            raise ValueError(f"branch_at = {first} leaves none of the {count} sampling steps; use at most {count - 1}")
        if self.resample_at is None:
            share = (count - first) / 4
            return tuple(sorted({k for i in (1, 2, 3) if first < (k := first + round(i * share)) < count}))
        bad = [k for k in self.resample_at if not first < k < count]
        if bad:
            raise ValueError(
                f"resample_at holds step {bad[0]}; allowed are {first + 1} to {count - 1}, after particles were split "
                f"at step {first} and before the end of {count} steps, which counts anyway"
            )
        return tuple(sorted(set(self.resample_at)))

    @torch.no_grad()
    def rollout(
        self,
        sampler: Sampler,
        velocity_fn: VelocityFn,
        x1: Tensor,
        cond: Any,
        noise: Randomness,
        reward: Callable[[Tensor, Tensor], Tensor],
        steps: Sequence[int] | None = None,
        keep: Sequence[int] | None = None,
        sign: Tensor | None = None,
    ) -> Steered:
        """Sample S systems of K particles from t = 1 to data.

        Args:
            sampler: gives the steps; particles part from each other at stochastic ones alone.
            velocity_fn: the network.
            x1: start latents [S K, ...], one system after another; where particles are split later than at the start,
                the first of each system counts.
            cond: conditioning of the S K particles.
            noise: their noise, and uniform numbers for resampling.
            reward: (predicted data [B, ...], rows int64 [B] among the S K) -> [B], NaN where not scored.
            steps: the stochastic steps; by default those of iteration 0.
            keep: stochastic steps whose latents are kept; by default all.
            sign: [S] of 1 and -1, the direction in which a system is driven; by default upwards.

        Returns:
            The survivors. With equal weights throughout (strength 0, constant rewards) this is the sampler's own
            roll-out, to the last bit, unless particles share their first steps.
        """
        steps = sampler.steps() if steps is None else tuple(sorted(steps))
        kept = steps if keep is None else tuple(k for k in steps if k in keep)
        moments, device, size = self.moments(sampler), x1.device, self.particles
        systems = len(x1) // size
        ahead = sign if sign is not None else torch.ones(systems, device=device)  # [S]
        every, seen = torch.arange(len(x1), device=device), _Seen(velocity_fn)
        # Before they are split, the first particle of each system stands for all.
        first = every[::size] if self.branch_at else every
        spread = every // size
        x, c = index_batch(x1, first), index_batch(cond, first)
        draw = noise.for_rows([noise.rows[i] for i in first.tolist()]) if self.branch_at else noise
        states: dict[int, Tensor] = {}
        means: dict[int, Tensor] = {}
        known = Particles.start(systems, size, device)
        lineage = every
        count = _Counts()
        evaluations = 0
        for k in range(sampler.n_steps):
            if k == self.branch_at and k > 0:
                x, c, draw = x[spread], cond, noise
                states, means = ({i: value[spread] for i, value in held.items()} for held in (states, means))
            step = sampler.step(k, k in steps)
            mean = sampler.transition(seen, x, step, c).mean
            evaluations += len(x)
            if k in moments:
                x0_hat = sampler.path.x0_eps(x, seen.v, torch.tensor(step.t, dtype=torch.float64).to(device).float())[0]
                rewards = reward(x0_hat, every).reshape(systems, size)
                known = self._potential.weigh(known, ahead[:, None] * rewards)
                ancestors, known = self._resample(known, noise, k, self.ess_threshold, count)
                rows = flat_index(ancestors)
                x, mean, lineage = x[rows], mean[rows], lineage[rows]
                states, means = follow(states, ancestors), follow(means, ancestors)
            if k in steps:
                start, x = x, GaussianTransition(mean, step.s).at(draw(k, tuple(mean.shape)).to(mean))
                if k in kept:
                    states[k], means[k], states[k + 1] = start, mean, x
            else:
                x = mean
        drawn = reward(x, every).reshape(systems, size)
        known = self._potential.finish(known, ahead[:, None] * drawn)
        ancestors, known = self._resample(known, noise, sampler.n_steps, 2.0, count)
        rows = flat_index(ancestors)
        trajectory = Trajectory(
            sampler.schedule.t, kept, follow(states, ancestors), follow(means, ancestors), x[rows], evaluations
        )
        left = len(lineage[rows].unique()) / len(lineage)
        metrics = count.metrics() | {"unscored": float(known.unscored), "ancestors": left}
        return Steered(trajectory, drawn.flatten()[rows].reshape(systems, size), drawn, metrics)

    def _resample(
        self, known: Particles, noise: Randomness, k: int, threshold: float, count: _Counts
    ) -> tuple[Tensor, Particles]:
        systems, size = known.log_weight.shape
        uniform = noise.uniform(k, (systems * size, 1)).reshape(systems, size).to(known.log_weight)
        ancestors, done = ancestors_of(known, threshold, self.scheme, uniform)  # type: ignore[arg-type]
        count.ess.append(float(effective_sample_size(known.log_weight).mean()) / size)
        count.done.append(float(done.double().mean()))
        return ancestors, known.resampled(ancestors, done)

    def sampled_steps(self, steps: int) -> float:
        """Network evaluations that a particle costs, of `steps` sampling steps."""
        return steps - self.branch_at + self.branch_at / self.particles

    def with_particles(self, particles: int) -> ParticleSteering:
        """The same with another number of particles."""
        return replace(self, particles=particles)


class _Seen:
    """A velocity function that keeps its last value."""

    def __init__(self, velocity_fn: VelocityFn):
        self.velocity_fn = velocity_fn
        self.v = torch.empty(0)

    def __call__(self, x: Tensor, t: Tensor, cond: Any) -> Tensor:
        self.v = self.velocity_fn(x, t, cond)
        return self.v


class _Counts:
    """What is logged about the moments of a roll-out."""

    def __init__(self) -> None:
        self.ess: list[float] = []
        self.done: list[float] = []

    def metrics(self) -> dict[str, float]:
        return {"ess": sum(self.ess) / len(self.ess), "resampled": sum(self.done) / len(self.done)}
