"""Homing: bad samples are not pushed away but led to good ones (DHO / Flow3D-Pro, arXiv 2610.01233).

The abstract gives the idea: every negative gets a *distinct* positive by a minimum-cost matching (Hungarian algorithm),
and its trajectory is redirected by a corrective velocity that knows the remaining time. **The formulas here are our
derivation of that description**; the paper's own were not at hand.

With x_t = (1 - t) x- + t eps, the constant velocity that carries x_t to x+ in the time t that is left is::

    v* = (x_t - x+) / t
       = (eps - x-) + (x- - x+) / t                    own velocity + corrective velocity
       = (eps - x+) + ((1 - t) / t) (x- - x+)          the target's velocity + what is left of the way

The corrective velocity is a displacement over the remaining time. It diverges for t -> 0, hence ``1 / max(t, t_clamp)``
in velocity space; a strength below 1 ends at (1 - strength) x- + strength x+. The same regression in data space,
``|| x0_hat - x+ ||^2 = t^2 || v - v* ||^2``, has no such term. On other paths, where x0_hat = p x + q v, |q| takes the
place of t.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from genrl.diffusion.paths import Path, RectifiedFlow, expand_like

Space = Literal["x0", "velocity"]


def split(advantage: Tensor, dead_band: float = 0.0, top: int | None = None) -> Tensor:
    """Which samples of a group are positive (1), negative (-1) or unused (0); int64 [..., G].

    Args:
        advantage: [..., G]; NaN is unused.
        dead_band: samples with |A| <= dead_band are unused; an advantage of 0 always is.
        top: instead of all, the `top` best and the `top` worst of those. Of equal ones the earlier is the worse.

    Raises:
        ValueError: a negative dead band, or groups of fewer than 2 top samples.
    """
    if not dead_band >= 0:
        raise ValueError(f"dead_band = {dead_band} must not be negative; 0 uses every sample with an advantage")
    size = advantage.shape[-1]
    known = ~torch.isnan(advantage)
    filled = torch.where(known, advantage, torch.zeros_like(advantage))
    sign = torch.where(filled.abs() > dead_band, filled.sign(), torch.zeros_like(filled)).long()
    if top is None:
        return sign
    if not 1 <= top <= size // 2:
        raise ValueError(f"top = {top} best and {top} worst do not fit groups of {size}; use 1 to {max(size // 2, 1)}")
    rank = filled.argsort(dim=-1, stable=True).argsort(dim=-1)  # negatives first, positives last
    return torch.where((rank < top) & (sign < 0) | (rank >= size - top) & (sign > 0), sign, torch.zeros_like(sign))


def without_surplus(sign: Tensor, advantage: Tensor) -> Tensor:
    """The signs with only the |P| worst negatives where there are more than |P|, so that each can have its own target.

    Args:
        sign: of :func:`split`, [..., G].
        advantage: [..., G].
    """
    positives = (sign > 0).sum(-1, keepdim=True)
    last = torch.where(sign < 0, advantage, torch.full_like(advantage, torch.inf))
    rank = last.argsort(dim=-1, stable=True).argsort(dim=-1)
    return torch.where((sign < 0) & (rank >= positives), torch.zeros_like(sign), sign)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Mean over elements of (a_i - b_j)^2, float64 [n, m], for a [n, ...] and b [m, ...]."""
    a, b = a.detach().flatten(1).double(), b.detach().flatten(1).double()
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square() / a.shape[1]


def chamfer_distances(a: Tensor, b: Tensor) -> Tensor:
    """Set distance of sets of K vectors, float64 [n, m], for a [n, K, C] and b [m, L, C].

    The mean squared distance of a vector to the nearest of the other set, in both directions, over C. It does not
    depend on the order of the vectors, as the latents of a vector set should not.

    Raises:
        ValueError: for latents that are no sets of vectors.
    """
    if a.dim() != 3 or b.dim() != 3 or a.shape[2] != b.shape[2]:
        raise ValueError(
            f"the chamfer distance needs sets of vectors [B, K, C]; got {tuple(a.shape)} and {tuple(b.shape)}; use "
            "distance: l2, or features that return such sets"
        )
    a, b = a.detach().double(), b.detach().double()
    rows = []
    for one in a:
        apart = torch.cdist(one[None], b, compute_mode="donot_use_mm_for_euclid_dist").square()  # [m, K, L]
        rows.append(apart.amin(2).mean(1) + apart.amin(1).mean(1))
    return torch.stack(rows) / a.shape[2]


DISTANCES = {"l2": squared_distances, "chamfer": chamfer_distances}


def match(cost: Tensor, capacity: int = 1) -> Tensor:
    """The positive of every negative at the least total cost, int64 [n].

    With ``capacity`` 1 no positive is taken twice (``scipy.optimize.linear_sum_assignment``, the Hungarian problem).

    Args:
        cost: [n, m], n negatives by m positives.
        capacity: how many negatives a positive can take.

    Raises:
        ValueError: more negatives than places, or a cost that is not finite.
    """
    from scipy.optimize import linear_sum_assignment

    n, m = cost.shape
    if n > m * capacity:
        raise ValueError(
            f"{n} negatives do not fit {m} positives of capacity {capacity}; leave some out, or use the capacity "
            f"{-(-n // max(m, 1))}"
        )
    if not bool(torch.isfinite(cost).all()):
        raise ValueError("the cost of a pair is not finite; check the latents or the feature map of the matching")
    table = np.asarray(cost.detach().double().cpu()).repeat(capacity, axis=1)
    _, columns = linear_sum_assignment(table)
    return torch.as_tensor(columns // capacity, device=cost.device)


def remaining(t: Tensor, path: Path | None = None) -> Tensor:
    """|q| of x0_hat = p x + q v, [B]: the time that is left, which on the straight path is t."""
    path = RectifiedFlow() if path is None else path
    return path.prediction_coefficients(t)[0][1].abs()


def corrective_velocity(
    x0: Tensor, target: Tensor, t: Tensor, t_clamp: float = 0.05, path: Path | None = None
) -> Tensor:
    """(x0 - target) / max(t, t_clamp), [B, ...]: what is added to a sample's own velocity to reach the target.

    Args:
        x0: samples [B, ...]. target: where they are led, [B, ...]. t: times [B].
        t_clamp: remaining time below which the velocity no longer grows (.05, our choice).
        path: of the velocity; rectified flow by default.
    """
    left = remaining(t, path).clamp(min=t_clamp)
    return (x0 - target) / expand_like(left, x0)


def homing_velocity(
    x0: Tensor,
    target: Tensor,
    eps: Tensor,
    t: Tensor,
    strength: float = 1.0,
    t_clamp: float = 0.05,
    path: Path | None = None,
) -> Tensor:
    """v = own velocity + strength x corrective velocity, [B, ...]; detached.

    Where target = x0, or with strength 0, it is the flow-matching target of the sample itself.
    """
    path = RectifiedFlow() if path is None else path
    own = path.velocity(x0, eps, t)
    return (own + strength * corrective_velocity(x0, target, t, t_clamp, path)).detach()


def endpoint(x0: Tensor, target: Tensor, strength: float = 1.0) -> Tensor:
    """(1 - strength) x0 + strength target, where the homing velocity ends."""
    return x0 + strength * (target - x0)


def homing_loss(
    v: Tensor,
    x_t: Tensor,
    t: Tensor,
    x0: Tensor,
    target: Tensor,
    eps: Tensor,
    strength: float = 1.0,
    space: Space = "x0",
    t_clamp: float = 0.05,
    path: Path | None = None,
) -> Tensor:
    """Regression of a sample on its target, mean over elements, [B].

    Args:
        v: velocity at x_t with gradient, [B, ...].
        x_t: noised samples [B, ...], of x0 and eps at t [B].
        x0: the samples. target: where each is led; x0 itself for positives.
        eps: the noise.
        strength: in [0, 1].
        space: ``"x0"``, || x0_hat - endpoint ||^2, or ``"velocity"``, || v - v* ||^2 with the clamp.
        t_clamp: in velocity space only.
        path: of the velocity; rectified flow by default.

    Raises:
        ValueError: for another space.
    """
    path = RectifiedFlow() if path is None else path
    if space == "x0":
        error = path.x0_eps(x_t, v, t)[0] - endpoint(x0, target, strength)
    elif space == "velocity":
        error = v - homing_velocity(x0, target, eps, t, strength, t_clamp, path)
    else:
        raise ValueError(f"space = {space!r} is unknown; allowed are 'x0' and 'velocity'")
    return error.square().flatten(1).mean(1)
