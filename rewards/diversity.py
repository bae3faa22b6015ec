"""How varied a set of samples is.

Diversity needs several numbers. The spread within a prompt falls when a generator collapses, but pixel noise raises
it; the distance to the nearest real image rises with noise, but falls on collapse. Only together do they tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from .classifier import check_digit_media, digit_labels


class DigitSpread:
    """Spread of generated digits within each prompt, against real images that the generator has not seen.

    Images are scaled to [-1, 1]; a distance is rms over pixels; each number is averaged over the images of a digit,
    then over digits. The real images are the proxy and gold parts (897).

    * `spread_std`: standard deviation within a digit, averaged over pixels. Real data .33. Low: collapsed. Noise and
      wrong digits raise it.
    * `spread_nn`: generated image -> nearest real image of the digit. Real data .28. High: dirty or wrong images. It
      falls when the generator collapses onto a clean prototype.
    * `spread_rec`: real image -> nearest generated image of the digit. Real data .28. High: parts of the data are not
      covered, or everything is dirty. It falls as more images a digit are given (compare equal counts only).

    Healthy fine-tuning keeps the std above about .27 and raises neither distance by more than .03.
    """

    def __init__(self) -> None:
        self._real: tuple[Tensor, Tensor] | None = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the real images; they stay on the CPU."""
        if self._real is None:
            from genrl.generators.digits_data import load_digits_split

            split = load_digits_split()
            images = [torch.from_numpy(part.images) for part in (split.proxy, split.gold)]
            labels = [torch.from_numpy(part.labels) for part in (split.proxy, split.gold)]
            self._real = torch.cat(images), torch.cat(labels)

    def measure(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, float]:
        """`spread_std`, `spread_nn`, `spread_rec` of media [N, 1, 8, 8] in [0, 1]; reads `metadata[i]["label"]`."""
        check_digit_media(media)
        self.prepare()
        assert self._real is not None
        return digit_spread(media.detach().cpu(), digit_labels(metadata, prompts), *self._real)

    def reference(self) -> dict[str, float]:
        """The same numbers for the generator's 900 real training images: what real data reads."""
        from genrl.generators.digits_data import load_digits_split

        self.prepare()
        assert self._real is not None
        part = load_digits_split().generator
        return digit_spread(torch.from_numpy(part.images), torch.from_numpy(part.labels), *self._real)


def digit_spread(images: Tensor, labels: Tensor, real: Tensor, real_labels: Tensor) -> dict[str, float]:
    """The numbers of `DigitSpread`: images [N, C, H, W] in [0, 1] with labels [N], against real ones [M, C, H, W]."""
    spread, nearest, recall = [], [], []
    for label in labels.unique():
        ours = images[labels == label].flatten(1).double() * 2 - 1  # [n, D]
        theirs = real[real_labels == label].flatten(1).double() * 2 - 1  # [m, D]
        distance = rms_distance(ours, theirs)  # [n, m]
        spread.append(ours.std(dim=0, correction=0).mean())
        nearest.append(distance.amin(dim=1).mean())
        recall.append(distance.amin(dim=0).mean())
    names = ("spread_std", "spread_nn", "spread_rec")
    return {
        name: torch.stack(values).mean().item() for name, values in zip(names, (spread, nearest, recall), strict=True)
    }


def rms_distance(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square difference of every row of a [n, D] to every row of b [m, D]: [n, m]."""
    # The matrix-product form loses digits for near-equal rows, which is where collapse has to be seen.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist") / a.shape[1] ** 0.5


def prompt_groups(prompts: Sequence[str], metadata: Sequence[dict]) -> list[list[int]]:
    """Rows of the samples of each prompt: those that share text and metadata (one instruction, several images)."""
    groups: dict[tuple[str, str], list[int]] = {}
    for row, (prompt, entry) in enumerate(zip(prompts, metadata, strict=True)):
        groups.setdefault((prompt, repr(entry)), []).append(row)
    return list(groups.values())


class PairwiseDiversity:
    """`pairwise_distance`: mean rms pixel distance between two samples of one prompt, averaged over prompts.

    For any media, in units of the pixel range [0, 1]. Compare with the starting model's value: a fall is a collapse,
    a rise is often noise. NaN if no prompt has two samples. Evaluations measure it where no other set metric is
    configured; `EmbeddingDiversity` is its counterpart in the features of a vision model.

    Args:
        size: larger pictures are averaged down to this many pixels a side, which keeps large sets quick and looks at
            what is shown rather than at its grain; null takes every pixel.
        frames: of a video, at most so many, evenly spaced.
    """

    def __init__(self, size: int | None = 64, frames: int = 8) -> None:
        if frames < 1 or (size is not None and size < 1):
            raise ValueError(f"size = {size} and frames = {frames} must be at least 1; size null takes every pixel")
        self.size, self.frames = size, frames

    def measure(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, float]:
        """`{"pairwise_distance": ...}` of media [N, ...] in [0, 1], grouped by prompt."""
        means = []
        for rows in prompt_groups(prompts, metadata):
            if (n := len(rows)) > 1:
                flat = self._reduced(media[rows].detach()).flatten(1).double()  # [n, D]
                means.append(rms_distance(flat, flat).sum().item() / (n * (n - 1)))
        return {"pairwise_distance": sum(means) / len(means) if means else float("nan")}

    def _reduced(self, media: Tensor) -> Tensor:
        if media.dim() == 5:
            kept = torch.linspace(0, media.shape[1] - 1, min(self.frames, media.shape[1])).round().long()
            media = media[:, kept].flatten(1, 2)  # [n, F C, H, W]
        factor = 1 if self.size is None else -(-max(media.shape[-2:]) // self.size)
        return avg_pool2d(media, factor, ceil_mode=True) if factor > 1 else media
