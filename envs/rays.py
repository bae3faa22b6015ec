"""Ray casting without OpenGL: the same cameras, depth and identities, and simple colours.

Depth and identities equal OpenGL's up to pixels on outlines and meshes with one-sided faces (which OpenGL looks
through from behind). Colours are Lambert-shaded from a lamp at the camera,
without textures (a texture counts with its mean colour) and without smooth shading, so they differ from OpenGL's:
enough for videos and coloured points, but do not train a policy on the one and evaluate it on the other.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import mujoco
import numpy as np

from genrl.envs.rendering import CameraModel, Scene, View

AMBIENT = 0.35  # share of light that does not depend on the surface's direction
BACKGROUND = 0
SHAPES = mujoco.mjtGeom
# Directions to all sides: a simple shape that is met in every one of them surrounds the camera.
AROUND = [np.array(ray) / np.linalg.norm(ray) for ray in itertools.product((-1.0, 0.0, 1.0), repeat=3) if any(ray)]


class RayRenderer:
    """Casts one ray a pixel against the model's bodies (MuJoCo) and its markers (in closed form).

    Args:
        sites: draw markers without a body.
    """

    name = "rays"

    def __init__(self, sites: bool = True) -> None:
        self.sites = sites
        self._view: View | None = None
        self._colours: np.ndarray | None = None  # [ngeom, 3] in [0, 1]

    def _cast(self, scene: Scene, camera: Any, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, CameraModel]:
        """Depth [H, W] and [H, W, 2] identities."""
        if self._view is None or self._view.model is not scene.model:
            self._view = View(scene.model, self.sites)
            self._colours = geom_colours(scene.model)
        model = self._view.look(scene, camera, size)
        directions = model.directions(*size)
        lengths = np.linalg.norm(directions, axis=-1, keepdims=True)
        rays = np.ascontiguousarray(directions / lengths).reshape(-1, 3)
        ids, distances = self._bodies(scene, model.position, rays)
        objects = np.stack([ids, np.where(ids >= 0, mujoco.mjtObj.mjOBJ_GEOM.value, -1)], 1)
        if self.sites:
            for geom in self._view.geoms.geoms[: self._view.geoms.ngeom]:
                if geom.objtype == mujoco.mjtObj.mjOBJ_SITE.value and geom.rgba[3] > 0:
                    hits = shape_distance(geom, model.position, rays)
                    nearer = hits < distances
                    distances[nearer] = hits[nearer]
                    objects[nearer] = geom.objid, geom.objtype
        depth = distances.reshape(size) / lengths[..., 0]
        return depth, objects.reshape(*size, 2).astype(np.int32), model

    def _bodies(self, scene: Scene, origin: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Index [N] of the body shape that each ray meets, -1 for none, and its distance [N]."""
        assert self._view is not None
        groups = np.asarray(self._view.option.geomgroup, np.uint8)
        ids, distances = np.full(len(rays), -1, np.int32), np.empty(len(rays))
        hit = np.empty(1, np.int32)
        with hidden(scene, enclosing(scene, origin, groups)):
            # One call a ray: MuJoCo's call for many rays skips shapes right above or below the camera (3.3.0).
            for ray in range(len(rays)):
                distances[ray] = mujoco.mj_ray(scene.model, scene.data, origin, rays[ray], groups, 1, -1, hit)
                ids[ray] = hit[0]
        ids[distances < 0] = -1
        return ids, np.where(ids >= 0, distances, np.inf)

    def depth(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """Depth [H, W] float32 in metres, infinite where nothing is."""
        return self._cast(scene, camera, size)[0].astype(np.float32)

    def segmentation(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """[H, W, 2] int32: index and type of the object seen, -1 where nothing is."""
        return self._cast(scene, camera, size)[1]

    def rgb(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """Picture [H, W, 3] uint8."""
        depth, objects, model = self._cast(scene, camera, size)
        assert self._colours is not None
        seen = np.isfinite(depth)
        ids, kinds = objects[..., 0], objects[..., 1]
        geoms = kinds == mujoco.mjtObj.mjOBJ_GEOM.value
        sites = kinds == mujoco.mjtObj.mjOBJ_SITE.value
        albedo = np.zeros((*size, 3))
        albedo[geoms] = self._colours[ids[geoms]]
        albedo[sites] = scene.model.site_rgba[ids[sites], :3]
        points = model.points(np.where(seen, depth, 0.0))
        light = AMBIENT + (1 - AMBIENT) * facing(points, ids + 100_000 * kinds, model.directions(*size))
        picture = np.where(seen[..., None], 255 * albedo * light[..., None], BACKGROUND)
        return np.clip(np.round(picture), 0, 255).astype(np.uint8)

    def close(self) -> None:
        """Forget the model."""
        self._view = self._colours = None


def enclosing(scene: Scene, origin: np.ndarray, groups: np.ndarray) -> list[int]:
    """Shapes that contain the camera; OpenGL does not draw the inside of a surface."""
    model, data = scene.model, scene.data
    away = np.linalg.norm(data.geom_xpos - origin, axis=1)
    near = np.nonzero((away <= model.geom_rbound) & (groups[np.minimum(model.geom_group, 5)] > 0))[0]
    inside = []
    for geom in near:
        kind = model.geom_type[geom]
        if kind == SHAPES.mjGEOM_MESH:
            within = winding(model, model.geom_dataid[geom], local_to(scene, int(geom), origin)) > 0.5
        elif kind in (SHAPES.mjGEOM_HFIELD, SHAPES.mjGEOM_SDF):
            within = False
        else:
            size, position, frame = model.geom_size[geom], data.geom_xpos[geom], data.geom_xmat[geom]
            within = all(mujoco.mju_rayGeom(position, frame, size, origin, ray, kind) >= 0 for ray in AROUND)
        if within:
            inside.append(int(geom))
    return inside


def local_to(scene: Scene, geom: int, point: np.ndarray) -> np.ndarray:
    """A point of the world in a shape's own frame."""
    return (point - scene.data.geom_xpos[geom]) @ scene.data.geom_xmat[geom].reshape(3, 3)


def winding(model: Any, mesh: int, point: np.ndarray) -> float:
    """How often a mesh's surface goes around a point: 1 inside, 0 outside, in between where the surface has holes."""
    first_vertex, first_face = model.mesh_vertadr[mesh], model.mesh_faceadr[mesh]
    vertices = model.mesh_vert[first_vertex : first_vertex + model.mesh_vertnum[mesh]]
    faces = model.mesh_face[first_face : first_face + model.mesh_facenum[mesh]]
    a, b, c = np.moveaxis((vertices - point)[faces], 1, 0)
    na, nb, nc = (np.linalg.norm(corner, axis=1) for corner in (a, b, c))
    volume = (a * np.cross(b, c)).sum(1)
    # Solid angle of each triangle, as a share of the full sphere.
    rest = na * nb * nc + (a * b).sum(1) * nc + (b * c).sum(1) * na + (c * a).sum(1) * nb
    return float(np.arctan2(volume, rest).sum() / (2 * np.pi))


@contextlib.contextmanager
def hidden(scene: Scene, geoms: list[int]) -> Iterator[None]:
    """Some shapes are in a group that is not drawn."""
    before = scene.model.geom_group[geoms].copy()
    scene.model.geom_group[geoms] = 5
    try:
        yield
    finally:
        scene.model.geom_group[geoms] = before


def geom_colours(model: Any) -> np.ndarray:
    """[ngeom, 3] in [0, 1]: material or own colour, times the mean of the texture."""
    colours = model.geom_rgba[:, :3].astype(float).copy()
    role = int(mujoco.mjtTextureRole.mjTEXROLE_RGB.value)
    for geom, material in enumerate(model.geom_matid):
        if material < 0:
            continue
        # A geom's own colour counts only where it was changed from the default grey.
        if np.allclose(model.geom_rgba[geom], 0.5 * np.ones(4) + np.array([0, 0, 0, 0.5])):
            colours[geom] = model.mat_rgba[material, :3]
        texture = model.mat_texid[material, role]
        if texture >= 0:
            start = model.tex_adr[texture]
            size = model.tex_height[texture] * model.tex_width[texture] * model.tex_nchannel[texture]
            texels = model.tex_data[start : start + size].reshape(-1, model.tex_nchannel[texture])
            colours[geom] *= texels[:, :3].mean(0) / 255 if texels.shape[1] >= 3 else texels.mean() / 255
    return colours


def facing(points: np.ndarray, objects: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """|cosine| [H, W] between the viewing ray and the surface's normal.

    The normal comes from the neighbours [H, W, 3] that belong to the same object; a pixel without any faces the camera.
    """
    across, down = _difference(points, objects, 1), _difference(points, objects, 0)
    normals = np.cross(across, down)
    sizes = np.linalg.norm(normals, axis=-1) * np.linalg.norm(directions, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = np.abs((normals * directions).sum(-1)) / sizes
    return np.where(np.isfinite(cosine), cosine, 1.0)


def _difference(points: np.ndarray, objects: np.ndarray, axis: int) -> np.ndarray:
    """Step to the next pixel of the same object along an axis, or from the one before, or 0."""
    points, objects = np.moveaxis(points, axis, 0), np.moveaxis(objects, axis, 0)
    step = np.zeros_like(points)
    if len(points) > 1:
        forward = points[1:] - points[:-1]
        same = (objects[1:] == objects[:-1])[..., None]
        step[1:] = np.where(same, forward, 0)
        step[:-1] = np.where(same, forward, step[:-1])
    return np.moveaxis(step, 0, axis)


def shape_distance(geom: Any, origin: np.ndarray, rays: np.ndarray) -> np.ndarray:
    """Distance [N] at which rays [N, 3] from one point meet a marker's surface, infinite where they miss it."""
    frame = np.asarray(geom.mat, float).reshape(3, 3)
    start = (origin - np.asarray(geom.pos, float)) @ frame
    rays = rays @ frame
    size = np.asarray(geom.size, float)
    kind = geom.type
    if kind == SHAPES.mjGEOM_SPHERE:
        return _ellipsoid(start, rays, np.full(3, size[0]))
    if kind == SHAPES.mjGEOM_ELLIPSOID:
        return _ellipsoid(start, rays, size)
    if kind == SHAPES.mjGEOM_BOX:
        return _box(start, rays, size)
    if kind == SHAPES.mjGEOM_CYLINDER:
        return _cylinder(start, rays, size[0], size[2])
    if kind == SHAPES.mjGEOM_CAPSULE:
        ends = [_ellipsoid(start - np.array([0, 0, z]), rays, np.full(3, size[0])) for z in (-size[2], size[2])]
        return np.minimum.reduce([*ends, _tube(start, rays, size[0], size[2])])
    return np.full(len(rays), np.inf)


def _first(roots: np.ndarray) -> np.ndarray:
    """The smallest positive of [..., N] distances along the first axis."""
    return np.where(np.isfinite(roots) & (roots > 0), roots, np.inf).min(0)


def _quadratic(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Both roots [2, N] of a s^2 + 2 b s + c, NaN where there are none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        root = np.sqrt(b * b - a * c)
        return np.stack([(-b - root) / a, (-b + root) / a])


def _ellipsoid(start: np.ndarray, rays: np.ndarray, radii: np.ndarray) -> np.ndarray:
    p, v = start / radii, rays / radii
    return _first(_quadratic((v * v).sum(1), v @ p, p @ p - 1))


def _box(start: np.ndarray, rays: np.ndarray, half: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        planes = np.stack([(-half - start) / rays, (half - start) / rays])
    enter, leave = np.nanmin(planes, 0).max(1), np.nanmax(planes, 0).min(1)
    return np.where(enter <= leave, _first(np.stack([enter, leave])), np.inf)


def _tube(start: np.ndarray, rays: np.ndarray, radius: float, half: float) -> np.ndarray:
    roots = _quadratic((rays[:, :2] ** 2).sum(1), rays[:, :2] @ start[:2], start[:2] @ start[:2] - radius**2)
    heights = start[2] + roots * rays[:, 2]
    with np.errstate(invalid="ignore"):
        return _first(np.where(np.abs(heights) <= half, roots, np.inf))


def _cylinder(start: np.ndarray, rays: np.ndarray, radius: float, half: float) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        caps = np.stack([(-half - start[2]) / rays[:, 2], (half - start[2]) / rays[:, 2]])
        inside = ((start[:2] + caps[..., None] * rays[:, :2]) ** 2).sum(-1) <= radius**2
    return np.minimum(_first(np.where(inside, caps, np.inf)), _tube(start, rays, radius, half))
