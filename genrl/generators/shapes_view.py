"""Views of shapes: soft silhouettes and depths for conditions and rewards, shaded pictures for people.

A shape is given as its truncated signed distance [B, n, n, n], indexed [x, y, z], negative inside (`to_distance` makes
it from media). Cameras are orthographic and look at the origin.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from genrl.generators.shapes_data import clean_shape, shape_of

VIEW_SIZE = 24
AZIMUTH, ELEVATION = 35.0, 25.0
HALF_WIDTH = 1.1  # of the picture, in units of the grid's half side
SOFTNESS = 0.15
View = Literal["silhouette", "depth"]


def to_distance(media: Tensor) -> Tensor:
    """Media in [0, 1], above .5 inside, to truncated distances in [-1, 1], negative inside."""
    return 1 - 2 * media


def to_media(distance: Tensor) -> Tensor:
    """Truncated distances to media in [0, 1]."""
    return ((1 - distance) / 2).clamp(0, 1)


def camera(azimuth: float, elevation: float) -> Tensor:
    """[3, 3]: right, up, and the direction from the camera into the scene; degrees."""
    a, e = math.radians(azimuth), math.radians(elevation)
    toward = torch.tensor([math.cos(a) * math.cos(e), math.sin(a) * math.cos(e), math.sin(e)])
    right = torch.tensor([-math.sin(a), math.cos(a), 0.0])
    return torch.stack([right, torch.linalg.cross(toward, right), -toward])


@lru_cache(maxsize=32)
def _rays(size: int, steps: int, azimuth: float, elevation: float) -> Tensor:
    """Points [steps, size, size, 3] of the rays of a picture (first row on top), near to far, as grid_sample wants."""
    right, up, into = camera(azimuth, elevation)
    line = ((torch.arange(size) + 0.5) * (2 / size) - 1) * HALF_WIDTH
    along = depths(steps)
    points = along[:, None, None, None] * into - line[None, :, None, None] * up + line[None, None, :, None] * right
    return points.flip(-1)  # grid_sample counts the last axis of the volume first


def depths(steps: int) -> Tensor:
    """Places [steps] of a ray's points along it, 0 beside the centre of the grid."""
    return torch.linspace(-1.55, 1.55, steps)


def sample_volume(volume: Tensor, points: Tensor, outside: float) -> Tensor:
    """Trilinear values [B, C, ...] of volumes [B, C, n, n, n] at points [..., 3] or [B, ..., 3] (z, y, x)."""
    batch = len(volume)
    points = points.to(volume.device, volume.dtype)
    if points.dim() == 4:
        points = points.expand(batch, *points.shape)
    return F.grid_sample(volume - outside, points, align_corners=False) + outside


def march(distance: Tensor, size: int, steps: int, azimuth: float, elevation: float) -> Tensor:
    """Distances [B, steps, size, size] along the rays of a picture; outside of the grid all is empty."""
    return sample_volume(distance[:, None], _rays(size, steps, azimuth, elevation), 1.0)[:, 0]


def silhouette(
    distance: Tensor, size: int = VIEW_SIZE, azimuth: float = AZIMUTH, elevation: float = ELEVATION
) -> Tensor:
    """Soft silhouettes [B, size, size] in (0, 1) of distances [B, n, n, n]; gradients flow.

    sigmoid(-min / .15) of the least distance on each ray.
    """
    steps = 2 * distance.shape[-1]
    return torch.sigmoid(-march(distance, size, steps, azimuth, elevation).amin(1) / SOFTNESS)


def depth(distance: Tensor, size: int = VIEW_SIZE, azimuth: float = AZIMUTH, elevation: float = ELEVATION) -> Tensor:
    """Soft depth pictures [B, size, size]: 0 on the background, else nearness in (0, 1); gradients flow.

    The expected nearness of the first hit, where a point of a ray stops it with probability sigmoid(-distance / .05).
    """
    steps = 2 * distance.shape[-1]
    stop = torch.sigmoid(-march(distance, size, steps, azimuth, elevation) / 0.05)  # [B, S, h, w]
    passed = torch.cumprod(1 - stop, 1)
    hit = stop * torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], 1)
    near = (1 - depths(steps).to(distance) / 1.55) / 2  # 1 nearest, 0 farthest
    return (hit * near[:, None, None]).sum(1)


RENDERERS = {"silhouette": silhouette, "depth": depth}


def condition_views(
    prompts: Sequence[str], metadata: Sequence[dict[str, Any]], resolution: int, view: View = "silhouette"
) -> Tensor:
    """The pictures [B, 24, 24] in [0, 1] that the shapes of some prompts are generated from.

    Rendered from the whole object of the prompt, or read from `metadata[i]["image"]` where it has one.
    """
    return torch.stack([_condition_view(p, m, resolution, view) for p, m in zip(prompts, metadata, strict=True)])


def _condition_view(prompt: str, metadata: dict[str, Any], resolution: int, view: View) -> Tensor:
    if metadata.get("image") is not None:
        return read_view(metadata["image"])
    return _rendered(*shape_of(prompt, metadata), resolution, view)


@lru_cache(maxsize=4096)
def _rendered(kind: str, seed: int, resolution: int, view: View) -> Tensor:
    return RENDERERS[view](clean_shape(kind, seed, resolution)[None])[0]


def read_view(image: Any) -> Tensor:
    """A view [24, 24] in [0, 1] from an image: the object bright on a dark ground, or opaque on a transparent one.

    Args:
        image: a path, a PIL image, or a tensor [24, 24] in [0, 1]. Other sizes are resized.

    Raises:
        FileNotFoundError: no such file. ValueError: a tensor of another shape.
    """
    if isinstance(image, Tensor):
        if tuple(image.shape) != (VIEW_SIZE, VIEW_SIZE):
            raise ValueError(f"a view has shape {tuple(image.shape)}; give [{VIEW_SIZE}, {VIEW_SIZE}] in [0, 1]")
        return image.float()
    import numpy as np
    from PIL import Image

    if isinstance(image, (str, os.PathLike)):
        if not os.path.isfile(image):
            raise FileNotFoundError(f"{image} is no file; a shape's metadata names an image of its silhouette there")
        with Image.open(image) as opened:
            image = opened.copy()
    image = image.convert("RGBA").getchannel("A") if "A" in image.getbands() else image.convert("L")
    if image.size != (VIEW_SIZE, VIEW_SIZE):
        image = image.resize((VIEW_SIZE, VIEW_SIZE), Image.Resampling.BOX)
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)


@torch.no_grad()
def shaded(media: Tensor, size: int = 72, azimuth: float = AZIMUTH, elevation: float = ELEVATION) -> Tensor:
    """Pictures [B, 3, size, size] in [0, 1] of media [B, n, n, n]: the surface of .5, lit from the upper left."""
    return torch.cat([_shaded(part, size, azimuth, elevation) for part in media.float().split(16)])


def _shaded(media: Tensor, size: int, azimuth: float, elevation: float) -> Tensor:
    distance, steps = to_distance(media), 4 * media.shape[-1]
    values = march(distance, size, steps, azimuth, elevation)  # [B, S, h, w]
    inside = values < 0
    hit, first = inside.any(1), inside.int().argmax(1)  # [B, h, w]
    at = values.gather(1, first[:, None])[:, 0]
    before = values.gather(1, (first - 1).clamp(min=0)[:, None])[:, 0]
    part = before / (before - at).clamp(min=1e-6)  # where between the two points the surface is
    place = (first - 1 + part).clamp(min=0) * (3.1 / (steps - 1)) - 1.55
    right, up, into = camera(azimuth, elevation).to(media.device)
    start = _rays(size, 2, azimuth, elevation)[0].to(media.device) + 1.55 * into.flip(0)  # [h, w, 3]
    points = start + place[..., None] * into.flip(0)  # [B, h, w, 3]
    slope = torch.stack(torch.gradient(F.pad(distance, (1,) * 6, value=1.0), dim=(1, 2, 3)), 1)[..., 1:-1, 1:-1, 1:-1]
    normal = sample_volume(slope, points[:, None], 0.0)[:, :, 0]  # [B, 3, h, w]
    normal = normal / normal.norm(dim=1, keepdim=True).clamp(min=1e-6)
    light = F.normalize(-into + 0.6 * up - 0.5 * right, dim=0)
    bright = 0.25 + 0.75 * torch.einsum("bchw,c->bhw", normal, light).clamp(min=0)
    colour = torch.tensor([0.95, 0.80, 0.55], device=media.device)
    ground = torch.tensor([0.12, 0.13, 0.16], device=media.device)
    mask = hit[:, None].float()
    return mask * bright[:, None] * colour[None, :, None, None] + (1 - mask) * ground[None, :, None, None]
