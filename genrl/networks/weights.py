"""Sets of weights beside the live ones: a frozen start, a moving average, an old policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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
        """Inside, the live parameters have these values; afterwards their own again, bit for bit.

        Values are exchanged through `Tensor.data`, which keeps autograd's version counters: a graph made before the
        block is valid after it, because by then it sees the values that it was made with.
        """
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
