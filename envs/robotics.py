"""Fetch arm and Shadow hand of gymnasium-robotics, goal-conditioned.

State: the observation and then the desired goal (FetchPickAndPlace 25 + 3, FetchReach 10 + 3). Success as the
environments report it; the rule is ``final``, as the goal has to hold at the end of the 50 (hand: up to 100) steps.
Actions in [-1, 1]: Fetch takes hand displacement (3) and gripper opening (1).
"""

from __future__ import annotations

import gymnasium as gym

from genrl.envs.base import DISPLACEMENT, UNSPECIFIED
from genrl.envs.gym_scene import GymScene
from genrl.envs.gym_simulator import GymSimulator, make_bare, newest
from genrl.envs.quiet import quiet
from genrl.envs.settings import EnvSettings

with quiet():
    import gymnasium_robotics

gym.register_envs(gymnasium_robotics)

PACKAGES = ("gymnasium-robotics", "mujoco")
FOLDERS = ("gymnasium_robotics.envs.fetch", "gymnasium_robotics.envs.shadow_dexterous_hand")


def list_envs() -> tuple[str, ...]:
    """Names of the tasks, newest versions."""
    return newest([name for name, spec in gym.registry.items() if str(spec.entry_point).startswith(FOLDERS)])


def build(name: str, settings: EnvSettings) -> GymSimulator:
    """The simulator of one task."""
    env, limit = make_bare(name, **settings.kwargs)
    fetch = name.startswith("Fetch")
    scene = GymScene(
        env,
        # The table's top is at 0.42 m; what stands or moves above it.
        crop=((0.9, 0.3, 0.425), (1.7, 1.2, 1.1)) if fetch else None,
        depth_range=(0.5, 3.5) if fetch else None,
    )
    actions = DISPLACEMENT if fetch else UNSPECIFIED
    return GymSimulator(env, limit, "final", PACKAGES, scene=scene, actions=actions)
