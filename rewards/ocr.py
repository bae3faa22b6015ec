"""Rendered text read by a real OCR model (PP-OCRv4, which rapidocr-onnxruntime ships with its weights)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions that turn a into b."""
    previous = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        current = [i]
        for j, right in enumerate(b, start=1):
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return previous[-1]


def text_similarity(read: str, target: str, ignore_case: bool = True) -> float:
    """1 - edit distance / length of the longer text, spaces ignored: 1 if equal, 0 if nothing was read.

    Raises:
        ValueError: the target is empty, so that "nothing read" would be right.
    """
    read, target = "".join(read.split()), "".join(target.split())
    if not target:
        raise ValueError("the target text is empty; give the text that the image shall show.")
    if ignore_case:
        read, target = read.casefold(), target.casefold()
    return 1.0 - edit_distance(read, target) / max(len(read), len(target))


class OCRReward:
    """How close the text in the image is to `metadata[i]["text"]`: 1 if equal, 0 if nothing is read.

    Rewards text only: watch `image_statistics` and a reward for the picture, or backgrounds go blank.

    Args:
        detect: False reads the whole image as one line (it must be filled by the text; 20 to 40 ms an image). True
            looks for text first, for text somewhere in a larger picture.
        detect_side: with `detect`, the side to which images are scaled for the search. 128 is quick and enough for
            small pictures; rapidocr's own value is 736.
        ignore_case: take capitals and small letters as equal.
        threads: of onnxruntime.

    Needs the extra `ocr`: pip install "genrl[ocr]".
    """

    differentiable = False
    range = (0.0, 1.0)
    name = "ocr"

    def __init__(
        self, detect: bool = False, detect_side: int = 128, ignore_case: bool = True, threads: int = 1
    ) -> None:
        self.detect, self.detect_side = detect, detect_side
        self.ignore_case, self.threads = ignore_case, threads
        self._engine: Any = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the models. They run on the CPU wherever the media are."""
        if self._engine is None:
            self._engine = _load_engine(self.detect_side, self.threads)

    def read(self, media: Tensor) -> list[str]:
        """The text in each image of media [B, C, H, W], C = 1 or 3; "" where none is found."""
        if media.dim() != 4 or media.shape[1] not in (1, 3):
            raise ValueError(f"media has shape {tuple(media.shape)}; OCR takes [B, 1, H, W] or [B, 3, H, W].")
        self.prepare()
        images = _as_bgr(media)
        if self.detect:
            found = [self._engine(image, use_cls=False)[0] or [] for image in images]
            return ["".join(line[1] for line in lines) for lines in found]
        results, _ = self._engine.text_rec(images)
        return [result[0] for result in results]

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] similarity in [0, 1]."""
        targets = [entry.get("text") for entry in metadata]
        for target, prompt in zip(targets, prompts, strict=True):
            if not isinstance(target, str) or not target.strip():
                raise ValueError(
                    f"prompt {prompt!r} has metadata text {target!r}; OCRReward takes the text to be shown, not empty. "
                    'Add {"text": ...} to each prompt.'
                )
        scores = [
            text_similarity(read, str(target), self.ignore_case)
            for read, target in zip(self.read(media), targets, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32, device=media.device)


def _as_bgr(media: Tensor) -> list[np.ndarray]:
    """uint8 [H, W, 3] arrays. The recogniser scales every line to a height of 48 pixels, small images included."""
    pixels = (media.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).flip(1)
    return [np.ascontiguousarray(image) for image in pixels.permute(0, 2, 3, 1).numpy()]


def _load_engine(detect_side: int, threads: int) -> Any:
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise ImportError('OCRReward needs rapidocr-onnxruntime. Install it with: pip install "genrl[ocr]"') from error
    engine = RapidOCR(
        det_limit_side_len=detect_side,
        intra_op_num_threads=threads,
        inter_op_num_threads=threads,
        rec_batch_num=1,  # padding to the widest of a batch costs more than batching gains on a CPU
    )
    for name in ("RapidOCR", "OrtInferSession"):  # each has a handler of its own that reports every empty image
        logging.getLogger(name).setLevel(logging.ERROR)
    return engine
