"""PushT: push a T onto its outline, a planar task without MuJoCo (gym-pusht).

State, 5 numbers: pusher (x, y), T (x, y, angle), in pixels of a 512 x 512 field and radians. Also ``agent_pos`` (2) and
``environment_state`` (16: eight corners of the T). Actions: where the pusher should go, in [0, 512]. Success: the T
covers more than 95 % of its outline, upon which an episode terminates; the reward is the share covered, over 0.95.
The rule is ``any``; episodes last 300 steps.
"""

from __future__ import annotations

from typing import Any

import gym_pusht.envs
import numpy as np
from gymnasium.spaces import Box

from genrl.envs.base import TARGET, Observation, SimStep
from genrl.envs.settings import EnvSettings

NAME = "PushT-v0"


def list_envs() -> tuple[str, ...]:
    """Names of the environments."""
    return (NAME,)


def build(name: str, settings: EnvSettings) -> PushT:
    """The simulator."""
    return PushT(settings.kwargs)


class PushT:
    """The planar pushing task.

    Args:
        kwargs: for the environment's constructor.
    """

    max_steps = 300
    success_rule = "any"
    packages = ("gym-pusht", "pymunk")
    has_success = True
    draws = True
    actions = TARGET

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.env: Any = gym_pusht.envs.PushTEnv(obs_type="state", render_mode="rgb_array", **kwargs)
        self.action_space = Box(0.0, 512.0, (2,), np.float32)
        self.shapes = {"state": (5,), "agent_pos": (2,), "environment_state": (16,)}

    def _vectors(self, state: np.ndarray) -> Observation:
        corners = self.env.get_keypoints(self.env._block_shapes)
        return {"state": state, "agent_pos": state[:2], "environment_state": np.asarray(corners).reshape(-1)}

    def reset(self, seed: int) -> SimStep:
        """Start the episode of a seed."""
        state, info = self.env.reset(seed=seed)
        return SimStep(self._vectors(state), 0.0, False, bool(info["is_success"]))

    def step(self, action: np.ndarray) -> SimStep:
        """A tenth of a second."""
        state, reward, terminated, _, info = self.env.step(action)
        return SimStep(self._vectors(state), float(reward), bool(terminated), bool(info["is_success"]), info)

    def scene(self) -> None:
        """No MuJoCo here."""

    def picture(self, size: int) -> np.ndarray:
        """[size, size, 3], x to the right and y down."""
        self.env.visualization_width = self.env.visualization_height = size
        return self.env.render()

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()
