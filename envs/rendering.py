"""Pictures, depth and segmentation of a MuJoCo scene, with OpenGL or with ray casting.

Conventions, the same for all simulators and both renderers: row 0 is the top of the picture, column 0 its left; top is
up in the world (cameras that are mounted upside down are turned). Depth is the distance along the viewing direction in
metres, infinite where nothing is. OpenGL draws without shadows, reflections, sky and multisampling: 12 to 17 times
faster on a CPU, and less to distract a policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import mujoco
import numpy as np

from genrl.envs.gl import INSTALL, GLContext, RendererError, candidates
from genrl.envs.settings import Box3, EnvError

MAX_GEOMS = 10_000  # in one picture


@dataclass
class Scene:
    """What is drawn.

    Args:
        model: MuJoCo's model.
        data: its state.
        camera: the usual camera's name, or a free camera: {"lookat": [x, y, z], "distance": metres,
            "azimuth": degrees, "elevation": degrees}.
        upside_down: cameras of the model that are mounted upside down.
        crop: the part of space where things happen, lowest and highest corner in metres.
        groups: groups of the model's shapes that are drawn (0 to 5).
        depth_range: metres between which depth pictures have their 255 steps.
        refresh: called before a picture is drawn, for markers that the simulator moves by hand.
        last_camera: the pinhole model of the newest picture.
    """

    model: Any
    data: Any
    camera: str | dict[str, Any] = field(default_factory=dict)
    upside_down: frozenset[str] = frozenset()
    crop: Box3 | None = None
    depth_range: tuple[float, float] = (0.0, 3.0)
    groups: tuple[int, ...] = (0, 1, 2)
    refresh: Callable[[], None] | None = None
    last_camera: CameraModel | None = None


@dataclass(frozen=True)
class CameraModel:
    """A pinhole camera.

    Args:
        position: [3], in world coordinates (metres).
        rotation: [3, 3]; its columns are the directions right, down and forward in world coordinates.
        intrinsics: [3, 3]; pixel = intrinsics @ (right, down, forward) / forward, pixel centres at halves.
    """

    position: np.ndarray
    rotation: np.ndarray
    intrinsics: np.ndarray

    def directions(self, height: int, width: int) -> np.ndarray:
        """[H, W, 3]: displacement in world coordinates for one metre of depth, per pixel."""
        rows, columns = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
        right = (columns - self.intrinsics[0, 2]) / self.intrinsics[0, 0]
        down = (rows - self.intrinsics[1, 2]) / self.intrinsics[1, 1]
        return np.stack([right, down, np.ones_like(right)], -1) @ self.rotation.T

    def points(self, depth: np.ndarray) -> np.ndarray:
        """World coordinates [H, W, 3] of the pixels of a depth picture [H, W] in metres."""
        return self.position + self.directions(*depth.shape) * depth[..., None]

    def project(self, points: np.ndarray) -> np.ndarray:
        """Column, row and depth [N, 3] of world coordinates [N, 3]."""
        local = (points - self.position) @ self.rotation
        pixels = local @ self.intrinsics.T
        return np.concatenate([pixels[:, :2] / pixels[:, 2:], local[:, 2:]], 1)


class Renderer(Protocol):
    """What both renderers offer.

    `size` is (height, width); `camera` a name, a free camera (see `Scene`), or None for the usual one.
    """

    name: str

    def rgb(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """Picture [H, W, 3] uint8."""
        ...

    def depth(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """Depth [H, W] float32 in metres, infinite where nothing is."""
        ...

    def segmentation(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """[H, W, 2] int32: index and type (`mujoco.mjtObj`) of the object seen, -1 where nothing is."""
        ...

    def close(self) -> None:
        """Free the renderer."""
        ...


class View:
    """MuJoCo's list of what is seen from a camera, and the camera's pinhole model.

    Args:
        model: MuJoCo's model.
        sites: include markers without a body.
    """

    def __init__(self, model: Any, sites: bool = True) -> None:
        self.model = model
        self.geoms = mujoco.MjvScene(model=model, maxgeom=MAX_GEOMS)
        self.option = mujoco.MjvOption()
        if not sites:
            self.option.sitegroup[:] = 0
        for flag in (
            mujoco.mjtRndFlag.mjRND_SHADOW,
            mujoco.mjtRndFlag.mjRND_REFLECTION,
            mujoco.mjtRndFlag.mjRND_SKYBOX,
        ):
            self.geoms.flags[flag] = 0

    def look(self, scene: Scene, camera: Any, size: tuple[int, int]) -> CameraModel:
        """Fill the list as seen from a camera.

        Raises:
            EnvError: no such camera.
        """
        if scene.refresh is not None:
            scene.refresh()
        self.option.geomgroup[:] = [group in scene.groups for group in range(6)]
        eye, turned = camera_of(scene, camera)
        mujoco.mjv_updateScene(
            scene.model, scene.data, self.option, None, eye, mujoco.mjtCatBit.mjCAT_ALL.value, self.geoms
        )
        for geom in self.geoms.geoms[: self.geoms.ngeom]:
            if geom.rgba[3] <= 0:
                geom.segid = -1  # else what is invisible would be in depth and identities
        if turned:
            for view in self.geoms.camera:
                view.up[:] = -np.asarray(view.up)
        scene.last_camera = pinhole(self.geoms, size)
        return scene.last_camera


def camera_of(scene: Scene, camera: Any) -> tuple[Any, bool]:
    """MuJoCo's camera object for a name or a free camera, and whether it has to be turned by 180 degrees."""
    camera = scene.camera if camera is None else camera
    eye = mujoco.MjvCamera()
    if isinstance(camera, dict):
        mujoco.mjv_defaultFreeCamera(scene.model, eye)
        for name, value in camera.items():
            if name == "lookat":
                eye.lookat[:] = value
            else:
                setattr(eye, name, value)
        return eye, False
    index = mujoco.mj_name2id(scene.model, mujoco.mjtObj.mjOBJ_CAMERA.value, camera)
    if index < 0:
        names = [scene.model.camera(i).name for i in range(scene.model.ncam)]
        raise EnvError(
            f"no camera {camera!r} in this environment; it has {', '.join(names) or 'none of its own'}. "
            "Leave camera out (null) for the usual view"
        )
    eye.type, eye.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, index
    return eye, camera in scene.upside_down


def pinhole(geoms: Any, size: tuple[int, int]) -> CameraModel:
    """The camera of MuJoCo's list for a picture of some size (both eyes of a stereo camera coincide here)."""
    eyes = geoms.camera
    position = (np.asarray(eyes[0].pos, float) + np.asarray(eyes[1].pos, float)) / 2
    forward, up = np.asarray(eyes[0].forward, float), np.asarray(eyes[0].up, float)
    height, width = size
    view = eyes[0]
    # Square pixels: MuJoCo derives the frustum's width from the picture's shape.
    focal = height * view.frustum_near / (view.frustum_top - view.frustum_bottom)
    middle_row = height * view.frustum_top / (view.frustum_top - view.frustum_bottom)
    intrinsics = np.array([[focal, 0, width / 2], [0, focal, middle_row], [0, 0, 1]])
    return CameraModel(position, np.stack([np.cross(forward, up), -up, forward], 1), intrinsics)


class GLRenderer:
    """Off-screen OpenGL; made in the process that draws.

    Args:
        backend: ``"egl"`` or ``"osmesa"``.
        sites: draw markers without a body.

    Raises:
        RendererError: the library is missing or does not work.
    """

    def __init__(self, backend: str, sites: bool = True) -> None:
        self.name = backend
        self.sites = sites
        self._gl = GLContext(backend, (1, 1))
        self._context: Any = None
        self._view: View | None = None
        self._size = (0, 0)

    def _prepare(self, model: Any, size: tuple[int, int]) -> View:
        """A context for this model whose buffer holds the size."""
        fits = size[0] <= self._size[0] and size[1] <= self._size[1]
        if self._view is None or self._view.model is not model or not fits:
            self._size = (max(size[0], self._size[0]), max(size[1], self._size[1]))
            self._free_model()
            if self.name == "osmesa":  # whose own buffer has a fixed size
                self._gl.free()
                self._gl = GLContext(self.name, self._size)
            self._gl.make_current()
            with _buffer(model, self._size):
                self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
            self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR.value
            self._view = View(model, self.sites)
        # Another environment's context may be the current one.
        self._gl.make_current()
        return self._view

    def _draw(self, scene: Scene, camera: Any, size: tuple[int, int], ids: bool) -> tuple[np.ndarray, np.ndarray, Any]:
        view = self._prepare(scene.model, size)
        view.look(scene, camera, size)
        flags = view.geoms.flags
        # Depth is read from the picture of identities, which draws far and transparent parts exactly.
        flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = ids
        height, width = size
        frame = mujoco.MjrRect(0, 0, width, height)
        colours, depth = np.empty((height, width, 3), np.uint8), np.empty((height, width), np.float32)
        mujoco.mjr_render(frame, view.geoms, self._context)
        mujoco.mjr_readPixels(colours, depth if ids else None, frame, self._context)
        return colours[::-1].copy(), depth[::-1], view  # OpenGL's row 0 is the lowest

    def rgb(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """Picture [H, W, 3] uint8."""
        return self._draw(scene, camera, size, ids=False)[0]

    def depth(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """Depth [H, W] float32 in metres, infinite where nothing is."""
        buffer = self._draw(scene, camera, size, ids=True)[1].astype(np.float64)
        extent = scene.model.stat.extent
        near, far = scene.model.vis.map.znear * extent, scene.model.vis.map.zfar * extent
        with np.errstate(divide="ignore"):
            # Reversed depth b: 1 at the near plane, 0 at the far one, linear in 1 / z.
            metres = near * far / (near + buffer * (far - near))
        return np.where(buffer > 0, metres, np.inf).astype(np.float32)

    def segmentation(self, scene: Scene, camera: Any, size: tuple[int, int]) -> np.ndarray:
        """[H, W, 2] int32: index and type of the object seen, -1 where nothing is."""
        colours, _, view = self._draw(scene, camera, size, ids=True)
        ids = colours.astype(np.int32) @ np.array([1, 2**8, 2**16], np.int32)
        table = np.full((view.geoms.ngeom + 1, 2), -1, np.int32)
        for geom in view.geoms.geoms[: view.geoms.ngeom]:
            if geom.segid >= 0:
                table[geom.segid + 1] = geom.objid, geom.objtype
        return table[ids]

    def _free_model(self) -> None:
        if self._context is not None:
            with contextlib.suppress(RendererError):  # a fork only forgets its parent's context
                self._gl.make_current()
                self._context.free()
        self._context = self._view = None

    def close(self) -> None:
        """Free the context."""
        self._free_model()
        self._gl.free()

    def __del__(self) -> None:
        # At the interpreter's end the libraries may be gone before us, and a failed constructor made nothing.
        with contextlib.suppress(Exception):
            self.close()


@contextlib.contextmanager
def _buffer(model: Any, size: tuple[int, int]) -> Iterator[None]:
    """The model asks for a buffer of at least this size and for no multisampling, for as long as a context is made."""
    vis = model.vis
    before = vis.global_.offheight, vis.global_.offwidth, vis.quality.offsamples, vis.quality.shadowsize
    vis.global_.offheight, vis.global_.offwidth = size
    vis.quality.offsamples = vis.quality.shadowsize = 0
    try:
        yield
    finally:
        vis.global_.offheight, vis.global_.offwidth, vis.quality.offsamples, vis.quality.shadowsize = before


def make_renderer(kind: str, colours: bool, sites: bool = True) -> Renderer:
    """The renderer of a setting.

    Args:
        kind: ``"egl"``, ``"osmesa"``, ``"rays"``, or ``"auto"``: what MUJOCO_GL says, else EGL, OSMesa, rays in this
            order.
        colours: a policy sees colours, for which ``"auto"`` does not fall back on rays.
        sites: draw markers without a body.

    Raises:
        RendererError: no OpenGL library works and rays were not asked for.
    """
    from genrl.envs.rays import RayRenderer

    if kind == "rays":
        return RayRenderer(sites)
    if kind != "auto":
        return GLRenderer(kind, sites)
    errors = []
    for name in candidates():
        try:
            return GLRenderer(name, sites)
        except RendererError as error:
            errors.append(error)
    if not colours:
        return RayRenderer(sites)
    if errors:
        raise errors[0]
    raise RendererError(
        f"pictures need OpenGL, and no library for it is installed. Install one ({INSTALL}), or draw without OpenGL "
        "and with simpler colours, in training and in evaluation alike: renderer: rays"
    )
