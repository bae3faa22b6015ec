"""Point and ant mazes of gymnasium-robotics, and TwoWays, a maze with two equally good ways.

State: the observation and then the goal's position (point: x, y, vx, vy + 2; ant: 27 or 105 + 2). Success: within 0.45
of the goal, under which an episode terminates here (the packages' default would move the goal away instead, so that a
successful policy never ends; ``kwargs: {continuing_task: true}`` brings that back). The rule is ``any``.

``maze/TwoWays``: 5 x 5 cells with a wall of three in the middle column between start (left) and goal (right), so that
the ways above and below it are mirror images. A policy that averages them runs into the wall. Start and goal vary by a
quarter of a cell, and the reward is 1 in the goal.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import gymnasium as gym

from genrl.envs.gym_scene import GymScene
from genrl.envs.gym_simulator import GymSimulator, make_bare, newest
from genrl.envs.quiet import quiet
from genrl.envs.settings import EnvSettings

with quiet():
    import gymnasium_robotics

gym.register_envs(gymnasium_robotics)

PACKAGES = ("gymnasium-robotics", "mujoco")
TWO_WAYS = "TwoWays"
TWO_WAYS_STEPS = 300
# 1 wall, 0 free, r start, g goal.
TWO_WAYS_MAP: list[list[Any]] = [
    [1, 1, 1, 1, 1, 1, 1],
    [1, 0, 0, 0, 0, 0, 1],
    [1, 0, 0, 1, 0, 0, 1],
    [1, "r", 0, 1, 0, "g", 1],
    [1, 0, 0, 1, 0, 0, 1],
    [1, 0, 0, 0, 0, 0, 1],
    [1, 1, 1, 1, 1, 1, 1],
]


def list_envs() -> tuple[str, ...]:
    """Names of the mazes, newest versions."""
    folder = "gymnasium_robotics.envs.maze"
    return (TWO_WAYS, *newest([n for n, spec in gym.registry.items() if str(spec.entry_point).startswith(folder)]))


def build(name: str, settings: EnvSettings) -> GymSimulator:
    """The simulator of one maze."""
    kwargs: dict[str, Any] = {"continuing_task": False, **settings.kwargs}
    if name == TWO_WAYS:
        env, limit = make_bare("PointMaze_UMaze-v3", **{"maze_map": TWO_WAYS_MAP, **kwargs})
        limit = TWO_WAYS_STEPS
    else:
        env, limit = make_bare(name, **kwargs)
    with contextlib.suppress(OSError, AttributeError):
        os.remove(env.tmp_xml_file_path)  # type: ignore[attr-defined]  # written to /tmp, and left there
    return GymSimulator(env, limit, packages=PACKAGES, scene=GymScene(env, camera=above(env)))


def above(env: Any) -> dict[str, Any]:
    """A camera that looks down on the whole maze, north up."""
    size = max(env.maze.map_length, env.maze.map_width) * env.maze.maze_size_scaling
    return {"lookat": [0.0, 0.0, 0.0], "distance": 1.3 * size, "azimuth": 90.0, "elevation": -90.0}
