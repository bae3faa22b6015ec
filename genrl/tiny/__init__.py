"""Tiny random twins of published pipelines and reward models, made offline in well under a second each.

A twin has the classes, the call and the scheduler of its family, so that code that works for it works for the
checkpoint; its weights are random and its pictures are noise.

    pipeline = genrl.tiny.pipeline("sd3")
    image = pipeline("a red cat", **genrl.tiny.call_arguments("sd3"), num_inference_steps=2).images[0]
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch

from genrl.tiny import images, images_language, videos  # noqa: F401 - they fill the table
from genrl.tiny.families import REGISTRY, Family, build, family_in, known_family
from genrl.tiny.folders import saved
from genrl.tiny.rewards import saved_clip, saved_open_clip, saved_vlm

__all__ = [
    "FAMILIES",
    "call_arguments",
    "condition_image",
    "family_of",
    "pipeline",
    "saved_clip",
    "saved_open_clip",
    "saved_pipeline",
    "saved_vlm",
]

FAMILIES: tuple[str, ...] = tuple(REGISTRY)


def find(name: str) -> Family:
    """The family of this name; ValueError lists the names."""
    if name not in REGISTRY:
        raise ValueError(f"unknown family {name!r}; tiny twins exist of {', '.join(FAMILIES)}")
    return REGISTRY[name]


def pipeline(family: str, seed: int = 0) -> Any:
    """A diffusers pipeline of the family: float32 on the CPU, every network in eval mode.

    The weights depend on `seed` alone. Global random states stay as they were.
    """
    find(family)
    return build(family, seed)


def call_arguments(family: str) -> dict[str, Any]:
    """Arguments of the pipeline's call that make it small (height, width, number of frames...), without a prompt."""
    return copy.deepcopy(find(family).arguments)


def condition_image(family: str) -> Any:
    """The PIL image (RGB, 32 x 32) that the call of a family with an image condition can take, else None."""
    from PIL import Image

    if not find(family).takes_image:
        return None
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    pixels = torch.stack([8 * rows, 8 * columns, 128 + 0 * rows], -1)  # [H, W, 3]
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def family_of(model_id: str) -> str:
    """The family of a pipeline, by its hub id or its folder ("stabilityai/stable-diffusion-3.5-medium" is "sd3").

    ValueError lists the hub ids that are known.
    """
    folder = Path(model_id)
    found = family_in(folder) if (folder / "model_index.json").is_file() else known_family(model_id)
    if found is None:
        known = "; ".join(f"{entry.name}: {', '.join(entry.models)}" for entry in REGISTRY.values())
        raise ValueError(f"no tiny twin is known for the model {model_id!r}; there are twins of {known}")
    return found.name


def saved_pipeline(family: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder with the twin of seed 0, as `save_pretrained` writes it; made once.

    Args:
        family: one of `FAMILIES`.
        folder: where it lies; default: a folder in genrl's cache.
    """
    find(family)
    return saved(family, lambda path: pipeline(family).save_pretrained(path), folder)
