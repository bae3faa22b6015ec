"""Meshes of shapes on grids: surface nets, points on them, and PLY files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Mesh:
    """A mesh of quads.

    Args:
        vertices: float32 [V, 3] in [-1, 1], in the grid's axes. quads: int [Q, 4], counter-clockwise from outside.
    """

    vertices: np.ndarray
    quads: np.ndarray

    @property
    def triangles(self) -> np.ndarray:
        """int [2 Q, 3]."""
        return self.quads[:, [[0, 1, 2], [0, 2, 3]]].reshape(-1, 3)


def surface_nets(media: np.ndarray, level: float = 0.5) -> Mesh:
    """The surface of a grid [n, n, n] at `level`, inside above it (naive surface nets, Gibson 1998).

    Every cube of eight neighbouring cell centres that the surface crosses gets one vertex, the mean of the crossings of
    its edges (linear between the centres), and every crossed edge one quad of the four cubes around it. The grid is
    padded with empty cells, so that the mesh is closed; a shape that touches the border gets a flat end there.
    """
    size = np.array(media.shape)
    field = np.pad(np.asarray(media, np.float64) - level, 1, constant_values=-level)
    inside = field > 0
    totals = np.zeros((*(np.array(field.shape) - 1), 4))  # of each cube: sum of its crossings, and their number
    quads = []
    index = np.full(totals.shape[:3], -1)
    edges = []
    for axis in range(3):
        a = np.moveaxis(field, axis, 0)
        crossed = np.moveaxis(inside, axis, 0)
        at = np.argwhere(crossed[:-1] != crossed[1:])  # [E, 3], moved axes
        low, high = a[tuple(at.T)], a[tuple((at + [1, 0, 0]).T)]
        start = np.empty_like(at)
        others = [i for i in range(3) if i != axis]
        start[:, axis], start[:, others[0]], start[:, others[1]] = at.T
        point = start.astype(np.float64)
        point[:, axis] += low / (low - high)
        # The padding keeps every crossed edge away from the border, so that all four cubes exist.
        for i in (0, 1):
            for j in (0, 1):
                cube = start.copy()
                cube[:, others[0]] -= i
                cube[:, others[1]] -= j
                np.add.at(totals, tuple(cube.T), np.concatenate([point, np.ones((len(at), 1))], 1))
        edges.append((axis, others, start, low > 0))
    used = totals[..., 3] > 0
    index[used] = np.arange(used.sum())
    vertices = totals[used][:, :3] / totals[used][:, 3:]
    for axis, others, start, outward in edges:
        ring = []
        for i, j in ((0, 0), (1, 0), (1, 1), (0, 1)):
            cube = start.copy()
            cube[:, others[0]] -= i
            cube[:, others[1]] -= j
            ring.append(index[tuple(cube.T)])
        quad = np.stack(ring, 1).reshape(-1, 4)
        # The ring is counter-clockwise as seen from the end of the axis for axes 0 and 2, clockwise for 1.
        flip = outward if axis == 1 else ~outward
        quad[flip] = quad[flip][:, ::-1]
        quads.append(quad)
    # Padded cell k has its centre at (k - 1/2) * 2 / n - 1.
    return Mesh(((vertices - 0.5) * (2 / size) - 1).astype(np.float32), np.concatenate(quads))


def surface_points(mesh: Mesh, per_side: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Points evenly over every quad, per_side^2 each, and the area that each stands for: [P, 3], [P]."""
    corners = mesh.vertices[mesh.quads]  # [Q, 4, 3]
    place = (np.arange(per_side) + 0.5) / per_side
    u, v = (grid.ravel()[None, :, None] for grid in np.meshgrid(place, place, indexing="ij"))
    a, b, c, d = (corners[:, i, None] for i in range(4))
    points = (1 - u) * ((1 - v) * a + v * d) + u * ((1 - v) * b + v * c)  # [Q, k, 3]
    area = np.linalg.norm(np.cross(corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1]), axis=1) / 2
    return points.reshape(-1, 3), np.repeat(area / per_side**2, per_side**2)


def write_ply(mesh: Mesh, file: str | os.PathLike[str]) -> None:
    """Write a mesh as a binary PLY file of triangles."""
    faces = np.empty(len(mesh.triangles), np.dtype([("count", "u1"), ("corners", "<i4", 3)]))
    faces["count"], faces["corners"] = 3, mesh.triangles
    header = (
        f"ply\nformat binary_little_endian 1.0\nelement vertex {len(mesh.vertices)}\n"
        "property float x\nproperty float y\nproperty float z\n"
        f"element face {len(faces)}\nproperty list uchar int vertex_indices\nend_header\n"
    )
    Path(file).write_bytes(header.encode() + mesh.vertices.astype("<f4").tobytes() + faces.tobytes())


def export_meshes(media: Tensor, folder: str | os.PathLike[str], names: Sequence[str]) -> list[Path]:
    """Write each of media [B, n, n, n] as `NAME.ply`; characters that files do not like become "-".

    Args:
        media: in [0, 1], above .5 inside. An empty shape gives a file without faces.
        folder: made if it is not there.
        names: B names; a second one that is the same gets "-2", and so on.

    Returns:
        The files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for grid, name in zip(media.detach().float().cpu().numpy(), names, strict=True):
        plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "shape"
        file, count = folder / f"{plain}.ply", 1
        while file in files:
            count += 1
            file = folder / f"{plain}-{count}.ply"
        write_ply(surface_nets(grid), file)
        files.append(file)
    return files
