"""How far a set of generated videos of moving digits is from real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from .moving_digits import check_digit_video, densest_window


def video_features(media: Tensor) -> Tensor:
    """What is simple to say of videos [N, F, 1, 16, 16], [N, 5 F + 32], float32.

    Of every frame the ink, its centre (row, column) and its standard deviation along both; of the first and the last
    frame the 8x8 window that holds most ink, averaged over 2x2 pixels.
    """
    check_digit_video(media)
    frames = media.detach().float().cpu()[:, :, 0]  # [N, F, H, W]
    total = frames.sum((-1, -2)).clamp(min=1e-6)  # [N, F]
    place = torch.arange(frames.shape[-1], dtype=torch.float32)
    found = [total / 10]  # real digits hold about 20 pixels of ink
    for profile in (frames.sum(-1), frames.sum(-2)):  # [N, F, H], [N, F, W]
        centre = (profile * place).sum(-1) / total
        spread = (profile * (place - centre[..., None]).square()).sum(-1) / total
        found += [centre, spread.sqrt()]
    shape = [avg_pool2d(densest_window(media.detach().float().cpu()[:, k]), 2).flatten(1) for k in (0, -1)]
    return torch.cat([*found, *shape], 1)


class VideoDistance:
    """Frechet distance of the features of samples to those of real videos that nothing was trained on; to be logged.

    Each feature is divided by its standard deviation over the real videos, so that all count alike. It falls to the
    value of real data (`reference`), not to 0, because both sets are finite; compare equal numbers of samples only. The
    real ones have the prompts' digits and motions in equal shares, as the default prompts do.

    Args:
        n: real videos, of the gold part of the digits.
        seed: of them.
    """

    def __init__(self, n: int = 3000, seed: int = 5) -> None:
        if n < 2:
            raise ValueError(f"n is {n}; give at least 2 real videos")
        self.n, self.seed = n, seed
        self._real: Tensor | None = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Make the real videos' features; they stay on the CPU."""
        if self._real is None:
            from genrl.generators.moving_digits import moving_digits

            real = video_features(moving_digits(self.n, "gold", self.seed)[0])
            self._scale = real.std(0).clamp(min=1e-3)
            self._real = real / self._scale

    def measure(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, float]:
        """{"frechet": distance} of media [N, F, 1, 16, 16]."""
        from genrl.objectives.distribution_matching import frechet_distance

        self.prepare()
        assert self._real is not None
        return {"frechet": frechet_distance(video_features(media) / self._scale, self._real)}

    def reference(self) -> dict[str, float]:
        """The same for 300 real videos of the generator's digits."""
        from genrl.generators.moving_digits import moving_digits

        return self.measure(moving_digits(300, "generator", self.seed + 1)[0], [], [])
