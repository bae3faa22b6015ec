"""How varied a set of samples is, and cheap statistics that show a reward being hacked.

Diversity needs several numbers. The spread within a prompt falls when a generator collapses, but pixel noise raises
it; the distance to the nearest real image rises with noise, but falls on collapse. Only together do they tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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


class PairwiseDiversity:
    """`pairwise_distance`: mean rms pixel distance between two samples of one prompt, averaged over prompts.

    For any media, in units of the pixel range [0, 1]. Compare with the starting model's value: a fall is a collapse,
    a rise is often noise. NaN if no prompt has two samples.
    """

    def measure(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, float]:
        """`{"pairwise_distance": ...}` of media [N, ...] in [0, 1], grouped by equal prompts."""
        groups: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(prompt, []).append(index)
        means = []
        for rows in groups.values():
            if (n := len(rows)) > 1:
                flat = media[rows].detach().flatten(1).double()  # [n, D]
                means.append(rms_distance(flat, flat).sum().item() / (n * (n - 1)))
        return {"pairwise_distance": sum(means) / len(means) if means else float("nan")}


def image_statistics(media: Tensor) -> dict[str, float]:
    """Statistics that no reward is based on; a steady drift of one of them means that the reward is being hacked.

    Media [B, C, H, W] or [B, F, C, H, W] in [0, 1]; luminance is the mean over channels.

    * `brightness`: mean luminance.
    * `dark_share`, `saturated_share`: pixels darker than 0.1, brighter than 0.9.
    * `edge_energy`: mean squared difference of neighbouring pixels.
    * `entropy`: of the histogram of luminance in 32 bins, in bits, averaged over images (0: flat, 5: uniform).
    """
    frames = media.detach().float()
    luminance = (frames.flatten(0, 1) if frames.dim() == 5 else frames).mean(dim=1)  # [N, H, W]
    bins = (luminance * 32).long().clamp(0, 31).flatten(1)  # [N, H W]
    counts = torch.zeros(len(bins), 32, device=media.device).scatter_add_(
        1, bins, torch.ones_like(bins, dtype=torch.float32)
    )
    share = counts / bins.shape[1]
    across, down = luminance.diff(dim=2).square(), luminance.diff(dim=1).square()
    statistics = {
        "brightness": luminance.mean(),
        "dark_share": (luminance < 0.1).float().mean(),
        "saturated_share": (luminance > 0.9).float().mean(),
        "edge_energy": (across.sum() + down.sum()) / max(across.numel() + down.numel(), 1),
        "entropy": -torch.xlogy(share, share).sum(dim=1).mean() / torch.log(torch.tensor(2.0)),
    }
    return {name: value.item() for name, value in statistics.items()}
