"""Images as the input of a vision model: resized, cropped and normalised on tensors, so that gradients flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Resize = Literal["shortest", "longest", "squash", "none"]
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # PIL's numbers


@dataclass(frozen=True)
class Pixels:
    """Frames [N, C, H, W] in [0, 1], C = 1 or 3 -> float32 pixel values [N, 3, h, w].

    The same steps as a model's own processor. That one works on 8-bit images, this one on floats: pixels in [0, 1]
    differ by up to 2/255 after resizing and by rounding (1e-6) without. Pillow 13 resizes some images that are not
    square height first, which shifts pixels at hard black or white edges by up to 12/255.

    Args:
        size: (height, width) that `resize` aims at.
        resize: "shortest" covers the size, "longest" fits into it, both keep the aspect ratio; "squash" does not;
            "none" leaves the frames as they are.
        crop: (height, width) that is cut from the centre; smaller frames are padded with black. None: no crop.
        mean, std: of the normalisation, one a channel.
        interpolation: "bicubic" or "bilinear", always with antialiasing.
        clip: cut what bicubic interpolation overshoots, as 8-bit images do, after each direction. The gradient is 0
            there.
        crop_rounds: where the crop is off-centre by half a pixel, round its corner (torchvision: to even numbers)
            instead of rounding down (transformers).
    """

    size: tuple[int, int]
    resize: Resize
    crop: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    clip: bool = True
    crop_rounds: bool = False

    @classmethod
    def of_processor(cls, processor: Any) -> Pixels:
        """The steps of an image processor of transformers; ValueError names a step that this class does not know."""
        steps = processor.to_dict()
        name = type(processor).__name__
        if steps.get("do_pad") or not steps.get("do_rescale", True):
            raise ValueError(f"{name} pads or does not rescale; only resize, centre crop and normalisation are known.")
        resize, size = _resize_of(steps, name)
        resample = steps.get("resample", 3)
        if resize != "none" and resample not in _RESAMPLE:
            raise ValueError(f"{name} resizes with PIL's filter {resample}; known are 2 (bilinear) and 3 (bicubic).")
        crop = _pair(steps.get("crop_size")) if steps.get("do_center_crop") else None
        normalise = steps.get("do_normalize", True)
        return cls(
            size=size,
            resize=resize,
            crop=crop,
            mean=tuple(steps["image_mean"]) if normalise else (0.0, 0.0, 0.0),
            std=tuple(steps["image_std"]) if normalise else (1.0, 1.0, 1.0),
            interpolation=_RESAMPLE.get(resample, "bicubic"),
        )

    @classmethod
    def of_open_clip(cls, config: Mapping[str, Any]) -> Pixels:
        """The steps of an open_clip model's preprocessing configuration (`model.visual.preprocess_cfg`)."""
        size = config["size"]
        pair = (size, size) if isinstance(size, int) else tuple(size)
        mode: Resize = config.get("resize_mode") or "shortest"
        if config.get("fill_color", 0) not in (0, None):
            raise ValueError(f"open_clip pads with colour {config['fill_color']}; only black, 0, is known.")
        return cls(
            size=pair,
            resize=mode,
            crop=None if mode == "squash" else pair,
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation="bilinear" if config.get("interpolation") == "bilinear" else "bicubic",
            crop_rounds=mode == "shortest",
        )

    def __call__(self, frames: Tensor) -> Tensor:
        """[N, 3, h, w] float32; gradients reach `frames`."""
        if frames.dim() != 4 or frames.shape[1] not in (1, 3) or not frames.is_floating_point():
            raise ValueError(
                f"frames have shape {tuple(frames.shape)} and dtype {frames.dtype}; vision models take floats "
                "[N, 1, H, W] or [N, 3, H, W] in [0, 1]."
            )
        pixels = frames.float().expand(-1, 3, -1, -1)
        height, width = self.resized(*pixels.shape[-2:])
        # torchvision and most versions of Pillow resize the width first.
        for size in ((pixels.shape[-2], width), (height, width)) if self.clip else ((height, width),):
            if size != tuple(pixels.shape[-2:]):
                pixels = F.interpolate(pixels, size, mode=self.interpolation, align_corners=False, antialias=True)
                pixels = pixels.clamp(0, 1) if self.clip else pixels
        pixels = self._centre(pixels) if self.crop else pixels
        mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (self.mean, self.std))
        return (pixels - mean) / std

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size of a frame after resizing, before the crop."""
        if self.resize == "none":
            return height, width
        to_height, to_width = self.size
        if self.resize == "squash":
            return to_height, to_width
        if self.resize == "shortest" and to_height == to_width:  # the longer side is rounded down, as in torchvision
            short = min(height, width)
            return int(to_height * height / short), int(to_height * width / short)
        choose = min if self.resize == "shortest" else max
        ratio = choose(height / to_height, width / to_width)
        return round(height / ratio), round(width / ratio)

    def _centre(self, pixels: Tensor) -> Tensor:
        assert self.crop is not None
        high, wide = self.crop
        extra = [max(wide - pixels.shape[-1], 0), max(high - pixels.shape[-2], 0)]
        if any(extra):
            pixels = F.pad(pixels, [side for e in extra for side in (e // 2, e - e // 2)])
        whole = round if self.crop_rounds else int
        top, left = whole((pixels.shape[-2] - high) / 2), whole((pixels.shape[-1] - wide) / 2)
        return pixels[..., top : top + high, left : left + wide]


def _resize_of(steps: Mapping[str, Any], name: str) -> tuple[Resize, tuple[int, int]]:
    """`Pixels.resize` and `.size` of a processor's settings."""
    if not steps.get("do_resize", True):
        return "none", (0, 0)
    size = steps["size"]
    if isinstance(size, int):
        return "shortest", (size, size)
    given = {key: value for key, value in dict(size).items() if value}
    if set(given) == {"shortest_edge"}:
        return "shortest", (given["shortest_edge"],) * 2
    if set(given) == {"height", "width"}:
        return "squash", (given["height"], given["width"])
    raise ValueError(f"{name} resizes to {given}; known are shortest_edge, or height and width.")


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    size = dict(size)
    return size["height"], size["width"]
