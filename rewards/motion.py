"""How much a video moves, and how evenly, without a model: [B, F, C, H, W] only.

The two belong together. A still video is perfectly smooth, and noise moves most: reward one, and watch the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


def displacement(before: Tensor, after: Tensor) -> Tensor:
    """By how many pixels (down, right) the content moves from one frame to the other, by phase correlation.

    One motion for the whole frame: that of the camera, or of what moves before an even background. Shifts are found
    modulo the size, so at most half of it; whole pixels are exact where the content stays inside or wraps, fractions
    are good to about a tenth. 0 for frames without content or change. Not differentiable.

    Args:
        before, after: [..., C, H, W].

    Returns:
        [..., 2] float32.
    """
    grey = [frame.detach().float().mean(-3) for frame in (before, after)]  # [..., H, W]
    first, second = (torch.fft.fft2(frame - frame.mean((-2, -1), keepdim=True)) for frame in grey)
    cross = second * first.conj()
    scale = cross.abs().amax((-2, -1), keepdim=True)
    strong = cross.abs() > 1e-6 * scale  # frequencies that hold nothing but rounding have no phase
    phase = torch.where(strong, cross / cross.abs().clamp_min(torch.finfo(torch.float32).tiny), 0)
    peaks = torch.fft.ifft2(phase).real  # [..., H, W]
    height, width = peaks.shape[-2:]
    best = peaks.flatten(-2).argmax(-1)
    row, column = best // width, best % width
    down = _refined(peaks.gather(-1, column[..., None, None].expand(*column.shape, height, 1))[..., 0], row)
    right = _refined(peaks.gather(-2, row[..., None, None].expand(*row.shape, 1, width))[..., 0, :], column)
    return torch.stack([down, right], dim=-1)


def _refined(line: Tensor, peak: Tensor) -> Tensor:
    """The place of the peak of a line [..., n], between pixels, in [-n/2, n/2).

    A shift between two pixels spreads over sin(pi d) / (pi d) and its neighbour, whose ratio is d / (1 - d).
    """
    size = line.shape[-1]
    centre, left, right = (line.gather(-1, (peak + step)[..., None] % size)[..., 0].clamp_min(0) for step in (0, -1, 1))
    side = torch.maximum(left, right)
    part = side / (side + centre).clamp_min(1e-12)
    place = peak + torch.where(right >= left, part, -part) * (size > 2)
    return (place + size / 2) % size - size / 2


class MotionSmoothness:
    """How evenly a video moves, in [0, 1], larger is smoother; 1 for a still one, so pair it with `DynamicDegree`.

    1 - sum |d_(t+1) - d_t| / sum (|d_(t+1)| + |d_t|), where d_t is the change from frame t to the next: 1 if all
    changes are equal, 0 if each undoes the last, as in flicker.

    Args:
        mode: ``"pixels"`` takes d as the change of each pixel: the error of guessing a frame as the mean of its
            neighbours, relative to the motion. Differentiable. ``"displacement"`` takes d as the frame's displacement
            (see `displacement`): evenness of one large motion, whatever its texture.
        pool: with pixels, side of the squares that are averaged first. An edge that moves further than its own width
            changes other pixels each time, which looks uneven: pool to about the motion of one frame.

    Videos of three frames or more.
    """

    range = (0.0, 1.0)
    name = "motion_smoothness"

    def __init__(self, mode: Literal["pixels", "displacement"] = "pixels", pool: int = 4) -> None:
        self.mode, self.pool = _checked_mode(mode, ("pixels", "displacement")), pool
        if pool < 1:
            raise ValueError(f"pool is {pool}; give the side of a square in pixels, at least 1 (no pooling).")
        self.differentiable = mode == "pixels"

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B]."""
        check_video(media, 3, type(self).__name__)
        if self.mode == "displacement":
            change = displacement(media[:, :-1], media[:, 1:])  # [B, F - 1, 2]
            sizes, jumps = change.norm(dim=-1), change.diff(dim=1).norm(dim=-1)
        else:
            change = _pooled(media, self.pool).float().diff(dim=1).flatten(2)  # [B, F - 1, C H W]
            sizes, jumps = change.abs().mean(-1), change.diff(dim=1).abs().mean(-1)
        motion = (sizes[:, 1:] + sizes[:, :-1]).sum(1)
        uneven = jumps.sum(1) / motion.clamp_min(1e-6)
        return 1 - uneven.clamp(max=1)  # beyond 1 by rounding only


class DynamicDegree:
    """How much a video moves, larger is more; noise and cuts count too, so pair it with `MotionSmoothness`.

    Args:
        mode: ``"difference"`` is the mean absolute change of a pixel from frame to frame, in [0, 1]; differentiable.
            ``"displacement"`` is the mean distance, in pixels a frame, that the content moves (see `displacement`);
            brightness, fades and faint noise do not count.

    Videos of two frames or more.
    """

    name = "dynamic_degree"

    def __init__(self, mode: Literal["difference", "displacement"] = "difference") -> None:
        self.mode = _checked_mode(mode, ("difference", "displacement"))
        self.differentiable = mode == "difference"
        self.range = (0.0, 1.0) if mode == "difference" else (0.0, math.inf)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B]."""
        check_video(media, 2, type(self).__name__)
        if self.mode == "displacement":
            return displacement(media[:, :-1], media[:, 1:]).norm(dim=-1).mean(1)
        return media.float().diff(dim=1).abs().flatten(1).mean(1)


def check_video(media: Tensor, frames: int, who: str) -> None:
    """Raise ValueError unless media are [B, F, C, H, W] with at least so many frames."""
    if media.dim() != 5 or media.shape[1] < frames:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; {who} takes videos [B, F, C, H, W] of {frames} frames or more. Use "
            "it with a video generator."
        )


def _checked_mode(mode: str, known: tuple[str, ...]) -> str:
    if mode not in known:
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(known)}.")
    return mode


def _pooled(media: Tensor, side: int) -> Tensor:
    """Means over squares; the side is cut to that of the frames."""
    side = min(side, *media.shape[-2:])
    return F.avg_pool2d(media.flatten(0, 1), side).unflatten(0, media.shape[:2]) if side > 1 else media
