"""Cheap statistics of pictures that no reward is based on: they move when a reward is hacked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEVELS = 32  # bins of luminance
COLOR_LEVELS = 8  # bins of each of R, G and B
PIXELS_AT_ONCE = 2**22  # bounds the memory for large sets of large pictures


def image_statistics(media: Tensor) -> dict[str, float]:
    """Statistics of media [B, C, H, W] or [B, F, C, H, W] in [0, 1]; luminance is the mean over channels.

    * `brightness`: mean luminance.
    * `dark_share`, `saturated_share`: pixels darker than 0.1, brighter than 0.9.
    * `edge_energy`: mean squared difference of neighbouring pixels.
    * `entropy`: of the histogram of luminance in 32 bins, in bits, averaged over images (0: flat, 5: uniform).

    With three channels also

    * `color_saturation`: mean of the largest minus the smallest channel (0: grey). Saturation times value of HSV, since
      saturation alone is the noise of dark pixels.
    * `color_entropy`: of the joint histogram of R, G and B in 8 bins each, in bits, averaged over images (0 to 9).

    A steady drift of one of them from the starting model's value on the same noise means that the reward is being
    hacked: blank backgrounds, overexposure, oversaturation, textures.
    """
    frames = media.detach().flatten(0, 1) if media.dim() == 5 else media.detach()  # [N, C, H, W]
    some = max(1, PIXELS_AT_ONCE // frames[0, 0].numel())
    total: dict[str, Tensor] = {}
    for part in frames.split(some):
        for name, value in _statistics(part.float()).items():
            total[name] = total.get(name, 0) + value * len(part) / len(frames)
    values = torch.stack(list(total.values())).tolist()  # one transfer from the device
    return dict(zip(total, values, strict=True))


def _statistics(frames: Tensor) -> dict[str, Tensor]:
    luminance = frames.mean(dim=1)  # [N, H, W]
    across, down = luminance.diff(dim=2).square(), luminance.diff(dim=1).square()
    found = {
        "brightness": luminance.mean(),
        "dark_share": (luminance < 0.1).float().mean(),
        "saturated_share": (luminance > 0.9).float().mean(),
        "edge_energy": (across.sum() + down.sum()) / max(across.numel() + down.numel(), 1),
        "entropy": _entropy(_bins(luminance, LEVELS), LEVELS),
    }
    if frames.shape[1] == 3:
        red, green, blue = _bins(frames, COLOR_LEVELS).unbind(1)
        joint = (red * COLOR_LEVELS + green) * COLOR_LEVELS + blue  # [N, H, W]
        found["color_saturation"] = (frames.amax(1) - frames.amin(1)).mean()
        found["color_entropy"] = _entropy(joint, COLOR_LEVELS**3)
    return found


def _bins(values: Tensor, count: int) -> Tensor:
    return (values * count).long().clamp(0, count - 1)


def _entropy(bins: Tensor, count: int) -> Tensor:
    """Entropy in bits of each image's histogram, bins [N, H, W], averaged over images."""
    flat = bins.flatten(1)
    ones = torch.ones_like(flat, dtype=torch.float32)
    share = torch.zeros(len(flat), count, device=bins.device).scatter_add_(1, flat, ones) / flat.shape[1]
    return -torch.xlogy(share, share).sum(dim=1).mean() / math.log(2.0)
