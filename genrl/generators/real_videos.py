"""Real moving digits that fit prompts, for students that are trained on a real past."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genrl.diffusion import RowNoise
from genrl.generators.moving_digits import MOTIONS, moving_digits
from genrl.prompts import Prompt

_DRAW = 40_000  # stream of a noise source


class RealMovingDigits:
    """Latents of real videos with the digit and the motion of a prompt.

    Args:
        n: videos that are kept, over all digits and motions.
        part: of the digit images, see `genrl.generators.moving_digits.moving_digits`.
        seed: of the videos.
    """

    def __init__(self, n: int = 4096, part: str = "generator", seed: int = 0):
        self.n, self.part, self.seed = n, part, seed
        self._videos: Tensor | None = None
        self._rows: dict[tuple[int, str], Tensor] = {}

    def _load(self) -> Tensor:
        if self._videos is None:
            videos, digits, motions = moving_digits(self.n, self.part, self.seed)
            self._videos = 2 * videos - 1
            for digit in range(10):
                for place, motion in enumerate(MOTIONS):
                    self._rows[digit, motion] = ((digits == digit) & (motions == place)).nonzero()[:, 0]
        return self._videos

    def __call__(self, prompts: Sequence[Prompt], noise: RowNoise) -> Tensor:
        """Latents [B, F, 1, 16, 16] in [-1, 1]; which video is drawn depends on the sample alone.

        Raises:
            ValueError: for a prompt of which there is no video.
        """
        videos = self._load()
        share = noise.uniform(_DRAW, (len(prompts), 1))[:, 0].tolist()
        chosen = []
        for prompt, place in zip(prompts, share, strict=True):
            rows = self._rows.get((prompt.metadata.get("label", -1), prompt.metadata.get("motion", "")))
            if rows is None or not len(rows):
                raise ValueError(
                    f"there is no real video for {prompt.text!r} with {dict(prompt.metadata)} among {self.n}; use "
                    "MovingDigitPrompts, or a larger n"
                )
            chosen.append(int(rows[min(int(place * len(rows)), len(rows) - 1)]))
        return videos[torch.tensor(chosen)]
