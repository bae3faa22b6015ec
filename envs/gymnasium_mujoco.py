"""Gymnasium's MuJoCo tasks (HalfCheetah, Hopper, ...): locomotion with a reward and without a notion of success.

State: the environment's own observation. Episodes last as registered (1000 steps, Reacher 50, Pusher 100); falling
terminates where the task says so. `TaskEnv.has_success` is False: evaluations report returns.
"""

from __future__ import annotations

import gymnasium as gym

from genrl.envs.gym_scene import GymScene
from genrl.envs.gym_simulator import GymSimulator, make_bare, newest
from genrl.envs.settings import EnvSettings


def list_envs() -> tuple[str, ...]:
    """Names of the tasks, newest versions."""
    return newest([k for k, spec in gym.registry.items() if str(spec.entry_point).startswith("gymnasium.envs.mujoco")])


def never(info: object) -> bool:
    """No step of these tasks is a success."""
    return False


def build(name: str, settings: EnvSettings) -> GymSimulator:
    """The simulator of one task."""
    env, limit = make_bare(name, **settings.kwargs)
    return GymSimulator(env, limit, packages=("mujoco",), success=never, scene=GymScene(env), has_success=False)
