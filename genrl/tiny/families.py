"""What a family of pipelines is to this package, and the table of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

REGISTRY: dict[str, Family] = {}


@dataclass(frozen=True)
class Family:
    """One pipeline class with the form of its parts.

    Attributes:
        name: how tests and `genrl.tiny.pipeline` call it.
        build: makes the pipeline with random weights of torch's default generator.
        arguments: keyword arguments of the pipeline's call that make it small; no prompt, no image.
        models: beginnings of the hub ids of its checkpoints.
        takes_image: whether the call has an argument `image` that conditions it.
    """

    name: str
    build: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    takes_image: bool = False


def family(
    *models: str, name: str | None = None, takes_image: bool = False, **arguments: Any
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Decorator that enters a builder into the table, under the function's name; see `Family`."""

    def enter(build: Callable[[], Any]) -> Callable[[], Any]:
        key = name or build.__name__
        REGISTRY[key] = Family(key, build, arguments, models, takes_image)
        return build

    return enter


def networks(pipeline: Any) -> dict[str, nn.Module]:
    """The networks among the parts of a diffusers pipeline, by the names of its arguments."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


@torch.no_grad()
def enliven(module: nn.Module, std: float = 0.05) -> None:
    """Give matrices and kernels that start at zero small random values.

    Diffusion transformers start with zero gates and a zero last layer: without this, their output is zero for every
    input, and no test could see that a prompt or a time is ignored. Biases and scales of norms stay as they are.
    """
    for parameter in module.parameters():
        if parameter.dim() >= 2 and not parameter.any():
            parameter.normal_(std=std)


def build(name: str, seed: int) -> Any:
    """The family's pipeline with the weights that belong to `seed`, in eval mode; global random states stay."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also reseed the accelerators
        pipeline = REGISTRY[name].build()
        for module in networks(pipeline).values():
            enliven(module)
            module.eval().float()  # a pipeline made from parts starts in train mode, with dropout
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
