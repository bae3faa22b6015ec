"""Which steps of a sampler are stochastic, and so trained.

A window is any callable ``(eligible, iteration, seed) -> steps``; ``eligible`` are the steps that have a density, in
order. Windows are functions of their arguments alone, so every process and every resumed run agrees on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Window = Callable[[Sequence[int], int, int], Sequence[int]]


@dataclass(frozen=True)
class AllSteps:
    """Every eligible step (Flow-GRPO, DanceGRPO)."""

    def __call__(self, eligible: Sequence[int], iteration: int = 0, seed: int = 0) -> Sequence[int]:
        return list(eligible)


@dataclass(frozen=True)
class FixedWindow:
    """The same steps in every iteration.

    Args:
        start: first step.
        size: number of steps.
    """

    start: int = 0
    size: int = 2

    def __call__(self, eligible: Sequence[int], iteration: int = 0, seed: int = 0) -> Sequence[int]:
        return _slice(eligible, self.start, self.size)


@dataclass(frozen=True)
class SlidingWindow:
    """MixGRPO's window, which moves from noise to data during training (arXiv 2507.21802).

    Args:
        size: steps in the window, 4 in the paper's main setting.
        stride: steps it moves at a time.
        every: iterations between two moves, 25 in the paper.

    After the last position it starts again at the first.
    """

    size: int = 4
    stride: int = 1
    every: int = 25

    def __post_init__(self) -> None:
        if min(self.size, self.stride, self.every) < 1:
            raise ValueError(f"size, stride and every of a SlidingWindow must be at least 1, got {self}")

    def __call__(self, eligible: Sequence[int], iteration: int = 0, seed: int = 0) -> Sequence[int]:
        last = max(len(eligible) - self.size, 0)
        positions = [*range(0, last, self.stride), last]  # the last steps are reached whatever the stride
        return _slice(eligible, positions[(iteration // self.every) % len(positions)], self.size)


@dataclass(frozen=True)
class RandomWindow:
    """A window at a random place, drawn anew each iteration (Flow-GRPO-Fast).

    Drawn once an iteration for all prompts: windows drawn per prompt were seen to diverge where these were stable.

    Args:
        size: steps in the window, 2 in Flow-GRPO-Fast.
        last_start: largest start position, or None for any that fits.
    """

    size: int = 2
    last_start: int | None = None

    def __call__(self, eligible: Sequence[int], iteration: int = 0, seed: int = 0) -> Sequence[int]:
        last = max(len(eligible) - self.size, 0)
        if self.last_start is not None:
            last = min(last, self.last_start)
        start = random.Random(f"window {seed} {iteration}").randint(0, last)
        return _slice(eligible, start, self.size)


def _slice(eligible: Sequence[int], start: int, size: int) -> Sequence[int]:
    if not 0 <= start <= len(eligible) - size or size < 1:
        raise ValueError(
            f"a window of {size} steps from position {start} does not fit the {len(eligible)} steps that have a "
            "density; use more sampling steps or a smaller window"
        )
    return list(eligible[start : start + size])
