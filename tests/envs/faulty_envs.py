"""A small environment, and versions of it with one fault each."""

from __future__ import annotations

import os

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box


class Reach(gym.Env):
    """Move a point [2] by actions in [-1, 1] (a tenth of them) to a goal [2]; observation: both."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (gymnasium's own declaration)

    def __init__(self, render_mode: str | None = None, size: float = 1.0) -> None:
        self.observation_space = Box(-10, 10, (4,), np.float64)
        self.action_space = Box(-1, 1, (2,), np.float32)
        self.render_mode = render_mode
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-self.size, self.size, 2)
        self.goal = self.np_random.uniform(-self.size, self.size, 2)
        return self.observe(), {}

    def observe(self):
        return np.concatenate([self.position, self.goal])

    def step(self, action):
        self.position = self.position + 0.1 * action
        distance = float(np.linalg.norm(self.position - self.goal))
        return self.observe(), -distance, False, False, {"success": distance < 0.1}

    def render(self):
        return np.full((20, 30, 3), 128, np.uint8)


class GlobalSeed(Reach):
    """Draws from numpy's global generator: reset(seed) fixes nothing."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.random.uniform(-1, 1, 2)
        return self.observe(), {}


class HiddenController(Reach):
    """Its controller keeps the last action over a reset: the start is equal, the first step is not."""

    last = np.zeros(2)

    def step(self, action):
        result = super().step(0.5 * (action + self.last))
        self.last = np.array(action)
        return result


class OneStart(Reach):
    """Every episode starts alike."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)


class SharedBuffer(Reach):
    """Returns the same array each time."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.buffer = np.zeros(4)

    def observe(self):
        self.buffer[:] = super().observe()
        return self.buffer


class NotFinite(Reach):
    """Its observations turn into NaN."""

    def step(self, action):
        result = super().step(action)
        self.position = self.position * np.nan
        return result


class RaisesAtLimit(Reach):
    """Refuses to go on after thirty steps."""

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.count += 1
        if self.count > 30:
            raise ValueError("reset me")
        return super().step(action)


class StartsInGoal(Reach):
    """The start already is a success."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = self.position.copy()
        return self.observe(), {"success": True}


class Dies(Reach):
    """Ends its process with exit code 3 at the second step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > 1:
            os._exit(3)
        return super().step(action)


class Fails(Reach):
    """Raises in a step."""

    def step(self, action):
        raise RuntimeError("a mistake in the environment")


class Countdown(Reach):
    """Terminates at its third step; the observation counts the steps."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def observe(self):
        return np.concatenate([self.position, [float(getattr(self, "count", 0)), 0.0]])

    def step(self, action):
        self.count += 1
        obs, reward, _, _, info = super().step(action)
        return obs, reward, self.count == 3, False, info


class Parts(Reach):
    """A goal-conditioned dictionary."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        box = Box(-10, 10, (2,), np.float64)
        self.observation_space = gym.spaces.Dict({"observation": box, "achieved_goal": box, "desired_goal": box})

    def observe(self):
        return {"observation": self.position, "achieved_goal": self.position, "desired_goal": self.goal}


def make_limited(size: float = 1.0, render_mode: str | None = None):
    """Reach with a time limit of 7 steps."""
    return gym.wrappers.TimeLimit(Reach(render_mode, size), 7)


NOT_CALLABLE = 3


def make_nothing():
    return None
