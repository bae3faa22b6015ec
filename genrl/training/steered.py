"""Samples of a finished run that are steered by its reward, without further training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.algorithms.base import chunked
from genrl.algorithms.feynman_kac import check_steerable
from genrl.algorithms.steering import ParticleSteering
from genrl.diffusion import DDIM, RowNoise, Sampler
from genrl.generators.base import Generator, encode_prompts, sampler_for, schedule_for
from genrl.prompts import Prompt
from genrl.rewards import Compose, as_compose, score
from genrl.training.evaluation import ROWS_PER_PROMPT, SampleSet, measure

PICK = 1_000_000  # the "step" of the numbers that choose a system's particle


@dataclass(frozen=True)
class SteeredSamples:
    """Samples with and without steering, from the same noise.

    Args:
        before: one unsteered sample for each system. after: one steered sample for each.
        values: {"before": ..., "steered": ...} rewards, gauges and image statistics of both, what steering did, and
            the sampler.
    """

    before: SampleSet
    after: SampleSet
    values: dict[str, Any]


def trained_score(reward: Any, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """The weighted sum [B] of the rewards that a run trains on, capped and gated as there; NaN where not scored."""
    compose = as_compose(reward).for_training()
    raw = score(compose, media, [p.text for p in prompts], [dict(p.metadata) for p in prompts])
    counted, weights = compose.for_advantage(raw)
    return torch.stack([weights[name] * value.double() for name, value in counted.items()]).sum(0).float()


def stochastic_sampler(generator: Generator, trained: Sampler, steps: int, shift: float | None) -> Sampler:
    """A sampler with noise, which steering needs: with the kernel of training, or DDIM (eta 1) if that has none.

    Raises:
        ValueError: when the generator does not sample whole latents at once.
    """
    kernel = trained.kernel if trained.eligible else DDIM(1.0)
    sampler = sampler_for(generator, kernel, schedule_for(generator, steps, shift))
    check_steerable(sampler)
    return sampler


@torch.no_grad()
def steered_samples(
    run: Mapping[str, Any],
    prompts: Sequence[Prompt],
    per_prompt: int,
    steering: ParticleSteering,
    *,
    steps: int | None = None,
    seed: int = 0,
    pick: Literal["draw", "best"] = "draw",
) -> SteeredSamples:
    """Draw steered samples of a run, trained or not (`load_run(..., checkpoint="start")`).

    Each sample is one particle of a system of its own, so samples of a prompt are independent; it costs K times the
    network evaluations of an ordinary one.

    Args:
        run: the parts that :func:`genrl.training.evaluation.load_run` gives.
        prompts: P prompts. per_prompt: systems for each.
        steering: number of particles, strength and the rest.
        steps: sampling steps, by default those of the run's evaluation. seed: of the noise.
        pick: the particle of a system that is taken: one drawn among the survivors, which is a sample of
            p(x0) exp(strength r(x0)) for large K; or the best of them, which is higher in reward and less diverse.

    Raises:
        ValueError: for a sampler that cannot be steered.
    """
    generator, device = run["generator"], run["device"]
    compose: Compose = as_compose(run["reward"])
    for part in [compose, *run["evaluation"].gauges.values()]:
        if hasattr(part, "prepare"):
            part.prepare(device)
    steps = steps or run["evaluation"].steps
    sampler = stochastic_sampler(generator, run["algorithm"].train_sampler(), steps, run["algorithm"].shift)
    size, limit = steering.particles, run["evaluation"].batch
    rows = [p * ROWS_PER_PROMPT + j for p in range(len(prompts)) for j in range(per_prompt)]
    owners = [prompts[p] for p in range(len(prompts)) for _ in range(per_prompt)]
    plain, taken, seen = [], [], []
    for part in chunked(len(rows), None if limit is None else max(1, limit // size)):
        chosen = [prompt for prompt in owners[part] for _ in range(size)]
        noise = RowNoise.of((seed, "steered"), [row * size + k for row in rows[part] for k in range(size)], device)
        cond = encode_prompts(generator, chosen)
        x1 = generator.initial_latents(cond, noise.initial)

        def reward(x0: Tensor, places: Tensor, chosen: list[Prompt] = chosen) -> Tensor:
            media = generator.decode(x0).float()
            return trained_score(compose, media, [chosen[i] for i in places.tolist()]).to(x0.device)

        found = steering.rollout(sampler, generator.velocity, x1, cond, noise, reward, keep=())
        draw = noise.uniform(PICK, (len(chosen), 1)).reshape(-1, size)[:, 0]
        place = (draw * size).long() if pick == "draw" else found.rewards.nan_to_num(-math.inf).argmax(1)
        index = torch.arange(len(place), device=x1.device) * size
        taken.append(generator.decode(found.trajectory.x0[index + place.to(index.device)]).float().cpu())
        seen.append({**found.metrics, "systems": len(place)})
        first = noise.for_rows([noise.rows[i] for i in index.tolist()])
        own_cond = encode_prompts(generator, owners[part])
        x0 = sampler.rollout(generator.velocity, x1[index], own_cond, first, keep=()).x0
        plain.append(generator.decode(x0).float().cpu())
    before, after = (SampleSet(torch.cat(media), owners, per_prompt, generator) for media in (plain, taken))
    total = sum(row["systems"] for row in seen)
    done = {k: sum(row[k] * row["systems"] for row in seen) / total for k in ("ess", "resampled", "ancestors")}
    values = {
        "before": measure(before, compose, run["evaluation"].gauges, limit, device),
        "steered": measure(after, compose, run["evaluation"].gauges, limit, device),
        "steering": {**done, "unscored": sum(row["unscored"] for row in seen)},
        "sampler": f"{sampler.kernel} with {steps} steps",
    }
    return SteeredSamples(before, after, _plain(values))


def _plain(values: Any) -> Any:
    """NaN as None, which JSON has."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values
