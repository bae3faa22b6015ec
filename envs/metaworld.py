"""The 50 tasks of Meta-World v3.

State, 39 numbers: hand position (3), gripper opening (1), position and quaternion of up to two objects (14), the same
18 numbers of the step before, and the goal's position (3), which is never hidden. Actions: hand displacement (3) in
centimetres and gripper effort (1), all in [-1, 1].

Pictures: camera corner2 by default. It and corner, corner3 and corner4 are mounted upside down in the model and are
turned here, by 180 degrees and not mirrored. The default crop keeps what stands on the table and drops the table.

Success is an any-time property in Meta-World's own evaluation; episodes last 500 steps there.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import metaworld.env_dict as tasks
import mujoco
import numpy as np
from gymnasium.spaces import Box

from genrl.envs.base import DISPLACEMENT, SimStep
from genrl.envs.rendering import Scene
from genrl.envs.settings import EnvSettings

NEVER = 10**9  # Meta-World raises once this many steps are done; `TaskEnv` has its own limit.
# Fields of the model that tasks move at a reset.
MOVED = ("body_pos", "body_quat", "site_pos", "geom_pos")


def list_envs() -> tuple[str, ...]:
    """Names of the tasks."""
    return tuple(tasks.ALL_V3_ENVIRONMENTS)


def build(name: str, settings: EnvSettings) -> MetaWorld:
    """The simulator of one task."""
    return MetaWorld(name, settings.kwargs)


class MetaWorld:
    """One task, whose reset depends on the seed and on nothing else.

    Meta-World's own reset ignores its seed, draws from the global random generator unless two private flags say
    otherwise, and starts from what the last episode left in the task object. Here the task object and the model are put
    back to what they were when new, the start (``rand_vec``: object and goal positions) is drawn from the task's own
    distribution by the seed, and the task is then reset as its benchmark does with a fixed start.

    Args:
        name: task, for example ``"pick-place-v3"``.
        kwargs: for the task's constructor (``reward_function_version`` for example).
    """

    max_steps = 500
    success_rule = "any"
    packages = ("metaworld", "mujoco")
    has_success = True
    draws = False
    actions = DISPLACEMENT

    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        self.env = tasks.ALL_V3_ENVIRONMENTS[name](**kwargs)
        self.env._set_task_called = True
        self.env._partially_observable = False  # the goal is part of the state, as in the benchmark MT1
        self.env.__dict__.pop("sawyer_observation_space", None)  # cached with a hidden goal
        self.env.max_path_length = NEVER
        self.action_space = Box(-1.0, 1.0, (4,), np.float32)
        self.shapes = {"state": (39,)}
        self._new = copy.deepcopy({k: v for k, v in self.env.__dict__.items() if _is_plain(v)})
        self._scene = Scene(
            self.env.model,
            self.env.data,
            camera="corner2",
            upside_down=frozenset({"corner", "corner2", "corner3", "corner4"}),
            crop=((-0.6, 0.3, 0.005), (0.6, 1.05, 0.7)),
            depth_range=(0.3, 2.3),
            refresh=self._place_markers,
        )
        self._model = {field: getattr(self.env.model, field).copy() for field in MOVED}

    def reset(self, seed: int) -> SimStep:
        """Start from the state that the seed draws."""
        env = self.env
        self._renew()
        env.seed(seed)
        # The draw (and its rejections) happens inside a reset; without moving the hand this costs next to nothing.
        env._freeze_rand_vec, env.seeded_rand_vec = False, True
        env._reset_hand = partial(_leave_hand, env)
        env.reset()
        start = env._last_rand_vec.copy()
        del env._reset_hand
        self._renew()
        env._freeze_rand_vec, env._last_rand_vec = True, start
        state, _ = env.reset()
        return SimStep({"state": state}, 0.0, False, False)

    def _renew(self) -> None:
        env = self.env
        for name in [name for name, value in env.__dict__.items() if _is_plain(value) and name not in self._new]:
            del env.__dict__[name]
        env.__dict__.update(copy.deepcopy(self._new))
        for field, values in self._model.items():
            getattr(env.model, field)[:] = values
        mujoco.mj_resetData(env.model, env.data)
        mujoco.mj_forward(env.model, env.data)

    def step(self, action: np.ndarray) -> SimStep:
        """One control step, five steps of the physics."""
        state, reward, _, _, info = self.env.step(action)
        return SimStep({"state": state}, float(reward), False, bool(info["success"]), info)

    def scene(self) -> Scene:
        """The table, the arm and the goal's marker."""
        return self._scene

    def _place_markers(self) -> None:
        # A step's last computation puts the markers back to where the model has them.
        for name, position in self.env._target_site_config:
            self.env.data.site(name).xpos = position[:3]

    def picture(self, size: int) -> None:
        """Drawn from the scene."""

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()


def _leave_hand(env: Any, steps: int = 50) -> None:
    """In place of moving the hand to its start: only what a reset reads afterwards."""
    mujoco.mj_forward(env.model, env.data)
    env.init_tcp = env.tcp_center


def _is_plain(value: Any) -> bool:
    """Part of a task's own memory: numbers, arrays and collections, not the simulator or spaces."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return value is None or isinstance(value, (bool, int, float, str, np.ndarray, np.generic))
