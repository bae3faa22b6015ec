"""The MuJoCo scene of a gymnasium environment."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from genrl.envs.rendering import Scene
from genrl.envs.settings import Box3


class GymScene:
    """Makes the scene of an environment that has ``model`` and ``data``; called once a picture.

    Args:
        env: unwrapped.
        camera: the usual camera; None takes the environment's own: its camera ``track``, or its free camera.
        crop: see `Scene`.
        depth_range: see `Scene`; None takes twice the model's extent.
        upside_down: cameras that are mounted upside down.
    """

    def __init__(
        self,
        env: Any,
        camera: str | dict[str, Any] | None = None,
        crop: Box3 | None = None,
        depth_range: tuple[float, float] | None = None,
        upside_down: frozenset[str] = frozenset(),
    ) -> None:
        self.env = env
        self.camera = own_camera(env) if camera is None else camera
        self.crop, self.upside_down = crop, upside_down
        self.depth_range = depth_range or (0.0, float(2 * env.model.stat.extent))
        self._scene: Scene | None = None

    def __call__(self) -> Scene:
        if self._scene is None or self._scene.model is not self.env.model or self._scene.data is not self.env.data:
            self._scene = Scene(
                self.env.model,
                self.env.data,
                self.camera,
                self.upside_down,
                self.crop,
                self.depth_range,
                refresh=getattr(self.env, "_render_callback", None),
            )
        return self._scene


def own_camera(env: Any) -> str | dict[str, Any]:
    """The camera that the environment's own pictures show."""
    renderer = None
    for holder in (env, *(getattr(env, name, None) for name in ("robot_env", "point_env", "ant_env"))):
        renderer = renderer or getattr(holder, "mujoco_renderer", None)
    config = dict(getattr(renderer, "default_cam_config", None) or {})
    if not config and mujoco.mj_name2id(env.model, mujoco.mjtObj.mjOBJ_CAMERA.value, "track") >= 0:
        return "track"
    if mujoco.mj_name2id(env.model, mujoco.mjtObj.mjOBJ_CAMERA.value, "track") >= 0:
        return "track"
    config.setdefault("lookat", np.median(env.data.geom_xpos, axis=0).tolist())
    config.setdefault("distance", float(env.model.stat.extent))
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in config.items()
        if name in ("lookat", "distance", "azimuth", "elevation", "trackbodyid")
    }
