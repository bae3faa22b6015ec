"""Samples of an iteration with their rewards and advantages."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from genrl.algorithms.base import Algorithm, Batch, Rollout, chunked
from genrl.diffusion import RowNoise, index_batch
from genrl.generators.base import Generator, encode_prompts
from genrl.prompts import Prompt, PromptSource
from genrl.rewards import Compose, image_statistics
from genrl.rewards.base import check_same_names
from genrl.rewards.base import joined as score_table
from genrl.training.checkpoint import broadcast
from genrl.training.off_load import moved
from genrl.training.scoring import RewardWorker
from genrl.training.seeding import Layout, draw_prompts
from genrl.training.settings import TrainerSettings

_STATS = "stats/"


@dataclass(frozen=True)
class Collected:
    """What one process sampled.

    Args:
        rollout, batch: the samples and how they were drawn.
        values: {name: [L]} rewards, and image statistics under ``stats/``.
        prompt_ids: [P] place of each group's prompt in the prompt source.
        times: seconds by part.
        metrics: of how they came about.
    """

    rollout: Rollout
    batch: Batch
    values: dict[str, Tensor]
    prompt_ids: Tensor
    times: dict[str, float]
    metrics: dict[str, float] = field(default_factory=dict)


class Collector:
    """Draws samples, has them scored in the background, and turns rewards into advantages.

    Args:
        generator, algorithm, prompts, reward: the parts of the run.
        settings: of the trainer. seed: of the run.
    """

    def __init__(
        self,
        generator: Generator,
        algorithm: Algorithm,
        prompts: PromptSource,
        reward: Compose,
        settings: TrainerSettings,
        seed: int,
    ):
        self.generator, self.algorithm, self.prompts, self.reward = generator, algorithm, prompts, reward
        self.settings, self.seed = settings, seed
        self._worker: RewardWorker | None = None
        self.by_prompt: dict[int, float] = {}  # place of a prompt -> its mean reward in the last iteration

    def prepare(self, accelerator: Any, layout: Layout) -> None:
        self.accelerator, self.layout = accelerator, layout

    def choose(self, iteration: int) -> list[int]:
        """The prompts of an iteration."""
        return draw_prompts(len(self.prompts.train), self.settings.prompts_per_iteration, self.seed, iteration)

    def batch(self, rows: Tensor, chosen: list[int], iteration: int, encode: bool = True) -> tuple[Batch, list[Prompt]]:
        """The batch of some sample numbers, and their prompts; without ``encode`` its conditioning is None."""
        groups = rows // self.settings.group_size
        prompts = [self.prompts.train[chosen[p]] for p in groups.tolist()]
        key = (self.seed, "rollout", iteration)
        device = self.accelerator.device
        # Every prompt is encoded once, however many samples it has.
        places, own = groups.unique(return_inverse=True)
        different = [self.prompts.train[chosen[p]] for p in places.tolist()]
        batch = Batch(
            cond=index_batch(encode_prompts(self.generator, different), own) if encode else None,
            rows=rows,
            groups=groups,
            noise=RowNoise.of(key, rows, device),
            group_noise=RowNoise.of((*key, "group"), groups, device),
            seed=self.seed,
            iteration=iteration,
            prompts=prompts,
            score=self._score,
        )
        return batch, prompts

    def _score(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The reward that is trained [B] of media that a method wants to know about on the way."""
        if self._worker is None:
            raise RuntimeError("rewards can be asked for while an iteration is sampled only")
        texts = [p.text for p in prompts]
        scores = self._worker.wait(self._worker.submit(media, texts, [dict(p.metadata) for p in prompts]), texts)
        counted, weights = self.reward.for_advantage({name: value[:, None] for name, value in scores.items()})
        total = torch.stack([weights[name] * value.double() for name, value in counted.items()]).sum(0)
        return total[:, 0].float().to(media.device)

    def sample(self, worker: RewardWorker, iteration: int) -> Collected:
        """Samples of this process, with their rewards. Moves no weights; only sharded forwards communicate."""
        began = time.perf_counter()
        rows, chosen = self.layout.local(), self.choose(iteration)
        observe = getattr(self.algorithm, "observe", None)
        self._worker = worker
        parts, futures, stats = [], [], []
        for part in chunked(len(rows), self.settings.rollout_batch):
            batch, prompts = self.batch(rows[part], chosen, iteration)
            rollout = self.algorithm.rollout(self.generator.velocity, self.generator, batch)
            with torch.no_grad():
                media = self.generator.decode(rollout.x0).float()
            if observe is not None:
                rollout = observe(rollout, media, prompts)
            texts = [p.text for p in prompts]
            futures.append((worker.submit(media, texts, [dict(p.metadata) for p in prompts]), texts))
            stats.append((len(media), image_statistics(media)))
            parts.append(moved(rollout, "cpu") if self.settings.latents_on_cpu else rollout)
        sampled = time.perf_counter()
        scores = [worker.wait(future, texts) for future, texts in futures]
        values = score_table(scores, [text for _, texts in futures for text in texts])
        for name in stats[0][1]:  # a mean of means: every sample carries that of its batch
            means = [torch.full((n,), found[name], dtype=torch.float64) for n, found in stats]
            values[_STATS + name] = torch.cat(means)
        times = {"time/rollout": sampled - began, "time/reward": time.perf_counter() - sampled}
        whole, _ = self.batch(rows, chosen, iteration, encode=False)
        joined = Rollout.concatenate(parts)
        joined = moved(joined, "cpu") if self.settings.latents_on_cpu and len(parts) > 1 else joined  # pinned again
        return Collected(joined, whole, values, torch.tensor(chosen), times)

    def check_names(self, collected: Collected) -> None:
        """Every process must have the same scores, since they are gathered one after another.

        Raises:
            RewardError: on the processes whose names differ from the main one's.
        """
        names = broadcast(self.accelerator, list(collected.values))
        check_same_names(names, collected.values, [f"those of process {self.layout.rank}"])

    def advantages(self, collected: Collected) -> tuple[Rollout, Tensor, dict[str, float]]:
        """Advantages over whole groups, gathered from all processes.

        Returns:
            The local roll-out with its advantages and weights, the weights [P G] of all samples, and metrics.
        """
        tables = {name: self._gather(value) for name, value in collected.values.items()}
        metrics = {name: float(value.mean()) for name, value in tables.items() if name.startswith(_STATS)}
        rewards = {name: value for name, value in tables.items() if not name.startswith(_STATS)}
        for name, value in rewards.items():
            metrics |= _mean_and_std(f"reward/{name}", value)
        metrics |= {f"gate/{name}": share for name, share in self.reward.gate_shares(rewards).items()}
        counted, weights = self.reward.for_advantage(rewards)
        total = torch.stack([weights[name] * value.double() for name, value in counted.items()]).sum(0)
        metrics["reward/total"] = _mean_and_std("total", total)["total"]
        metrics["advantage/within_group_std"] = _within_groups(total)
        self.by_prompt = dict(zip(collected.prompt_ids.tolist(), total.nanmean(1).tolist(), strict=True))
        result = self.algorithm.advantages(counted, weights, collected.prompt_ids)
        # A sample that was not scored is left out altogether: an advantage of 0 alone would still let it take part in
        # averages and regularisers.
        nan = torch.stack([torch.isnan(value) for value in counted.values()]).any(0)  # [P, G]
        missing = nan & (result.values == 0)
        keep = self.algorithm.keep(result.values.masked_fill(missing, math.nan))
        weight = (~missing if keep is None else keep & ~missing).float().flatten()  # [P G]
        local, device = collected.rollout.rows, self.accelerator.device
        extra = dict(collected.rollout.extra)
        if result.by_step is not None:
            extra["advantage_by_step"] = result.by_step.float().flatten(0, 1)[local].to(device)  # [B, T]
        rollout = replace(
            collected.rollout,
            extra=extra,
            advantage=result.values.float().flatten()[local].to(device),
            weight=weight[local].to(device),
        )
        return rollout, weight, metrics | result.metrics

    def _gather(self, values: Tensor) -> Tensor:
        """Local values [L] -> [P, G] in sample order, on every process."""
        world = self.layout.processes
        table = torch.empty(self.layout.total, dtype=values.dtype)
        gathered = self.accelerator.gather(values.to(self.accelerator.device)).cpu() if world > 1 else values
        for rank, part in enumerate(gathered.reshape(world, -1)):
            table[replace(self.layout, rank=rank).local()] = part
        return table.reshape(self.layout.prompts, self.layout.group_size)


def _mean_and_std(name: str, values: Tensor) -> dict[str, float]:
    scored = values[~torch.isnan(values)].double()
    return {
        name: float(scored.mean()) if len(scored) else math.nan,
        f"{name}_std": float(scored.std()) if len(scored) > 1 else 0.0,
    }


def _within_groups(total: Tensor) -> float:
    """Mean over groups of the standard deviation (population) of what is scored in each of [P, G]."""
    scored = [row[~torch.isnan(row)] for row in total]
    found = [float(row.std(correction=0)) for row in scored if len(row) > 1]
    return sum(found) / len(found) if found else 0.0
