"""The moving average of the weights, and how far they have moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from genrl.networks.weights import WeightSet


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
    squares = (((p.detach().cpu() - s) ** 2).sum().double() for p, s in zip(parameters, start, strict=True))
    return float(sum(squares) ** 0.5)
