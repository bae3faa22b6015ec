"""How well images and videos fit their prompts, by the cosine of CLIP features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .encoders import Dtype, Encoder, LoadedModel, PromptCosine, check_frame_stride, frame_features
from .pretrained import check_open_clip, is_open_clip, load_open_clip, load_transformers

OPENAI_CLIP = "openai/clip-vit-large-patch14"


class CLIPScore(PromptCosine):
    """Cosine of image and prompt features of a CLIP-like model of transformers; higher is a better fit.

    Range -scale to scale. Real pictures with fitting captions read about .2 to .35, unrelated ones .05 to .2. Saturates
    early and counts objects badly; its gradients are easily exploited.

    Any model with `get_image_features` and `get_text_features` (CLIP, SigLIP, MetaCLIP...). Prompts are cut to its
    context length (CLIP: 77 tokens with start and end), with one warning. A video scores the mean over its frames.

    Default model `openai/clip-vit-large-patch14`: 428 M weights, 1.7 GB in float32, .86 GB in bfloat16. Licence of code
    and weights MIT; its model card limits it to research.

    Args:
        model: hub id or folder.
        processor: hub id or folder of processor and tokenizer, if not that of the model.
        scale: factor of the cosine.
        clamp: cut negative values to 0, where the gradient is then 0. `scale: 2.5, clamp: true` is CLIPScore as
            published (arXiv:2104.08718), which also prefixes prompts by "A photo depicts"; `scale: 100, clamp: true`
            is that of torchmetrics.
        frame_stride: score every k-th frame of a video.
        batch_size: images of one forward pass.
        dtype: of the weights.
    """

    name = "clip_score"

    def __init__(
        self,
        model: str = OPENAI_CLIP,
        processor: str | None = None,
        scale: float = 1.0,
        clamp: bool = False,
        frame_stride: int = 1,
        batch_size: int = 32,
        dtype: Dtype = "float32",
    ) -> None:
        def load() -> LoadedModel:
            return load_transformers("CLIPScore", model, processor)

        super().__init__(load, "CLIPScore", scale, frame_stride, batch_size, dtype, clamp)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model."""
        from genrl.tiny import saved_clip

        return {**arguments, "model": str(saved_clip(folder / "clip")), "processor": None}


class OpenCLIPScore(PromptCosine):
    """Cosine of image and prompt features of a model of open_clip; higher is a better fit. See `CLIPScore`.

    Range -scale to scale. Prompts are cut to the model's context length (mostly 77 tokens), with one warning. A video
    scores the mean over its frames.

    Default `ViT-H-14, laion2b_s32b_b79k`: 986 M weights, 3.9 GB in float32, 2.0 GB in bfloat16. Licence MIT.

    Args:
        model: architecture, "hf-hub:" and an id, or "local-dir:" and a folder with open_clip_config.json and weights.
        pretrained: with an architecture: tag of published weights, or a file of weights. A file does not say how its
            images were prepared; a warning then names what is assumed.
        preprocess: mean, std, interpolation or resize_mode ("shortest", "longest", "squash") of a file of weights.
        scale, clamp, frame_stride, batch_size, dtype: see `CLIPScore`.

    Raises:
        ValueError: no weights are named, or a tag was trained with another activation than the architecture has
            ("openai" weights need "ViT-L-14-quickgelu").
    """

    name = "open_clip_score"

    def __init__(
        self,
        model: str = "ViT-H-14",
        pretrained: str | None = "laion2b_s32b_b79k",
        preprocess: dict[str, Any] | None = None,
        scale: float = 1.0,
        clamp: bool = False,
        frame_stride: int = 1,
        batch_size: int = 32,
        dtype: Dtype = "float32",
    ) -> None:
        check_open_clip("OpenCLIPScore", model, pretrained)

        def load() -> LoadedModel:
            return load_open_clip("OpenCLIPScore", model, pretrained, preprocess=preprocess)

        super().__init__(load, "OpenCLIPScore", scale, frame_stride, batch_size, dtype, clamp)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model."""
        from genrl.tiny import saved_open_clip

        model, _ = saved_open_clip(folder / "open_clip")
        return {**arguments, "model": model, "pretrained": None, "preprocess": None}


class CLIPFrames:
    """Two numbers of a video, both cosines in -1 to 1, higher is better:

    * `alignment`: of frames and prompt, mean over frames, as `CLIPScore`;
    * `consistency`: of neighbouring frames, mean over pairs. A still video reads 1, so weigh it little, or only log it
      beside a measure of motion. Real clips at 8 frames a second read about .95 to .99.

    The model, its licence, memory and the cutting of prompts are those of `CLIPScore`, or of `OpenCLIPScore` if
    `pretrained` is given or `model` begins with "hf-hub:" or "local-dir:".

    Args:
        model: hub id or folder for transformers; architecture, "hf-hub:..." or "local-dir:..." for open_clip.
        pretrained: tag or file of weights for open_clip.
        frame_stride: take every k-th frame; at least two must remain.
        batch_size: frames of one forward pass.
        dtype: of the weights.
    """

    differentiable = True
    range = (-1.0, 1.0)
    name = "clip_frames"

    def __init__(
        self,
        model: str = OPENAI_CLIP,
        pretrained: str | None = None,
        frame_stride: int = 1,
        batch_size: int = 32,
        dtype: Dtype = "float32",
    ) -> None:
        def load() -> LoadedModel:
            if is_open_clip(model, pretrained):
                return load_open_clip("CLIPFrames", model, pretrained)
            return load_transformers("CLIPFrames", model)

        self.encoder = Encoder(load, "CLIPFrames", batch_size, dtype)
        self.frame_stride = check_frame_stride("CLIPFrames", frame_stride)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model."""
        from genrl.tiny import saved_clip

        return {**arguments, "model": str(saved_clip(folder / "clip")), "pretrained": None}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model to `device`."""
        self.encoder.prepare(device, progress)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        """`alignment` and `consistency`, [B] each."""
        if media.dim() != 5 or media[:, :: self.frame_stride].shape[1] < 2:
            raise ValueError(
                f"media has shape {tuple(media.shape)}; CLIPFrames takes video [B, F, C, H, W] with two frames or more "
                f"at frame_stride {self.frame_stride}. Use CLIPScore for images."
            )
        frames = frame_features(self.encoder, media, self.frame_stride)  # [B, F, D]
        texts = self.encoder.texts(prompts).to(frames.device)  # [B, D]
        return {
            "alignment": (frames * texts[:, None]).sum(dim=-1).mean(dim=1),
            "consistency": (frames[:, 1:] * frames[:, :-1]).sum(dim=-1).mean(dim=1),
        }
