"""FrankaKitchen of gymnasium-robotics: several things to do in one episode.

State: the observation (59 numbers: arm joints and velocities, then objects' positions and velocities, with the
environment's own seeded sensor noise). The goals are constant and left out. Actions: 9 joint velocities in [-1, 1].

Tasks: ``kwargs: {tasks_to_complete: [microwave, kettle, ...]}``; the default is D4RL's usual four (microwave, kettle,
light switch, slide cabinet). Success: all of them were completed in this episode (distance below 0.3 each), upon which
the environment terminates. Episodes last 280 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium as gym

from genrl.envs.gym_scene import GymScene
from genrl.envs.gym_simulator import GymSimulator, make_bare, newest
from genrl.envs.quiet import quiet
from genrl.envs.settings import EnvSettings

with quiet():
    import gymnasium_robotics

gym.register_envs(gymnasium_robotics)

USUAL = ("microwave", "kettle", "light switch", "slide cabinet")


def list_envs() -> tuple[str, ...]:
    """Names of the environments."""
    folder = "gymnasium_robotics.envs.franka_kitchen"
    return newest([name for name, spec in gym.registry.items() if str(spec.entry_point).startswith(folder)])


def build(name: str, settings: EnvSettings) -> GymSimulator:
    """The simulator."""
    env, limit = make_bare(name, **{"tasks_to_complete": list(USUAL), **settings.kwargs})
    return GymSimulator(
        env,
        limit,
        packages=("gymnasium-robotics", "mujoco"),
        success=partial(all_done, len(env.goal)),  # type: ignore[attr-defined]
        scene=GymScene(env, crop=((-1.5, -0.8, 0.3), (1.5, 1.5, 3.2)), depth_range=(0.5, 5.0)),
        state_keys=("observation",),
    )


def all_done(tasks: int, info: Mapping[str, Any]) -> bool:
    """Every task was completed in this episode."""
    return len(info["episode_task_completions"]) == tasks
