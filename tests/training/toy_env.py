"""A point that is to be brought to the origin: an environment that costs nothing."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

ID = "toy_env:PointEnv"


class PointEnv(gym.Env):
    """State [3]: position in the plane and a constant. Actions [2] move it.

    Args:
        fail_at: step at which `step` raises; 0 for never.
        deaf: ignore the seed of `reset`.
    """

    observation_space = gym.spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, fail_at: int = 0, deaf: bool = False):
        self.fail_at, self.deaf = fail_at, deaf

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=None if self.deaf else seed)
        self.position, self.steps = self.np_random.uniform(-1, 1, 2), 0
        return self._state(), {}

    def step(self, action: np.ndarray):
        self.steps += 1
        if self.fail_at and self.steps >= self.fail_at:
            raise RuntimeError("the motor is on fire")
        self.position = self.position + 0.2 * np.asarray(action, float)
        distance = float(np.linalg.norm(self.position))
        return self._state(), -distance, False, False, {"success": distance < 0.5}

    def _state(self) -> np.ndarray:
        return np.array([*self.position, 1.0], np.float32)
