"""Weights of the elements of a latent in the policy gradient: which parts of a sample its reward speaks about.

A part is called once a roll-out with the decoded media, and its weights w >= 0, of mean 1 for each sample, enter the
log-ratio of every step, ``(1/K) sum_k w_k (l_k - l_k^old)``. Sign and size of an update stay with the advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from genrl.algorithms.base import Rollout, chunked
from genrl.objectives.credit import (
    Combination,
    check_settings,
    chunk_weights,
    credit_map,
    pool_frames,
    pool_space,
    spread_frames,
    unpool,
)
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
            f"{name} gave weights of shape {tuple(weights.shape)} for latents of shape {tuple(x0.shape)}; give as many "
            "dimensions, each as large as the latent's or 1"
        )
    weights = weights.detach().to(x0.device, torch.float32)
    if not bool((weights >= 0).all() and weights.isfinite().all()):  # NaN is not above 0 either
        low, high = float(weights.min()), float(weights.max())
        raise ValueError(f"{name} gave weights from {low:.3g} to {high:.3g}; they must be finite and not negative")
    means = weights.flatten(1).mean(1)
    worst = float(means[(means - 1).abs().argmax()])
    if abs(worst - 1) > TOLERANCE:
        raise ValueError(f"{name} gave a sample weights of mean {worst:.4g}; divide them by it, so that it is 1")
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
            f"{type(generator).__name__} has latents of shape {shape}, which are no grid of frames, height and width "
            "that weights could be laid over (packed tokens have lost it); use a generator whose latents are CHW, CFHW "
            "or FCHW and which says so in latent_axes, or leave algorithm.token_weights out"
        )
    return axes


class VideoCredit:
    """TVRL: a critic's gradient on the frames says which parts of a video its advantage is about (arXiv 2610.01973).

    A critic is asked several questions about each video. The size of the gradient of each answer's value with respect
    to the frames is averaged over the pixels and frames of each latent cell, divided by its mean and combined over the
    questions (:mod:`genrl.objectives.credit`). Nothing flows through the map or into the critic.

    Pair it with the critic's own value as the reward: a critic with the same model and options shares its weights.
    Images serve as well, as videos of one frame.

    Args:
        questions: the critic, a part with ``questions(media, prompts, metadata)`` and ``gradient_magnitude(media,
            questions)``, such as :class:`genrl.rewards.VLMLikelihood`; :class:`RewardGradient` makes one of any
            differentiable reward.
        combine: ``"mean"`` over the questions, or ``"failed"``, which weighs a question by 1 - its value.
        lam: share of the credit against uniform weights. 0 is plain GRPO, bit for bit.
        c_min, c_max: bounds of the credit before it is divided by its mean; None has no upper bound.
        patch: cells a side that the network takes as one token; their credit is averaged.
        layout: how frames belong to latent frames, see :func:`genrl.objectives.credit.pool_frames`.
        interpolation: of the credit between frames that the critic was shown.
    """

    def __init__(
        self,
        questions: Any,
        combine: Combination = "mean",
        lam: float = 1.0,
        c_min: float = 0.0,
        c_max: float | None = None,
        patch: int = 1,
        layout: Literal["auto", "causal", "plain"] = "auto",
        interpolation: Literal["nearest", "linear"] = "linear",
    ):
        missing = [name for name in ("questions", "gradient_magnitude") if not hasattr(questions, name)]
        if missing:
            raise ValueError(
                f"token_weights.questions is a {type(questions).__name__}, which has no {missing[0]}(); credit needs a "
                "critic that answers questions, such as genrl.rewards.VLMLikelihood"
            )
        self.questions = questions
        self.combine, self.lam, self.c_min, self.c_max = combine, lam, c_min, math.inf if c_max is None else c_max
        check_settings(combine, lam, c_min, self.c_max)
        self.patch, self.layout, self.interpolation = patch, layout, interpolation

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the critic.

        Raises:
            ValueError: its values have no gradient on the frames.
        """
        if hasattr(self.questions, "prepare"):
            self.questions.prepare(device, progress=progress)
        if not getattr(self.questions, "differentiable", True):
            raise ValueError(
                f"{type(self.questions).__name__} passes no gradients to the frames, from which credit is read; "
                "use a model whose image processor runs on torchvision"
            )

    def configure(self, generator: Any) -> None:
        latent_axes(generator)

    def __call__(self, rollout: Rollout, media: Tensor, prompts: Sequence[Prompt], generator: Any) -> Tensor:
        axes = latent_axes(generator)
        credit = self.credit(media, prompts, rollout.x0.shape[1:], axes)  # [B, f, h, w]
        return credit[:, 0][:, None] if axes == "CHW" else credit.unsqueeze(1 + axes.index("C"))

    def credit(self, media: Tensor, prompts: Sequence[Prompt], shape: Sequence[int], axes: str) -> Tensor:
        """Credit [B, f, h, w] of mean 1 for the cells of latents of a shape, for media [B, (F,) C, H, W]."""
        texts, metadata = [p.text for p in prompts], [dict(p.metadata) for p in prompts]
        asked = self.questions.questions(media, texts, metadata)
        values, magnitude = self.questions.gradient_magnitude(media, asked)  # [B, Q], [B, Q, (F,) H, W]
        if media.dim() == 4:
            magnitude = magnitude.unsqueeze(2)
        elif hasattr(self.questions, "frames_shown"):
            magnitude = spread_frames(magnitude, self.questions.frames_shown(media.shape[1]), self.interpolation)
        size = dict(zip(axes, shape, strict=True))
        pooled = pool_frames(magnitude.float(), size.get("F", 1), self.layout)
        pooled = pool_space(pooled, size["H"], size["W"], self.patch)
        return credit_map(pooled, values, self.combine, self.lam, self.c_min, self.c_max)

    def shown(self, media: Tensor, prompts: Sequence[Prompt], generator: Any) -> Tensor:
        """The credit of every pixel, [B, (F,) H, W] of mean 1, for pictures."""
        credit = self.credit(media, prompts, generator.latent_shape, latent_axes(generator))
        frames = media.shape[1] if media.dim() == 5 else 1
        pixels = unpool(credit, frames, media.shape[-2], media.shape[-1], self.layout)
        return pixels if media.dim() == 5 else pixels[:, 0]


class RewardGradient:
    """Any differentiable reward as a critic for `VideoCredit`: each of its values is a question.

    Args:
        reward: a part with ``differentiable = True``, such as :class:`genrl.rewards.DigitProxy` or CLIPScore.
        batch: samples of a backward pass; None takes all at once.
    """

    def __init__(self, reward: Any, batch: int | None = None):
        self.reward, self.batch = reward, batch

    @property
    def differentiable(self) -> bool:
        return bool(getattr(self.reward, "differentiable", False))

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        if hasattr(self.reward, "prepare"):
            self.reward.prepare(device, progress=progress)

    def questions(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> list[tuple[str, dict]]:
        """What the reward is asked about each sample: its prompt and metadata."""
        return list(zip(prompts, metadata, strict=True))

    def gradient_magnitude(self, media: Tensor, questions: Sequence[tuple[str, dict]]) -> tuple[Tensor, Tensor]:
        """Values [B, Q] of the reward's Q numbers, and the norms of their gradients, [B, Q, (F,) H, W]."""
        parts = [self._part(media[rows], questions[rows]) for rows in chunked(len(media), self.batch)]
        values, magnitude = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(magnitude)

    def _part(self, media: Tensor, questions: Sequence[tuple[str, dict]]) -> tuple[Tensor, Tensor]:
        prompts, metadata = [prompt for prompt, _ in questions], [entry for _, entry in questions]
        with torch.enable_grad():
            leaf = media.detach().float().requires_grad_()
            found = self.reward(leaf, prompts, metadata)
            values = list(found.values()) if isinstance(found, dict) else [found]  # [b] each
            gradients = [torch.autograd.grad(value.nansum(), leaf, retain_graph=True)[0] for value in values]
        return torch.stack([v.detach() for v in values], 1), torch.stack([g.norm(dim=-3) for g in gradients], 1)


class ChunkWeights:
    """Weights of the chunks of a video that is generated chunk by chunk (RAVEN, arXiv 2605.15190).

    See :func:`genrl.objectives.credit.chunk_weights`: with a < 0 later chunks count more, since earlier ones are also
    trained through the history of those after them.

    Args:
        a: -1 is the published value; 0 is uniform.
        chunks: number of chunks of equal length, or the frames of each; by default the generator's attribute
            ``chunks``, else one chunk for each latent frame.
    """

    def __init__(self, a: float = -1.0, chunks: int | list[int] | None = None):
        self.a, self.chunks = a, chunks

    def configure(self, generator: Any) -> None:
        self._weights(generator)

    def _weights(self, generator: Any) -> Tensor:
        """[..., F, ...], a dimension of the latent's frames among ones."""
        axes, shape = latent_axes(generator), tuple(generator.latent_shape)
        if "F" not in axes:
            raise ValueError(f"{type(generator).__name__} has latents {axes} without frames; ChunkWeights needs videos")
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
        raise ValueError(f"chunks = {chunks!r} do not divide {frames} latent frames; give a divisor or their lengths")
    return lengths
