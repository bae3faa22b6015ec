"""LAION's aesthetic predictor: a linear network on CLIP image features."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .clip import OPENAI_CLIP
from .encoders import Dtype, Encoder, LoadedModel, check_frame_stride, frame_features
from .pretrained import checkpoint_file, load_transformers, read_weights

HEAD, HEAD_FILE = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"


class AestheticScore:
    """Mean rating that people would give an image, about 1 to 10, by a head on unit CLIP features; higher is nicer.

    Does not read the prompt. Not bounded: pictures of good generators read 5 to 7, and optimised ones above 8, by then
    mostly painterly and alike.

    The head "sac+logos+ava1-l14-linearMSE" is five linear layers, 768-1024-128-64-16-1, with dropout and no activation
    between them; the older linear head of LAION is one layer. Any chain of linear layers is read, in the order of the
    numbers in its names.

    CLIP ViT-L/14 without its text encoder: 304 M weights, 1.2 GB in float32, .6 GB in bfloat16 (the text encoder is
    read and dropped); the head stays in float32 and is small (.9 M). Licences: CLIP MIT, its model card limits it to
    research; LAION's linear head MIT, "improved-aesthetic-predictor" Apache-2.0. A video scores the mean over its
    frames.

    Args:
        model: hub id or folder of CLIP, the one that the head was fitted on.
        head: hub id, folder or file (.pth, .safetensors) of the head.
        head_file: name of the file in the hub id or folder.
        frame_stride: score every k-th frame of a video.
        batch_size: images of one forward pass.
        dtype: of CLIP's weights.
    """

    differentiable = True
    range = (float("-inf"), float("inf"))
    name = "aesthetic"

    def __init__(
        self,
        model: str = OPENAI_CLIP,
        head: str = HEAD,
        head_file: str = HEAD_FILE,
        frame_stride: int = 1,
        batch_size: int = 32,
        dtype: Dtype = "float32",
    ) -> None:
        def load() -> LoadedModel:
            return load_transformers("AestheticScore", model, text=False)

        self.encoder = Encoder(load, "AestheticScore", batch_size, dtype)
        self.head, self.head_file = head, head_file
        self.frame_stride = check_frame_stride("AestheticScore", frame_stride)
        self._layers: list[tuple[Tensor, Tensor]] | None = None

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random CLIP and a random linear head."""
        from genrl.tiny import saved_clip

        model, head = str(saved_clip(folder / "clip")), folder / "aesthetic.pth"
        if not head.exists():
            from transformers import AutoConfig

            width = AutoConfig.from_pretrained(model).projection_dim
            weight = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
            torch.save({"weight": weight, "bias": torch.tensor([5.0])}, head)
        return {**arguments, "model": model, "head": str(head)}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load head and CLIP to `device`."""
        if self._layers is None:  # first, since a wrong path shows sooner
            path = checkpoint_file("AestheticScore", self.head, self.head_file)
            self._layers = linear_chain(read_weights("AestheticScore", path), str(path))
        self.encoder.prepare(device, progress)
        self._layers = [(weight.to(device), bias.to(device)) for weight, bias in self._layers]

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] rating."""
        if self._layers is None:
            self.prepare(media.device, progress=False)
        assert self._layers is not None
        features = frame_features(self.encoder, media, self.frame_stride)  # [B, F, D]
        width = self._layers[0][0].shape[1]
        if features.shape[-1] != width:
            raise ValueError(
                f"the head reads {width} features, the model gives {features.shape[-1]}; give the CLIP model that the "
                "head was fitted on (768: ViT-L/14)."
            )
        values = features
        with torch.autocast(media.device.type, enabled=False):
            for weight, bias in self._layers:
                values = torch.nn.functional.linear(values, weight.to(values.device), bias.to(values.device))
        return values.squeeze(-1).mean(dim=1)


def linear_chain(state: dict[str, Tensor], source: str) -> list[tuple[Tensor, Tensor]]:
    """(weight [out, in], bias [out]) of successive linear layers, from a state dict ending in one output.

    ValueError if the names are not those of numbered linear layers, or the widths do not fit.
    """

    def number(name: str) -> int:
        found = re.findall(r"\d+", name)
        return int(found[-1]) if found else 0

    names = sorted((name.removesuffix("weight") for name in state if name.endswith("weight")), key=number)
    layers = [(state[f"{name}weight"].float(), state.get(f"{name}bias")) for name in names]
    shapes = [tuple(weight.shape) for weight, _ in layers]
    fits = all(len(shape) == 2 for shape in shapes) and all(a[0] == b[1] for a, b in itertools.pairwise(shapes))
    if not layers or not fits or shapes[-1][0] != 1 or any(bias is None for _, bias in layers):
        raise ValueError(
            f"{source} has layers of shapes {shapes}; the aesthetic head is a chain of linear layers with biases that "
            "ends in one output. Give the file of such a head."
        )
    return [(weight, bias.float()) for weight, bias in layers if bias is not None]
