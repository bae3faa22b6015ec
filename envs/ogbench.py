"""OGBench: manipulation (cube, scene, puzzle) and mazes (point, ant, humanoid, ant soccer).

``ogbench/cube-single-singletask-v0`` and ``...-singletask-task2-v0`` have one fixed goal; their state is the
observation (cube-single 28 numbers). ``ogbench/cube-single-v0`` is goal-conditioned: one of five tasks is drawn by the
seed at each reset (``kwargs: {task_id: 3}`` fixes it), and the state is the observation and then the goal (28 + 28);
both are observations of their own too (``observation``, ``goal``).

Success as OGBench defines it, of the state after the step; it terminates an episode (``kwargs: {terminate_at_goal:
false}``; the single-task variants notice at the step after). The rule is ``any``.
Actions in [-1, 1]; manipulation: hand displacement (3), yaw (1) and gripper (1). Pictures replace the ``visual-``
variants of the package (whose cameras and colours differ).
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import ogbench  # noqa: F401  (registers the environments)
from gymnasium.spaces import Box

from genrl.envs.base import UNSPECIFIED, Observation, SimStep
from genrl.envs.gl import load_compiler_first
from genrl.envs.global_draws import GlobalDraws
from genrl.envs.gym_scene import GymScene
from genrl.envs.gym_simulator import make_bare
from genrl.envs.settings import EnvError, EnvSettings

load_compiler_first()  # dm_control, which comes with an environment, opens a display when it is imported

FOLDERS = ("ogbench.locomaze", "ogbench.manipspace")


def list_envs() -> tuple[str, ...]:
    """Names of the environments."""
    names = [name for name, spec in gym.registry.items() if str(spec.entry_point).startswith(FOLDERS)]
    return tuple(sorted(name for name in names if not name.startswith("visual-")))


def build(name: str, settings: EnvSettings) -> OGBench:
    """The simulator of one environment."""
    return OGBench(name, dict(settings.kwargs))


class OGBench:
    """One environment. OGBench draws tasks, noise and teleports from numpy's global generator, which is ours here.

    Args:
        name: of the environment.
        kwargs: for its constructor; ``task_id`` fixes the task of a goal-conditioned one.
    """

    success_rule = "any"
    packages = ("ogbench", "mujoco", "dm-control")
    has_success = True
    draws = False

    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        self._draws = GlobalDraws()
        self._task: int | None = kwargs.pop("task_id", None)
        self.goal_conditioned = "singletask" not in name and kwargs.get("mode", "task") == "task"
        with self._draws:
            env, self.max_steps = make_bare(name, **kwargs)
            self.env: Any = env
            # Manipulation makes its space anew at each use, so that the random steps on the way to a goal had no seed.
            self._space = env.action_space
            env.__class__ = type(type(env).__name__, (type(env),), {"action_space": self._space})
            self._space.seed(0)
            obs, info = env.reset(seed=0)
        tasks = getattr(env, "num_tasks", 0)
        if self._task is not None and not (self.goal_conditioned and 1 <= self._task <= tasks):
            raise EnvError(f"ogbench/{name} has no task_id {self._task}; goal-conditioned ones have 1 to {tasks}")
        size, goal = np.size(obs), np.size(info["goal"]) if self.goal_conditioned else 0
        self.shapes = {"state": (size + goal,), "observation": (size,)}
        if self.goal_conditioned:
            self.shapes["goal"] = (goal,)
        space = self._space
        self.action_space = Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
        self._goal = np.zeros(0)
        self._maze = hasattr(env, "maze_map")
        camera = self._above() if self._maze else "front"
        self.actions = UNSPECIFIED if self._maze else {"frame": "delta", "rotation": "unspecified"}
        self.scene = GymScene(
            env,
            camera=camera,
            crop=None if self._maze else ((0.15, -0.5, 0.005), (0.75, 0.5, 0.6)),
            depth_range=None if self._maze else (0.3, 2.3),
        )

    def _above(self) -> dict[str, Any]:
        """A camera that looks down on the whole maze."""
        ends = [self.env.ij_to_xy(ij) for ij in ((0, 0), tuple(np.array(self.env.maze_map.shape) - 1))]
        low, high = np.min(ends, 0), np.max(ends, 0)
        distance = 1.35 * float((high - low).max() + self.env._maze_unit)
        return {"lookat": [*((low + high) / 2), 0.0], "distance": distance, "azimuth": 90.0, "elevation": -90.0}

    def _vectors(self, obs: Any) -> Observation:
        obs = np.asarray(obs, np.float64).reshape(-1)
        vectors = {"state": np.concatenate([obs, self._goal]), "observation": obs}
        return {**vectors, "goal": self._goal} if self.goal_conditioned else vectors

    def reset(self, seed: int) -> SimStep:
        """Start the episode of a seed: its task (if several), start and goal."""
        self._draws.seed(seed)
        self._space.seed(seed)
        with self._draws:
            options = None if self._task is None else {"task_id": self._task}
            obs, info = self.env.reset(seed=seed, options=options)
        if self.goal_conditioned:
            self._goal = np.asarray(info["goal"], np.float64).reshape(-1)
        return SimStep(self._vectors(obs), 0.0, False, False, {"task_id": getattr(self.env, "cur_task_id", None)})

    def step(self, action: np.ndarray) -> SimStep:
        """One control step."""
        with self._draws:
            obs, reward, terminated, _, info = self.env.step(action)
        return SimStep(self._vectors(obs), float(reward), bool(terminated), self._success(), info)

    def _success(self) -> bool:
        """Of the state now; single-task variants report that of the state before the action, one step late."""
        return bool(self.env.compute_success() if self._maze else self.env._success)

    def picture(self, size: int) -> None:
        """Drawn from the scene."""

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()
