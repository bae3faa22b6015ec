"""Plain behaviour cloning: the chunk is regressed on the observation."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from torch import Tensor

from genrl.networks import Backbone, EncoderSettings, MLPBackbone
from genrl.policies.base import Chunking, ChunkPolicy, Draw, Metrics, Noise, Normalization, Start, same_time

Distance = Literal["mse", "l1"]


class RegressionPolicy(ChunkPolicy):
    """The same network without noise, called once at x = 0 and t = 1: the baseline of every generative policy.

    Where the data know several ways, it predicts their mean (mse) or median (l1).

    Args:
        network, encoder, chunking, normalization, mask_padding: see `ChunkPolicy`.
        distance: ``"mse"`` or ``"l1"`` (ACT's).

    Raises:
        ValueError: another distance.
    """

    one_step: ClassVar[bool] = True

    def __init__(
        self,
        network: Backbone = MLPBackbone(),
        encoder: EncoderSettings = EncoderSettings(),
        chunking: Chunking = Chunking(),
        normalization: Normalization = Normalization(),
        mask_padding: bool = False,
        distance: Distance = "mse",
    ):
        super().__init__(network, encoder, chunking, normalization, mask_padding)
        if distance not in get_args(Distance):
            raise ValueError(f"distance = {distance!r}; allowed are {list(get_args(Distance))}")
        self.distance = distance

    def _loss(
        self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw, progress: float
    ) -> tuple[Tensor, Metrics]:
        error = self._regress(cond) - x0
        return self.chunk_mean(error.square() if self.distance == "mse" else error.abs(), weight), {}

    def _sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        return self._regress(cond)

    def _regress(self, cond: Tensor) -> Tensor:
        x = cond.new_zeros(cond.shape[0], self.chunking.horizon, self.action_dim)
        return self.velocity(x, same_time(1.0, x), cond)
