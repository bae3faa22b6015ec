"""Divergences between Gaussian transitions that share a standard deviation, in closed form."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from genrl.diffusion import Reduction, reduce_elements


def expand(value: Tensor | float, like: Tensor) -> Tensor | float:
    """A number or [B] tensor, shaped to broadcast against ``like`` [B, ...], in its dtype and on its device."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(like)
    return value.reshape(-1, *(1,) * (like.dim() - 1)) if value.dim() == 1 else value


def gaussian_kl(
    mean: Tensor, other: Tensor, std: Tensor | float, reduction: Reduction = "mean", weight: Tensor | None = None
) -> Tensor:
    """KL(N(mean, std^2) || N(other, std^2)) = |mean - other|^2 / (2 std^2), [B] in float32.

    Args:
        mean, other: [B, ...] of rank 2 or more.
        std: a positive number or [B].
        reduction: ``"sum"`` is the KL of the D-dimensional Gaussians, ``"mean"`` that divided by D.
        weight: optional weights of the elements.

    Raises:
        ValueError: for a std that is a number and not positive.
    """
    if not isinstance(std, Tensor) and not std > 0:
        raise ValueError(
            f"the KL between transitions with std = {std} does not exist; std must be positive, so leave deterministic "
            "steps out"
        )
    shift = mean.float() - other.float()
    return reduce_elements(shift * shift / (2 * expand(std, shift) ** 2), reduction, weight)


def kl_penalty(
    mean: Tensor,
    reference: Tensor,
    std: Tensor | float,
    dt: Tensor | float,
    form: Literal["exact", "flow_grpo"] = "exact",
    reduction: Reduction = "mean",
) -> Tensor:
    """KL to a reference transition, [B].

    Args:
        mean, reference: [B, ...].
        std: s of the transition, sqrt(dt) included.
        dt: step size D = t - t' > 0.
        form: ``"exact"``, or ``"flow_grpo"``, which divides by 2 g^2 = 2 s^2 / D instead of 2 s^2 and so is D times
            the exact value (arXiv 2505.05470, official code).

    Raises:
        ValueError: for another form.
    """
    if form not in ("exact", "flow_grpo"):
        raise ValueError(f"kl_form {form!r} is unknown; allowed are 'exact' and 'flow_grpo'")
    exact = gaussian_kl(mean, reference, std, reduction)
    return exact if form == "exact" else exact * expand(dt, exact)


def ratio_ess(kl: Tensor) -> Tensor:
    """Effective share of the sample size under importance weights between two Gaussians: exp(-2 KL), KL summed."""
    return torch.exp(-2 * kl)
