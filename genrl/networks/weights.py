"""Sets of weights beside the live ones (a frozen start, a moving average, an old policy), whole or sharded.

A sharded parameter is a `DTensor`, of which every process holds a part. Sharding a module makes new parameter objects;
whoever holds an old one finds the new one through :func:`current`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

P = TypeVar("P", bound=Tensor)
REPLACED_BY = "_replaced_by"  # attribute of a parameter whose place in its module another object has taken


def current(parameter: P) -> P:
    """The parameter that stands in the module for `parameter` now."""
    return getattr(parameter, REPLACED_BY, parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether every process holds a part of `tensor` only."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, detached; writing to it writes to the tensor."""
    return tensor.detach().to_local().data if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


@torch.no_grad()
def whole(tensor: Tensor, part: Tensor | None = None) -> Tensor:
    """The complete tensor, detached. Every process must call it for a sharded one.

    Args:
        tensor: sharded or not.
        part: this process's part of another tensor that is laid out like `tensor`, which is then what is completed.
    """
    if not is_sharded(tensor):
        return tensor.detach() if part is None else part
    from torch.distributed.tensor import DTensor

    like: Any = tensor
    part = local(tensor) if part is None else part
    # Off-loaded weights are on the CPU, but processes talk through the device of the mesh.
    part = part.to(like.device_mesh.device_type)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def on_main(tensor: Tensor, part: Tensor | None = None) -> Tensor:
    """As `whole`, on the CPU of the main process; the others, who only take part, get an empty tensor."""
    found = whole(tensor, part)
    if not is_sharded(tensor):
        return found.cpu()
    return found.cpu() if torch.distributed.get_rank() == 0 else found.new_empty(0, device="cpu")


@torch.no_grad()
def share(value: Tensor, like: Tensor) -> Tensor:
    """The part of a complete tensor that this process holds when it is laid out like `like`. Communicates nothing."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    laid: Any = like
    value = value.to(laid.device_mesh.device_type)
    part = distribute_tensor(value, laid.device_mesh, laid.placements, src_data_rank=None).to_local()
    return part.to(local(like).device).clone()


class WeightSet:
    """A detached copy of some parameters that can take their place for a while.

    Parameters are always written in place: re-assigning ``.data`` would be ignored by sharded modules. Of sharded
    parameters every process keeps its own part; a set that was made before the sharding is cut at its next use.

    Args:
        parameters: the live parameters, all float32.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = [current(p) for p in parameters]
        self.values = [local(p).clone() for p in self._parameters]

    def _live(self) -> list[Tensor]:
        """What this process holds of the live parameters."""
        parts = []
        for i, p in enumerate(self._parameters):
            if current(p) is not p:
                p = self._parameters[i] = current(p)
                self.values[i] = share(self.values[i], p)
            parts.append(local(p))
        return parts

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """values <- decay values + (1 - decay) live; 0 copies."""
        live = self._live()
        if decay == 0:
            torch._foreach_copy_(self.values, live)
        else:
            torch._foreach_lerp_(self.values, live, 1 - decay)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the live parameters have these values; afterwards their own again, bit for bit.

        Values are exchanged through `Tensor.data`, which keeps autograd's version counters: a graph made before the
        block is valid after it, because by then it sees the values that it was made with.
        """
        live = [part.data for part in self._live()]
        kept = [part.clone() for part in live]
        with torch.no_grad():
            torch._foreach_copy_(live, self.values)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, kept)

    def state_dict(self) -> dict[str, Any]:
        """The complete values; of sharded parameters on the main process only, and every process must call it."""
        self._live()
        return {"values": [on_main(p, value) for p, value in zip(self._parameters, self.values, strict=True)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["values"]) != len(self.values):
            raise ValueError(
                f"the checkpoint holds {len(state['values'])} averaged tensors, the model has {len(self.values)}"
            )
        self._live()
        for value, saved, p in zip(self.values, state["values"], self._parameters, strict=True):
            value.copy_(share(saved, p))
