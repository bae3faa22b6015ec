"""Samples on disk: a picture of all, and a file for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from genrl.training.pictures import image_grid, moving_grid, save_animation, save_image


def save_samples(media: Tensor, names: list[str], per_prompt: int, folder: Path, generator: Any = None) -> Path:
    """Write ``grid.png`` with a row for each prompt, and ``prompt000-000.png`` and so on; videos also as films.

    Media that are no pictures are shown by the generator's ``preview`` and written by its ``export_media``, as files
    ``prompt000-000-NAME`` of its own kind.

    Args:
        media: [N, C, H, W] or [N, F, C, H, W] in [0, 1], all samples of a prompt one after another.
        names: of the prompts, one a sample. per_prompt: samples of each. folder: made if it is not there.
        generator: what drew them.

    Returns:
        The path of the grid.
    """
    shown = media if not hasattr(generator, "preview") else generator.preview(media)
    whole = max(shown.shape[-2:])  # single files are not reduced
    labels = [f"prompt{i // per_prompt:03d}-{i % per_prompt:03d}" for i in range(len(media))]
    for label, one in zip(labels, shown, strict=True):
        if one.dim() == 4:
            save_animation(list(one), folder / f"{label}.png")
        else:
            save_image(image_grid(one[None, None], gap=0, most=whole), folder / f"{label}.png")
    if hasattr(generator, "export_media"):
        generator.export_media(media, folder, [f"{label}-{name}" for label, name in zip(labels, names, strict=True)])
    table = shown.reshape(-1, per_prompt, *shown.shape[1:])
    grid = folder / "grid.png"
    save_image(image_grid(table), grid)
    if table.dim() == 6:
        save_animation(moving_grid(table), grid)
    return grid
