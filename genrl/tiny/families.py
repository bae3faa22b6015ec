"""What a family of pipelines is to this package, and the table of them."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

REGISTRY: dict[str, Family] = {}
DENOISERS = ("transformer", "transformer_2", "unet")  # the names of the networks that pipelines call in their loops


@dataclass(frozen=True)
class Family:
    """One pipeline class with the form of its parts.

    Attributes:
        name: how tests and `genrl.tiny.pipeline` call it.
        build: makes the pipeline, with random weights from torch's default generator.
        pipeline_class: name of the class in diffusers.
        models: hub ids of its checkpoints, as patterns of `fnmatch`.
        arguments: keyword arguments of the pipeline's call that make it small; no prompt, no image.
        takes_image: whether the call has an argument `image` that conditions it.
        two_experts: whether there is a `transformer_2` for small times.
    """

    name: str
    build: Callable[[], Any]
    pipeline_class: str
    models: tuple[str, ...]
    arguments: dict[str, Any]
    takes_image: bool = False
    two_experts: bool = False


def family(
    pipeline_class: str, *models: str, takes_image: bool = False, two_experts: bool = False, **arguments: Any
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Decorator that enters a builder into the table, under the function's name; see `Family` for the arguments."""

    def enter(build: Callable[[], Any]) -> Callable[[], Any]:
        name = build.__name__
        REGISTRY[name] = Family(name, build, pipeline_class, models, arguments, takes_image, two_experts)
        return build

    return enter


def known_family(model_id: str) -> Family | None:
    """The family of a hub id, by the table; upper and lower case are the same."""
    for entry in REGISTRY.values():
        if any(fnmatch.fnmatchcase(model_id.lower(), pattern.lower()) for pattern in entry.models):
            return entry
    return None


def family_in(folder: Path) -> Family | None:
    """The family of a pipeline that `save_pretrained` wrote, by the class and the experts in its model_index.json."""
    index = json.loads((folder / "model_index.json").read_text())
    fitting = [entry for entry in REGISTRY.values() if entry.pipeline_class == index["_class_name"]]
    two_experts = index.get("transformer_2", [None, None])[0] is not None
    fitting.sort(key=lambda entry: entry.two_experts != two_experts)
    return fitting[0] if fitting else None


def networks(pipeline: Any) -> dict[str, nn.Module]:
    """The networks among the parts of a diffusers pipeline, by the names of its arguments."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


@torch.no_grad()
def enliven(module: nn.Module, std: float = 0.05) -> None:
    """Give matrices and kernels that start at zero small random values.

    A network whose last layer starts at zero gives zero for every input, and no test could see that it ignores a prompt
    or a time. Of the families here only Z-Image has such parameters (its padding tokens); others may come.
    """
    for parameter in module.parameters():
        if parameter.dim() >= 2 and not parameter.any():
            parameter.normal_(std=std)


@torch.no_grad()
def strengthen(module: nn.Module, gain: float = 1.5) -> None:
    """Scale the matrices and kernels of a denoiser.

    torch's default for linear layers makes signals smaller from layer to layer: with it, another prompt changes the
    output of some families by 0.3%. With 1.5, outputs have a standard deviation of about 1, as velocities do, another
    prompt changes them by 1% to 70% and another time by 15% to 70%.
    """
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(gain)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's CPU generator is seeded and tensors are made on the CPU; outside, nothing has changed."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also reseed the accelerators
        yield


def require(library: str, extra: str) -> None:
    """ImportError with the command that installs the library, unless it can be imported."""
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ImportError(f'tiny twins need {library}. Install it with: pip install "genrl[{extra}]"') from error


def build(name: str, seed: int) -> Any:
    """The family's pipeline with the weights that belong to `seed`, every network in eval mode."""
    require("diffusers", "diffusers")
    with seeded(seed):
        pipeline = REGISTRY[name].build()
        for part, module in networks(pipeline).items():
            enliven(module)
            if part in DENOISERS:
                strengthen(module)
            module.eval()  # a pipeline made from parts starts in train mode, with dropout
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
