"""Small environments whose outcomes are known, made by their import path (`toy_envs:Line`)."""

from __future__ import annotations

import os

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box


class Line(gym.Env):
    """A point on a line, state (x, goal); an action moves it by up to 0.1. Reward -|x - goal|, success within 0.05.

    Args:
        fixed: every episode starts from the same state.
        reuse: observations are one buffer that is overwritten.
        terminate: end at the goal.
        die: seed of the episode in which the process ends at step 3.
        fail: seed of the episode in which `step` raises at step 3.
        flags: success flags by step, instead of the distance.
        solved: start in the goal.
        dark: it has no pictures.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        fixed=False,
        reuse=False,
        terminate=False,
        die=None,
        fail=None,
        flags=None,
        solved=False,
        dark=False,
        render_mode=None,
    ):
        self.observation_space = Box(-2, 2, (2,), np.float32)
        self.action_space = Box(-1, 1, (1,), np.float32)
        self.fixed, self.reuse, self.terminate, self.solved = fixed, reuse, terminate, solved
        self.die, self.fail, self.flags, self.render_mode = die, fail, flags, None if dark else render_mode
        self.buffer = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.step_count = seed, 0
        rng = np.random.default_rng(0 if self.fixed else seed)
        self.x, self.goal = 0.0, float(rng.uniform(-1, 1))
        self.x = self.goal if self.solved else 0.0
        return self._obs(), {"success": self.solved}

    def step(self, action):
        self.step_count += 1
        if self.seed == self.die and self.step_count == 3:
            os._exit(3)
        if self.seed == self.fail and self.step_count == 3:
            raise ArithmeticError("joint limit")
        self.x += 0.1 * float(np.clip(action[0], -1, 1))
        gap = abs(self.x - self.goal)
        success = gap < 0.05
        if self.flags is not None:
            success = bool(self.flags[min(self.step_count, len(self.flags)) - 1])
        return self._obs(), -gap, bool(self.terminate and gap < 0.05), False, {"success": success}

    def _obs(self):
        if not self.reuse:
            return np.array([self.x, self.goal], np.float32)
        self.buffer[:] = self.x, self.goal
        return self.buffer

    def render(self):
        if self.render_mode is None:
            return None
        frame = np.zeros((32, 64, 3), np.uint8)
        frame[:, : int(np.clip(32 + 28 * self.x, 1, 64))] = 200
        return frame


def line(**kwargs):
    """Settings of `Line` with 30 steps."""
    from genrl.envs import EnvSettings

    return EnvSettings("toy_envs:Line", max_steps=30, kwargs=kwargs)


class Walker(Line):
    """A task without a notion of success: its steps report none."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {}
