"""The processes of a run and their devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from genrl.training.errors import SetupError
from genrl.training.settings import RunSettings


def make_accelerator(settings: RunSettings) -> Any:
    """Join the processes that a launcher started.

    Raises:
        SetupError: for a device or precision that is not there, or another number of processes than was asked for.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    cuda = torch.cuda.is_available()
    if settings.mixed_precision == "fp16" and (settings.device == "cpu" or not cuda):
        raise SetupError("trainer.mixed_precision = fp16 needs a CUDA device; use bf16 or no")
    if settings.device == "cuda" and not cuda:
        raise SetupError("trainer.device = cuda, but torch sees no CUDA device; use auto or cpu")
    # Other processes wait for the slowest reward, and for the one that trains a base.
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=max(3600.0, 2 * settings.reward_timeout)))
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
