"""Named sets of weights beside the live ones: the moving average and the old policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightSet:
    """A detached copy of some parameters that can take their place for a while.

    Parameters are always written in place: re-assigning ``.data`` would be ignored by sharded modules.

    Args:
        parameters: the live parameters, all float32.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._live = list(parameters)
        self.values = [p.detach().clone() for p in self._live]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """values <- decay values + (1 - decay) live; 0 copies."""
        if decay == 0:
            torch._foreach_copy_(self.values, [p.detach() for p in self._live])
        else:
            torch._foreach_lerp_(self.values, [p.detach() for p in self._live], 1 - decay)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the live parameters have these values; afterwards their own again, bit for bit."""
        kept = [p.detach().clone() for p in self._live]
        with torch.no_grad():
            torch._foreach_copy_([p.data for p in self._live], self.values)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([p.data for p in self._live], kept)

    def state_dict(self) -> dict[str, Any]:
        return {"values": [value.cpu() for value in self.values]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["values"]) != len(self.values):
            raise ValueError(
                f"the checkpoint holds {len(state['values'])} averaged tensors, the model has {len(self.values)}"
            )
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved.to(value))


class EMA(WeightSet):
    """Exponential moving average with a warm-up: decay_n = min(decay, (1 + n) / (10 + n)) at update n.

    Args:
        parameters: the live parameters.
        decay: the final decay, in [0, 1).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float):
        super().__init__(parameters)
        self.decay, self.updates = decay, 0

    @property
    def current_decay(self) -> float:
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    def step(self) -> None:
        """Take in the live weights once."""
        self.updates += 1
        self.update(self.current_decay)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates = int(state["updates"])


def change_norm(parameters: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """L2 norm of the difference of two lists of tensors."""
    return float(sum(((p.detach() - s) ** 2).sum().double() for p, s in zip(parameters, start, strict=True)) ** 0.5)
