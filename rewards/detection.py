"""Detectors of named objects, a part of `CompositionReward`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .encoders import DTYPES, Dtype, explained

OWL = "google/owlv2-base-patch16-ensemble"


@dataclass(frozen=True)
class Detection:
    """An object in an image: its label, its box (left, top, right, bottom) as shares of width and height, its score."""

    label: str
    box: tuple[float, float, float, float]
    score: float


class Detector(Protocol):
    """Finds objects. `prepare(device, progress=True)` is optional, as for a reward."""

    def detect(self, media: Any, labels: Any, /) -> Any:
        """`(media [B, C, H, W] in [0, 1], labels: for every image the names to look for)` -> a list of detections each.

        Only labels that were asked for come back.
        """


class ZeroShotDetector:
    """Objects named by text, by a zero-shot detector of transformers: OWL-ViT, OWLv2, Grounding DINO and others.

    Default `google/owlv2-base-patch16-ensemble`: 155 M weights, .62 GB in float32, .31 GB in bfloat16, and about 1 GB
    for a batch of 8. Licence Apache-2.0. `IDEA-Research/grounding-dino-tiny` (172 M, Apache-2.0) separates objects that
    stand close better; give it a threshold of .3.

    Args:
        model: hub id or folder.
        threshold: lowest score of a detection. 0.2 suits OWLv2, whose scores are small.
        overlap: of two boxes of a label with a larger intersection over union, the one with the lower score goes.
        template: the text for a label; null takes "a photo of a {label}" for OWL and "{label}" for others.
        batch_size: images of one forward pass.
        dtype: of the weights.

    Needs the extra `rewards`: pip install "genrl[rewards]".
    """

    def __init__(
        self,
        model: str = OWL,
        threshold: float = 0.2,
        overlap: float = 0.5,
        template: str | None = None,
        batch_size: int = 8,
        dtype: Dtype = "float32",
    ) -> None:
        for name, value in (("threshold", threshold), ("overlap", overlap)):
            if not 0 <= value <= 1:
                raise ValueError(f"ZeroShotDetector: {name} = {value} must lie in [0, 1]")
        if template is not None and "{label}" not in template:
            raise ValueError(f"ZeroShotDetector: template {template!r} lacks {{label}}, where the object's name goes")
        if batch_size < 1:
            raise ValueError(f"ZeroShotDetector: batch_size = {batch_size} must be at least 1")
        if dtype not in DTYPES:
            raise ValueError(f"ZeroShotDetector: dtype is {dtype!r}; known: {', '.join(DTYPES)}")
        self.model, self.threshold, self.overlap, self.template = model, threshold, overlap, template
        self.batch_size, self.dtype = batch_size, dtype
        self._network: Any = None
        self._processor: Any = None

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model."""
        from genrl.tiny.detection import saved_detector

        return {**arguments, "model": str(saved_detector(folder / "detector"))}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model unless that has been done, and move it to `device`."""
        if self._network is None:
            try:
                from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor
            except ImportError as error:
                raise ImportError(
                    'ZeroShotDetector needs transformers. Install it with: pip install "genrl[rewards]"'
                ) from error
            with torch.random.fork_rng(devices=[]), explained("ZeroShotDetector", self.model):
                network, report = AutoModelForZeroShotObjectDetection.from_pretrained(
                    self.model, output_loading_info=True
                )
                if report["missing_keys"]:
                    raise ValueError(f"the checkpoint lacks weights, such as {sorted(report['missing_keys'])[0]}")
                self._processor = AutoProcessor.from_pretrained(self.model)
            self._network = network.eval().requires_grad_(False).to(DTYPES[self.dtype])
        self._network.to(device)

    @torch.no_grad()
    def detect(self, media: Tensor, labels: Sequence[Sequence[str]]) -> list[list[Detection]]:
        """Detections of every image, the best first."""
        if self._network is None:
            self.prepare(media.device, progress=False)
        found: list[list[Detection]] = [[] for _ in labels]
        together: dict[tuple[str, ...], list[int]] = {}
        for row, names in enumerate(labels):
            if names:  # images that look for the same objects share a pass
                together.setdefault(tuple(dict.fromkeys(names)), []).append(row)
        for names, rows in together.items():
            for start in range(0, len(rows), self.batch_size):
                chunk = rows[start : start + self.batch_size]
                for row, detections in zip(chunk, self._pass(media[chunk], names), strict=True):
                    found[row] = without_duplicates(detections, self.overlap)
        return found

    def _pass(self, media: Tensor, names: tuple[str, ...]) -> list[list[Detection]]:
        height, width = media.shape[-2:]
        owl = str(getattr(self._network.config, "model_type", "")).startswith("owl")
        template = self.template or ("a photo of a {label}" if owl else "{label}")
        texts = [template.format(label=name) for name in names]
        pixels = (media.expand(-1, 3, -1, -1).clamp(0, 1) * 255).round().byte().cpu()
        images = [image.permute(1, 2, 0).numpy() for image in pixels]
        inputs = self._processor(
            text=[texts] * len(images), images=images, return_tensors="pt", padding=True, truncation=True
        )
        inputs = inputs.to(self._network.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self._network.dtype)
        outputs = self._network(**inputs)
        results = self._processor.post_process_grounded_object_detection(
            outputs, threshold=self.threshold, target_sizes=[(height, width)] * len(images),
            text_labels=[list(names)] * len(images),
        )  # fmt: skip
        scale = torch.tensor([width, height, width, height])
        detections = []
        for result in results:
            boxes = (result["boxes"].float().cpu() / scale).clamp(0, 1).tolist()
            entries = zip(result["text_labels"], boxes, result["scores"].float().tolist(), strict=True)
            named = ((_known(text, names), box, score) for text, box, score in entries)
            detections.append([Detection(label, tuple(box), score) for label, box, score in named if label])
        return detections


def _known(text: str | None, names: Sequence[str]) -> str | None:
    """The label that a detector's text stands for; Grounding DINO gives words of the prompt, sometimes not all."""
    text = (text or "").strip().lower()
    exact = [name for name in names if name.lower() == text]
    close = [name for name in names if text and (text in name.lower() or name.lower() in text)]
    return next(iter(exact + close), None)


def without_duplicates(detections: Sequence[Detection], overlap: float) -> list[Detection]:
    """The best first; of boxes of one label that overlap by more, the best alone."""
    kept: list[Detection] = []
    for one in sorted(detections, key=lambda detection: -detection.score):
        same = (other for other in kept if other.label == one.label)
        if all(intersection_over_union(one.box, other.box) <= overlap for other in same):
            kept.append(one)
    return kept


def intersection_over_union(a: Sequence[float], b: Sequence[float]) -> float:
    """Of two boxes (left, top, right, bottom)."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (areas - width * height) if areas > width * height else 0.0
