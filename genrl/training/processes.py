"""The processes of a run, their devices, and how they share a network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from genrl.training.errors import SetupError
from genrl.training.settings import RunSettings

Plan = Literal["copies", "fsdp2", "zero2"]
_FSDP, _DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"


class Sharing(Protocol):
    """How the processes share the trained network.

    Attributes:
        lockstep: every process must run the same number of backwards in an update.
        gathers: a forward is an exchange between the processes, so all must evaluate the same networks in turn.
    """

    lockstep: bool
    gathers: bool

    def distribute(self, generator: Any) -> None:
        """Divide the parameters of ``generator.module``, before the optimizer is made."""
        ...

    def prepare(self, module: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """The module to call and the optimizer to step."""
        ...

    def together(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around a forward and its backward, of which the last of an update is told."""
        ...

    def backward(self, loss: Tensor) -> None: ...

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the averaged gradients down to a norm; returns the norm that they had."""
        ...

    def complete(self) -> AbstractContextManager[Any]:
        """Inside, the generator of the main process can be written; every process must enter it."""
        ...


class Copies:
    """One process, or a whole copy of the network on each (DistributedDataParallel)."""

    lockstep = gathers = False

    def __init__(self, accelerator: Any, settings: Any):
        self.accelerator, self.settings = accelerator, settings

    def distribute(self, generator: Any) -> None:
        # A network whose weights do not all take part in a forward, as one of two experts, must be searched for those
        # that did; of others the search would only cost time.
        partly = self.settings.find_unused_parameters
        if partly is None:
            partly = bool(getattr(generator, "uses_part_of_weights", False))
        self.accelerator.ddp_handler.find_unused_parameters = partly

    def prepare(self, module: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return self.accelerator.prepare(module, optimizer)

    def together(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.accelerator.no_sync(module)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        return torch.as_tensor(self.accelerator.clip_grad_norm_(parameters, max_norm))

    def complete(self) -> AbstractContextManager[Any]:
        return nullcontext()


def plan(settings: Any) -> Plan:
    """How a network is shared: as ``trainer.sharding`` says, and for ``"auto"`` as `accelerate launch` was told.

    Raises:
        SetupError: when that is not possible.
    """
    wanted = getattr(settings, "sharding", None)
    fsdp, deepspeed = (os.environ.get(name, "").lower() == "true" for name in (_FSDP, _DEEPSPEED))
    if wanted is None:  # policies
        if fsdp or deepspeed:
            raise SetupError(
                "a policy is trained with a whole copy on every process; launch it with torchrun or with "
                "configs/accelerate/ddp_8gpu.yaml instead of a file for FSDP or DeepSpeed"
            )
        return "copies"
    asked: Plan = "fsdp2" if fsdp else "zero2" if deepspeed else "copies"
    chosen: Plan = asked if wanted == "auto" else "copies" if wanted == "none" else wanted
    if chosen == "fsdp2" and fsdp:
        _check_fsdp_file()
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if chosen == "zero2" and deepspeed and stage != "2":
        raise SetupError(
            f"zero_stage = {stage} in the accelerate file is not supported: weights that take another's place for a "
            "while (reference, average, old policy) would not reach weights that ZeRO-3 has divided. Use zero_stage: "
            "2, or fsdp2_8gpu.yaml, which divides weights too"
        )
    devices = [os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") for part in ("OPTIMIZER", "PARAM")]
    if chosen == "zero2" and deepspeed and set(devices) != {"none"}:
        raise SetupError(
            "the accelerate file asks DeepSpeed to off-load, which is not supported; set offload_optimizer_device and "
            "offload_param_device to none, or use fsdp2_8gpu.yaml with fsdp_offload_params: true"
        )
    if chosen != "copies" and settings.mixed_precision == "fp16":
        raise SetupError(f"trainer.mixed_precision = fp16 with {chosen}: use bf16 or no; gradients are not scaled")
    return chosen


def _check_fsdp_file() -> None:
    """Refuse what an accelerate file asks for and would not get."""
    refused = [
        ("FSDP_VERSION", ("2",), "fsdp_version", "2"),
        ("FSDP_RESHARD_AFTER_FORWARD", ("true", "full_shard"), "fsdp_reshard_after_forward", "true"),
        ("FSDP_ACTIVATION_CHECKPOINTING", ("false",), "fsdp_activation_checkpointing", "false"),
    ]
    for variable, allowed, key, value in refused:
        found = os.environ.get(variable, allowed[0])
        if found.lower() not in allowed:
            extra = "; checkpointing is the generator's switch" if "CHECKPOINTING" in variable else ""
            raise SetupError(f"{key} = {found} in the accelerate file is not supported; set it to {value}{extra}")


def make_sharing(accelerator: Any, settings: Any) -> Sharing:
    """What :func:`plan` says; a single process has nothing to divide."""
    chosen = plan(settings)
    if chosen == "copies" or accelerator.num_processes == 1:
        return Copies(accelerator, settings)
    if chosen == "zero2":
        from genrl.training.zero import Zero

        return Zero(accelerator, settings)
    from genrl.training.sharding import Shards

    return Shards(accelerator, settings)


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Hide the wish for FSDP or DeepSpeed from accelerate, which would do without on CPUs, or take over the loop."""
    hidden = {name: os.environ.pop(name) for name in (_FSDP, _DEEPSPEED) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
        # Else transformers, which reads the variable too, would load empty weights on all processes but the first.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def make_accelerator(settings: RunSettings) -> Any:
    """Join the processes that a launcher started.

    Raises:
        SetupError: for a device or precision that is not there, or another number of processes than was asked for.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    plan(settings)
    if not torch.distributed.is_initialized():
        # accelerate keeps precision and device for the whole process; an earlier run in it may have had others.
        AcceleratorState._reset_state(reset_partial_state=True)
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    cuda = torch.cuda.is_available()
    if settings.mixed_precision == "fp16" and (settings.device == "cpu" or not cuda):
        raise SetupError("trainer.mixed_precision = fp16 needs a CUDA device; use bf16 or no")
    if settings.device == "cuda" and not cuda:
        raise SetupError("trainer.device = cuda, but torch sees no CUDA device; use auto or cpu")
    # Other processes wait while one trains a base, or scores a whole evaluation, which has a limit for each batch. A
    # process that is gone is noticed by the launcher, which ends them all.
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=max(86_400.0, 2 * settings.reward_timeout)))
    with _without_plugins():
        accelerator = Accelerator(
            mixed_precision=settings.mixed_precision,
            # Without CUDA, accelerate joins the processes of torchrun only when it is told to use the CPU.
            cpu=settings.device == "cpu" or not cuda,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False), patience],
        )
    if settings.processes is not None and settings.processes != accelerator.num_processes:
        raise SetupError(
            f"trainer.processes = {settings.processes}, but {accelerator.num_processes} process(es) were started; "
            f"launch with `torchrun --nproc_per_node {settings.processes} -m genrl train ...` "
            "(`accelerate launch --cpu` starts only one)"
        )
    return accelerator
