"""The name of an object's colour, a part of `CompositionReward`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .encoders import Dtype, Encoder, LoadedModel
from .pretrained import is_open_clip, load_open_clip, load_transformers

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")  # GenEval's


class ColorNamer(Protocol):
    """Names colours. `prepare(device, progress=True)` is optional."""

    colors: Sequence[str]

    def name(self, crops: Any, labels: Any, /) -> Any:
        """`(crops [C, h, w] in [0, 1], label of the object in each)` -> one of `colors` each, or another word."""


# sRGB, several for colours that the eye sees in many shades. "gray" is no colour of GenEval, so it is never right.
PROTOTYPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((220, 30, 30), (150, 15, 20), (255, 60, 50)),
    "orange": ((255, 140, 0), (240, 110, 30)),
    "yellow": ((255, 225, 30), (240, 230, 120), (220, 190, 20)),
    "green": ((40, 160, 50), (20, 85, 30), (140, 200, 80), (0, 220, 90)),
    "blue": ((30, 80, 220), (100, 170, 235), (20, 30, 110), (10, 10, 140), (60, 190, 230)),
    "purple": ((128, 20, 140), (160, 100, 210), (75, 0, 130)),
    "pink": ((255, 170, 195), (255, 80, 170), (230, 130, 150)),
    "brown": ((120, 70, 30), (80, 50, 30), (165, 105, 55)),
    "black": ((15, 15, 15), (45, 45, 45)),
    "white": ((248, 248, 248), (225, 225, 225)),
    "gray": ((125, 125, 125), (175, 175, 175), (85, 85, 85)),
}


class ColorPrototypes:
    """The nearest of some shades in CIELAB, pixel by pixel; the most frequent name of the middle of the box wins.

    Needs no model, and knows plain colours. A box holds background too: of an object that fills little of its box the
    background is named. `CLIPColors` looks at the object.

    Args:
        middle: share of a box's width and height that is looked at, around its centre.
    """

    colors: Sequence[str] = COLORS

    def __init__(self, middle: float = 0.6) -> None:
        if not 0 < middle <= 1:
            raise ValueError(f"ColorPrototypes: middle = {middle} must lie in (0, 1]")
        self.middle = middle
        self._names = [name for name, shades in PROTOTYPES.items() for _ in shades]
        shades = torch.tensor([shade for shades in PROTOTYPES.values() for shade in shades]) / 255
        self._shades = to_lab(shades)  # [K, 3]

    def name(self, crops: Sequence[Tensor], labels: Sequence[str]) -> list[str]:
        """The name of each crop's most frequent colour."""
        return [self._name(crop) for crop in crops]

    def _name(self, crop: Tensor) -> str:
        height, width = crop.shape[-2:]
        kept = max(1, round(height * self.middle)), max(1, round(width * self.middle))
        top, left = (height - kept[0]) // 2, (width - kept[1]) // 2
        pixels = crop[:, top : top + kept[0], left : left + kept[1]].detach().float().cpu().expand(3, -1, -1)
        nearest = torch.cdist(to_lab(pixels.flatten(1).T), self._shades).argmin(1)  # [h w]
        votes: dict[str, int] = {}
        for place, count in zip(*(t.tolist() for t in nearest.unique(return_counts=True)), strict=True):
            votes[self._names[place]] = votes.get(self._names[place], 0) + count
        return max(votes, key=votes.__getitem__)


def to_lab(rgb: Tensor) -> Tensor:
    """sRGB [N, 3] in [0, 1] -> CIELAB [N, 3] (D65), where distances are about those that the eye sees."""
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb.clamp(min=0) + 0.055) / 1.055) ** 2.4)
    matrix = linear.new_tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = linear @ matrix.T / linear.new_tensor([0.9505, 1.0, 1.089])
    f = torch.where(xyz > 216 / 24389, xyz.clamp(min=1e-9) ** (1 / 3), (24389 / 27 * xyz + 16) / 116)
    return torch.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)


class CLIPColors:
    """The colour whose descriptions CLIP finds nearest to the crop, as GenEval does it (there with ViT-L/14).

    Model, licence and memory are those of `CLIPScore`, or of `OpenCLIPScore` if `pretrained` is given or `model` begins
    with "hf-hub:" or "local-dir:".

    Args:
        model: hub id or folder for transformers; architecture, "hf-hub:..." or "local-dir:..." for open_clip.
        pretrained: tag or file of weights for open_clip.
        batch_size: texts of one forward pass.
        dtype: of the weights.
    """

    colors: Sequence[str] = COLORS
    templates = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        pretrained: str | None = None,
        batch_size: int = 32,
        dtype: Dtype = "float32",
    ) -> None:
        def load() -> LoadedModel:
            if is_open_clip(model, pretrained):
                return load_open_clip("CLIPColors", model, pretrained)
            return load_transformers("CLIPColors", model)

        self.encoder = Encoder(load, "CLIPColors", batch_size, dtype)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model."""
        from genrl.tiny import saved_clip

        return {**arguments, "model": str(saved_clip(folder / "clip")), "pretrained": None}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model to `device`."""
        self.encoder.prepare(device, progress)

    @torch.no_grad()
    def name(self, crops: Sequence[Tensor], labels: Sequence[str]) -> list[str]:
        """The nearest colour of each crop."""
        found = []
        for crop, label in zip(crops, labels, strict=True):
            image = self.encoder.images(crop[None].expand(-1, 3, -1, -1))[0]  # [D]
            texts = [t.format(color=color, label=label) for color in self.colors for t in self.templates]
            features = self.encoder.texts(texts).to(image).unflatten(0, (len(self.colors), -1)).mean(1)  # [colors, D]
            found.append(self.colors[int((torch.nn.functional.normalize(features, dim=-1) @ image).argmax())])
        return found
