"""What a backward pass would keep in memory, found without computing it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that were made inside it and still exist, and the most that ever did."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given | self._known:
                self._take(tensor.untyped_storage())
        return result

    def _take(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class StandIn(nn.Module):
    """Takes the place of a network: gives zeros of the right shapes and measures a forward and a backward.

    Tensors are fake, which have shapes but no memory, so a network of any size is measured in a moment.

    Args:
        network: what is measured. half: under autocast to bfloat16.
    """

    def __init__(self, network: nn.Module, half: bool):
        super().__init__()
        self.__dict__["network"] = network  # not a part: its parameters are not those of this module
        self.autocast, self.kept, self.largest = half, 0, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        state: dict[str, Tensor] = {}
        network: nn.Module = self.__dict__["network"]
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            fake: Tensor = fakes.from_tensor(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                fake = fake.requires_grad_(tensor.requires_grad)
                if tensor.requires_grad:
                    fake.register_post_accumulate_grad_hook(_forget)  # gradients are counted elsewhere
            state[name] = fake
        args, kwargs = tree_map_only(Tensor, lambda t: fakes.from_tensor(t.detach()), (args, kwargs))
        alive = Alive()
        with fakes, alive, torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            result = torch.func.functional_call(network, state, args, kwargs)
        self.kept += alive.now
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        with fakes, alive:
            torch.stack([t.float().sum() for t in outputs if t.requires_grad]).sum().backward()
        self.largest = max(self.largest, alive.most)
        return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype).requires_grad_(), result)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def backward_peak(generator: Any, x: Tensor, t: Tensor, cond: Any, half: bool = False) -> int:
    """Bytes that exist at most between the start of a forward and the end of its backward, without the gradients.

    Args:
        generator: prepared, not wrapped. x, t, cond: arguments of its `velocity`.
        half: under autocast to bfloat16.

    Raises:
        Exception: of many kinds, for networks whose course depends on the values of tensors.
    """
    network = generator.module
    generator.module = stand_in = StandIn(network, half)
    try:
        generator.velocity(x, t, cond)
    finally:
        generator.module = network
    # Several evaluations (guidance in two calls) keep their tensors until the common backward.
    return max(stand_in.kept, stand_in.largest)
