"""Geometry of shapes on grids: media [B, n, n, n] in [0, 1], above .5 inside, as `ShapesGenerator` draws them.

What is optimised looks at the shape and at the picture that it was drawn from. What compares with the whole object
(`FScore`, `Chamfer`, `VolumeIoU`) is for the log only: nobody has the object when there is only a picture of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from genrl.generators.meshes import surface_nets, surface_points
from genrl.generators.shapes_data import clean_shape, shape_of
from genrl.generators.shapes_view import View, condition_views, depth, silhouette, to_distance, to_media

from .diversity import prompt_groups

ROUGHNESS_OF_OBJECTS = 0.21  # mean of `roughness` over 600 whole objects on 16 cells a side
_AT_ONCE = 32  # shapes that are rendered at a time


def check_grids(media: Tensor) -> Tensor:
    """Media as it is.

    Raises:
        ValueError: for anything but [B, n, n, n].
    """
    if media.dim() != 4 or len(set(media.shape[1:])) != 1:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; rewards of geometry take grids [B, n, n, n] above .5 inside, "
            "as ShapesGenerator draws them"
        )
    return media


class Components:
    """1 / number of connected components (cells that share a face), in (0, 1]; 0 for an empty shape.

    Args:
        least: components of fewer cells are not counted.
    """

    differentiable = False
    range = (0.0, 1.0)

    def __init__(self, least: int = 1) -> None:
        if least < 1:
            raise ValueError(f"least = {least} cells must be at least 1")
        self.least = least

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        counts = [component_count(grid, self.least) for grid in (check_grids(media) > 0.5).cpu().numpy()]
        return torch.tensor([1 / count if count else 0.0 for count in counts], device=media.device)


def component_count(solid: Any, least: int = 1) -> int:
    """Components of a bool array [n, n, n] that have at least `least` cells."""
    import numpy as np
    from scipy import ndimage

    labels, count = ndimage.label(solid)
    return count if least == 1 else int((np.bincount(labels.ravel())[1:] >= least).sum())


class Watertight:
    """Share of the surface that is closed without an end at the border of the grid, in [0, 1]; 0 for an empty shape.

    A surface of a grid has no holes, except where the shape reaches the border and is cut off. 1 - border faces / all
    faces between solid cells and empty ones or the outside.
    """

    differentiable = False
    range = (0.0, 1.0)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        solid = (check_grids(media) > 0.5).float()
        border = torch.zeros(len(media), device=media.device)
        between = torch.zeros_like(border)
        for axis in (1, 2, 3):
            border += solid.select(axis, 0).flatten(1).sum(1) + solid.select(axis, -1).flatten(1).sum(1)
            between += solid.diff(dim=axis).abs().flatten(1).sum(1)
        return torch.where(border + between > 0, between / (border + between).clamp(min=1), 0.0)


def soft_iou(a: Tensor, b: Tensor) -> Tensor:
    """Sum of minima over sum of maxima [B] of pictures or grids [B, ...] in [0, 1]; 1 for two empty ones."""
    low, high = torch.minimum(a, b).flatten(1).sum(1), torch.maximum(a, b).flatten(1).sum(1)
    return torch.where(high > 0, low / high.clamp(min=1e-8), 1.0)


class SilhouetteAgreement:
    """Soft intersection over union of a shape's silhouette with the picture of the prompt, in [0, 1].

    Reads `kind` and `seed`, or `image`, as the generator does. Use it with generators whose view is the silhouette.
    """

    differentiable = True
    range = (0.0, 1.0)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        wanted = condition_views(prompts, metadata, check_grids(media).shape[-1]).to(media)
        return soft_iou(_rendered(media, "silhouette"), wanted)


class DepthAgreement:
    """Agreement of a shape's depth picture with that of the prompt's object, in [0, 1].

    1 - the mean of min(|difference| / tolerance, 1) over the pixels, each counted as much as the nearer of the two
    pictures lets it stand out from the background. With a `depth` view it is what the generator sees; with a
    `silhouette` it knows more than the generator, as a depth camera would. An `image` in the metadata is taken as the
    depth picture: nearness, from 0 for the background to 1 for 1.55 half sides before the centre.

    Args:
        tolerance: difference that counts as wholly wrong; 1 is the depth of the scene (3.1 half sides of the grid).
    """

    differentiable = True
    range = (0.0, 1.0)

    def __init__(self, tolerance: float = 0.2) -> None:
        if tolerance <= 0:
            raise ValueError(f"tolerance = {tolerance} must be positive")
        self.tolerance = tolerance

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        wanted = condition_views(prompts, metadata, check_grids(media).shape[-1], "depth").to(media)
        found = _rendered(media, "depth")
        stands_out = torch.maximum(wanted, found)
        error = ((found - wanted).abs() / self.tolerance).clamp(max=1)
        total = stands_out.flatten(1).sum(1)
        wrong = (error * stands_out).flatten(1).sum(1)
        return torch.where(total > 0, 1 - wrong / total.clamp(min=1e-8), 1.0)


def _rendered(media: Tensor, view: View) -> Tensor:
    render = silhouette if view == "silhouette" else depth
    return torch.cat([render(to_distance(part)) for part in media.split(_AT_ONCE)])


class NormalSmoothness:
    """Minus the roughness beyond that of whole objects: 0 is as smooth as they are, and smoother is no better.

    Without the hinge a generator earns most with molten shapes, whose edges are rounder than any object's.

    Args:
        hinge: roughness that costs nothing; by default that of the objects on 16 cells a side.
    """

    differentiable = True
    range = (-2.0, 0.0)

    def __init__(self, hinge: float = ROUGHNESS_OF_OBJECTS) -> None:
        self.hinge = hinge

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        return -(roughness(media) - self.hinge).clamp(min=0)


def roughness(media: Tensor) -> Tensor:
    """Mean of 1 - cos of the angle between the normals of neighbouring cells near the surface, [B] in [0, 2].

    Normals are central differences; near is a truncated distance below .6 in size, 1.2 cells at 16 a side. 0 where
    there is no surface.
    """
    distance = to_distance(check_grids(media))
    padded = F.pad(distance, (1,) * 6, value=1.0)
    centre = slice(1, -1)
    slope = torch.stack(
        [
            padded[:, 2:, centre, centre] - padded[:, :-2, centre, centre],
            padded[:, centre, 2:, centre] - padded[:, centre, :-2, centre],
            padded[:, centre, centre, 2:] - padded[:, centre, centre, :-2],
        ],
        1,
    )  # [B, 3, n, n, n]
    normal = slope / slope.square().sum(1, keepdim=True).clamp(min=1e-8).sqrt()
    near = distance.detach().abs() < 0.6
    total, count = distance.new_zeros(len(media)), distance.new_zeros(len(media))
    for axis in (1, 2, 3):
        n = media.shape[axis] - 1
        both = near.narrow(axis, 0, n) & near.narrow(axis, 1, n)
        cos = (normal.narrow(axis + 1, 0, n) * normal.narrow(axis + 1, 1, n)).sum(1)
        total = total + ((1 - cos) * both).flatten(1).sum(1)
        count = count + both.flatten(1).sum(1)
    return total / count.clamp(min=1)


class ViewConsistency:
    """Do pictures from mirrored cameras mirror each other, in [0, 1]: left-right symmetry as seen from outside.

    Most things that are made have an upright plane of symmetry, so a hidden side that does not fit the visible one
    betrays itself: the silhouette from azimuth a should be the mirror image of that from the azimuth that the plane
    mirrors a to. The soft IoU of the two, averaged over azimuths, for the better of the planes x = 0 and y = 0.
    (Silhouettes from opposite directions are no test: those of any solid agree.) This measure is ours. Whole objects
    have .98 on average, mugs with a handle at the side the least (.83).

    Args:
        azimuths: of the cameras, in degrees, not along a plane.
    """

    differentiable = True
    range = (0.0, 1.0)

    def __init__(self, azimuths: Sequence[float] = (35.0, 125.0)) -> None:
        if not azimuths:
            raise ValueError("azimuths is empty; give at least one camera")
        self.azimuths = tuple(azimuths)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        return torch.cat([self._agreement(part) for part in check_grids(media).split(_AT_ONCE)])

    def _agreement(self, media: Tensor) -> Tensor:
        distance = to_distance(media)
        planes = []
        for axis in (1, 2):
            # The mirrored camera's picture, mirrored, is the camera's picture of the mirrored shape.
            flipped = distance.flip(axis)
            each = [soft_iou(silhouette(distance, azimuth=a), silhouette(flipped, azimuth=a)) for a in self.azimuths]
            planes.append(torch.stack(each).mean(0))
        return torch.stack(planes).amax(0)


# -------------------------------------------------------------------- against the whole object, never to be optimised


@lru_cache(maxsize=1024)
def _clean_surface(kind: str, seed: int, resolution: int) -> tuple[Any, Any, Any]:
    from scipy.spatial import cKDTree

    points, area = surface_points(surface_nets(to_media(clean_shape(kind, seed, resolution)).numpy()))
    return points, area, cKDTree(points)


def surface_distances(
    media: Tensor, prompts: Sequence[str], metadata: Sequence[dict], within: float = float("inf")
) -> list[tuple[Any, Any, Any, Any] | None]:
    """Of each shape: distances from its surface to the object's with the areas they stand for, and the other way.

    None for an empty shape; distances beyond `within` are infinite. Both surfaces are those of the grids.
    """
    from scipy.spatial import cKDTree

    found: list[tuple[Any, Any, Any, Any] | None] = []
    for grid, prompt, entry in zip(check_grids(media).detach().float().cpu().numpy(), prompts, metadata, strict=True):
        points, area = surface_points(surface_nets(grid))
        if len(points) == 0:
            found.append(None)
            continue
        clean, clean_area, tree = _clean_surface(*shape_of(prompt, entry), grid.shape[0])
        there = tree.query(points, distance_upper_bound=within)[0]
        back = cKDTree(points).query(clean, distance_upper_bound=within)[0]
        found.append((there, area, back, clean_area))
    return found


def _with_objects(
    media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]
) -> tuple[Tensor, list[int], list[str], list[dict]]:
    """NaN for every sample [B], and the rows whose object is known: a picture of the user's has none."""
    check_grids(media)
    rows = [i for i, entry in enumerate(metadata) if entry.get("image") is None]
    values = torch.full((len(media),), float("nan"), device=media.device)
    return values, rows, [prompts[i] for i in rows], [metadata[i] for i in rows]


class FScore:
    """F-score of the surface against that of the whole object, in [0, 1]; for the log only.

    Harmonic mean of precision (share of the shape's surface within `threshold` of the object's) and recall (the other
    way), by area (Knapitsch et al. 2017). NaN for pictures without an object, 0 for an empty shape.

    Args:
        threshold: in half sides of the grid; the default is half a cell of 16.
    """

    differentiable = False
    log_only = True
    range = (0.0, 1.0)

    def __init__(self, threshold: float = 0.0625) -> None:
        self.threshold = threshold

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        values, rows, texts, entries = _with_objects(media, prompts, metadata)
        for row, found in zip(rows, surface_distances(media[rows], texts, entries, self.threshold), strict=True):
            values[row] = 0.0
            if found is not None:
                there, area, back, clean_area = found
                precision = float(area[there <= self.threshold].sum() / area.sum())
                recall = float(clean_area[back <= self.threshold].sum() / clean_area.sum())
                values[row] = 2 * precision * recall / max(precision + recall, 1e-12)
        return values


class Chamfer:
    """Minus the mean distance of the surface to the whole object's, averaged over both directions; for the log only.

    In half sides of the grid, by area. NaN for pictures without an object and for empty shapes.
    """

    differentiable = False
    log_only = True
    range = (-3.5, 0.0)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        values, rows, texts, entries = _with_objects(media, prompts, metadata)
        for row, found in zip(rows, surface_distances(media[rows], texts, entries), strict=True):
            if found is not None:
                there, area, back, clean_area = found
                one, other = (there * area).sum() / area.sum(), (back * clean_area).sum() / clean_area.sum()
                values[row] = -float(one + other) / 2
        return values


class VolumeIoU:
    """Intersection over union of the solid cells with those of the whole object, in [0, 1]; for the log only.

    NaN for pictures without an object.
    """

    differentiable = False
    log_only = True
    range = (0.0, 1.0)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        values, rows, texts, entries = _with_objects(media, prompts, metadata)
        if rows:
            objects = [clean_shape(*shape_of(t, e), media.shape[-1]) for t, e in zip(texts, entries, strict=True)]
            wanted = (to_media(torch.stack(objects)) > 0.5).to(media)
            values[rows] = soft_iou((media[rows] > 0.5).to(media), wanted)
        return values


class ShapeDiversity:
    """`shape_distance`: 1 - intersection over union of two samples of a prompt, mean over pairs, then over prompts.

    NaN if no prompt has two samples. A fall towards 0 is a collapse onto one guess of what the picture does not show.
    """

    def measure(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, float]:
        solid = (check_grids(media) > 0.5).flatten(1).double()
        means = []
        for rows in prompt_groups(prompts, metadata):
            if (n := len(rows)) > 1:
                own = solid[rows]
                both, size = own @ own.T, own.sum(1)
                either = size[:, None] + size[None, :] - both
                distance = torch.where(either > 0, 1 - both / either.clamp(min=1), 0.0)
                means.append(float(distance.sum()) / (n * (n - 1)))
        return {"shape_distance": sum(means) / len(means) if means else float("nan")}
