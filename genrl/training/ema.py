"""The moving average of the weights, and how far they have moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from genrl.networks.weights import WeightSet, is_sharded, local


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
    """L2 norm of the difference of two lists of tensors; of sharded ones, `start` has the parts of this process.

    Every process must call it when the parameters are sharded.
    """
    squares = [((local(p).cpu() - s) ** 2).sum().double() for p, s in zip(parameters, start, strict=True)]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    sharded: Any = next((p for p in parameters if is_sharded(p)), None)
    if sharded is not None:
        total = total.to(sharded.device_mesh.device_type)
        torch.distributed.all_reduce(total)
    return float(total) ** 0.5
