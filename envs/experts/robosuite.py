"""robosuite's Lift: hover, descend, close, lift, in displacements of the OSC_POSE controller.

It decides by the present observation alone, so that a policy without memory can imitate it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv

METRES, RADIANS = 0.05, 0.5  # that an action of 1 asks for
OPEN, CLOSE = -1.0, 1.0
HOVER = 0.06  # metres above the cube
HELD = 0.027  # finger position at which the cube (half size 0.02 to 0.022) is held; open: 0.04
SPEED = 0.6  # share of the way in one step: the arm lags behind what it is asked for


def list_experts() -> tuple[str, ...]:
    """Names of the tasks."""
    return ("Lift",)


def build(name: str) -> LiftExpert:
    """The expert of one task."""
    return LiftExpert()


class LiftExpert:
    """Grasps the cube from above and lifts it."""

    def reset(self, seed: int) -> None:
        """Nothing is random or remembered."""

    def __call__(self, obs: Mapping[str, np.ndarray], env: TaskEnv) -> np.ndarray:
        vectors = {name: np.asarray(value, np.float64) for name, value in env.vectors.items()}
        cube, hand = vectors["object"][:3], vectors["robot0_eef_pos"]
        fingers = float(np.abs(vectors["robot0_gripper_qpos"]).mean())
        away = cube - hand
        aside = float(np.linalg.norm(away[:2]))
        at_cube = aside < 0.02 and abs(away[2]) < 0.015
        turn = _quarter(_heading(vectors["object"][3:7]) - _heading(vectors["robot0_eef_quat"]))
        if at_cube and fingers < HELD:
            move, grip, turn = np.array([0.0, 0.0, METRES]), CLOSE, 0.0
        elif at_cube:
            move, grip = away, CLOSE
        elif aside > 0.012 and away[2] > -HOVER / 2:  # too low to come from the side
            move, grip = np.array([0.0, 0.0, METRES]), OPEN
        elif aside > 0.008 or abs(turn) > 0.15:
            move, grip = away + [0.0, 0.0, HOVER], OPEN
        else:
            move, grip = away, OPEN
        action = np.array([*(SPEED * move / METRES), 0.0, 0.0, SPEED * turn / RADIANS, grip])
        return np.clip(action, -1.0, 1.0).astype(np.float32)


def env_args_of(env: TaskEnv) -> dict[str, Any]:
    """robomimic's ``env_args`` of a robosuite environment, controller included, for files that robomimic reads too."""
    from robosuite.controllers import load_composite_controller_config

    name = env.id.partition("/")[2]
    robots = ["Panda", "Panda"] if name.startswith("TwoArm") else "Panda"
    settings: dict[str, Any] = {
        "robots": robots,
        "controller_configs": load_composite_controller_config(robot="Panda"),
        "control_freq": 20,
        "use_object_obs": True,
        "reward_shaping": False,
        **env.settings.kwargs,
        "has_renderer": False,
        "has_offscreen_renderer": False,
        "use_camera_obs": False,
        "ignore_done": True,
    }
    return {"env_name": name, "type": 1, "env_version": env.versions()["robosuite"], "env_kwargs": settings}


def _heading(quaternion: np.ndarray) -> float:
    """Angle about the vertical of the first axis of a rotation (x, y, z, w)."""
    x, y, z, w = quaternion
    return float(np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z)))


def _quarter(angle: float) -> float:
    """The smallest turn that is equal for a square: in [-45, 45] degrees."""
    return (angle + np.pi / 4) % (np.pi / 2) - np.pi / 4
