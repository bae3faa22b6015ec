"""Consistency models: a function f(y, sigma) that maps every noised sample to the clean end of its path.

On the variance-exploding path y = x0 + sigma z (arXiv 2303.01469), with f(y, sigma_min) = y built in::

    f(y, sigma) = c_skip(sigma) y + c_out(sigma) F(c_in(sigma) y, sigma)

Training compares f at two levels of one path: the upper one is trained, the lower one is its target. With N levels the
fixed point on Gaussian data is biased by O(1/N); fewer levels learn faster. The variants of the field differ in levels
(`genrl.objectives.matching.noise_levels`), in the distance and in how the lower point is made, all here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from genrl.objectives.matching.noise_levels import SIGMA_MIN

SIGMA_DATA = 0.5

LevelFunction = Callable[[Tensor, Tensor], Tensor]
"""f(y [B, ...], sigma [B]) -> [B, ...]"""


def boundary_coefficients(
    sigma: Tensor, sigma_data: float = SIGMA_DATA, sigma_min: float = SIGMA_MIN
) -> tuple[Tensor, Tensor, Tensor]:
    """(c_skip, c_out, c_in) of f = c_skip y + c_out F(c_in y), like sigma.

    With s = sigma_data::

        c_skip = s^2 / ((sigma - sigma_min)^2 + s^2)     c_out = s (sigma - sigma_min) / sqrt(sigma^2 + s^2)
        c_in = 1 / sqrt(sigma^2 + s^2)

    At sigma_min: c_skip = 1 and c_out = 0. c_in gives the network inputs of variance 1 at every level; the published
    consistency policy (arXiv 2309.16984) leaves it out.
    """
    root = (sigma.square() + sigma_data**2).sqrt()
    above = sigma - sigma_min
    return sigma_data**2 / (above.square() + sigma_data**2), sigma_data * above / root, 1 / root


def flow_boundary_coefficients(
    t: Tensor, sigma_data: float = SIGMA_DATA, sigma_min: float = SIGMA_MIN
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on the rectified-flow path x_t = (1 - t) x0 + t eps: f = c_skip x_t + c_out F(c_in x_t), like t.

    Since y = x_t / (1 - t) at sigma = t / (1 - t), c_skip and c_in are divided by 1 - t. Written so that t = 1, pure
    noise, is an ordinary point: c_skip = 0, c_out = sigma_data, c_in = 1.
    """
    signal = 1 - t
    root = (t.square() + (sigma_data * signal).square()).sqrt()
    above = t - sigma_min * signal
    c_skip = sigma_data**2 * signal / (above.square() + (sigma_data * signal).square())
    return c_skip, sigma_data * above / root, 1 / root


# ---- distances --------------------------------------------------------------------------------------------


def pseudo_huber(x: Tensor, y: Tensor, c: float | None = None) -> Tensor:
    """sqrt(|x-y|^2 + c^2) - c of whole samples, [B] (improved consistency training, arXiv 2310.14189).

    |x-y|^2 / (2c) for small and |x-y| - c for large distances. The norm runs over all elements of a sample; public
    code that applies the formula to single elements has another loss, as c = 0.00054 sqrt(d) shows.

    Args:
        x, y: [B, ...].
        c: > 0; 0.00054 sqrt(d) by default.
    """
    square = (x - y).flatten(1).square().sum(1)
    c = 0.00054 * math.sqrt(x[0].numel()) if c is None else c
    return square / ((square + c**2).sqrt() + c)  # no cancellation where c is large


def cauchy(x: Tensor, y: Tensor, c: float) -> Tensor:
    """log(1 + |x-y|^2 / (2 c^2)), [B] (improved latent consistency training, arXiv 2502.01441).

    The influence r / (c^2 + r^2/2) of a residual r peaks at sqrt(2) c and falls as 2/r: outliers hardly count.
    """
    return ((x - y).flatten(1).square().sum(1) / (2 * c**2)).log1p()


def cauchy_scale(n: int, dim: int | None = None) -> float:
    """c of :func:`cauchy` for N noise levels: exp(-1.18 ln(N - 1) - 0.72), decreasing as levels get closer.

    The fit is recalled from the paper's figure for latents of 4 x 32 x 32; residuals grow as the root of the number of
    elements, so `dim` rescales it by sqrt(dim / 4096).
    """
    c = math.exp(-1.18 * math.log(n - 1) - 0.72)
    return c if dim is None else c * math.sqrt(dim / 4096)


# ---- the lower point --------------------------------------------------------------------------------------


def posterior_mean(
    y: Tensor,
    sigma: Tensor,
    references: Tensor,
    log_weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """E[x0 | y] over a set of references, [B, ...]: the score identity of stable consistency tuning (2410.18958).

        sum_j w_ij x_j ,   w_i = softmax_j( -|y_i - x_j|^2 / (2 sigma_i^2) + log_weights_ij )

    The set must contain the sample that made y_i, or the estimate is wrong at small levels. With that sample alone the
    result is the sample itself, which is ordinary consistency training. In a conditional model the references of a row
    must share its condition: `log_weights` says how near they are (-inf: not at all).

    Args:
        y: [B, ...]. sigma: [B]. references: [R, ...].
        log_weights: [B, R].
        mask: [B, ...] in {0, 1}: elements of y that the distance counts.
    """
    flat, others = y.flatten(1), references.flatten(1)
    if mask is None:  # not by matrix products, whose rounding is large next to small sigma^2
        square = torch.cdist(flat, others, compute_mode="donot_use_mm_for_euclid_dist").square()  # [B, R]
    else:
        square = ((flat[:, None] - others) * mask.flatten(1)[:, None]).square().sum(2)
    logits = -square / (2 * sigma[:, None].square())
    if log_weights is not None:
        logits = logits + log_weights
    return (logits.softmax(1) @ others).reshape(y.shape)


def successor(y: Tensor, sigma: Tensor, r: Tensor, x0_hat: Tensor) -> Tensor:
    """The point at level r on the straight line from y to x0_hat: y + (r - sigma) (y - x0_hat) / sigma, [B, ...].

    With x0_hat = x0 this is x0 + r z, the sampled successor. With x0_hat = E[x0 | y] it is the step of the
    probability-flow ODE: the same mean, and no variance.
    """
    return y + expand((r - sigma) / sigma, y) * (y - x0_hat)


def expand(value: Tensor, x: Tensor) -> Tensor:
    """[B] -> [B, 1, ...] for products with x."""
    return value.reshape(-1, *(1,) * (x.dim() - 1))


# ---- sampling ---------------------------------------------------------------------------------------------


def consistency_sample(
    f: LevelFunction,
    y: Tensor,
    levels: Sequence[float],
    noise: Callable[[int, tuple[int, ...]], Tensor],
    sigma_min: float = SIGMA_MIN,
) -> Tensor:
    """Multistep sampling: x = f(y, s_1); for every further level s: x <- f(x + sqrt(s^2 - sigma_min^2) z, s).

    Differentiable from end to end, so that a critic's gradient may flow through it.

    Args:
        f: consistency function.
        y: noised start [B, ...] at levels[0]; s_1 times standard noise by default.
        levels: descending, see `genrl.objectives.matching.noise_levels.sampling_levels`.
        noise: noise(step, shape) -> standard normal, step 0 for the second level.
    """

    def at(level: float) -> Tensor:
        return y.new_full((y.shape[0],), level)

    x = f(y, at(levels[0]))
    for step, level in enumerate(levels[1:]):
        z = noise(step, tuple(x.shape)).to(x)
        x = f(x + math.sqrt(max(level**2 - sigma_min**2, 0.0)) * z, at(level))
    return x
