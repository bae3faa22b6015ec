"""robosuite's manipulation tasks (Lift, Can, Square, ...), with robomimic's names.

Observations have robomimic's keys: ``object``, ``robot0_eef_pos``, ``robot0_eef_quat``, ``robot0_gripper_qpos``,
``robot0_joint_pos`` and so on; ``state`` is robot0_eef_pos, robot0_eef_quat, robot0_gripper_qpos (the same of robot1
where there are two) and object, one after the other: robomimic's low-dimensional set in its order. Pictures of any
camera: ``agentview_image``, ``robot0_eye_in_hand_image``.

Actions in [-1, 1]: OSC_POSE with displacements (3 position, 3 rotation) and gripper (1) per arm, robomimic's default.
Success: the task's own check at each step; rule ``any``. Nothing terminates an episode; lengths are robomimic's.

The model is built once, from a fixed seed, and not again at every reset (``hard_reset=False``, 4 to 8 ms instead of
1 s): positions vary between episodes, sizes of objects do not. ``kwargs: {hard_reset: true}`` varies both.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from genrl.envs.base import Observation, SimStep
from genrl.envs.global_draws import GlobalDraws
from genrl.envs.quiet import quiet
from genrl.envs.rendering import Scene
from genrl.envs.settings import EnvSettings

with quiet():
    import robosuite
    from robosuite.environments.base import REGISTERED_ENVS

LENGTHS = {"ToolHang": 700, "TwoArmTransport": 700}  # robomimic's; 400 for its other tasks
DEFAULTS: dict[str, Any] = {
    "has_renderer": False,
    "has_offscreen_renderer": False,  # pictures are drawn here, from the model
    "use_camera_obs": False,
    "use_object_obs": True,
    "reward_shaping": False,
    "ignore_done": True,  # robosuite would raise after its horizon
    "control_freq": 20,
    "renderer": "mujoco",
}
MODEL_SEED = 0


def list_envs() -> tuple[str, ...]:
    """Names of the tasks."""
    return tuple(sorted(REGISTERED_ENVS))


def build(name: str, settings: EnvSettings) -> Robosuite:
    """The simulator of one task."""
    return Robosuite(name, settings.kwargs)


class Robosuite:
    """One task, whose draws (positions, joint noise, sizes) all come from the seed.

    Args:
        name: of the task.
        kwargs: for robosuite, over our defaults.
    """

    success_rule = "any"
    packages = ("robosuite", "mujoco", "mink")
    has_success = True
    draws = False

    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
        self.max_steps = LENGTHS.get(name, 400)
        robots = ["Panda", "Panda"] if name.startswith("TwoArm") else "Panda"
        self._draws = GlobalDraws(MODEL_SEED)
        kwargs = {"robots": robots, "hard_reset": False, **kwargs}
        with self._draws:
            self.env: Any = robosuite.make(name, **{**kwargs, **DEFAULTS, **_allowed(kwargs)})
        for key in self.env.observation_names:
            if "joint_pos" in key or "eef_vel" in key:  # as robomimic does
                self.env.modify_observable(observable_name=key, attribute="active", modifier=True)
        low, high = self.env.action_spec
        self.action_space = Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        self.actions = _representation(self.env)
        self._scene: Scene | None = None
        self.shapes = {key: value.shape for key, value in self.reset(0).obs.items()}

    def _vectors(self, raw: dict[str, Any]) -> Observation:
        robots = range(len(self.env.robots))
        own = {
            key: np.atleast_1d(value)
            for key, value in raw.items()
            if key.startswith(tuple(f"robot{i}_" for i in robots)) and not key.endswith("proprio-state")
        }
        parts = [own[f"robot{i}_{part}"] for i in robots for part in _state_parts(own, i)]
        thing = raw.get("object-state", np.zeros(0))
        return {"state": np.concatenate([*parts, thing]), "object": thing, **own}

    def reset(self, seed: int) -> SimStep:
        """Start the episode of a seed."""
        self._draws.seed(seed)
        self.env.rng = np.random.default_rng(seed)
        with self._draws:
            raw = self.env.reset()
        return SimStep(self._vectors(raw), 0.0, False, self._success())

    def step(self, action: np.ndarray) -> SimStep:
        """A twentieth of a second."""
        with self._draws:
            raw, reward, _, info = self.env.step(action)
        return SimStep(self._vectors(raw), float(reward), False, self._success(), dict(info))

    def _success(self) -> bool:
        found = self.env._check_success()
        return bool(found["task"] if isinstance(found, dict) else found)

    def scene(self) -> Scene:
        """The visual shapes; collision shapes are hidden."""
        model, data = self.env.sim.model._model, self.env.sim.data._data
        if self._scene is None or self._scene.model is not model or self._scene.data is not data:
            self._scene = Scene(
                model,
                data,
                camera="agentview",
                crop=((-0.5, -0.6, 0.805), (0.6, 0.6, 1.6)),
                depth_range=(0.2, 2.2),
                groups=(1,),
            )
        return self._scene

    def picture(self, size: int) -> None:
        """Drawn from the scene."""

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()


def _representation(env: Any) -> dict[str, str]:
    """What the arm's controller takes."""
    parts = env.robots[0].part_controller_config.values()
    arm: dict[str, Any] = next((part for part in parts if "input_type" in part), {})
    rotations = {"OSC_POSE": "axis_angle", "IK_POSE": "axis_angle", "OSC_POSITION": "none"}
    return {
        "frame": arm.get("input_type", "unspecified"),
        "rotation": rotations.get(arm.get("type", ""), "unspecified"),
    }


def _state_parts(own: dict[str, Any], robot: int) -> list[str]:
    return [part for part in ("eef_pos", "eef_quat", "gripper_qpos") if f"robot{robot}_{part}" in own]


def _allowed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of our defaults those that a user may change."""
    return {key: kwargs[key] for key in ("reward_shaping", "control_freq", "use_object_obs") if key in kwargs}
