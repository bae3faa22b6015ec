"""A function of your own as a reward, named in a config by its import path."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import UNBOUNDED, nearest_name


class FunctionReward:
    """`my_package.module:function` as a reward.

    The function gets `(media, prompts, metadata, **arguments)` and returns a tensor, an array or a list with one
    number a sample, or a dict of those; None in a list means not scored.

    Args:
        path: import path and function, joined by a colon.
        range: (lowest, highest) value that it returns.
        differentiable: whether gradients reach the media.
        arguments: passed on by name.

    Raises:
        ValueError: the path has no colon, or what it names is missing or not callable.
        ModuleNotFoundError: the module cannot be found.
    """

    def __init__(
        self,
        path: str,
        range: tuple[float, float] = UNBOUNDED,
        differentiable: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.range = (float(range[0]), float(range[1]))
        self.differentiable = differentiable
        self.arguments = dict(arguments or {})
        self.function = _import_function(path)
        self.name = path.rpartition(":")[2]

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | dict[str, Tensor]:
        """[B], or name -> [B]."""
        result = self.function(media, prompts, metadata, **self.arguments)
        if isinstance(result, dict):
            return {name: _as_tensor(values, media) for name, values in result.items()}
        return _as_tensor(result, media)


def _as_tensor(values: Any, media: Tensor) -> Tensor:
    if isinstance(values, Tensor):
        return values.to(media.device, torch.float32)
    if isinstance(values, (list, tuple)):
        values = [float("nan") if value is None else value for value in values]
    return torch.as_tensor(values, dtype=torch.float32, device=media.device)


def _import_function(path: str) -> Any:
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"reward path {path!r} is not 'package.module:function'; put a colon before the function.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, something that it imports does not
        raise ModuleNotFoundError(
            f"reward path {path!r}: there is no module {error.name!r} here. Install it, or put its folder on "
            "PYTHONPATH.",
            name=error.name,
        ) from error
    function: Any = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            public = [name for name in dir(function) if not name.startswith("_")]
            raise ValueError(f"reward path {path!r}: {module_name} has no {part!r}; {nearest_name(part, public)}")
        function = getattr(function, part)
    if not callable(function):
        raise ValueError(
            f"reward path {path!r} is a {type(function).__name__}; it must be a function of three arguments."
        )
    return function
