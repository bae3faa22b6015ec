"""Weights that are divided over the processes (PyTorch's FSDP2), on GPUs and on CPUs alike.

`fully_shard` is applied here and not by accelerate, whose plug-in falls back to whole copies on CPUs without a word.
Every process holds its part of every parameter, gradient, optimizer state and average; a block's weights are complete
only while it computes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from genrl.networks.weights import REPLACED_BY, local, whole
from genrl.training.errors import SetupError


def repeated_blocks(module: nn.Module, classes: Sequence[str] = ()) -> list[nn.Module]:
    """The outermost members of the `ModuleList`s of a network, which are what is gathered at a time.

    Args:
        module: the network.
        classes: class names of the blocks; none takes those that the network's parts name in `_no_split_modules`
            where such are found, and all members otherwise.

    Raises:
        SetupError: when `classes` are given and the network has none of them.
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    members = list({id(m): m for part in lists for m in part if any(True for _ in m.parameters())}.values())
    named = set(classes) or {n for m in module.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    chosen = [m for m in members if type(m).__name__ in named]
    if classes and not chosen:
        there = ", ".join(sorted({type(m).__name__ for m in members})) or "none"
        raise SetupError(f"no block of the network is one of {', '.join(classes)}; its lists hold {there}")
    members = chosen or members
    inner = {id(part) for member in members for part in member.modules() if part is not member}
    return [member for member in members if id(member) not in inner]


def norm_of(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """L2 norm of tensors of which this process holds `parts`; every process must call it."""
    squares = [norm.to(device, torch.float32) ** 2 for norm in torch._foreach_norm(list(parts))] if parts else []
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    torch.distributed.all_reduce(total)
    return total.sqrt()


class Shards:
    """One shard of the network on each process.

    Args:
        accelerator: of the run, made without a plug-in.
        settings: of the trainer.
    """

    lockstep = gathers = True

    def __init__(self, accelerator: Any, settings: Any):
        self.accelerator, self.settings = accelerator, settings
        # A file of `accelerate launch` says these in variables.
        classes = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")
        self.classes = tuple(settings.shard_classes) or tuple(name for name in classes if name)
        self.offload = settings.offload_weights or os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true"

    def distribute(self, generator: Any) -> None:
        """Divide the parameters of the generator's module; those that hold them find the new ones by `current`.

        Raises:
            SetupError: for a trainable parameter without dimensions, which cannot be divided.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        module: nn.Module = generator.module
        scalars = {p: name for name, p in module.named_parameters() if p.dim() == 0}
        for p, name in scalars.items():
            if p.requires_grad:
                raise SetupError(f"{name} is a trainable scalar, which FSDP2 cannot shard; give it the shape [1]")
        owners = [(m, n, p) for m in module.modules() for n, p in m._parameters.items() if p is not None]
        classes = {m: type(m) for m in module.modules()}
        self._adapters_only = all("lora_" in name for name, p in module.named_parameters() if p.requires_grad)
        device = self.accelerator.device.type
        half = torch.bfloat16 if self.settings.mixed_precision == "bf16" else None
        # Inputs are not cast: a time in half precision is another time. Autocast does the arithmetic, as elsewhere.
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device, (self.accelerator.num_processes,)),
            "reshard_after_forward": True,  # so that weights that take another's place for a while are seen
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda")
            if self.offload
            else OffloadPolicy(),
            "ignored_params": set(scalars),
        }
        for block in [*repeated_blocks(module, self.classes), module]:
            fully_shard(block, **options)
        self._classes = {m: (cls, type(m)) for m, cls in classes.items() if isinstance(m, FSDPModule)}
        now = [(m, n, p, m._parameters[n]) for m, n, p in owners]
        self._places = [(m, n, old, new) for m, n, old, new in now if new is not None and new is not old]
        for _, _, old, new in self._places:
            setattr(old, REPLACED_BY, new)
            torch._C._autograd._unsafe_set_version_counter((new,), (old._version,))  # nothing has been written
            old.data = old.data.new_empty(0)  # the whole tensor is let go of, also where the old object is kept

    def prepare(self, module: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        module = self.accelerator.prepare_model(module, device_placement=False, evaluation_mode=True)  # autocast only
        return module, self.accelerator.prepare_optimizer(optimizer)

    def together(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Gradients are summed up in shards after every backward: whole ones would not fit."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    @torch.no_grad()
    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        norm = norm_of(grads, self.accelerator.device)
        if grads and math.isfinite(float(norm)):
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        return norm

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Inside, the module of the main process has whole weights on the CPU and its own classes, to be written.

        Every process must enter it. Where only adapters are trained, only they are gathered.
        """
        main = self.accelerator.is_main_process
        places = [place for place in self._places if place[3].requires_grad or not self._adapters_only]
        for module in self._classes:
            module.reshard()  # type: ignore[operator]
        filled: dict[nn.Parameter, nn.Parameter] = {}
        try:
            for owner, name, old, new in places:
                if new not in filled:
                    value = whole(new)
                    if main:
                        old.data = value.cpu()
                    filled[new] = old
                if main:
                    owner._parameters[name] = old
            if main:
                self._set_classes(own=True)
            yield
        finally:
            if main:
                self._set_classes(own=False)
            for owner, name, old, new in places:
                owner._parameters[name] = new
                old.data = old.data.new_empty(0)

    def _set_classes(self, own: bool) -> None:
        """Classes carry the name that is written; `fully_shard` has put one of its own in their place."""
        for module, (mine, sharded) in self._classes.items():
            module.__class__ = mine if own else sharded  # type: ignore[assignment]
