"""Sampling chunk by chunk: each chunk of a video is denoised to its end, given those before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from genrl.diffusion.kernels import Kernel, linear_mean
from genrl.diffusion.paths import Path
from genrl.diffusion.sampler import Sampler, StepNoise, Trajectory, VelocityFn, _noise
from genrl.diffusion.schedule import Schedule
from genrl.diffusion.transition import GaussianTransition
from genrl.diffusion.windows import Window


class ChunkVelocity(Protocol):
    """A causal network with a cache of what the finished chunks left.

    ``frames_per_chunk`` is the number f of frames of a chunk.
    """

    frames_per_chunk: int

    def chunk(self, x: Tensor, t: Tensor, cond: Any, cache: Any) -> Tensor:
        """Velocity of the next chunk x [B, f, ...] at t [B]; the cache is None before the first."""
        ...

    def extend(self, cache: Any, chunk: Tensor, cond: Any) -> Any:
        """The cache with one more finished chunk."""
        ...


class ChunkSampler(Sampler):
    """A sampler of videos [B, F, ...] that finishes one chunk of frames after the other.

    Every chunk goes through all steps of the schedule, given the finished chunks before it. A trajectory holds at step
    k the states of all chunks at that step, and the finished video, from which `replay` evaluates a step of all chunks
    in one forward: cond then has the entry "history".

    Args:
        kernel, schedule, stochastic_steps, path: see `Sampler`.
        causal: () -> the network, chunk by chunk, with the weights in force.

    The condition is a dictionary.
    """

    def __init__(
        self,
        kernel: Kernel,
        schedule: Schedule,
        stochastic_steps: str | Sequence[int] | Window,
        path: Path | None,
        causal: Callable[[], ChunkVelocity],
    ):
        super().__init__(kernel, schedule, stochastic_steps, path)
        self.causal = causal

    @torch.no_grad()
    def rollout(
        self,
        velocity_fn: VelocityFn,
        x1: Tensor,
        cond: Any = None,
        generator: torch.Generator | StepNoise | None = None,
        steps: Sequence[int] | None = None,
        expand: Tensor | None = None,
        keep: Sequence[int] | None = None,
    ) -> Trajectory:
        """As `Sampler.rollout`; the noise of a step is drawn once for all chunks.

        Raises:
            ValueError: with ``expand``, since chunks have no common prefix of steps.
        """
        if expand is not None:
            raise ValueError("chunk by chunk there is no prefix of steps to share; set share_prefix: false")
        steps = self.steps() if steps is None else tuple(sorted(steps))
        self._check(steps)
        kept = steps if keep is None else tuple(k for k in steps if k in keep)
        network, x1 = self.causal(), x1.float()
        frames, total = network.frames_per_chunk, x1.shape[1]
        noise = {k: _noise(generator, k, x1) for k in steps}
        states: dict[int, list[Tensor]] = {k: [] for step in kept for k in (step, step + 1)}
        means: dict[int, list[Tensor]] = {k: [] for k in kept}
        done: list[Tensor] = []
        cache = None
        for start in range(0, total, frames):
            part = slice(start, start + frames)
            x = x1[:, part]
            for k in range(self.n_steps):
                if k in states:
                    states[k].append(x)
                step = self.step(k, k in steps)
                t = torch.full((len(x),), step.t, device=x.device, dtype=torch.float32)
                mean = linear_mean(x, network.chunk(x, t, cond, cache), step.c_x, step.c_v)
                if k in means:
                    means[k].append(mean)
                x = GaussianTransition(mean, step.s).at(noise[k][:, part]) if k in steps else mean
            if self.n_steps in states:
                states[self.n_steps].append(x)
            done.append(x)
            if part.stop < total:
                cache = network.extend(cache, x, cond)
        chunks = total // frames
        spent = round(len(x1) * (self.n_steps + (chunks - 1) / chunks))  # the finished chunks are read once each
        whole_states, whole_means = (
            {k: torch.cat(parts, 1) for k, parts in found.items()} for found in (states, means)
        )
        return Trajectory(self.schedule.t, kept, whole_states, whole_means, torch.cat(done, 1), spent)

    def replay(
        self, velocity_fn: VelocityFn, trajectory: Trajectory, step: int | Sequence[int] | Tensor, cond: Any = None
    ) -> GaussianTransition:
        """As `Sampler.replay`, in one forward of all chunks, each with the finished ones before it as history."""
        return super().replay(velocity_fn, trajectory, step, {**cond, "history": trajectory.x0})
