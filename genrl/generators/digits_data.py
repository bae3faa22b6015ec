"""The real data behind `DigitsGenerator`: scikit-learn's 1,797 handwritten 8x8 digits, in three disjoint parts.

The generator, the reward that is optimised and the judge that is never optimised must not share an image: a reward
that has seen the generator's images could reward copies of them, and a judge that shares the reward's images inherits
its mistakes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SPLIT_SEED = 0
GENERATOR_IMAGES = 900


@dataclass(frozen=True)
class DigitsPart:
    """One part of the split.

    Attributes:
        images: float32 [N, 1, 8, 8] in [0, 1]; 0 is paper, 1 is ink.
        labels: int64 [N], the digit 0..9.
        indices: int64 [N], rows of `sklearn.datasets.load_digits()`.
    """

    images: np.ndarray
    labels: np.ndarray
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DigitsSplit:
    """Three disjoint parts: `generator` (900 images), `proxy` (448, for rewards) and `gold` (449, for judges)."""

    generator: DigitsPart
    proxy: DigitsPart
    gold: DigitsPart


def load_digits_split(seed: int = SPLIT_SEED) -> DigitsSplit:
    """Split the 1,797 digits by class with a fixed seed.

    Args:
        seed: seed of the shuffle inside every class. Everything in this package uses the default, so that generator,
            reward and judge agree on who has seen what.

    Returns:
        `DigitsSplit`, a fresh copy on every call.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)[:, None]  # [1797, 1, 8, 8]
    labels = data.target.astype(np.int64)  # [1797]
    rows = np.arange(len(labels))
    generator, rest = train_test_split(rows, train_size=GENERATOR_IMAGES, stratify=labels, random_state=seed)
    proxy, gold = train_test_split(rest, train_size=len(rest) // 2, stratify=labels[rest], random_state=seed)

    def part(index: np.ndarray) -> DigitsPart:
        return DigitsPart(images[index], labels[index], index.astype(np.int64))

    return DigitsSplit(part(generator), part(proxy), part(gold))
