"""Rows of nested batches, so that samplers and loops can slice any conditioning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor


def index_batch(tree: Any, index: Tensor | slice) -> Any:
    """Select rows of every tensor in a nest of mappings, lists and tuples; numbers, strings and None pass through.

    Args:
        tree: conditioning whose tensors have the batch as first dimension, or None.
        index: int64 [K] or a slice.

    Raises:
        TypeError: for a container whose tensors would not be found.
    """

    def rows(x: Tensor) -> Tensor:
        return x[index.to(x.device) if isinstance(index, Tensor) else index]

    return map_tensors(rows, tree)


def repeat_batch(tree: Any, times: int) -> Any:
    """Stack every tensor ``times`` times along its first dimension: rows 0..B-1, 0..B-1, ..."""
    return map_tensors(lambda x: x.repeat((times,) + (1,) * (x.dim() - 1)), tree)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of a nest; mappings of any class become dicts."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(function, value) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        raise TypeError(
            f"a batch holds a {type(tree).__name__}, whose tensors cannot be told apart from settings; use a dict"
        )
    return tree
