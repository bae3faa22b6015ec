"""Tensors that wait in CPU memory until they are needed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from genrl.algorithms.base import Rollout
from genrl.diffusion.batch import map_tensors

SMALLEST = 4096  # bytes below which a copy costs more than it saves


def moved(rollout: Rollout, device: torch.device | str) -> Rollout:
    """Samples with everything that was computed for them, on another device; sample numbers and times stay.

    What goes to the CPU while there is a GPU is pinned, so that it comes back fast.
    """
    pin = torch.device(device).type == "cpu" and torch.cuda.is_available()

    def put(tensor: Tensor) -> Tensor:
        there = tensor.to(device, non_blocking=not pin)
        return there.pin_memory() if pin else there

    trajectory = rollout.trajectory
    if trajectory is not None:
        states, means = map_tensors(put, trajectory.states), map_tensors(put, trajectory.means)
        trajectory = replace(trajectory, states=states, means=means, x0=put(trajectory.x0))
    return replace(
        rollout,
        cond=map_tensors(put, rollout.cond),
        x0=put(rollout.x0),
        advantage=map_tensors(put, rollout.advantage),
        weight=map_tensors(put, rollout.weight),
        trajectory=trajectory,
        extra=map_tensors(put, dict(rollout.extra)),
    )


def saved_on_cpu() -> AbstractContextManager[Any]:
    """Inside, what autograd keeps for a backward is copied to the CPU, except weights and small tensors."""

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if is_weight or tensor.nbytes < SMALLEST:
            return tensor.device, tensor
        kept = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        kept.copy_(tensor, non_blocking=False)
        return tensor.device, kept

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0], non_blocking=True))
