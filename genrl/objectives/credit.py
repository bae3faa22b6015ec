"""Weights of chunks and tokens, as pure functions: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_weights(tokens: Sequence[float], a: float = -1.0) -> Tensor:
    """Weights [J] of chunks that were generated one after another, of mean 1 over tokens (arXiv 2605.15190).

    With p_j the share of the tokens from chunk j on and pi_a(p) = a p / (1 + (a - 1) p)::

        a < 0:  w_j ~ pi_|a|(p_J / p_j)     rises; w_J / w_1 = J for J equal chunks at a = -1, where pi is the identity
        a = 0:  w_j ~ 1
        a > 0:  w_j ~ pi_a(p_j)             falls; the mirror image, which is ours: no publication uses it

    Args:
        tokens: number of tokens of each chunk, or anything proportional to it.
        a: -1 is the published value.

    Raises:
        ValueError: no chunk, or one without tokens.

    Example:
        >>> chunk_weights([1, 1, 1, 1])
        tensor([0.4800, 0.6400, 0.9600, 1.9200])
    """
    m = torch.tensor([float(n) for n in tokens], dtype=torch.float64)
    if not len(m) or not bool((m > 0).all()):
        raise ValueError(f"chunks of {list(tokens)} tokens have no weights; give at least one chunk, each above 0")
    if a == 0:
        return torch.ones(len(m))
    left = m.flip(0).cumsum(0).flip(0) / m.sum()  # [J] p_j
    p = left[-1] / left if a < 0 else left
    raw = abs(a) * p / (1 + (abs(a) - 1) * p)
    return (raw / ((raw * m).sum() / m.sum())).float()
