"""Weights of the elements of a latent in the policy gradient: which parts of a sample its reward speaks about.

A part is called once a roll-out with the decoded media, and its weights w >= 0, of mean 1 for each sample, enter the
log-ratio of every step, ``(1/K) sum_k w_k (l_k - l_k^old)``. Sign and size of an update stay with the advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from genrl.algorithms.base import Rollout
from genrl.objectives.credit import chunk_weights
from genrl.prompts import Prompt

TOLERANCE = 1e-3  # by which the mean of a sample's weights may differ from 1


class TokenWeights(Protocol):
    """What the policy gradient asks for weights.

    A method ``configure(generator)`` is optional: it is called once before anything else and may refuse a generator.
    """

    def __call__(self, rollout: Rollout, media: Tensor, prompts: Sequence[Prompt], generator: Any) -> Tensor:
        """Weights [B, ...] that broadcast to ``rollout.x0``: detached, not negative, of mean 1 for each sample."""
        ...


def checked_weights(weights: Tensor, x0: Tensor, name: str) -> Tensor:
    """The weights, float32 on the device of the latents, if they are such.

    Raises:
        ValueError: they do not broadcast to x0 [B, ...], are negative or not finite, or a sample's mean is not 1.
    """
    fits = weights.dim() == x0.dim() and len(weights) == len(x0)
    fits = fits and all(have in (1, want) for have, want in zip(weights.shape[1:], x0.shape[1:], strict=True))
    if not fits:
        raise ValueError(
            f"{name} gave weights of shape {tuple(weights.shape)} for latents of shape {tuple(x0.shape)}; give the same "
            "number of dimensions, each as large as the latent's or 1"
        )
    weights = weights.detach().to(x0.device, torch.float32)
    if not bool((weights >= 0).all() and weights.isfinite().all()):  # NaN is not above 0 either
        raise ValueError(f"{name} gave weights from {weights.min():.3g} to {weights.max():.3g}; they must be 0 or more")
    means = weights.flatten(1).mean(1)
    worst = means[(means - 1).abs().argmax()]
    if abs(float(worst) - 1) > TOLERANCE:
        raise ValueError(
            f"{name} gave a sample weights of mean {worst:.4g}; divide them by their mean, which must be 1"
        )
    return weights


def latent_axes(generator: Any) -> str:
    """What the dimensions of a latent are: ``"CHW"``, ``"CFHW"`` or ``"FCHW"``.

    Raises:
        ValueError: the generator does not say, and its latents are not such (packed tokens).
    """
    shape = tuple(generator.latent_shape)
    axes = getattr(generator, "latent_axes", None) or {3: "CHW", 4: "CFHW"}.get(len(shape), "")
    if len(axes) != len(shape) or axes not in ("CHW", "CFHW", "FCHW"):
        raise ValueError(
            f"{type(generator).__name__} has latents of shape {shape}, which are no grid of frames, height and width that "
            "weights could be laid over (packed tokens have lost it); use a generator with latents CHW, CFHW or FCHW and "
            "the attribute latent_axes, or leave algorithm.token_weights out"
        )
    return axes


class ChunkWeights:
    """Weights of the chunks of a video that is generated chunk by chunk (RAVEN, arXiv 2605.15190).

    See :func:`genrl.objectives.credit.chunk_weights`: with a < 0 later chunks count more, since earlier ones are also
    trained through the history of those after them.

    Args:
        a: -1 is the published value; 0 is uniform.
        chunks: number of chunks of equal length, or the frames of each; by default the generator's attribute ``chunks``,
            else one chunk for each latent frame.
    """

    def __init__(self, a: float = -1.0, chunks: int | list[int] | None = None):
        self.a, self.chunks = a, chunks

    def configure(self, generator: Any) -> None:
        self._weights(generator)

    def _weights(self, generator: Any) -> Tensor:
        """[..., F, ...], a dimension of the latent's frames among ones."""
        axes, shape = latent_axes(generator), tuple(generator.latent_shape)
        if "F" not in axes:
            raise ValueError(
                f"{type(generator).__name__} has latents {axes}, without frames; ChunkWeights needs videos"
            )
        frames = shape[axes.index("F")]
        lengths = frames_of_chunks(self.chunks or getattr(generator, "chunks", None), frames)
        weights = chunk_weights([float(n) for n in lengths], self.a)
        weights = weights.repeat_interleave(torch.tensor(lengths))  # [F]
        return weights.reshape([frames if axis == "F" else 1 for axis in axes])

    def __call__(self, rollout: Rollout, media: Tensor, prompts: Sequence[Prompt], generator: Any) -> Tensor:
        weights = self._weights(generator)
        return weights.to(rollout.x0).expand(len(rollout), *weights.shape).clone()


def frames_of_chunks(chunks: Any, frames: int) -> list[int]:
    """Frames of each chunk, from their number, their lengths, or None for chunks of one frame.

    Raises:
        ValueError: they do not make up the video.
    """
    if isinstance(chunks, int) and chunks > 0 and frames % chunks == 0:
        return [frames // chunks] * chunks
    lengths = [1] * frames if chunks is None else [] if isinstance(chunks, int) else [int(n) for n in chunks]
    if sum(lengths) != frames or min(lengths, default=0) < 1:
        raise ValueError(
            f"chunks = {chunks!r} do not divide {frames} latent frames; give a divisor, or a list of lengths"
        )
    return lengths
