"""The Fetch arm: proportional controllers for Reach, PickAndPlace and Push.

They decide by the present observation alone (what has been seen, not how long ago), so that a policy without memory can
imitate them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv

GAIN = 10.0  # action per metre; an action of 1 moves the hand by about 3 cm
OPEN, CLOSE = 1.0, -1.0
HELD = 0.028  # finger position at which the block is between the fingers (open: 0.05)


def list_experts() -> tuple[str, ...]:
    """Names of the tasks."""
    from genrl.envs import robotics

    starts = ("FetchReach", "FetchPickAndPlace", "FetchPush")
    return tuple(name for name in robotics.list_envs() if name.startswith(starts))


def build(name: str) -> FetchExpert:
    """The expert of one task."""
    return FetchExpert(name)


class FetchExpert:
    """The expert of one task.

    Args:
        name: of the task.
    """

    def __init__(self, name: str) -> None:
        kinds = {"FetchReach": self._reach, "FetchPick": self._pick, "FetchPush": self._push}
        self._act = next(act for start, act in kinds.items() if name.startswith(start))

    def reset(self, seed: int) -> None:
        """Nothing is random or remembered."""

    def __call__(self, obs: Mapping[str, np.ndarray], env: TaskEnv) -> np.ndarray:
        seen = np.asarray(env.vectors["observation"], np.float64)
        goal = np.asarray(env.vectors["desired_goal"], np.float64)
        return np.clip(self._act(seen, goal), -1.0, 1.0).astype(np.float32)

    @staticmethod
    def _reach(seen: np.ndarray, goal: np.ndarray) -> np.ndarray:
        return np.append(GAIN * (goal - seen[:3]), 0.0)

    @staticmethod
    def _pick(seen: np.ndarray, goal: np.ndarray) -> np.ndarray:
        hand, block, fingers = seen[:3], seen[3:6], float(seen[9:11].mean())
        offset = block - hand
        aside = float(np.linalg.norm(offset[:2]))
        if aside > 0.01 and abs(offset[2]) < 0.045 and aside > 0.025:  # too low to come from the side
            return np.append(GAIN * np.array([0.0, 0.0, 0.1]), OPEN)
        if aside > 0.01 and abs(offset[2]) > 0.02:
            return np.append(GAIN * (offset + [0.0, 0.0, 0.06]), OPEN)
        if abs(offset[2]) > 0.01:
            return np.append(GAIN * offset, OPEN)
        if fingers > HELD:
            return np.append(GAIN * offset, CLOSE)
        return np.append(GAIN * (goal - block), CLOSE)

    @staticmethod
    def _push(seen: np.ndarray, goal: np.ndarray) -> np.ndarray:
        hand, block = seen[:3], seen[3:6]
        way = goal[:2] - block[:2]
        left = float(np.linalg.norm(way))
        ahead = way / max(left, 1e-6)
        if left < 0.02:  # there: stay
            return np.zeros(4)
        relative = hand[:2] - block[:2]
        along, across = float(relative @ ahead), float(relative @ np.array([-ahead[1], ahead[0]]))
        behind = block[:2] - 0.07 * ahead
        low = hand[2] < block[2] + 0.03
        if low and along < -0.02 and abs(across) < 0.025:  # behind the block and in line: push, and steer
            side = np.array([-ahead[1], ahead[0]])
            speed = min(1.0, 12.0 * left)
            return np.array([*(speed * ahead - 15.0 * across * side), GAIN * (block[2] - hand[2]), 0.0])
        if np.linalg.norm(hand[:2] - behind) > 0.015:
            if hand[2] < block[2] + 0.05 and np.linalg.norm(relative) < 0.1:  # up first, not to touch it
                return np.array([0.0, 0.0, 1.0, 0.0])
            return np.append(GAIN * (np.append(behind, block[2] + 0.07) - hand), 0.0)
        return np.append(GAIN * (np.append(behind, block[2]) - hand), 0.0)
