"""Image embeddings, and how far apart the samples of a prompt are in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .diversity import prompt_groups
from .encoders import Dtype, Encoder, LoadedModel, check_frame_stride, frame_features
from .pretrained import is_open_clip, load_open_clip, load_transformers

DINO = "facebook/dinov2-base"


class ImageEmbedding:
    """Unit feature vectors of images by any vision model of transformers or open_clip.

    CLIP-like models give the features that they compare with text, others their pooled output, or the first token
    where there is none. A video gives the mean over its frames, normalised again. Gradients flow.

    Default `facebook/dinov2-base`: 87 M weights, .35 GB in float32, .17 GB in bfloat16. Licence Apache-2.0.

    Args:
        model: hub id or folder for transformers; architecture, "hf-hub:..." or "local-dir:..." for open_clip.
        pretrained: tag or file of weights for open_clip.
        frame_stride: take every k-th frame of a video.
        batch_size: images of one forward pass.
        dtype: of the weights.
    """

    differentiable = True

    def __init__(
        self,
        model: str = DINO,
        pretrained: str | None = None,
        frame_stride: int = 1,
        batch_size: int = 32,
        dtype: Dtype = "float32",
    ) -> None:
        owner = type(self).__name__

        def load() -> LoadedModel:
            if is_open_clip(model, pretrained):
                return load_open_clip(owner, model, pretrained)
            return load_transformers(owner, model, text=False)

        self.encoder = Encoder(load, owner, batch_size, dtype)
        self.frame_stride = check_frame_stride(owner, frame_stride)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model."""
        from genrl.tiny import saved_clip

        return {**arguments, "model": str(saved_clip(folder / "clip")), "pretrained": None}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model to `device`."""
        self.encoder.prepare(device, progress)

    def embed(self, media: Tensor) -> Tensor:
        """Unit vectors [B, D], float32, of media [B, C, H, W] or [B, F, C, H, W] in [0, 1]."""
        return F.normalize(frame_features(self.encoder, media, self.frame_stride).mean(dim=1), dim=-1)


class EmbeddingDiversity(ImageEmbedding):
    """`embedding_distance`: mean of 1 - cosine between two samples of one prompt, averaged over prompts.

    Range 0 (all alike) to 2, in practice below 1. Compare with the starting model's value: a fall is a collapse. NaN if
    no prompt has two samples. Model, licence, memory and arguments are those of `ImageEmbedding`.
    """

    @torch.no_grad()
    def measure(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, float]:
        """`{"embedding_distance": ...}` of media [N, ...] in [0, 1], grouped by prompt."""
        features = self.embed(media).double()  # [N, D]
        means = []
        for rows in prompt_groups(prompts, metadata):
            if (n := len(rows)) > 1:
                cosines = features[rows] @ features[rows].T  # [n, n]
                means.append(1 - ((cosines.sum() - cosines.diagonal().sum()) / (n * (n - 1))).item())
        return {"embedding_distance": sum(means) / len(means) if means else float("nan")}
