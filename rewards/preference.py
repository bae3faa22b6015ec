"""Rewards that were fitted to human choices between images: PickScore and HPSv2."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .encoders import Dtype, LoadedModel, PromptCosine
from .pretrained import checkpoint_file, load_open_clip, load_transformers

PICKSCORE = "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HPS_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}


class PickScore(PromptCosine):
    """PickScore (arXiv:2305.01569): CLIP ViT-H fitted to choices on Pick-a-Pic; higher is preferred.

    The value is exp(logit_scale) times the cosine of image and prompt, times `scale`. With scale 1 (raw) the range is
    -100 to 100 and images of good generators read about 18 to 24. Some tools divide by 26: `scale: 0.0384615` gives
    their numbers. Compare advantages, not raw values, between tools.

    `yuvalkirstain/PickScore_v1`: 986 M weights, 3.9 GB in float32, 2.0 GB in bfloat16. The model card names no licence;
    read the publisher's repository before commercial use. Prompts are cut to 77 tokens with one warning. A video scores
    the mean over its frames.

    Args:
        model, processor: hub ids or folders.
        scale: factor of the raw value.
        frame_stride: score every k-th frame of a video.
        batch_size: images of one forward pass.
        dtype: of the weights.
    """

    name = "pickscore"

    def __init__(
        self,
        model: str = PICKSCORE,
        processor: str | None = PICKSCORE_PROCESSOR,
        scale: float = 1.0,
        frame_stride: int = 1,
        batch_size: int = 32,
        dtype: Dtype = "float32",
    ) -> None:
        def load() -> LoadedModel:
            return load_transformers("PickScore", model, processor)

        super().__init__(load, "PickScore", scale, frame_stride, batch_size, dtype)
        self.range = (-100 * self.scale, 100 * self.scale)  # CLIP caps its logit scale at 100

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model."""
        from genrl.tiny import saved_clip

        return {**arguments, "model": str(saved_clip(folder / "clip")), "processor": None}

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] scaled logit."""
        return self.encoder.model.logit_scale * super().__call__(media, prompts, metadata)


class HPSv2(PromptCosine):
    """HPS v2 (arXiv:2306.09341): CLIP ViT-H fitted to choices on HPD v2; higher is preferred.

    The value is the cosine of image and prompt, times `scale`; range -scale to scale. Images of good generators read
    about .26 to .32; leaderboards print 100 times that (`scale: 100`). Images are letterboxed with black to a square,
    as the publisher's package does, not cropped.

    `xswu/HPSv2`: 986 M weights, 3.9 GB in float32, 2.0 GB in bfloat16. Licence Apache-2.0. Prompts are cut to 77 tokens
    with one warning. A video scores the mean over its frames.

    Args:
        checkpoint: hub id or folder that has the version's file, or a file; its weights may be under "state_dict".
        version: "v2.1" or "v2.0", which decides the file's name.
        model: architecture of open_clip.
        scale: factor of the cosine.
        frame_stride: score every k-th frame of a video.
        batch_size: images of one forward pass.
        dtype: of the weights.
    """

    name = "hpsv2"

    def __init__(
        self,
        checkpoint: str = "xswu/HPSv2",
        version: Literal["v2.0", "v2.1"] = "v2.1",
        model: str = "ViT-H-14",
        scale: float = 1.0,
        frame_stride: int = 1,
        batch_size: int = 32,
        dtype: Dtype = "float32",
    ) -> None:
        if version not in HPS_FILES:
            raise ValueError(f"HPSv2: version is {version!r}; known: {', '.join(HPS_FILES)}.")

        def load() -> LoadedModel:
            path = checkpoint_file("HPSv2", checkpoint, HPS_FILES[version])
            loaded = load_open_clip("HPSv2", model, checkpoint=path)
            size = loaded.pixels.size
            pixels = dataclasses.replace(loaded.pixels, resize="longest", crop=size, clip=False)
            return dataclasses.replace(loaded, pixels=pixels)

        super().__init__(load, "HPSv2", scale, frame_stride, batch_size, dtype)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model whose weights are under "state_dict", as in the published file."""
        from genrl.tiny import saved_open_clip

        model, _ = saved_open_clip(folder / "open_clip")
        path = folder / HPS_FILES["v2.1"]
        if not path.exists():
            torch.save({"state_dict": load_open_clip("HPSv2", model).module.state_dict()}, path)
        return {**arguments, "model": model, "checkpoint": str(path)}
