"""Previews on disk: grids of pictures, strips of the frames of videos, and grids that move."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

LEAST, MOST = 32, 256  # pixels that a picture has in a grid
STRIP = 4  # frames of a video that a strip shows
FRAMES_PER_SECOND = 8


def picture_counts(media: Tensor) -> tuple[int, int]:
    """(columns, rows) of a grid of media [N, ...] that stays small enough for a report."""
    side = min(MOST, max(media.shape[-2:]))
    columns, rows = (8, 10) if side <= 128 else (4, 4)
    return (max(1, columns // STRIP), min(rows, 6)) if media.dim() == 5 else (columns, rows)


def image_grid(images: Tensor, gap: int = 1, least: int = LEAST, most: int = MOST) -> Tensor:
    """Tile media [R, K, C, H, W] into one picture [C, H', W']; videos [R, K, F, C, H, W] as strips of some frames.

    Small tiles are enlarged until they have ``least`` pixels a side, large ones averaged down to ``most`` or fewer.
    """
    if images.dim() == 6:
        chosen = evenly(images.shape[2], STRIP)
        images = torch.cat([_scaled(images[:, :, f], least, most) for f in chosen], -1)  # side by side
        factor = 1
    else:
        factor = max(1, -(-least // min(images.shape[-2:])))
        images = _scaled(images, least, most)
    rows, columns, channels, height, width = images.shape
    pad = gap * max(1, factor // 2)
    canvas = torch.full((channels, rows * (height + pad) + pad, columns * (width + pad) + pad), 0.5)
    for r in range(rows):
        for c in range(columns):
            top, left = pad + r * (height + pad), pad + c * (width + pad)
            canvas[:, top : top + height, left : left + width] = images[r, c]
    return canvas


def _scaled(images: Tensor, least: int, most: int) -> Tensor:
    images = images.clamp(0, 1).float()
    factor, shrink = max(1, -(-least // min(images.shape[-2:]))), -(-max(images.shape[-2:]) // most)
    if shrink > 1:
        return avg_pool2d(images.flatten(0, 1), shrink, ceil_mode=True).unflatten(0, images.shape[:2])
    return images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)


def evenly(count: int, wanted: int) -> list[int]:
    """At most ``wanted`` of ``count`` places, evenly spaced, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, wanted)).round().int().tolist()


def moving_grid(videos: Tensor, gap: int = 1) -> list[Tensor]:
    """One grid [C, H', W'] for every frame of videos [R, K, F, C, H, W]."""
    return [image_grid(videos[:, :, f], gap) for f in range(videos.shape[2])]


def heat(media: Tensor, values: Tensor, brightest: float = 0.98) -> Tensor:
    """Values laid over media as a glow: grey pictures that turn red, then yellow where the value is large.

    Args:
        media: [N, (F,) C, H, W] in [0, 1]. values: [N, (F,) H, W], not negative; each sample has a scale of its own.
        brightest: share of a sample's values below which the glow still grows.

    Returns:
        [N, (F,) 3, H, W].
    """
    grey = media.float().clamp(0, 1).mean(-3)
    flat = values.float().flatten(1)
    top = flat.quantile(brightest, dim=1)
    top = torch.where(top > 0, top, flat.amax(1)).clamp(min=1e-12)  # where fewer have any value
    glow = (values.float() / top.reshape(-1, *(1,) * (values.dim() - 1))).clamp(0, 1)
    red, yellow = glow.sqrt(), (glow - 0.5).clamp(min=0) * 2
    base = 0.45 * grey
    return torch.stack([base + (1 - base) * red, base + (1 - base) * yellow * red, base * (1 - red)], -3)


def save_image(picture: Tensor, path: Path) -> None:
    """Write a picture [C, H, W] in [0, 1] as PNG, atomically."""
    _save(path, _as_image(picture), format="PNG")


def save_animation(frames: Sequence[Tensor], path: Path, frames_per_second: float = FRAMES_PER_SECOND) -> Path:
    """Write pictures [C, H, W] in [0, 1] as an endless WebP, or GIF where Pillow has no WebP; returns its path."""
    from PIL import features

    images = [_as_image(frame).convert("RGB") for frame in frames]
    webp = features.check("webp")
    path = path.with_suffix(".webp" if webp else ".gif")
    options: dict[str, Any] = {"quality": 80, "method": 2} if webp else {}
    duration = round(1000 / frames_per_second)
    _save(
        path,
        images[0],
        format="WEBP" if webp else "GIF",
        save_all=True,
        append_images=images[1:],
        duration=duration,
        loop=0,
        **options,
    )
    return path


def _as_image(picture: Tensor) -> Any:
    from PIL import Image

    pixels = (picture.clamp(0, 1) * 255).round().byte()
    if len(pixels) == 1:
        return Image.fromarray(pixels[0].numpy())
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _save(path: Path, image: Any, **options: Any) -> None:
    buffer = io.BytesIO()  # Pillow hides the reason when it cannot write to a file itself
    image.save(buffer, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("." + path.name)
    temporary.write_bytes(buffer.getvalue())
    temporary.replace(path)
