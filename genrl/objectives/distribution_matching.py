"""Distribution matching distillation (DMD, arXiv 2311.18828) as used for few-step video students, as pure functions.

Two networks look at a noised sample x_s of the student: the frozen teacher says x0_real, the clean sample that its
distribution would put there, and a critic that is trained on the student's own samples says x0_fake. Their difference
is the gradient of the KL divergence of the student's distribution from the teacher's, up to a positive factor, so that
the student's sample x0 is moved along ``x0_real - x0_fake``::

    norm       = mean | x0 - x0_real |                                   one detached number a sample
    regression = mean w ( x0 - sg( x0 + (x0_real - x0_fake) / norm ) )^2           (RAVEN, arXiv 2605.15190)
    linear     = mean w (x0_real - x0_fake) (x0_fake - x0) / norm                  (its code)

sg stops gradients and w are weights of mean 1. The linear form has exactly half the gradient of the regression. Means
are over the elements of a sample, where the paper writes a squared norm.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Form = Literal["regression", "linear"]
_LEAST_NORM = 1e-6  # of a sample that the teacher would not change at all


def dmd_norm(x0: Tensor, x0_real: Tensor) -> Tensor:
    """Mean over elements of |x0 - x0_real|, detached, [B]."""
    return (x0.detach().float() - x0_real.detach().float()).abs().flatten(1).mean(1).clamp(min=_LEAST_NORM)


def dmd_direction(x0: Tensor, x0_real: Tensor, x0_fake: Tensor) -> Tensor:
    """(x0_real - x0_fake) / norm [B, ...], detached: where samples are moved to lie where the teacher's lie."""
    norm = dmd_norm(x0, x0_real).reshape(-1, *(1,) * (x0.dim() - 1))
    return (x0_real.detach().float() - x0_fake.detach().float()) / norm


def dmd_loss(
    x0: Tensor, x0_real: Tensor, x0_fake: Tensor, weight: Tensor | None = None, form: Form = "regression"
) -> Tensor:
    """The loss [B] of a student's samples; see the module.

    Args:
        x0: [B, ...] what the student predicts, with gradient.
        x0_real, x0_fake: [B, ...] what teacher and critic predict from the same noised x0; used without gradient.
        weight: broadcastable to x0, of mean 1 over the elements of a sample; None for ones.
        form: ``"regression"``, or ``"linear"``, with half its gradient.

    Raises:
        ValueError: for another form, and for shapes that differ.
    """
    if not x0.shape == x0_real.shape == x0_fake.shape:
        raise ValueError(
            f"x0, x0_real and x0_fake have shapes {tuple(x0.shape)}, {tuple(x0_real.shape)}, {tuple(x0_fake.shape)}; "
            "all three must be equal"
        )
    direction = dmd_direction(x0, x0_real, x0_fake)
    if form == "regression":
        # x0 less its own value is exactly 0, where a direction added to a large x0 would be rounded away.
        value = (x0.float() - x0.detach().float() - direction).square()
    elif form == "linear":
        value = direction * (x0_fake.detach().float() - x0.float())
    else:
        raise ValueError(f"form = {form!r} is unknown; allowed are 'regression' and 'linear'")
    return (value if weight is None else weight * value).flatten(1).mean(1)


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Squared Frechet distance of two sets of features [N, D] and [M, D], each taken as a Gaussian, in float64.

    |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)); the trace of the root is the sum of the roots of the
    eigenvalues of C_a^(1/2) C_b C_a^(1/2), which are real.

    Raises:
        ValueError: for fewer than two rows, or another number of features.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ValueError(f"features of shapes {tuple(a.shape)} and {tuple(b.shape)}; give [N, D] and [M, D], N, M > 1")
    a, b = a.double(), b.double()
    ca, cb = torch.cov(a.T).reshape(a.shape[1], -1), torch.cov(b.T).reshape(a.shape[1], -1)
    values, vectors = torch.linalg.eigh(ca)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cb @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + ca.trace() + cb.trace() - 2 * cross)
