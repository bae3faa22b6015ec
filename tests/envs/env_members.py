"""Environments that tests run over, made once and shared by all tests of a process."""

from __future__ import annotations

import functools

import numpy as np

from genrl.envs import TaskEnv, make_env

# One or two of each family; a new family belongs here.
MEMBERS = (
    "metaworld/pick-place-v3",
    "metaworld/drawer-open-v3",
    "maze/TwoWays",
    "maze/AntMaze_UMaze-v5",
    "robotics/FetchPickAndPlace-v4",
    "robotics/HandReach-v3",
    "adroit/AdroitHandDoor-v1",
    "adroit/AdroitHandPen-v1",
    "kitchen/FrankaKitchen-v1",
    "robosuite/Lift",
    "ogbench/cube-single-v0",
    "ogbench/antmaze-medium-singletask-v0",
    "pusht/PushT-v0",
    "gymnasium/HalfCheetah-v5",
)
WITH_SCENE = tuple(name for name in MEMBERS if not name.startswith("pusht"))


@functools.cache
def shared_env(env_id: str) -> TaskEnv:
    """The state version of an environment. Do not close it; start each use with a reset."""
    return make_env(env_id)


def fixed_actions(env: TaskEnv, steps: int, seed: int = 7) -> np.ndarray:
    """Random actions [steps, A] that do not depend on the environment's state."""
    space = env.action_space
    return np.random.default_rng(seed).uniform(space.low, space.high, (steps, *space.shape))


def play(env: TaskEnv, seed: int, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Observations {name: [steps + 1, ...]} of an episode."""
    seen = [env.reset(seed=seed)[0], *(env.step(action)[0] for action in actions)]
    return {name: np.stack([obs[name] for obs in seen]) for name in seen[0]}
