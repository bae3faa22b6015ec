"""Peak memory of a policy-gradient update against the number of trained steps.

    python benchmarks/memory_by_steps.py [--steps 2 4 8 16] [--samples 96] [--device cpu]

The loop runs one backward a denoising step (column "by step"); for comparison the same losses are added up and
differentiated at once ("at once"). Same network (the digit transformer, untrained), same samples, one process. Peak
memory is what the allocator hands out during the update, over weights and stored roll-out; gradients are included. Time
is the best of three.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sampler_step import peak_bytes

from genrl.algorithms import PolicyGradient
from genrl.generators import DigitPrompts, DigitsGenerator
from genrl.training import EvaluationSettings, Loop, TrainerSettings
from genrl.training.logging import Meter


def brightness(media: Any, prompts: Any, metadata: Any) -> torch.Tensor:
    return media.mean((1, 2, 3))


def updates(trained: int, samples: int, device: str, cache: str) -> dict[str, Callable[[], object]]:
    """The update of one iteration with ``trained`` trained steps, in both ways."""
    algorithm = PolicyGradient(steps=trained + 1, minibatches=1)
    loop = Loop(
        "memory", "unused", 0, DigitsGenerator(base_steps=1, cache_dir=cache), DigitPrompts(), brightness, algorithm,
        TrainerSettings(prompts_per_iteration=8, group_size=samples // 8, device=device, cpu_threads=1),
        EvaluationSettings(every=0),
    )  # fmt: skip
    loop.setup()
    loop.prepare()
    batch, _ = loop.collector.batch(loop.layout.local(), list(range(8)), 0)
    rollout = algorithm.rollout(loop.generator.velocity, loop.generator, batch)
    advantage = torch.linspace(-1, 1, samples, device=loop.device)
    rollout = replace(rollout, advantage=advantage, weight=torch.ones_like(advantage))
    units = algorithm.units(rollout, batch)

    def by_step() -> None:
        loop.updater.optimizer.zero_grad()
        loop.updater.accumulate(rollout, samples, units, Meter(), Meter())

    def at_once() -> None:
        loop.updater.optimizer.zero_grad()
        losses = [algorithm.loss(loop.generator.velocity, rollout, unit, units)[0] for unit in units]
        torch.stack(losses).sum(0).mean().backward()

    return {"by step": by_step, "at once": at_once}


def best_seconds(run: Callable[[], object]) -> float:
    found = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--samples", type=int, default=96, help="a multiple of 8")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("trained steps  by step (MiB)  at once (MiB)  at once / by step   seconds by step / at once")
    with tempfile.TemporaryDirectory() as cache:
        first = None
        for trained in options.steps:
            ways = updates(trained, options.samples, options.device, cache)
            peak = {name: peak_bytes(run, options.device) / 2**20 for name, run in ways.items()}
            seconds = {name: best_seconds(run) for name, run in ways.items()}
            first = peak["by step"] if first is None else first
            print(
                f"{trained:>13}  {peak['by step']:>13.1f}  {peak['at once']:>13.1f}  "
                f"{peak['at once'] / peak['by step']:>17.2f}   {seconds['by step']:>10.2f} / {seconds['at once']:.2f}",
                flush=True,
            )
        print(f"by step, the last is {peak['by step'] / first:.3f} times the first")


if __name__ == "__main__":
    main()
