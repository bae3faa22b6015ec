"""The Adroit hand: door, hammer, pen, relocate (gymnasium-robotics).

State: the environment's own observation (door 39, hammer 46, pen 45, relocate 39 numbers). Actions in [-1, 1]: door 28,
hammer 26, pen 24, relocate 30 joint targets. Episodes last 200 steps and do not end at success.

Success, from the environments: door hinge beyond 1.35, nail driven in (its sensor beyond 0.09), pen within 7.5 cm and
cos(angle) > 0.95, ball within 10 cm of the target. The rule is DAPG's: in goal for more than 25 steps of an episode
(pen: more than 20), ``count:26`` and ``count:21``. Other papers count differently (any step, the last two), so compare
only under one rule: set ``success``.
"""

from __future__ import annotations

import gymnasium as gym

from genrl.envs.base import TARGET
from genrl.envs.gym_scene import GymScene
from genrl.envs.gym_simulator import GymSimulator, make_bare, newest
from genrl.envs.quiet import quiet
from genrl.envs.settings import EnvSettings

with quiet():
    import gymnasium_robotics

gym.register_envs(gymnasium_robotics)

PACKAGES = ("gymnasium-robotics", "mujoco")


def list_envs() -> tuple[str, ...]:
    """Names of the tasks, newest versions."""
    folder = "gymnasium_robotics.envs.adroit_hand"
    return newest([name for name, spec in gym.registry.items() if str(spec.entry_point).startswith(folder)])


def build(name: str, settings: EnvSettings) -> GymSimulator:
    """The simulator of one task."""
    env, limit = make_bare(name, **settings.kwargs)
    rule = "count:21" if "Pen" in name else "count:26"
    scene = GymScene(env, crop=((-0.6, -0.7, -0.05), (0.6, 0.7, 0.8)), depth_range=(0.2, 2.5))
    return GymSimulator(env, limit, rule, PACKAGES, scene=scene, actions=TARGET)
