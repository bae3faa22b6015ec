"""Procedural objects of several parts as truncated signed distances on a small grid, whole or broken.

Coordinates are x, y (the floor) and z (up) in [-1, 1]; a grid [n, n, n] is indexed [x, y, z] and holds the distances at
the centres of its cells, negative inside, divided by `TRUNCATION` and cut to [-1, 1]. Parts are at least .18 thick, so
that none falls between the cells of the smallest grid (.125 wide).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

KINDS = ("chair", "table", "mug", "lamp", "cross", "bracket")
RESOLUTION = 16
TRUNCATION = 0.25
BROKEN_SHARE = 0.5
_PROMPT = re.compile(rf"\s*(?:an? )?({'|'.join(KINDS)}) (\d{{1,9}})\s*", re.IGNORECASE)
_AT_ONCE = 128  # objects whose distances are computed at a time

Array = np.ndarray
Points = tuple[Array, Array, Array]


# ------------------------------------------------------------------------------------- primitives, all broadcasting


def box(p: Points, centre: Sequence[Any], half: Sequence[Any]) -> Array:
    """Exact distance to a box with sides 2 * half."""
    q = [np.abs(p[i] - centre[i]) - half[i] for i in range(3)]
    outside = np.sqrt(sum(np.maximum(side, 0) ** 2 for side in q))
    return outside + np.minimum(np.maximum(np.maximum(q[0], q[1]), q[2]), 0)


def cylinder(p: Points, centre: Sequence[Any], radius: Any, half: Any) -> Array:
    """Exact distance to an upright cylinder of height 2 * half."""
    side = np.sqrt((p[0] - centre[0]) ** 2 + (p[1] - centre[1]) ** 2) - radius
    end = np.abs(p[2] - centre[2]) - half
    return np.minimum(np.maximum(side, end), 0) + np.sqrt(np.maximum(side, 0) ** 2 + np.maximum(end, 0) ** 2)


def sphere(p: Points, centre: Sequence[Any], radius: Any) -> Array:
    return np.sqrt(sum((p[i] - centre[i]) ** 2 for i in range(3))) - radius


def _turned(p: Points, cos: Any, sin: Any) -> Points:
    """Points in the frame of an object that is turned about z."""
    return p[0] * cos + p[1] * sin, p[1] * cos - p[0] * sin, p[2]


def _union(*parts: Array) -> Array:
    result = parts[0]
    for part in parts[1:]:
        result = np.minimum(result, part)
    return result


def _legs(p: Points, width: Any, depth: Any, thick: Any, low: Any, high: Any) -> Array:
    # Four legs are one by symmetry.
    return box((np.abs(p[0]), np.abs(p[1]), p[2]), (width - thick, depth - thick, (low + high) / 2),
               (thick, thick, (high - low) / 2))  # fmt: skip


# ------------------------------------------------------------- kinds: numbers u in [0, 1), eight an object -> distance


def _within(u: Array, low: float, high: float) -> Array:
    return low + (high - low) * u


def _quarter(p: Points, u: Array) -> Points:
    turn = np.floor(4 * u).astype(int)
    return _turned(p, np.array([1.0, 0, -1, 0])[turn], np.array([0, 1.0, 0, -1])[turn])


def _chair(p: Points, u: Sequence[Array]) -> Array:
    p = _quarter(p, u[0])
    width, depth = _within(u[1], 0.35, 0.55), _within(u[2], 0.35, 0.5)
    seat, top, thick = _within(u[3], -0.25, 0.1), _within(u[4], 0.55, 0.8), _within(u[5], 0.09, 0.12)
    return _union(
        box(p, (0, 0, seat), (width, depth, _within(u[6], 0.09, 0.12))),
        box(p, (0, depth - 0.1, (seat + top) / 2), (width, 0.1, (top - seat) / 2)),
        _legs(p, width, depth, thick, -0.8, seat),
    )


def _table(p: Points, u: Sequence[Array]) -> Array:
    width, depth, height = _within(u[0], 0.45, 0.75), _within(u[1], 0.4, 0.65), _within(u[2], 0.05, 0.5)
    thick = _within(u[3], 0.09, 0.13)
    legs = _legs(p, width, depth, thick, -0.8, height)
    foot = cylinder(p, (0, 0, -0.71), _within(u[5], 0.25, 0.4), 0.09)
    pedestal = _union(foot, cylinder(p, (0, 0, (height - 0.8) / 2), thick + 0.03, (height + 0.8) / 2))
    return _union(
        box(p, (0, 0, height), (width, depth, _within(u[4], 0.09, 0.13))), np.where(u[6] < 0.6, legs, pedestal)
    )


def _mug(p: Points, u: Sequence[Array]) -> Array:
    radius, half = _within(u[0], 0.35, 0.5), _within(u[1], 0.35, 0.55)
    angle = 2 * np.pi * u[2]
    x, y, z = _turned(p, np.cos(angle), np.sin(angle))
    ring = np.sqrt((x - radius) ** 2 + z**2) - _within(u[3], 0.22, 0.3)
    handle = np.sqrt(ring**2 + y**2) - 0.095
    cavity = cylinder(p, (0, 0, 0.2), radius - 0.18, half)
    return np.maximum(_union(cylinder(p, (0, 0, 0), radius, half), handle), -cavity)


def _lamp(p: Points, u: Sequence[Array]) -> Array:
    low, wide, narrow = _within(u[0], 0.05, 0.3), _within(u[1], 0.35, 0.55), _within(u[2], 0.18, 0.3)
    half = (0.75 - low) / 2
    slope = (narrow - wide) / (2 * half)
    rho = np.sqrt(p[0] ** 2 + p[1] ** 2)
    middle = (low + 0.75) / 2
    side = (rho - (wide + narrow) / 2 - slope * (p[2] - middle)) / np.sqrt(1 + slope**2)
    shade = np.maximum(side, np.abs(p[2] - middle) - half)
    base = cylinder(p, (0, 0, -0.7), _within(u[3], 0.28, 0.45), 0.1)
    pole = cylinder(p, (0, 0, (low - 0.7) / 2), _within(u[4], 0.09, 0.11), (low + 0.7) / 2)
    return _union(shade, base, pole)


def _cross(p: Points, u: Sequence[Array]) -> Array:
    p = _quarter(p, u[0])
    thick, height = _within(u[1], 0.1, 0.16), _within(u[2], -0.1, 0.4)
    third = np.where(u[5] < 0.5, _within(u[4], 0.35, 0.6), thick)  # half of them have no third bar
    return _union(
        box(p, (0, 0, 0), (thick, thick, _within(u[6], 0.6, 0.8))),
        box(p, (0, 0, height), (_within(u[3], 0.4, 0.7), thick, thick)),
        box(p, (0, 0, height), (thick, third, thick)),
    )


def _bracket(p: Points, u: Sequence[Array]) -> Array:
    p = _quarter(p, u[0])
    length, width, height = _within(u[1], 0.5, 0.7), _within(u[2], 0.3, 0.5), _within(u[3], 0.2, 0.7)
    thick = _within(u[4], 0.09, 0.12)
    plate = box(p, (0, 0, -0.6), (length, width, thick))
    hole = np.where(u[5] < 0.5, _within(u[6], 0.14, 0.2), -1.0)  # a negative radius cuts nothing
    plate = np.maximum(plate, hole - np.sqrt((p[0] - length / 3) ** 2 + p[1] ** 2))
    wall = box(p, (-length + thick, 0, (height - 0.6) / 2), (thick, width, (height + 0.6) / 2))
    rise = (p[0] + length) / (1.4 * length) + (p[2] + 0.6) / (0.9 * (height + 0.6)) - 1
    slope = np.sqrt(1 / (1.4 * length) ** 2 + 1 / (0.9 * (height + 0.6)) ** 2)
    rib = np.maximum(box(p, (0, 0, (height - 0.6) / 2), (length, 0.1, (height + 0.6) / 2)), rise / slope)
    return _union(plate, wall, rib)


_DISTANCES: dict[str, Callable[[Points, Sequence[Array]], Array]] = {
    "chair": _chair, "table": _table, "mug": _mug, "lamp": _lamp, "cross": _cross, "bracket": _bracket,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ objects


def cell_centres(resolution: int) -> Array:
    """Coordinates [n] of the cells of one axis."""
    return ((np.arange(resolution) + 0.5) * (2 / resolution) - 1).astype(np.float32)


def distances(kind: str, seeds: Sequence[int], points: Array) -> Array:
    """Signed distances [N, M] (bounds, inside of unions) of the objects of some seeds at points [M, 3]."""
    numbers = np.stack([np.random.default_rng((KINDS.index(kind), seed)).random(8) for seed in seeds])
    p = tuple(points[None, :, i].astype(np.float32) for i in range(3))
    return _DISTANCES[kind](p, [column[:, None].astype(np.float32) for column in numbers.T])  # type: ignore[arg-type]


def broken(distance: Array, points: Array, rng: np.random.Generator) -> Array:
    """The distances [M] of an object with a slab cut out of it or with a ball that floats beside it."""
    if rng.random() < 0.5:
        solid = points[distance < 0]
        axis = int(np.argmax(rng.random(3) + (np.ptp(solid, 0) > 0.6)))  # thin directions are cut rarely
        low, high = solid[:, axis].min(), solid[:, axis].max()
        place = low + (high - low) * rng.uniform(0.3, 0.7)
        return np.maximum(distance, rng.uniform(0.1, 0.16) - np.abs(points[:, axis] - place))
    radius = rng.uniform(0.13, 0.2)
    room = np.where(np.abs(points).max(1) < 0.95 - radius, distance, -1)
    free = points[room >= min(radius + 0.2, room.max())]
    centre = free[rng.integers(len(free))]
    return np.minimum(distance, sphere((points[:, 0], points[:, 1], points[:, 2]), centre, radius))


def make_shapes(
    objects: Sequence[tuple[str, int]], resolution: int = RESOLUTION, broken_share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Objects, each determined by its kind and its seed alone.

    Args:
        objects: (kind, seed) of each.
        resolution: cells of a side.
        broken_share: probability that an object is broken.

    Returns:
        Truncated distances float32 [N, n, n, n] in [-1, 1], of the objects as they are and as they should be.

    Raises:
        ValueError: for an unknown kind.
    """
    for kind, _ in objects:
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} of a shape is unknown; allowed are {', '.join(KINDS)}")
    line = cell_centres(resolution)
    points = np.stack(np.meshgrid(line, line, line, indexing="ij"), -1).reshape(-1, 3)  # [M, 3]
    clean = np.empty((len(objects), len(points)), np.float32)
    for kind in KINDS:
        rows = [i for i, (own, _) in enumerate(objects) if own == kind]
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            clean[part] = distances(kind, [objects[i][1] for i in part], points)
    dirty = clean if broken_share == 0 else clean.copy()
    if broken_share > 0:
        for i, (kind, seed) in enumerate(objects):
            rng = np.random.default_rng((KINDS.index(kind), seed, 1))
            if rng.random() < broken_share:
                dirty[i] = broken(clean[i], points, rng)
    size = (-1, resolution, resolution, resolution)
    done = [torch.from_numpy(np.clip(d / TRUNCATION, -1, 1)).reshape(size) for d in (dirty, clean)]
    return done[0], done[1]


@lru_cache(maxsize=4096)
def clean_shape(kind: str, seed: int, resolution: int = RESOLUTION) -> Tensor:
    """Truncated distances [n, n, n] of one whole object; kept, so do not change it in place."""
    return make_shapes([(kind, seed)], resolution)[1][0]


def shape_of(prompt: str, metadata: dict[str, Any] | None = None) -> tuple[str, int]:
    """Kind and seed of the object that a prompt asks for.

    Args:
        prompt: such as "chair 17".
        metadata: its ``kind`` and ``seed`` take precedence.

    Raises:
        ValueError: when neither says so.
    """
    metadata = metadata or {}
    if "kind" in metadata and "seed" in metadata:
        return str(metadata["kind"]), int(metadata["seed"])
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(
            f"prompt {prompt!r} names no object; write a kind and a number such as 'chair 17' (kinds: "
            f"{', '.join(KINDS)}), or give metadata with kind and seed, or with the path of an image of 24x24 pixels"
        )
    return match.group(1).lower(), int(match.group(2))
