"""Flow matching of action chunks, and its integration in a few steps."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from genrl.networks import Backbone, EncoderSettings, MLPBackbone
from genrl.policies.base import Chunking, ChunkPolicy, Draw, Metrics, Noise, Normalization, Start, same_time

Solver = Literal["euler", "heun"]


class FlowPolicy(ChunkPolicy):
    """Rectified flow of action chunks (Lipman et al. 2022, Liu et al. 2022), sampled by an ODE solver.

    The loss is the mean of (v(x_t, t | s) - (eps - x0))^2 with t uniform in [0, 1]. `steps=1` is the baseline that
    every one-step method has to beat: one Euler step of a plain flow, which gives the conditional mean.

    Args:
        network, encoder, chunking, normalization, mask_padding: see `ChunkPolicy`.
        steps: of the solver, on a uniform grid.
        solver: ``"euler"`` (one network call a step) or ``"heun"`` (second order; two, and one in the last step, where
            the velocity at t = 0 would only be that of data).

    Raises:
        ValueError: fewer than one step, another solver.
    """

    one_step: ClassVar[bool] = False
    supports_warm_start: ClassVar[bool] = True

    def __init__(
        self,
        network: Backbone = MLPBackbone(),
        encoder: EncoderSettings = EncoderSettings(),
        chunking: Chunking = Chunking(),
        normalization: Normalization = Normalization(),
        mask_padding: bool = False,
        steps: int = 10,
        solver: Solver = "euler",
    ):
        super().__init__(network, encoder, chunking, normalization, mask_padding)
        if steps < 1:
            raise ValueError(f"steps = {steps}; the solver needs at least 1")
        if solver not in get_args(Solver):
            raise ValueError(f"solver = {solver!r}; allowed are {list(get_args(Solver))}")
        self.steps, self.solver = steps, solver

    @property
    def nfe(self) -> int:
        return self.steps if self.solver == "euler" else 2 * self.steps - 1

    def _loss(
        self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw, progress: float
    ) -> tuple[Tensor, Metrics]:
        eps, t = draw.normal(tuple(x0.shape)), draw.uniform((len(x0),))
        x_t = torch.lerp(x0, eps, t[:, None, None])
        error = (self.velocity(x_t, t, cond) - (eps - x0)).square()
        return self.chunk_mean(error, weight), {}

    def _sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        x, t_start = self.start_of(cond, noise, start)
        grid = [t_start * (1 - k / self.steps) for k in range(self.steps + 1)]
        for t, t_next in pairwise(grid):
            v = self._velocity_at(x, t, cond)
            if self.solver == "heun" and t_next > 0:
                ahead = self._velocity_at(x - (t - t_next) * v, t_next, cond)
                v = (v + ahead) / 2
            x = x - v if t - t_next == 1 else x - (t - t_next) * v
        return x

    def _velocity_at(self, x: Tensor, t: float, cond: Tensor) -> Tensor:
        return self.velocity(x, same_time(t, x), cond)
