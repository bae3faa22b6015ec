"""The scripted policies that come with Meta-World, one for each of the 50 tasks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from metaworld.policies import ENV_POLICY_MAP

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv


def list_experts() -> tuple[str, ...]:
    """Names of the tasks."""
    return tuple(ENV_POLICY_MAP)


def build(name: str) -> MetaWorldExpert:
    """The expert of one task."""
    return MetaWorldExpert(name)


class MetaWorldExpert:
    """Meta-World's policy, which reads the full state, with actions clipped to [-1, 1] as the environment clips them.

    Unclipped they leave [-1, 1] on more than half of the steps of most tasks, and a policy that learns them learns
    numbers that nothing executes.

    Args:
        name: of the task.
    """

    def __init__(self, name: str) -> None:
        self.policy = ENV_POLICY_MAP[name]()

    def reset(self, seed: int) -> None:
        """Nothing is random or remembered."""

    def __call__(self, obs: Mapping[str, np.ndarray], env: TaskEnv) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Constant(s) may be too high", for the clipping below
            action = self.policy.get_action(np.asarray(env.vectors["state"], np.float64))
        return np.clip(action, -1.0, 1.0).astype(np.float32)
