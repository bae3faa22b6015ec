"""How well an image compresses: the rewards of DDPO that need no model (Black et al., arXiv:2305.13301)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import torch
from torch import Tensor


class JPEGCompressibility:
    """Size of the JPEG file in kB (1000 bytes), negative by default: smaller files score higher.

    Args:
        quality: JPEG quality, 1 to 95 (95: DDPO).
        sign: -1 rewards small files, +1 rewards large ones.

    Media of 1 or 3 channels; video scores the mean over frames.
    """

    differentiable = False

    def __init__(self, quality: int = 95, sign: int = -1) -> None:
        if not 1 <= quality <= 95:
            raise ValueError(f"quality is {quality}; JPEG takes 1 to 95 (above, files grow without gain). Use 95.")
        if sign not in (-1, 1):
            raise ValueError(f"sign is {sign}; give -1 (small files score high) or +1 (large files score high).")
        self.quality, self.sign = quality, sign
        self.range: tuple[float, float] = (-math.inf, 0.0) if sign < 0 else (0.0, math.inf)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] signed size in kB."""
        frames = media if media.dim() == 5 else media.unsqueeze(1)  # [B, F, C, H, W]
        if frames.shape[2] not in (1, 3):
            raise ValueError(
                f"media has {frames.shape[2]} channels; JPEG takes 1 (grey) or 3 (RGB). Convert them first."
            )
        pixels = (
            (frames.detach().float() * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2).cpu().numpy()
        )
        sizes = [sum(self._bytes(frame) for frame in sample) / len(sample) for sample in pixels]
        return torch.tensor(sizes, dtype=torch.float32, device=media.device) * (self.sign / 1000)

    def _bytes(self, pixels) -> int:
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(
            buffer, "JPEG", quality=self.quality
        )
        return buffer.tell()


class Incompressibility(JPEGCompressibility):
    """Size of the JPEG file in kB: larger files, more detail or noise, score higher."""

    def __init__(self, quality: int = 95) -> None:
        super().__init__(quality=quality, sign=1)
