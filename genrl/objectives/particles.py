"""Feynman-Kac particle systems: potentials, weights, resampling and ancestors, in log space and without a loop over
samples.

K particles of each of S systems move together. At chosen moments a reward r_k of what a particle will become is known,
and the particle is weighted by a potential G_k of it; resampling copies heavy particles over light ones. When the
product of all potentials along a lineage is exp(lam r_final), the particles at the end represent

    p(x0) exp(lam r(x0)) / Z                                                                                      (1)

whatever the potentials in between were (Feynman-Kac steering, arXiv 2501.06848; iADD, arXiv 2610.01789):

========  =====================================  ============================
mode      log G_k                                running value
========  =====================================  ============================
``diff``  lam (r_k - last)                       last = r_k
``max``   lam max(r_k, high)                     high = max(r_k, high)
``add``   lam (r_k + total)                      total = r_k + total
``rt``    lam r_k                                none
the last  lam r_final - sum of all earlier log G, in every mode (for ``diff`` it is the same formula)
========  =====================================  ============================

Running values begin at 0. A reward of NaN means "not scored": the weight of the particle is 0 until it is resampled
away, unless no particle of its system was scored, which then learns nothing at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.objectives.advantages import CLIP, EPS, Advantages, Rewards, RunningAdvantage

Mode = Literal["diff", "max", "add", "rt"]
Scheme = Literal["multinomial", "systematic", "stratified", "residual"]
MODES: tuple[Mode, ...] = ("diff", "max", "add", "rt")


@dataclass(frozen=True)
class Particles:
    """What is known of S systems of K particles.

    Args:
        log_weight: float64 [S, K], log-potentials since a system was last resampled; -inf for a dead particle.
        log_product: float64 [S, K], log-potentials along the whole lineage.
        running: float64 [S, K], the running value of the mode.
        unscored: rewards of NaN so far.
    """

    log_weight: Tensor
    log_product: Tensor
    running: Tensor
    unscored: int = 0

    @staticmethod
    def start(systems: int, particles: int, device: torch.device | str = "cpu") -> Particles:
        """Equal weights."""
        zero = torch.zeros(systems, particles, dtype=torch.float64, device=device)
        return Particles(zero, zero, zero)

    def resampled(self, ancestors: Tensor, done: Tensor) -> Particles:
        """After resampling: lineages follow their ancestors [S, K]; weights start again in the systems of done [S]."""
        weight = torch.where(done[:, None], torch.zeros_like(self.log_weight), self.log_weight)
        return Particles(
            weight, self.log_product.gather(1, ancestors), self.running.gather(1, ancestors), self.unscored
        )


@dataclass(frozen=True)
class Potential:
    """The potentials of one mode.

    Args:
        mode: see the table of this module.
        strength: lam, 2.0 in iADD; 0 leaves the sampler as it is.
        legacy_reset: forget the running value before every weighting, as iADD's released code does; ``max`` (of
            positive rewards), ``add`` and ``diff`` then act as ``rt``. The last potential stays as in the table, so
            that (1) holds here too.

    Raises:
        ValueError: for an unknown mode or a strength that is not finite.
    """

    mode: Mode = "diff"
    strength: float = 2.0
    legacy_reset: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"potential mode {self.mode!r} is unknown; allowed are {', '.join(MODES)}")
        if not math.isfinite(self.strength):
            raise ValueError(f"potential strength = {self.strength} must be a finite number; 2.0 is iADD's")

    def weigh(self, particles: Particles, rewards: Tensor) -> Particles:
        """Weight the particles by the rewards [S, K] of what they are about to become."""
        rewards, scored, any_scored = _scored(rewards)
        running = torch.zeros_like(particles.running) if self.legacy_reset else particles.running
        if self.mode == "diff":
            value, after = rewards - running, rewards
        elif self.mode == "max":
            value = after = torch.maximum(rewards, running)
        elif self.mode == "add":
            value = after = rewards + running
        else:
            value, after = rewards, running
        after = torch.where(scored, after, particles.running)
        return _weighted(particles, self.strength * value, after, scored, any_scored)

    def finish(self, particles: Particles, rewards: Tensor) -> Particles:
        """Weight by the final rewards [S, K], so that every lineage's product is exp(strength * r_final)."""
        rewards, scored, any_scored = _scored(rewards)
        value = self.strength * rewards - particles.log_product
        return _weighted(particles, value, rewards, scored, any_scored)


def _scored(rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rewards = rewards.double()
    if bool(torch.isinf(rewards).any()):
        raise ValueError("a reward that steers is infinite; rewards must be finite, or NaN where not scored")
    scored = ~torch.isnan(rewards)
    return torch.where(scored, rewards, torch.zeros_like(rewards)), scored, scored.any(1, keepdim=True)


def _weighted(particles: Particles, value: Tensor, running: Tensor, scored: Tensor, any_scored: Tensor) -> Particles:
    value = torch.where(scored, value, torch.zeros_like(value))
    # A lineage's product leaves out what was not scored, with which it goes on only where its whole system has none.
    dead = ~scored & any_scored
    weight = torch.where(dead, torch.full_like(value, -math.inf), particles.log_weight + value)
    unscored = particles.unscored + int((~scored).sum())
    return Particles(weight, particles.log_product + value, running, unscored)


def normalised_weights(log_weight: Tensor) -> Tensor:
    """Weights [S, K] that sum to 1; uniform where every particle of a system is dead."""
    log_weight = log_weight.double()
    top = log_weight.amax(1, keepdim=True)
    alive = torch.isfinite(top)
    weight = torch.where(alive, (log_weight - torch.where(alive, top, torch.zeros_like(top))).exp(), 1.0)
    return weight / weight.sum(1, keepdim=True)


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """1 / sum of the squared normalised weights, [S], between 1 and K."""
    return 1 / normalised_weights(log_weight).square().sum(1)


def resample(
    log_weight: Tensor, scheme: Scheme = "systematic", random: torch.Generator | Tensor | None = None
) -> Tensor:
    """Ancestors of K new particles for each system, int64 [S, K].

    The expected number of copies of a particle is K times its weight under every scheme. Multinomial (iADD) draws each
    new particle on its own; stratified one in each of K equal intervals of the cumulative weights; systematic the same
    with one number for all; residual copies a particle floor(K w) times and draws the rest.

    Args:
        log_weight: [S, K], unnormalised.
        scheme: see above.
        random: a generator, or uniform numbers in [0, 1) [S, K] (systematic uses the first of each system).

    Raises:
        ValueError: for an unknown scheme, or numbers of another shape.
    """
    weight = normalised_weights(log_weight)
    systems, count = weight.shape
    if isinstance(random, Tensor):
        if random.shape != weight.shape:
            raise ValueError(
                f"the uniform numbers have shape {tuple(random.shape)}, the weights {tuple(weight.shape)}; pass one "
                "number for each particle"
            )
        u = random.to(weight)
    else:
        device = weight.device if random is None else random.device
        u = torch.rand(weight.shape, generator=random, device=device, dtype=torch.float64).to(weight.device)
    place = torch.arange(count, device=weight.device, dtype=torch.float64)
    if scheme == "multinomial":
        return _inverse(weight, u)
    if scheme == "stratified":
        return _inverse(weight, (place + u) / count)
    if scheme == "systematic":
        return _inverse(weight, (place + u[:, :1]) / count)
    if scheme == "residual":
        # Rounding must not turn the 1.0 expected copies of equal weights into none.
        copies = (count * weight + 1e-9).floor()
        total = copies.cumsum(1)  # [S, K]
        rest = (count * weight - copies).clamp(min=0)
        some = rest.sum(1, keepdim=True) > 1e-6
        drawn = _inverse(torch.where(some, rest, torch.ones_like(rest)), u)
        copied = torch.searchsorted(total, place.expand(systems, -1).contiguous(), right=True).clamp(max=count - 1)
        return torch.where(place < total[:, -1:], copied, drawn)
    raise ValueError(
        f"resampling scheme {scheme!r} is unknown; allowed are 'multinomial', 'systematic', 'stratified', 'residual'"
    )


def _inverse(weight: Tensor, points: Tensor) -> Tensor:
    """The particle in whose part of the cumulative weights a point of [0, 1) lies; never one of weight 0."""
    total = weight.cumsum(1)
    total = total / total[:, -1:]
    return torch.searchsorted(total, points.contiguous(), right=True).clamp(max=weight.shape[1] - 1)


def ancestors_of(
    particles: Particles,
    threshold: float = 0.5,
    scheme: Scheme = "systematic",
    random: torch.Generator | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ancestors [S, K], and which systems were resampled, bool [S]; in the others each particle is its own ancestor.

    A system is resampled when its effective sample size is below threshold K.

    Args:
        particles: with their weights.
        threshold: share of K, 0.5 in iADD; a number above 1 resamples always. A system of equal weights is never
            resampled, since there would be nothing to gain.
        scheme, random: see :func:`resample`.
    """
    log_weight = particles.log_weight
    count = log_weight.shape[1]
    own = torch.arange(count, device=log_weight.device).expand_as(log_weight)
    equal = log_weight.amax(1) == log_weight.amin(1)  # also where all are dead
    wanted = (effective_sample_size(log_weight) < threshold * count) & ~equal
    return torch.where(wanted[:, None], resample(log_weight, scheme, random), own), wanted


def flat_index(ancestors: Tensor) -> Tensor:
    """Rows [S K] of tensors that hold all systems one after another."""
    systems, count = ancestors.shape
    offset = torch.arange(systems, device=ancestors.device)[:, None] * count
    return (ancestors + offset).flatten()


def follow(stored: Mapping[int, Tensor], ancestors: Tensor) -> dict[int, Tensor]:
    """Stored tensors {step: [S K, ...]} of the lineages that survive.

    Applied to states and behaviour means alike, it makes every surviving trajectory complete: log-ratios of its stored
    transitions are those of the particle that went through them.
    """
    index = flat_index(ancestors)
    return {k: x[index.to(x.device)] for k, x in stored.items()}


class RecentAdvantage:
    """z-score of a reward among the rewards of its prompt in the last iterations that drew it (iADD, B2-DiffuRL).

    Args:
        iterations: of history, 8 in iADD; those of this iteration are among them.
        eps, clip: see :func:`genrl.objectives.group_relative`; clip 5.0 as in iADD.
    """

    def __init__(self, iterations: int = 8, eps: float = EPS, clip: float | None = CLIP):
        if iterations < 1:
            raise ValueError(f"RecentAdvantage.iterations = {iterations} must be at least 1")
        self.iterations, self.eps, self.clip = iterations, eps, clip
        self.inner: RunningAdvantage | None = None
        self._state: dict[str, Any] | None = None

    def __call__(
        self, rewards: Rewards, weights: Mapping[str, float] | None = None, prompt_ids: Tensor | None = None
    ) -> Advantages:
        size = (next(iter(rewards.values())) if isinstance(rewards, Mapping) else rewards).shape[1]
        if self.inner is None:
            self.inner = RunningAdvantage(self.iterations * size, 1, self.eps, self.clip)
            if self._state is not None:
                self.inner.load_state_dict(self._state)
        return self.inner(rewards, weights, prompt_ids)

    def state_dict(self) -> dict[str, Any]:
        return (self._state or {"history": {}}) if self.inner is None else self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self.inner = state, None


def keep_extreme(
    values: Tensor, particles: int, above: float | None = 0.5, below: float | None = -0.5, worst_systems: bool = False
) -> Tensor:
    """bool [P, G], the best particle of each system where it is good enough and the worst where it is bad enough.

    Args:
        values: [P, G] z-scores of G / particles systems a prompt; NaN is never kept.
        particles: K.
        above: the best particle of a system is kept when its value is at least this (0.5 in iADD); None keeps none.
        below: the worst is kept when its value is below this (-0.5 in iADD); None keeps none.
        worst_systems: every second system was driven towards low rewards: it gives the worst particle alone, and the
            others the best alone. Otherwise each system gives both.

    Raises:
        ValueError: when G is not a multiple of K (2 K with worst systems).
    """
    count, unit = values.shape[1], particles * (2 if worst_systems else 1)
    if count % unit:
        raise ValueError(
            f"a group of {count} samples is no whole number of systems of {particles} particles"
            f"{' in pairs of a best and a worst one' if worst_systems else ''}; set trainer.group_size to a multiple "
            f"of {unit}"
        )
    table = values.reshape(len(values), -1, particles)  # [P, S, K]
    scored = ~torch.isnan(table)
    kept = torch.zeros_like(scored)
    if above is not None:
        best = torch.where(scored, table, -math.inf)
        kept |= _one_hot(best.argmax(2), particles) & (best >= above) & _role(table, 0, worst_systems)
    if below is not None:
        worst = torch.where(scored, table, math.inf)
        kept |= _one_hot(worst.argmin(2), particles) & (worst < below) & _role(table, 1, worst_systems)
    return kept.reshape(values.shape)


def _one_hot(place: Tensor, count: int) -> Tensor:
    return torch.nn.functional.one_hot(place, count).bool()


def _role(table: Tensor, which: int, worst_systems: bool) -> Tensor:
    """bool [1, S, 1]: the systems that give best (0) or worst (1) particles."""
    systems = torch.arange(table.shape[1], device=table.device)[None, :, None]
    return systems % 2 == which if worst_systems else systems >= 0
