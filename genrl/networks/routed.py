"""Several networks as one module, called through whatever that module is wrapped in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from genrl.networks.weights import is_sharded


class Routed(nn.Module):
    """Networks that others call by themselves, as one module for data parallelism, sharding and autocast.

    Whoever holds one of the networks keeps it, with all its attributes; calling it calls `module()`, which comes back
    here and runs it. Results are float32, so that what is made of them (guidance) is computed in it.

    Args:
        parts: networks by name. Their classes are replaced by subclasses of the same name with another `__call__`.
        module: gives this module, or what it was wrapped in.
    """

    def __init__(self, parts: Mapping[str, nn.Module], module: Callable[[], nn.Module]):
        super().__init__()
        self.trained = {name for name, part in parts.items() if any(p.requires_grad for p in part.parameters())}
        for name, part in parts.items():
            self.add_module(name, part)
            kind, full = type(part), next(part.parameters()).dtype == torch.float32

            def call(_: Any, *args: Any, _name: str = name, _full: bool = full, **kwargs: Any) -> Any:
                if _full:  # inputs in half precision may come to a network that is trained in full precision
                    args, kwargs = _map(_float, args), _map(_float, kwargs)
                return _map(_float, module()(_name, *args, **kwargs))

            part.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        part = getattr(self, name)
        result = nn.Module.__call__(part, *args, **kwargs)  # past the replaced `__call__`
        if not torch.is_grad_enabled():
            return result
        if name not in self.trained:  # a loss that no trained weight has a part in is no error
            touched = [next(p for p in self.parameters() if p.requires_grad)]
        elif torch.distributed.is_initialized():
            # Data parallelism waits for the gradient of every weight of this part, and some have none. Other parts are
            # left without one, as on one process: a gradient of zero would let momentum and weight decay move them.
            touched = [p for p in part.parameters() if p.requires_grad and not is_sharded(p)]
        else:
            touched = []
        return _map(lambda x: _Touch.apply(x, *touched), result) if touched else result


class _Touch(torch.autograd.Function):
    """The identity of its first argument, which gives the others a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, *(torch.zeros_like(p) for p in ctx.parameters)


def _float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of a nest; classes of outputs, which are mappings, stay what they are."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return type(tree)(**{key: _map(function, value) for key, value in tree.items()})
    return type(tree)(_map(function, value) for value in tree) if isinstance(tree, (list, tuple)) else tree
