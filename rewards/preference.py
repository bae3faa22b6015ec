"""Rewards that were fitted to human choices between images: PickScore, HPSv2, ImageReward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .clip import check_scale
from .encoders import (
    Dtype,
    Encoder,
    LoadedModel,
    check_frame_stride,
    explained,
    prompt_cosines,
    split_frames,
    warn_of_truncation,
)
from .pixels import Pixels
from .pretrained import checkpoint_file, load_open_clip, load_transformers

PICKSCORE = "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HPS_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class PickScore:
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

    differentiable = True
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

        self.encoder = Encoder(load, "PickScore", batch_size, dtype)
        self.scale = check_scale("PickScore", scale)
        self.frame_stride = check_frame_stride("PickScore", frame_stride)
        self.range = (-100 * self.scale, 100 * self.scale)  # CLIP caps its logit scale at 100

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model."""
        from genrl.tiny import saved_clip

        return {**arguments, "model": str(saved_clip(folder / "clip")), "processor": None}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model to `device`."""
        self.encoder.prepare(device, progress)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] scaled logit."""
        cosines = prompt_cosines(self.encoder, media, prompts, self.frame_stride)  # [B, F]
        return self.scale * self.encoder.model.logit_scale * cosines.mean(dim=1)


class HPSv2:
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

    differentiable = True
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

        self.encoder = Encoder(load, "HPSv2", batch_size, dtype)
        self.scale = check_scale("HPSv2", scale)
        self.frame_stride = check_frame_stride("HPSv2", frame_stride)
        self.range = (-self.scale, self.scale)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model whose weights are under "state_dict", as in the published file."""
        from genrl.tiny import saved_open_clip

        model, _ = saved_open_clip(folder / "open_clip")
        path = folder / HPS_FILES["v2.1"]
        if not path.exists():
            torch.save({"state_dict": load_open_clip("HPSv2", model).module.state_dict()}, path)
        return {**arguments, "model": model, "checkpoint": str(path)}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model to `device`."""
        self.encoder.prepare(device, progress)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] scaled cosine."""
        return self.scale * prompt_cosines(self.encoder, media, prompts, self.frame_stride).mean(dim=1)


class ImageReward:
    """ImageReward (arXiv:2304.05977): BLIP with a head fitted to ratings, standardised; higher is preferred.

    Unbounded; images of good generators read about -1 to 1.8. Wraps the package `image-reward`: its network and
    tokenizer, with images prepared here, so that gradients flow.

    The package is old. Version 1.5 asks for timm 0.6.13, imports OpenAI's `clip`, which it does not declare, and cannot
    be imported beside transformers 5 (`apply_chunking_to_forward` is gone from where it looks). Serve it from an
    environment of its own, or use PickScore or HPSv2. It could not be imported where this class was written: the class
    was tested on a stand-in with the package's interface, not on the published weights.

    `THUDM/ImageReward`: 447 M weights, 1.8 GB in float32; it runs in float32. Licence Apache-2.0. Prompts are cut to 35
    tokens with one warning. A video scores the mean over its frames.

    Args:
        model: name of published weights, or a file of weights.
        med_config: file of the text encoder's configuration; None downloads it.
        frame_stride: score every k-th frame of a video.
        batch_size: images of one forward pass.
    """

    differentiable = True
    range = (-math.inf, math.inf)
    name = "image_reward"
    context = 35
    pixels = Pixels((224, 224), "shortest", (224, 224), _CLIP_MEAN, _CLIP_STD, crop_rounds=True)

    def __init__(
        self,
        model: str = "ImageReward-v1.0",
        med_config: str | None = None,
        frame_stride: int = 1,
        batch_size: int = 16,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"ImageReward: batch_size is {batch_size}; give 1 or more images a forward pass.")
        self.model, self.med_config, self.batch_size = model, med_config, batch_size
        self.frame_stride = check_frame_stride("ImageReward", frame_stride)
        self._network: Any = None
        self._warned = False

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Import the package and load the model to `device`."""
        if self._network is None:
            try:
                import ImageReward as package
            except ImportError as error:
                missing = isinstance(error, ModuleNotFoundError) and error.name == "ImageReward"
                raise ImportError(
                    "ImageReward needs the package image-reward. Install it with: pip install image-reward"
                    if missing
                    else f"the package image-reward is installed, but its import fails: {error}. Version 1.5 needs "
                    "OpenAI's clip, timm 0.6.13 and transformers before 5; give it an environment of its own."
                ) from error
            with explained("ImageReward", self.model), torch.random.fork_rng(devices=[]):
                network = package.load(self.model, device=str(device), med_config=self.med_config)
            self._network = network.eval().requires_grad_(False)
        self._network.to(device)
        self._network.device = torch.device(device)  # where the package makes its attention masks

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] standardised reward."""
        if self._network is None:
            self.prepare(media.device, progress=False)
        frames = split_frames(media, self.frame_stride)  # [B, F, C, H, W]
        count = frames.shape[1]
        repeated = [prompt for prompt in prompts for _ in range(count)]
        chunks = [
            self._score(chunk, repeated[i * self.batch_size : (i + 1) * self.batch_size])
            for i, chunk in enumerate(frames.flatten(0, 1).split(self.batch_size))
        ]
        return torch.cat(chunks).to(media.device).unflatten(0, (len(media), count)).mean(dim=1)

    def _score(self, frames: Tensor, prompts: list[str]) -> Tensor:
        device, tokenizer = self._network.device, self._network.blip.tokenizer
        lengths = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
        self._warned = warn_of_truncation("ImageReward", prompts, lengths, self.context, self._warned)
        tokens = tokenizer(
            prompts, padding="max_length", truncation=True, max_length=self.context, return_tensors="pt"
        ).to(device)
        with torch.autocast(torch.device(device).type, enabled=False):
            pixels = self.pixels(frames.to(device))
            # The package's name of the differentiable path, its own spelling.
            return self._network.score_gard(tokens.input_ids, tokens.attention_mask, pixels)[:, 0].float()
