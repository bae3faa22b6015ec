"""Gaussian transitions with exact log-densities, and log-ratios that do not subtract big numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from genrl.diffusion.paths import expand_like

Reduction = Literal["mean", "sum"]
Number = float | Tensor


class DeterministicTransitionError(ValueError):
    """A density was asked of a step without noise."""


class NonFiniteError(FloatingPointError):
    """A mean or a log-probability is inf or NaN."""


@dataclass(frozen=True)
class GaussianTransition:
    """x' ~ N(mean, std^2 I), an isotropic Gaussian per sample.

    Args:
        mean: [B, ...] in float32 or float64 (half precision is raised to float32: a log-density over many elements
            overflows and loses the digits that a clip range needs).
        std: a number, [] or [B], or one for each of mean's leading dimensions ([B, T], ..., singletons broadcast); 0
            means a deterministic step.
        deterministic: whether std is 0 anywhere, when the caller knows it: looking at a std on a device would
            synchronise with it.

    Reductions: ``"sum"`` is the true log-density over the D elements of a sample, ``"mean"`` is that divided by D, as
    Flow-GRPO and its descendants use it. Sum = D x mean.
    """

    mean: Tensor
    std: Number
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        if self.mean.dtype in (torch.float16, torch.bfloat16):
            object.__setattr__(self, "mean", self.mean.float())

    @property
    def is_deterministic(self) -> bool:
        """Whether any sample's step has no noise (reads a tensor std unless ``deterministic`` was given)."""
        if self.deterministic is not None:
            return self.deterministic
        return bool((self.std == 0).any()) if isinstance(self.std, Tensor) else self.std == 0

    def _scale(self) -> Number:
        """std, shaped to broadcast against mean."""
        std = self.std
        return expand_like(std, self.mean) if isinstance(std, Tensor) else std

    def _per_sample_std(self, what: str) -> Number:
        if self.is_deterministic:
            raise DeterministicTransitionError(
                f"{what} of a deterministic step (std = 0) does not exist; use a kernel with noise (noise_level or eta "
                "above 0) and leave the step into t = 0 out of the trained steps"
            )
        return self.std

    def _shared_std(self, other: GaussianTransition, what: str) -> Number:
        std = self._per_sample_std(what)
        # Tensors are not compared, which would synchronise with their device.
        if not isinstance(std, Tensor) and not isinstance(other.std, Tensor) and std != other.std:
            raise ValueError(
                f"{what} of transitions with std {std:.6g} and {other.std:.6g} was asked for; the closed form needs "
                "one std, so take both from the same kernel, schedule and step"
            )
        return std

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw x' [B, ...]; the mean itself when std is 0."""
        if not isinstance(self.std, Tensor) and self.std == 0:
            return self.mean
        noise = torch.randn(self.mean.shape, generator=generator, device=self.mean.device, dtype=self.mean.dtype)
        return self.at(noise)

    def at(self, noise: Tensor) -> Tensor:
        """x' = mean + std * noise for given standard noise [B, ...]."""
        scale = self._scale()
        if isinstance(scale, Tensor):
            return torch.addcmul(self.mean, scale.to(self.mean), noise)
        return torch.add(self.mean, noise, alpha=scale)

    def log_prob(self, x: Tensor, reduction: Reduction = "mean", weight: Tensor | None = None) -> Tensor:
        """log N(x; mean, std^2 I) per sample, [B].

        Args:
            x: the drawn point [B, ...].
            reduction: see the class docstring.
            weight: optional weights of the elements, broadcastable to [B, ...]; the weighted value is a density only
                for weights of 1.

        Raises:
            DeterministicTransitionError: when std is 0.
        """
        std = self._per_sample_std("the log-probability")
        gap = x.to(self.mean.dtype) - self.mean
        log_std = std.to(gap).log() if isinstance(std, Tensor) else math.log(std)
        per_element = log_std + 0.5 * math.log(2 * math.pi)  # shaped like std
        if weight is None and (not isinstance(std, Tensor) or std.dim() < 2):
            # One number per sample needs no pass over its elements.
            constant = per_element * (1 if reduction == "mean" else math.prod(gap.shape[1:]))
        else:
            spread = expand_like(torch.as_tensor(per_element).to(gap), gap).expand_as(gap)
            constant = reduce_elements(spread, reduction, weight)
        return -0.5 * _over_variance(gap, gap, std, reduction, weight) - constant

    def log_ratio(
        self, old: GaussianTransition, x: Tensor, reduction: Reduction = "mean", weight: Tensor | None = None
    ) -> Tensor:
        """log N(x; self) - log N(x; old) per sample, [B], for transitions that share std.

        Computed as <x - (mean + mean_old)/2, mean - mean_old> / std^2, which is exactly 0 for equal means and has no
        normalisers to cancel.

        Raises:
            DeterministicTransitionError: when std is 0.
            ValueError: when the two stds are numbers and differ.
        """
        std = self._shared_std(old, "the log-ratio")
        shift = self.mean - old.mean
        centred = torch.add(x.to(self.mean.dtype), self.mean + old.mean, alpha=-0.5)
        return _over_variance(centred, shift, std, reduction, weight)

    def kl(self, other: GaussianTransition, reduction: Reduction = "mean", weight: Tensor | None = None) -> Tensor:
        """KL(self || other) = |mean - mean_other|^2 / (2 std^2) per sample, [B], for transitions that share std."""
        std = self._shared_std(other, "the KL divergence")
        shift = self.mean - other.mean
        return 0.5 * _over_variance(shift, shift, std, reduction, weight)


def _over_variance(u: Tensor, v: Tensor, std: Number, reduction: Reduction, weight: Tensor | None) -> Tensor:
    """<u, v> / std^2, with one pass over the elements when std is one number per sample."""
    if isinstance(std, Tensor) and std.dim() > 1:
        shaped = expand_like(std.to(u), u)
        return reduce_elements(u * v / (shaped * shaped), reduction, weight)
    inner = reduce_elements(u * v, reduction, weight)
    return inner / (std.to(inner) ** 2 if isinstance(std, Tensor) else std * std)


def reduce_elements(terms: Tensor, reduction: Reduction = "mean", weight: Tensor | None = None) -> Tensor:
    """Reduce [B, ...] to [B] over all but the first dimension, optionally weighted element by element.

    Raises:
        ValueError: for another reduction than ``"mean"`` or ``"sum"``, or a rank below 2.
    """
    if terms.dim() < 2:
        raise ValueError(f"latents of shape {tuple(terms.shape)} have nothing to reduce; pass [B, ...] of rank >= 2")
    if weight is not None:
        terms = terms * weight
    flat = terms.flatten(1)
    if reduction == "mean":
        return flat.mean(1)
    if reduction == "sum":
        return flat.sum(1)
    raise ValueError(f"reduction {reduction!r} is unknown; allowed are 'mean' (over elements) and 'sum'")
