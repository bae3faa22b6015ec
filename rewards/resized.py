"""A reward or gauge that sees the media at another size, or in grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .base import reward_name

_SHARED = ("differentiable", "range", "range_of", "entry_weight", "log_only", "reference", "describe")


class Resized:
    """Gives a reward the media at its own size: a classifier of 8 x 8 grey images can score larger pictures in colour.

    Args:
        reward: what scores the resized media [B, C, height, width], or [B, F, C, height, width].
        size: [height, width], or one number for both.
        gray: average the channels to one. The weights are equal, so that grey pictures keep their values exactly.

    Smaller sizes average the pixels that fall together (exactly, where the size divides the old one), larger ones
    interpolate. Gradients pass. All else is the reward's: its name, its range, its reference; a set metric stays one.
    """

    def __init__(self, reward: Any, size: int | Sequence[int], gray: bool = False) -> None:
        height, width = (size, size) if isinstance(size, int) else size
        if height < 1 or width < 1:
            raise ValueError(f"size is {size}; give pixels as [height, width], each at least 1")
        self.reward, self.size, self.gray = reward, (height, width), gray
        self.name = reward_name(reward)

    def __getattr__(self, name: str) -> Any:
        if name == "measure":
            measure = self.__dict__["reward"].measure
            return lambda media, prompts, metadata: measure(self.resize(media), prompts, metadata)
        if name not in _SHARED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.__dict__["reward"], name)

    def prepare(self, device: Any, progress: bool = True) -> None:
        """Prepare the reward."""
        if hasattr(self.reward, "prepare"):
            self.reward.prepare(device, progress=progress)

    def resize(self, media: Tensor) -> Tensor:
        """The media that the reward gets."""
        frames = media.flatten(0, -4)  # [B or B F, C, H, W]
        if self.gray:
            frames = frames.mean(1, keepdim=True)
        height, width = frames.shape[-2:]
        if self.size[0] <= height and self.size[1] <= width:
            frames = F.adaptive_avg_pool2d(frames, self.size)
        else:
            # Bilinear weights are positive and sum to 1, so values stay in [0, 1].
            frames = F.interpolate(frames, self.size, mode="bilinear", antialias=True)
        return frames.unflatten(0, media.shape[:-3])

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Any:
        """What the reward gives for the resized media."""
        return self.reward(self.resize(media), prompts, metadata)
