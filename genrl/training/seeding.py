"""Who draws which sample: prompts of an iteration, and their split over updates and processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from genrl.diffusion import derive_seed


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed the global generators of Python, numpy and torch.

    The project itself draws from explicit generators only; this is for rewards and models of users that do not.
    """
    import random

    import numpy as np

    value = derive_seed(seed, "global", rank)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def draw_prompts(available: int, count: int, seed: int, iteration: int) -> list[int]:
    """The prompts of an iteration: ``count`` different ones out of ``available``.

    A function of (seed, iteration) alone, so that every process draws the same.

    Raises:
        ValueError: when fewer prompts are available than an iteration needs.
    """
    if count > available:
        raise ValueError(
            f"trainer.prompts_per_iteration = {count}, but the prompt source has only {available} training prompts"
        )
    generator = torch.Generator().manual_seed(derive_seed(seed, "prompts", iteration))
    return torch.randperm(available, generator=generator)[:count].tolist()


@dataclass(frozen=True)
class Layout:
    """Where each of the P x G samples of an iteration goes.

    The samples are split into ``minibatches`` optimizer updates by their place g in the group, then each minibatch over
    the processes. A minibatch so holds the same samples for any number of processes, and every prompt equally often.

    Args:
        prompts: P. group_size: G. minibatches: M, a divisor of G. processes: W, a divisor of P G / M. rank: this one.

    Raises:
        ValueError: naming the numbers that do not divide.
    """

    prompts: int
    group_size: int
    minibatches: int
    processes: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.group_size % self.minibatches:
            raise ValueError(
                f"trainer.group_size = {self.group_size} is not a multiple of algorithm.minibatches = "
                f"{self.minibatches}; each update takes the same number of samples of every group"
            )
        if self.total // self.minibatches % self.processes:
            raise ValueError(
                f"a minibatch of {self.total // self.minibatches} samples (prompts_per_iteration {self.prompts} x "
                f"group_size {self.group_size} / minibatches {self.minibatches}) does not split over "
                f"{self.processes} processes; change one of them"
            )

    @property
    def total(self) -> int:
        return self.prompts * self.group_size

    @property
    def local_minibatch(self) -> int:
        """Samples of one minibatch on one process."""
        return self.total // self.minibatches // self.processes

    def _order(self) -> Tensor:
        """Sample numbers p G + g in the order minibatch, prompt, place; [P G]."""
        sample = torch.arange(self.total).reshape(self.prompts, self.minibatches, -1)  # [P, M, G / M]
        return sample.transpose(0, 1).reshape(-1)

    def local(self) -> Tensor:
        """Sample numbers p G + g of this process, minibatch after minibatch; int64 [P G / W]."""
        split = self._order().reshape(self.minibatches, self.processes, -1)
        return split[:, self.rank].reshape(-1)

    def minibatch(self, m: int) -> Tensor:
        """Sample numbers of minibatch m over all processes; int64 [P G / M]."""
        return self._order().reshape(self.minibatches, -1)[m]
