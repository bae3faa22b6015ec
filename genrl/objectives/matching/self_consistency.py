"""Flow maps learned from themselves: OFP's self-consistency and guidance, and self-distillation (iSD).

Both replace MeanFlow's sampled velocity in the target by a model's prediction, which has no sampling noise, and both
are also satisfied by degenerate maps (u = (x - c)/t sends everything to c): only together with flow matching at r = t
do they determine u. Notation and the callable u(x, t, r) are those of `genrl.objectives.matching.mean_flow`.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from genrl.diffusion.paths import expand_like
from genrl.objectives.matching.mean_flow import DIFFERENCE_STEP, AverageVelocity, Derivative, total_derivative

Contraction = Literal["quadratic", "linear", "constant"]
Interpolant = Literal["linear", "trigonometric"]


def contraction(progress: float, schedule: Contraction = "quadratic") -> float:
    """rho in [0, 1], the share of an interval in which OFP's intermediate time lies.

    ``"quadratic"`` (1 - progress)^2 and ``"linear"`` 1 - progress start with targets that lean on the data (small
    influence of the teacher, large bias) and end with local ones; ``"constant"`` stays at 1.

    Raises:
        ValueError: for another schedule or a progress outside [0, 1].
    """
    if schedule not in get_args(Contraction):
        raise ValueError(f"schedule = {schedule!r} is unknown; allowed are {list(get_args(Contraction))}")
    if not 0 <= progress <= 1:
        raise ValueError(f"progress = {progress} must lie in [0, 1]: the share of training that is done")
    left = 1 - progress
    return {"quadratic": left**2, "linear": left, "constant": 1.0}[schedule]


def contracted_time(t: Tensor, r: Tensor, rho: float, p: Tensor, minimum: float = 0.01) -> Tensor:
    """m ~ U[t - (t-r) rho, t], but at least `minimum` below t and never below r, [B].

    At m = t the target is the teacher's own prediction and teaches nothing, hence the minimum.

    Args:
        t, r: [B], r < t. rho: in [0, 1]. p: uniform numbers [B]. minimum: of t - m, > 0.

    Raises:
        ValueError: for a minimum that is not positive, or a rho outside [0, 1].
    """
    if not minimum > 0:
        raise ValueError(f"minimum = {minimum} must be positive: at m = t the target repeats the teacher; try 0.01")
    if not 0 <= rho <= 1:
        raise ValueError(f"rho = {rho} must lie in [0, 1], see `contraction`")
    return torch.maximum(t - ((t - r) * rho * p).clamp(min=minimum), r)


def self_consistency_target(
    teacher: AverageVelocity, x_t: Tensor, x_m: Tensor, t: Tensor, m: Tensor, r: Tensor
) -> Tensor:
    """(x_t - x_r) / (t-r) with x_r = x_m - (m-r) teacher(x_m, m, r), [B, ...] and detached (OFP, arXiv 2603.12480).

    With x_m = (1-m) x0 + m eps of the same x0 and eps as x_t, its mean differs from the average velocity by
    O((t-m)^2), even with an exact teacher; with x_m on the path through x_t it is exact for every m.

    Args:
        teacher: u of the moving average. x_t, x_m: [B, ...]. t, m, r: [B], r <= m <= t and r < t.
    """
    with torch.no_grad():
        # Not as a difference to x_r, which would lose digits on short intervals.
        moved = (x_t - x_m) + expand_like(m - r, x_m) * teacher(x_m, m, r).to(x_m.dtype)
        return moved / expand_like(t - r, moved)


def self_guidance(
    conditional: AverageVelocity, unconditional: AverageVelocity, x0_hat: Tensor, t: Tensor, eps: Tensor
) -> Tensor:
    """Delta = u(x, t, t | s) - u(x, t, t | 0) at x = (1-t) x0_hat + t eps, [B, ...] and detached (OFP).

    Adding Delta to the network's u moves its sample x0_hat along t/(1-t) times the gradient of log p(s | x): towards
    what the condition makes likely, and beyond when too strong, which costs modes.

    Args:
        conditional, unconditional: the teacher with and without condition.
        x0_hat: one-step samples [B, ...]. t: [B] in (0, 1). eps: fresh noise [B, ...].
    """
    with torch.no_grad():
        x0_hat = x0_hat.detach()
        x = torch.lerp(x0_hat, eps, expand_like(t, x0_hat))
        return conditional(x, t, t) - unconditional(x, t, t)


def self_distillation_target(
    u: AverageVelocity,
    x: Tensor,
    t: Tensor,
    r: Tensor,
    interpolant: Interpolant = "linear",
    derivative: Derivative = "jvp",
    step: float = DIFFERENCE_STEP,
) -> Tensor:
    """What the identity of u says about u(x, t, r) when its own velocity is the true one, [B, ...] and detached.

    With F = u(x,t,r), v = u(x,t,t) and dF the derivative along the path of v (iSD, arXiv 2601.22679)::

        linear          v - (t-r) dF
        trigonometric   F + cos(d) (v - F) - sin(d) (x + dF) ,   d = (t-r) pi/2

    In the trigonometric form x_t = cos(t pi/2) x0 + sin(t pi/2) eps, velocities and dF are per radian, and the flow
    map is cos(d) x - sin(d) F (`trigonometric_step`). v carries no sampling noise, unlike MeanFlow's.

    Args:
        u: the network. x: [B, ...]. t, r: [B], r <= t. derivative, step: see `total_derivative`.

    Raises:
        ValueError: for another interpolant or derivative.
    """
    if interpolant not in get_args(Interpolant):
        raise ValueError(f"interpolant = {interpolant!r} is unknown; allowed are {list(get_args(Interpolant))}")
    with torch.no_grad():
        v = u(x, t, t).to(x.dtype)
    if interpolant == "linear":
        return v - expand_like(t - r, v) * total_derivative(u, x, t, r, v, derivative, step)[1]
    value, slope = total_derivative(u, x, t, r, v, derivative, step, speed=2 / math.pi)
    angle = expand_like((t - r) * (math.pi / 2), value)
    return value + angle.cos() * (v - value) - angle.sin() * (x.detach() + slope)


def trigonometric_step(u: Tensor, x: Tensor, t: Tensor, r: Tensor) -> Tensor:
    """cos(d) x - sin(d) u with d = (t-r) pi/2, [B, ...]: the flow map of the trigonometric interpolant.

    Args:
        u: u(x, t, r), [B, ...]. x: [B, ...]. t, r: [B].
    """
    angle = expand_like((t - r) * (math.pi / 2), x)
    return angle.cos() * x - angle.sin() * u
