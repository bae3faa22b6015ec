"""MeanFlow: average velocities learned from the identity that ties them to the velocity.

    u(x, r, t) = 1/(t-r) int_r^t v(x_tau, tau) dtau         average velocity of the path through (x, t)
    u = v - (t-r) du/dt ,  du/dt = v . grad_x u + d_t u      MeanFlow identity (arXiv 2505.13447)

so a network u is regressed on v - (t-r) sg[du/dt], and x - (t-r) u is where the path is at r: one step from noise to
data is x1 - u(x1, 0, 1).

| paper | here |
|---|---|
| u_theta(z_t, r, t) | `u(x, t, r)`, a callable with the condition bound |
| e - x | `v` = eps - x0 on x_t = (1-t) x0 + t eps |
| omega, kappa | `scale`, `mix` of the guided velocity |

With v = eps - x0 of the sample, also in the tangent, the loss at the true u is S_r^2 s0^2 / S_t^4 per coordinate for
Gaussian data (S_t^2 the variance of x_t), not 0: such a loss does not tell how good u is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from genrl.diffusion.paths import expand_like
from genrl.objectives.matching.forward_mode import directional_derivative

AverageVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""u(x [B, ...], t [B], r [B]) -> [B, ...], with r <= t and any condition bound."""
Derivative = Literal["jvp", "difference"]
DIFFERENCE_STEP = 0.005


def check_derivative(derivative: str, step: float) -> None:
    """Refuse an unknown way to differentiate, and a step outside (0, 0.1].

    Raises:
        ValueError: naming the value and what to use.
    """
    if derivative not in get_args(Derivative):
        raise ValueError(f"derivative = {derivative!r} is unknown; allowed are 'jvp' and 'difference'")
    if not 0 < step <= 0.1:
        raise ValueError(f"step = {step} of the central difference must lie in (0, 0.1]; 0.005 is the published value")


def total_derivative(
    u: AverageVelocity,
    x: Tensor,
    t: Tensor,
    r: Tensor,
    v: Tensor,
    derivative: Derivative = "jvp",
    step: float = DIFFERENCE_STEP,
    speed: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """u and its derivative v . grad_x u + speed d_t u along a path, both [B, ...] and detached.

    Args:
        u: average velocity; differentiated in x and t, r stays.
        x: [B, ...]. t, r: [B]. v: direction in x, [B, ...].
        derivative: ``"jvp"``, exact, by forward mode, two to five forward passes; or ``"difference"``, two forward
            passes at t -+ step, with an error of O(step^2). Both run in float32 outside autocast.
        step: of the difference (0.005: arXiv 2601.22679).
        speed: dt per unit of the path's own clock.

    Raises:
        ValueError: for another derivative or step, or a network that forward mode cannot differentiate.
    """
    check_derivative(derivative, step)
    if derivative == "jvp":
        return directional_derivative(lambda x, t: u(x, t, r), [x, t], [v, torch.full_like(t, speed)])
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x, v = (a if a.dtype == torch.float64 else a.float() for a in (x, v))
        ahead, behind = (u(x + h * v, t + h * speed, r).detach() for h in (step, -step))
    # Their mean is u up to O(step^2), so the difference needs no third call.
    return (ahead + behind) / 2, (ahead - behind) / (2 * step)


def mean_flow_target(
    u: AverageVelocity,
    x: Tensor,
    t: Tensor,
    r: Tensor,
    v: Tensor,
    tangent: Tensor | None = None,
    derivative: Derivative = "jvp",
    step: float = DIFFERENCE_STEP,
) -> Tensor:
    """v - (t-r) du/dt, [B, ...] and detached: what u(x, t, r) is regressed on.

    Rows with r = t have the target v and need no derivative: pass only the others, for cost.

    Args:
        u: the network.
        x, v: [B, ...], v = eps - x0 or a guided velocity (`guided_velocity`). t, r: [B], r <= t.
        tangent: velocity along which u is differentiated; v by default, as in MeanFlow. The model's own u(x, t, t)
            takes the noise of v out of the derivative and has the same solution.
        derivative, step: see `total_derivative`.
    """
    _, du = total_derivative(u, x, t, r, v if tangent is None else tangent, derivative, step)
    return v.detach() - expand_like(t - r, du) * du


def guided_velocity(
    v: Tensor, conditional: Tensor | None, unconditional: Tensor | None, scale: float, mix: float = 0.0
) -> Tensor:
    """scale v + mix u(x,t,t|s) + (1 - scale - mix) u(x,t,t|0), [B, ...] and detached (MeanFlow's guidance).

    Where the network matches it, u(x,t,t|s) = g v* + (1-g) u(x,t,t|0) with g = scale / (1 - mix): guidance of scale g
    is learned, and sampling stays one call. MP1 as published passes its conditional branch as the unconditional one,
    which guides nothing: the solution is v* for every scale, and the noise of the target grows by scale^2.

    Args:
        v: eps - x0. conditional, unconditional: the network at r = t with and without the condition, each None where
            its factor is 0.
        scale: w. 1 with mix 0 is no guidance. mix: kappa, in [0, 1).

    Raises:
        ValueError: for a scale that is not positive, a mix outside [0, 1), or a missing branch.
    """
    if not scale > 0:
        raise ValueError(f"scale = {scale} must be positive, or the target ignores the data; 1 is no guidance")
    if not 0 <= mix < 1:
        raise ValueError(f"mix = {mix} must lie in [0, 1); the guidance that results is scale / (1 - mix)")
    guided = scale * v
    rest = 1 - scale - mix
    for factor, branch, name in ((mix, conditional, "conditional"), (rest, unconditional, "unconditional")):
        if factor != 0:
            if branch is None:
                raise ValueError(f"scale = {scale} and mix = {mix} weigh the {name} branch by {factor}; pass it")
            guided = guided + factor * branch
    return guided.detach()


def adaptive_loss(delta: Tensor, power: float = 0.5, eps: float = 1e-3) -> Tensor:
    """delta / sg[(delta + eps)^power], like delta: rows with large errors weigh less.

    Power 0.5 (MP1) makes the gradient in the RMS error at most 2, power 1 is scale-free; 0 leaves delta. py-meanflow
    uses 0.75 on errors that are summed, not averaged, over dimensions; iSD power 1 and eps 0.01.

    Args:
        delta: squared errors >= 0, usually [B]. power: >= 0. eps: > 0.

    Raises:
        ValueError: for a negative power or an eps that is not positive.
    """
    if power < 0:
        raise ValueError(f"power = {power} must not be negative; 0 switches the weighting off, 0.5 is MP1's")
    if not eps > 0:
        raise ValueError(f"eps = {eps} must be positive, or errors of 0 have no weight; 1e-3 is the published value")
    return delta / (delta.detach() + eps) ** power


def dispersive_loss(features: Tensor | Iterable[Tensor], temperature: float = 1.0) -> Tensor:
    """log mean_ij exp(-|z_i - z_j|^2 / (max |z_i - z_j|^2 temperature)), a scalar in [-1/temperature, 0].

    Pushes hidden representations of different samples apart (arXiv 2506.09027, in MP1's scale-free form, summed over
    feature maps). The mean includes i = j, and is 0 exactly when all z are the same, then without a gradient.

    Args:
        features: a map [B, ...] or several. temperature: > 0.

    Raises:
        ValueError: for a temperature that is not positive, or no map at all.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be positive; 1 is MP1's value")
    maps = [features] if isinstance(features, Tensor) else list(features)
    if not maps:
        raise ValueError("the dispersive loss needs at least one feature map; the network returned none")
    return torch.stack([_dispersion(z.float().flatten(1), temperature) for z in maps]).sum()


def _dispersion(z: Tensor, temperature: float) -> Tensor:
    z = z - z[:1].detach()  # equal rows become exactly 0
    z = z - z.mean(0)  # keeps the products below small beside the distances
    products = z @ z.T
    norms = products.diagonal()
    distances = (norms[:, None] + norms[None] - 2 * products).clamp(min=0)  # [B, B]
    scaled = distances / distances.max().clamp(min=torch.finfo(z.dtype).tiny ** 0.5)
    return (-scaled / temperature).exp().mean().log()


def flow_map_sample(u: AverageVelocity, x: Tensor, times: Sequence[float]) -> Tensor:
    """x <- x - (t - r) u(x, t, r) over the pairs of neighbouring times, [B, ...].

    Args:
        u: average velocity. x: the start, at times[0]. times: falling, at least two; [1, 0] is a single step.

    Raises:
        ValueError: for fewer than two times, or times that do not fall.
    """
    if len(times) < 2 or any(r >= t for t, r in pairwise(times)):
        raise ValueError(f"times = {list(times)} must be at least two and fall, as in [1, 0] for one step")
    for t, r in pairwise(times):
        start, end = (x.new_full((1,), value).expand(x.shape[0]) for value in (t, r))
        x = x - (t - r) * u(x, start, end)
    return x
