"""Losses that match a velocity on noised samples."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from genrl.diffusion.paths import Path, RectifiedFlow


def flow_matching_loss(v: Tensor, x0: Tensor, eps: Tensor) -> Tensor:
    """Mean over elements of (v - (eps - x0))^2, [B] (Lipman et al. 2022, rectified-flow path)."""
    return (v.float() - (eps - x0).float()).square().flatten(1).mean(1)


def optimality(advantage: Tensor, a_max: float = 5.0) -> Tensor:
    """r = clip(A / (2 A_max) + 1/2, 0, 1): how far a sample counts as a positive one (arXiv 2509.16117)."""
    return (advantage / (2 * a_max) + 0.5).clamp(0, 1)


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    x_t: Tensor,
    t: Tensor,
    x0: Tensor,
    r: Tensor,
    beta: float = 1.0,
    form: Literal["x0", "velocity"] = "x0",
    path: Path | None = None,
) -> Tensor:
    """DiffusionNFT's loss (arXiv 2509.16117), [B].

    With v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v::

        velocity:  r |v+ - v*|^2 + (1 - r) |v- - v*|^2 ,   v* the velocity from x_t to x0
        x0:        r |x+ - x0|^2 / (w+ beta) + (1 - r) |x- - x0|^2 / (w- beta) ,   w = sg(mean |x - x0|)

    where x+ and x- are the predictions of x0 that v+ and v- make. All norms are means over elements.

    Args:
        v, v_old: current and old velocity at x_t, [B, ...]; only v carries a gradient.
        x_t: noised samples [B, ...]. t: times [B]. x0: the samples [B, ...].
        r: optimality in [0, 1], [B].
        beta: strength of the implicit policies, > 0.
        form: ``"x0"`` as in the official code, or ``"velocity"`` as in the paper.
        path: of the velocity; rectified flow by default.

    Raises:
        ValueError: for another form, or a beta that is not positive.
    """
    if not beta > 0:
        raise ValueError(f"beta = {beta} must be positive; 1.0 is the published value")
    if form not in ("x0", "velocity"):
        raise ValueError(f"form {form!r} is unknown; allowed are 'x0' and 'velocity'")
    path = RectifiedFlow() if path is None else path
    v, v_old = v.float(), v_old.detach().float()
    positive = beta * v + (1 - beta) * v_old
    negative = (1 + beta) * v_old - beta * v
    x_positive, x_negative = (path.x0_eps(x_t, u, t)[0] for u in (positive, negative))
    if form == "x0":
        plus, minus = (_scaled_error(x, x0) / beta for x in (x_positive, x_negative))
    else:
        # On a path that is linear in v, v* is the v whose prediction is x0: v* = v + (x0 - x_hat) / q. Near t = 0,
        # where q vanishes, x_t no longer tells v* from rounding; the floor fades those samples out.
        q = path.prediction_coefficients(t)[0][1].abs().clamp(min=1e-4).reshape(-1, *(1,) * (x0.dim() - 1))
        plus, minus = (((x - x0) / q).square().flatten(1).mean(1) for x in (x_positive, x_negative))
    return r * plus + (1 - r) * minus


def _scaled_error(x: Tensor, x0: Tensor) -> Tensor:
    """Squared error over its own detached mean absolute error, [B]."""
    error = (x - x0).flatten(1)
    return error.square().mean(1) / error.detach().abs().mean(1).clamp(min=1e-5)
