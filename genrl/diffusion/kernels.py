"""Transition kernels: every sampler of the field as three numbers.

A step from t down to t' (``D = t - t' > 0``) draws

    x_t' ~ N( a x0_hat + b eps_hat , s^2 I )                                                                      (1)

and a kernel is the function ``(t, t') -> (a, b, s)``. With exact predictions the new point has the right mean iff
a = A(t') and the right marginal iff also b^2 + s^2 = B(t')^2.

========== ============================ ============================== =================== ========
kernel     b                            s                              marginal            source
========== ============================ ============================== =================== ========
Euler      t'                           0                              exact, no density   the probability-flow ODE
FlowSDE    t' - eta^2 D / (2 (1-t))     eta sqrt(t D / (1-t))          O(D^2) excess       Flow-GRPO, arXiv 2505.05470
DanceSDE   t' - eta^2 D / (2 t)         eta sqrt(D)                    O(D^2) excess       DanceGRPO, arXiv 2505.07818
SAGE       t' - S / (2 t)               sqrt(S), S the exact variance  O(D^2), smaller     SAGE-GRPO, arXiv 2603.21872
CPS        t' cos(eta pi/2)             t' sin(eta pi/2)               exact               Flow-CPS, arXiv 2509.05952
DDIM       sqrt(t'^2 - s^2)             eta s_posterior                exact               DDIM, arXiv 2010.02502
Renoise    r e                          sqrt(t'^2 - r^2 e^2)           exact               RAVEN, arXiv 2605.15190
Consistency 0                           t'                             exact if x0_hat is  CM-GRPO, arXiv 2605.15190
========== ============================ ============================== =================== ========

with a = 1 - t' throughout. CPS, Renoise and Consistency exchange a fixed share of the noise in every step, however
short, so with posterior means for predictions, which is what a network gives, more steps do not bring them to the
spread of the data: near data they end at (1 + b / t') / 2 of its variance. The others converge to it.

The table is written for the rectified flow. Any other path x = A x0 + B eps is the image of it under the time t_rf = B
/ (A + B) and the scale x = (A + B) x_rf, so its kernel is (A' + B') times the kernel of the table: one formula serves
both, and DDIM on a variance-preserving path comes out as the DDPM posterior at eta = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from genrl.diffusion.paths import Path, RectifiedFlow
from genrl.diffusion.transition import GaussianTransition

Coefficients = tuple[Tensor, Tensor, Tensor]
Integrator = Literal["euler", "exact"]
_RECTIFIED_FLOW = RectifiedFlow()


class Kernel(Protocol):
    """What samplers need of a kernel."""

    def coefficients(self, t: Tensor, t_next: Tensor, path: Path = ...) -> Coefficients: ...

    def linear_coefficients(self, t: Tensor, t_next: Tensor, path: Path = ...) -> Coefficients: ...

    def transition(self, x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, path: Path = ...) -> GaussianTransition: ...


class PathKernel:
    """Carries a rectified-flow kernel over to every path; subclasses define :meth:`rf_coefficients` alone."""

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        """(a, b, s) on the rectified flow; tensors broadcast like t, which is in (0, 1] with t_next < t."""
        raise TypeError(f"{type(self).__name__} must define rf_coefficients(t, t_next) -> (a, b, s)")

    def coefficients(self, t: Tensor, t_next: Tensor, path: Path = _RECTIFIED_FLOW) -> Coefficients:
        """(a, b, s) of equation (1) of this module.

        Args:
            t, t_next: times with 1 >= t > t_next >= 0; tensors (or floats) of shapes that broadcast.
            path: the path whose x0_hat and eps_hat are mixed.

        Returns:
            Three tensors that broadcast like t; s = 0 means a deterministic step. Never inf or NaN.

        Raises:
            ValueError: when t_next >= t or a time is outside [0, 1].
        """
        t, t_next = _check_times(t, t_next)
        if isinstance(path, RectifiedFlow):
            return self.rf_coefficients(t, t_next)
        a_t, b_t = path.alpha(t), path.beta(t)
        a_n, b_n = path.alpha(t_next), path.beta(t_next)
        scale = a_n + b_n
        t_rf = b_t / (a_t + b_t)
        # Inside one rounding step of the table, t' could come out above t and s as the root of a negative number.
        a, b, s = self.rf_coefficients(t_rf, torch.minimum(b_n / scale, t_rf))
        return scale * a, scale * b, scale * s

    def linear_coefficients(self, t: Tensor, t_next: Tensor, path: Path = _RECTIFIED_FLOW) -> Coefficients:
        """(c_x, c_v, s) with mean = c_x x + c_v v: equation (1) after inserting the path's predictions.

        ``-c_v`` is the velocity sensitivity kappa, d mean / d v = -kappa I; it is D for a plain Euler step.
        """
        t, t_next = _check_times(t, t_next)
        a, b, s = self.coefficients(t, t_next, path)
        (p, q), (r, w) = path.prediction_coefficients(t)
        return a * p + b * r, a * q + b * w, s

    def kappa(self, t: Tensor, t_next: Tensor, path: Path = _RECTIFIED_FLOW) -> Tensor:
        """Velocity sensitivity: d mean / d v = -kappa I."""
        return -self.linear_coefficients(t, t_next, path)[1]

    def transition(
        self, x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, path: Path = _RECTIFIED_FLOW
    ) -> GaussianTransition:
        """The transition density from x [B, ...] with network output v [B, ...]; t, t_next are [] or [B]."""
        c_x, c_v, s = self.linear_coefficients(t, t_next, path)
        return GaussianTransition(linear_mean(x, v, c_x, c_v), s)


def linear_mean(x: Tensor, v: Tensor, c_x: Tensor | float, c_v: Tensor | float) -> Tensor:
    """c_x x + c_v v in float32 (float64 stays); coefficients are numbers, [] or [B]. Two passes over the latents."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, v = x.to(dtype), v.to(dtype)
    if isinstance(c_x, Tensor) and isinstance(c_v, Tensor):
        shape = c_x.shape + (1,) * (x.dim() - c_x.dim()) if c_x.dim() else c_x.shape
        return c_x.to(x).reshape(shape) * x + c_v.to(x).reshape(shape) * v
    return torch.add(x * c_x, v, alpha=float(c_v))


def _check_times(t: Tensor | float, t_next: Tensor | float) -> tuple[Tensor, Tensor]:
    t, t_next = torch.as_tensor(t), torch.as_tensor(t_next)
    dtype = torch.promote_types(torch.promote_types(t.dtype, t_next.dtype), torch.float32)
    t, t_next = t.to(dtype), t_next.to(dtype)
    if t.device.type == "cpu":  # values on a device are not read, to keep the hot path free of synchronisation
        if bool((t_next >= t).any()):
            raise ValueError(
                f"a step must go down in time, got t = {_show(t)} to t_next = {_show(t_next)}; genrl's clock runs "
                "from 1 (noise) to 0 (data), so flip an ascending table"
            )
        if bool((t > 1 + 1e-6).any() or (t_next < -1e-6).any()):
            raise ValueError(f"times must lie in [0, 1], got t = {_show(t)}, t_next = {_show(t_next)}; divide by 1000?")
    return t, t_next


def _show(t: Tensor) -> str:
    return f"{t.flatten()[0].item():.6g}" + ("" if t.numel() == 1 else ", ...")


def _check_level(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} = {value} is outside [{low:g}, {high:g}]")


@dataclass(frozen=True)
class Euler(PathKernel):
    """The ODE step x + (t' - t) v (on other paths: DDIM with eta = 0). It has no density."""

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        return 1 - t_next, t_next + 0 * t, 0 * (t + t_next)


@dataclass(frozen=True)
class FlowSDE(PathKernel):
    """Flow-GRPO's SDE, g(t) = eta sqrt(t / (1 - t)) (arXiv 2505.05470, eq. 9).

    At t = 1, where g is infinite, 1 - t is replaced by 1 - t' as in its official code: the first step then has
    s = eta when t' follows t = 1.

    Args:
        noise_level: eta, 0.7 in the SD3.5 recipe; 0 is the Euler step.
        integrator: ``"euler"`` (Euler-Maruyama, as published; leaves O(D^2) excess noise) or ``"exact"``, the same
            SDE integrated with x0_hat held fixed: rho = q^(eta^2/2), b = t' rho, s = t' sqrt(1 - rho^2). It preserves
            the marginal, and eta = sqrt(2) is the DDPM posterior.
    """

    noise_level: float = 0.7
    integrator: Integrator = "euler"

    def __post_init__(self) -> None:
        _check_level("FlowSDE.noise_level", self.noise_level, 0, 10)
        _check_integrator(self.integrator)

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        eta2, step = self.noise_level**2, t - t_next
        if self.integrator == "exact":
            return _frozen(t_next, _posterior_ratio(t, t_next) ** (eta2 / 2))
        below = torch.where(t < 1, 1 - t, 1 - t_next)  # see the class docstring
        return 1 - t_next, t_next - eta2 * step / (2 * below), (eta2 * t * step / below).sqrt()


@dataclass(frozen=True)
class DanceSDE(PathKernel):
    """DanceGRPO's SDE, constant g = eta (arXiv 2505.07818).

    Args:
        noise_level: eta, 0.3 in its recipes.
        integrator: see :class:`FlowSDE`; here rho = exp(-(eta^2/2) (1/t' - 1/t)).
    """

    noise_level: float = 0.3
    integrator: Integrator = "euler"

    def __post_init__(self) -> None:
        _check_level("DanceSDE.noise_level", self.noise_level, 0, 10)
        _check_integrator(self.integrator)

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        eta2, step = self.noise_level**2, t - t_next
        if self.integrator == "exact":
            # 1/t' - 1/t with t' floored, since the limit t' -> 0 is rho = 0 and inf would spoil eta = 0.
            gap = (1 / t_next.clamp(min=1e-12) - 1 / t).clamp(min=0)
            return _frozen(t_next, torch.exp(-(eta2 / 2) * gap))
        b = t_next - eta2 * step / (2 * t.clamp(min=1e-3))  # 1/t explodes at the end; 1e-3 is our floor
        return 1 - t_next, b, (eta2 * step).sqrt() + 0 * t_next


@dataclass(frozen=True)
class SAGE(PathKernel):
    """SAGE-GRPO: Flow-GRPO's g with its variance over the step integrated exactly (arXiv 2603.21872).

    S = eta^2 [ -(t - t') + log((1 - t') / (1 - t)) ]. At t = 1 the integral diverges, and the paper's treatment is not
    known to us: there we integrate up to the middle of t' and 1 only, S = eta^2 [ log 2 - (1 - t')/2 ], which is
    positive for every t'.

    Args:
        noise_level: eta, 0.7.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        _check_level("SAGE.noise_level", self.noise_level, 0, 10)

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        half = (1 - t_next) / 2
        below, step = torch.where(t < 1, 1 - t, half), torch.where(t < 1, t - t_next, half)
        # log1p, because the logarithm is close to the step that is subtracted from it.
        variance = self.noise_level**2 * (torch.log1p(step / below) - step)
        variance = variance.clamp(min=0)  # rounding only: the integrand is non-negative
        return 1 - t_next, t_next - variance / (2 * t), variance.sqrt()


@dataclass(frozen=True)
class CPS(PathKernel):
    """Flow-CPS, coefficients-preserving sampling (arXiv 2509.05952): s = t' sin(eta pi/2).

    Args:
        noise_level: eta in [0, 1], 0.8 by default; 0 is the ODE and 1 the consistency kernel.
    """

    noise_level: float = 0.8

    def __post_init__(self) -> None:
        _check_level("CPS.noise_level", self.noise_level, 0, 1)

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        angle, width = self.noise_level * math.pi / 2, t_next + 0 * t
        return 1 - t_next, width * math.cos(angle), width * math.sin(angle)


@dataclass(frozen=True)
class DDIM(PathKernel):
    """DDIM with stochasticity eta (arXiv 2010.02502, eq. 12 and 16); eta = 1 is the DDPM posterior q(x_t' | x_t, x0).

    Args:
        eta: in [0, 1]; 1.0 as in DDPO.
    """

    eta: float = 1.0

    def __post_init__(self) -> None:
        _check_level("DDIM.eta", self.eta, 0, 1)

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        ratio2 = _posterior_ratio(t, t_next) ** 2
        s2 = (self.eta * t_next) ** 2 * (1 - ratio2).clamp(min=0)
        return 1 - t_next, (t_next**2 - s2).clamp(min=0).sqrt(), s2.sqrt()


@dataclass(frozen=True)
class Renoise(PathKernel):
    """Go deterministically below t' and re-noise forward to it (the "eta" sampler of RAVEN's code, arXiv 2605.15190).

    Args:
        eta: in [0, 1]; the deterministic part ends at e = (1 - eta) t'.
    """

    eta: float = 0.5

    def __post_init__(self) -> None:
        _check_level("Renoise.eta", self.eta, 0, 1)

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        end = (1 - self.eta) * t_next
        b = (1 - t_next) / (1 - end) * end
        return 1 - t_next, b + 0 * t, (t_next**2 - b**2).clamp(min=0).sqrt() + 0 * t


@dataclass(frozen=True)
class Consistency(PathKernel):
    """N(A(t') x0_hat, B(t')^2 I): the multi-step consistency sampler as a policy (CM-GRPO, arXiv 2605.15190)."""

    def rf_coefficients(self, t: Tensor, t_next: Tensor) -> Coefficients:
        return 1 - t_next, 0 * (t + t_next), t_next + 0 * t


def _posterior_ratio(t: Tensor, t_next: Tensor) -> Tensor:
    """q = t'(1-t) / (t(1-t')): 0 at t = 1 and at t' = 0."""
    return t_next * (1 - t) / (t * (1 - t_next))


def _frozen(t_next: Tensor, rho: Tensor) -> Coefficients:
    """The marginal-preserving kernel whose noise part contracts by rho."""
    return 1 - t_next, t_next * rho, t_next * (1 - rho**2).clamp(min=0).sqrt()


def _check_integrator(value: str) -> None:
    if value not in ("euler", "exact"):
        raise ValueError(f"integrator {value!r} is unknown; allowed are 'euler' (Euler-Maruyama) and 'exact'")


KERNELS: dict[str, type[PathKernel]] = {
    "euler": Euler,
    "flow_sde": FlowSDE,
    "dance_sde": DanceSDE,
    "sage": SAGE,
    "cps": CPS,
    "ddim": DDIM,
    "renoise": Renoise,
    "consistency": Consistency,
}
"""Every kernel there is; the tests of the design's invariants run over this table."""
