"""Probability paths: how data and noise are mixed at time t.

Notation (t = 1 is noise, t = 0 is data)::

    x_t  = A(t) x0 + B(t) eps            a point of the path
    v    = the network's output, a rotation of (x0, eps) that is regular at both ends
           RectifiedFlow:       v = eps - x0          = dx/dt
           VariancePreserving:  v = A eps - B x0      = dx/d(angle), "v-prediction"

Every path is linear in (x, v), so it is described by two pairs of numbers per time:
``x0_hat = p x + q v`` and ``eps_hat = r x + w v``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol

import torch
from torch import Tensor

Prediction = Literal["velocity", "epsilon", "sample", "v_prediction"]
_PREDICTIONS = ("velocity", "epsilon", "sample", "v_prediction")


def expand_like(coefficient: Tensor, x: Tensor) -> Tensor:
    """Append singleton dimensions to a coefficient of shape [] or [B] so that it broadcasts against x [B, ...]."""
    if coefficient.dim() == 0:
        return coefficient
    return coefficient.reshape(coefficient.shape + (1,) * (x.dim() - coefficient.dim()))


class Path(Protocol):
    """A linear path between data and noise."""

    def alpha(self, t: Tensor) -> Tensor:
        """A(t), the share of data; same shape as t."""
        ...

    def beta(self, t: Tensor) -> Tensor:
        """B(t), the share of noise; same shape as t."""
        ...

    def prediction_coefficients(self, t: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """((p, q), (r, w)) with x0_hat = p x + q v and eps_hat = r x + w v."""
        ...

    def x0_eps(self, x: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]: ...

    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor: ...

    def velocity_from(self, prediction: Tensor, x: Tensor, t: Tensor, kind: Prediction) -> Tensor: ...

    def score(self, x: Tensor, v: Tensor, t: Tensor) -> Tensor: ...

    def interpolate(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor: ...


class _LinearPath(ABC):
    """What follows from A, B and the prediction coefficients alone."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def beta(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def prediction_coefficients(self, t: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]: ...

    def x0_eps(self, x: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Split a network output into (x0_hat, eps_hat), both [B, ...]; t is [] or [B]."""
        (p, q), (r, w) = self.prediction_coefficients(t)
        return (
            expand_like(p, x) * x + expand_like(q, x) * v,
            expand_like(r, x) * x + expand_like(w, x) * v,
        )

    def score(self, x: Tensor, v: Tensor, t: Tensor) -> Tensor:
        """Score of the marginal, -eps_hat / B(t). Infinite at t = 0, where B is 0."""
        return -self.x0_eps(x, v, t)[1] / expand_like(self.beta(t), x)

    def interpolate(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = A(t) x0 + B(t) eps."""
        return expand_like(self.alpha(t), x0) * x0 + expand_like(self.beta(t), x0) * eps

    def velocity_from(self, prediction: Tensor, x: Tensor, t: Tensor, kind: Prediction) -> Tensor:
        """Turn what a network predicts into this path's v.

        Args:
            prediction: network output [B, ...].
            x: the network's input x_t [B, ...].
            t: times, [] or [B]. ``"epsilon"`` is singular where A(t) = 0 and ``"sample"`` where B(t) = 0.
            kind: ``"velocity"`` (this path's own v, returned as it is), ``"epsilon"``, ``"sample"`` (x0) or
                ``"v_prediction"`` (A eps - B x0, diffusers' name).

        Raises:
            ValueError: for another kind.
        """
        if kind not in _PREDICTIONS:
            raise ValueError(f"prediction kind {kind!r} is unknown; allowed are {', '.join(_PREDICTIONS)}")
        if kind == "velocity":
            return prediction
        a, b = expand_like(self.alpha(t), x), expand_like(self.beta(t), x)
        if kind == "epsilon":
            return self.velocity((x - b * prediction) / a, prediction, t)
        if kind == "sample":
            return self.velocity(prediction, (x - a * prediction) / b, t)
        # x = A x0 + B eps and v = A eps - B x0 invert to x0, eps with determinant A^2 + B^2.
        norm = a * a + b * b
        return self.velocity((a * x - b * prediction) / norm, (b * x + a * prediction) / norm, t)

    @abstractmethod
    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor: ...


class RectifiedFlow(_LinearPath):
    """x_t = (1 - t) x0 + t eps with velocity v = eps - x0 (Liu et al. 2022; Lipman et al. 2022).

    Example:
        >>> path = RectifiedFlow()
        >>> x0, eps = torch.zeros(1, 2), torch.ones(1, 2)
        >>> path.interpolate(x0, eps, torch.tensor(0.25))
        tensor([[0.2500, 0.2500]])
    """

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def beta(self, t: Tensor) -> Tensor:
        return t

    def prediction_coefficients(self, t: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        one = torch.ones_like(t)
        return (one, -t), (one, 1 - t)

    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return eps - x0


class VariancePreserving(_LinearPath):
    """x_t = sqrt(ab) x0 + sqrt(1 - ab) eps over a discrete table of ab = alphas_cumprod (Ho et al. 2020).

    Time of table index k (diffusers' integer timestep) is t = (k + 1) / N, so that t = 0 is clean data and t = 1 the
    last entry. Between entries ab is interpolated linearly; on entries it is exact.

    Args:
        alphas_cumprod: decreasing table [N] in (0, 1); the last entry may be 0 (zero terminal signal-to-noise ratio,
            arXiv 2305.08891), where an epsilon prediction says nothing about x0 and only the others can be used.
        final_alpha_cumprod: ab at t = 0. 1.0 is diffusers' ``set_alpha_to_one=True``; pass ``alphas_cumprod[0]`` for
            checkpoints with ``set_alpha_to_one=False``, whose last DDIM step then leaves a little noise.

    Raises:
        ValueError: for a table that is not one-dimensional, not decreasing or outside [0, 1).
    """

    def __init__(self, alphas_cumprod: Tensor, final_alpha_cumprod: float = 1.0):
        table = torch.as_tensor(alphas_cumprod, dtype=torch.float64).detach().cpu()
        if table.dim() != 1 or len(table) < 2:
            raise ValueError(f"alphas_cumprod has shape {tuple(table.shape)}; pass a table [N] with N >= 2")
        if not bool((table[:-1] > 0).all() and table[-1] >= 0 and (table < 1).all() and (table.diff() <= 0).all()):
            raise ValueError(
                "alphas_cumprod must decrease inside (0, 1), the last entry may be 0; got values from "
                f"{table.max():.4g} to {table.min():.4g} (is the table reversed, or is it betas instead?)"
            )
        self.n = len(table)
        self._table = torch.cat([torch.tensor([final_alpha_cumprod], dtype=torch.float64), table])  # [N + 1]
        self._tables: dict[torch.device, Tensor] = {}  # a copy a device, made once

    def alphas_cumprod(self, t: Tensor) -> Tensor:
        """ab at time t, in t's dtype and shape."""
        position = (t.detach().double() * self.n).clamp(0, self.n)
        # float32 times are off a grid point by up to 1e-4 of a cell; a grid point must give the table's own value.
        nearest = position.round()
        position = torch.where((position - nearest).abs() < 1e-3, nearest, position)
        low = position.floor().long().clamp(max=self.n - 1)
        if t.device not in self._tables:
            self._tables[t.device] = self._table.to(t.device)
        table = self._tables[t.device]
        return torch.lerp(table[low], table[low + 1], position - low).to(t.dtype)

    def alpha(self, t: Tensor) -> Tensor:
        return self.alphas_cumprod(t.double()).sqrt().to(t.dtype)

    def beta(self, t: Tensor) -> Tensor:
        # In float64, because 1 - ab loses half of float32's digits near t = 0.
        return (1 - self.alphas_cumprod(t.double())).sqrt().to(t.dtype)

    def prediction_coefficients(self, t: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        a, b = self.alpha(t), self.beta(t)
        return (a, -b), (b, a)

    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return expand_like(self.alpha(t), x0) * eps - expand_like(self.beta(t), x0) * x0
