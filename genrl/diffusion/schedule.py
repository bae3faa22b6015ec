"""Time grids from noise (t = 1) to data (t = 0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """A decreasing grid of float32 times; step k goes from t[k] to t[k + 1].

    The values are stored with every trajectory and used by the replay, so that sampling and scoring cannot disagree.

    Args:
        t: [n + 1] float32, decreasing, in [0, 1]; the last value is 0 for a grid that ends at data.
        timesteps: [n] the numbers that a diffusers model expects at these times, in its own dtype, or None.

    Raises:
        ValueError: for a grid that is not decreasing or leaves [0, 1].

    Example:
        >>> Schedule.uniform(4).t
        tensor([1.0000, 0.7500, 0.5000, 0.2500, 0.0000])
    """

    t: Tensor
    timesteps: Tensor | None = None

    def __post_init__(self) -> None:
        t = torch.as_tensor(self.t, dtype=torch.float32).detach().cpu()
        if t.dim() != 1 or len(t) < 2:
            raise ValueError(f"a schedule needs a grid [n + 1] with n >= 1 steps, got shape {tuple(t.shape)}")
        falls = t[1:] < t[:-1]  # False for NaN as well
        if not bool(falls.all()):
            where = int((~falls).nonzero()[0])
            raise ValueError(
                f"times must decrease from noise (1) to data (0), but t[{where}] = {t[where]:.6g} is followed by "
                f"{t[where + 1]:.6g}; flip an ascending table and drop repeated entries"
            )
        if t[0] > 1 + 1e-6 or t[-1] < 0:
            raise ValueError(f"times must lie in [0, 1], got {t[0]:.6g} to {t[-1]:.6g}; divide timesteps by 1000?")
        if self.timesteps is not None and len(self.timesteps) != len(t) - 1:
            raise ValueError(
                f"{len(self.timesteps)} timesteps do not fit {len(t)} times; a grid of n + 1 times has n steps"
            )
        object.__setattr__(self, "t", t.clamp(max=1.0))

    @property
    def n_steps(self) -> int:
        return len(self.t) - 1

    @staticmethod
    def uniform(n: int, shift: float = 1.0) -> Schedule:
        """n equal steps, optionally shifted toward noise: t <- shift t / (1 + (shift - 1) t) (SD3, arXiv 2403.03206).

        Args:
            n: number of steps, at least 1.
            shift: 1 keeps the grid uniform; 3 is the SD3 default.
        """
        if n < 1:
            raise ValueError(f"a schedule needs at least 1 step, got n = {n}")
        if not shift > 0:
            raise ValueError(f"shift must be positive, got {shift}; 1.0 leaves the grid uniform")
        t = torch.linspace(1, 0, n + 1, dtype=torch.float64)
        return Schedule((shift * t / (1 + (shift - 1) * t)).float())

    @staticmethod
    def from_sigmas(sigmas: Sequence[float] | Tensor, timesteps: Tensor | None = None) -> Schedule:
        """A grid from flow-matching sigmas (sigma = t), with a final 0 appended when it is missing."""
        t = torch.as_tensor(sigmas, dtype=torch.float64).flatten()
        if len(t) and t[-1] > 0:
            t = torch.cat([t, t.new_zeros(1)])
        return Schedule(t.float(), timesteps)

    @staticmethod
    def from_scheduler(scheduler: Any, n: int, device: str = "cpu", **set_timesteps: Any) -> Schedule:
        """The grid that a diffusers scheduler would use for n steps.

        Flow-matching schedulers give their sigmas. Schedulers with an ``alphas_cumprod`` table of N entries give
        t = (timestep + 1) / N, the time of :class:`genrl.diffusion.VariancePreserving`, and end at t = 0.

        Args:
            scheduler: a diffusers scheduler; its ``set_timesteps`` is called.
            n: number of steps.
            **set_timesteps: passed on, for instance ``mu=`` or ``sigmas=``.

        Raises:
            ValueError: when the scheduler makes another number of steps than n, or has neither kind of table.
        """
        if "sigmas" in set_timesteps:
            scheduler.set_timesteps(device=device, **set_timesteps)
        else:
            scheduler.set_timesteps(n, device=device, **set_timesteps)
        timesteps = scheduler.timesteps.detach().cpu()
        if len(timesteps) != n:
            raise ValueError(
                f"{type(scheduler).__name__} made {len(timesteps)} steps where {n} were asked for; choose a "
                "first-order scheduler or the number of steps that it supports"
            )
        prediction = getattr(scheduler.config, "prediction_type", None)
        if hasattr(scheduler, "alphas_cumprod") and prediction != "flow_prediction":
            t = (timesteps.double() + 1) / len(scheduler.alphas_cumprod)
            return Schedule(torch.cat([t, t.new_zeros(1)]).float(), timesteps)
        if hasattr(scheduler, "sigmas"):
            return Schedule(scheduler.sigmas.detach().cpu().float(), timesteps)
        raise ValueError(
            f"{type(scheduler).__name__} has neither sigmas nor alphas_cumprod; pass Schedule.from_sigmas(...) instead"
        )
