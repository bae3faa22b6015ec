"""Any gymnasium environment as a `Simulator`; the families built on gymnasium share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.spaces.utils import flatdim, flatten

from genrl.envs.base import UNSPECIFIED, Observation, SimStep
from genrl.envs.settings import EnvError

GOAL_KEYS = ("observation", "desired_goal")  # of goal-conditioned environments, in this order
SUCCESS_KEYS = ("success", "is_success")


class GymSimulator:
    """A gymnasium environment with continuous actions.

    A vector observation is the state. Of a dictionary every entry (nested ones flattened, in sorted order of their
    keys) is an observation of its own name, and ``state_keys`` one after the other make the state; what a
    goal-conditioned environment has achieved already is in its observation and is left out of the state.

    Args:
        env: without time limit.
        max_steps: usual length of an episode.
        success_rule: see `genrl.envs.episode_success`.
        packages: distributions whose versions decide about the results.
        success: flag from the ``info`` of a step; None looks for ``"success"`` and ``"is_success"``.
        scene: makes what the renderers draw; None where there is no MuJoCo.
        state_keys: entries of a dictionary observation that make the state; None takes ``observation`` and
            ``desired_goal``, or all entries.
        prepare: called before each reset, to put back what the environment's own reset forgets.
        has_success: the task has a notion of success; found out at each step where `success` is None.
        actions: see `Simulator`.

    Raises:
        EnvError: actions that are not a bounded vector, or observations that are not vectors.
    """

    def __init__(
        self,
        env: gym.Env,
        max_steps: int,
        success_rule: str = "any",
        packages: tuple[str, ...] = (),
        success: Callable[[Mapping[str, Any]], bool] | None = None,
        scene: Callable[[], Any] | None = None,
        state_keys: tuple[str, ...] | None = None,
        prepare: Callable[[], None] | None = None,
        has_success: bool = True,
        actions: Mapping[str, str] = UNSPECIFIED,
    ) -> None:
        self.env = env
        self.max_steps, self.success_rule, self.packages = max_steps, success_rule, packages
        self.has_success, self.actions = has_success, dict(actions)
        self.draws = scene is None and env.render_mode == "rgb_array"
        self._success = success or reported_success
        self._scene = scene
        self._prepare = prepare
        space = env.action_space
        if not isinstance(space, Box) or len(space.shape) != 1 or not space.is_bounded():
            raise EnvError(f"{env} has the action space {space}; policies need a bounded Box of shape (A,)")
        self._dtype = space.dtype
        self.action_space = Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
        self._keys = self._state_keys(state_keys)
        self.shapes = self._shapes()

    def _state_keys(self, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
        space = self.env.observation_space
        if not isinstance(space, Dict):
            return ()
        if wanted is None:
            wanted = GOAL_KEYS if all(key in space.spaces for key in GOAL_KEYS) else tuple(space.spaces)
        return wanted

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        space = self.env.observation_space
        if not isinstance(space, Dict):
            if not isinstance(space, Box):
                raise EnvError(f"{self.env} has the observation space {space}; a Box or a Dict of boxes is needed")
            return {"state": (flatdim(space),)}
        sizes = {key: flatdim(part) for key, part in space.spaces.items()}
        return {"state": (sum(sizes[key] for key in self._keys),), **{key: (size,) for key, size in sizes.items()}}

    def _vectors(self, obs: Any) -> Observation:
        space = self.env.observation_space
        if not isinstance(space, Dict):
            return {"state": np.asarray(obs).reshape(-1)}
        parts = {key: np.asarray(flatten(part, obs[key])).reshape(-1) for key, part in space.spaces.items()}
        return {"state": np.concatenate([parts[key] for key in self._keys]), **parts}

    def reset(self, seed: int) -> SimStep:
        """Start the episode of a seed."""
        if self._prepare is not None:
            self._prepare()
        obs, info = self.env.reset(seed=seed)
        return SimStep(self._vectors(obs), 0.0, False, self._success(info))

    def step(self, action: np.ndarray) -> SimStep:
        """One control step."""
        obs, reward, terminated, _, info = self.env.step(action.astype(self._dtype))
        if self._success is reported_success:
            self.has_success = any(key in info for key in SUCCESS_KEYS)
        return SimStep(self._vectors(obs), float(reward), bool(terminated), self._success(info), _own_lists(info))

    def scene(self) -> Any:
        """What the renderers draw."""
        return None if self._scene is None else self._scene()

    def picture(self, size: int) -> np.ndarray | None:
        """The environment's own picture."""
        picture: Any = self.env.render() if self.draws else None
        return picture if isinstance(picture, np.ndarray) else None

    def close(self) -> None:
        """Free the environment."""
        self.env.close()


def _own_lists(info: Mapping[str, Any]) -> dict[str, Any]:
    """Info whose lists the environment does not go on filling (FrankaKitchen does)."""
    return {key: list(value) if isinstance(value, list) else value for key, value in info.items()}


def reported_success(info: Mapping[str, Any]) -> bool:
    """The flag under its usual names; without one there is no success."""
    return any(bool(np.all(info[key])) for key in SUCCESS_KEYS if key in info)


def make_bare(env_id: str, **kwargs: Any) -> tuple[gym.Env, int]:
    """A registered environment without the wrappers that limit, order and check, and its usual length."""
    env = gym.make(env_id, disable_env_checker=True, **kwargs)
    limit = env.spec.max_episode_steps if env.spec is not None else None
    return env.unwrapped, limit or 1000


def newest(names: list[str]) -> tuple[str, ...]:
    """Of ``Name-v1``, ``Name-v3`` ... only the highest version, sorted."""
    best: dict[str, int] = {}
    for name in names:
        stem, _, version = name.rpartition("-v")
        best[stem] = max(best.get(stem, -1), int(version))
    return tuple(sorted(f"{stem}-v{version}" for stem, version in best.items()))
