"""Rows of nested batches, so that samplers and loops can slice any conditioning."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def index_batch(tree: Any, index: Tensor | slice) -> Any:
    """Select rows of every tensor in a nest of dicts, lists and tuples; everything else passes through.

    Args:
        tree: conditioning whose tensors have the batch as first dimension, or None.
        index: int64 [K] or a slice.
    """
    if isinstance(tree, Tensor):
        return tree[index.to(tree.device) if isinstance(index, Tensor) else index]
    if isinstance(tree, dict):
        return {key: index_batch(value, index) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(index_batch(value, index) for value in tree)
    return tree


def repeat_batch(tree: Any, times: int) -> Any:
    """Stack every tensor ``times`` times along its first dimension: rows 0..B-1, 0..B-1, ..."""
    if isinstance(tree, Tensor):
        return tree.repeat((times,) + (1,) * (tree.dim() - 1))
    if isinstance(tree, dict):
        return {key: repeat_batch(value, times) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(repeat_batch(value, times) for value in tree)
    return tree
