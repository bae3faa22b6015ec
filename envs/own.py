"""An environment of your own, by the import path of its class or of a function that makes it.

``"my_lab.envs:make_env"`` or ``"my_lab.envs.ReachEnv"``; `kwargs` of the settings are passed on, and
``render_mode="rgb_array"`` if videos are wanted and it is accepted. It follows gymnasium's interface:
``reset(seed=...)`` returns (observation, info), ``step`` five values; observations are a Box or a Dict of boxes,
actions a bounded Box of one dimension; ``info["success"]`` or ``info["is_success"]`` of a step says whether the goal is
reached. A time limit around it becomes `max_steps`, which the settings can change.
"""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym

from genrl.envs.base import Simulator
from genrl.envs.gym_simulator import GymSimulator
from genrl.envs.settings import EnvError, EnvSettings
from genrl.parts import import_object

DEFAULT_STEPS = 1000


def is_own(env_id: str) -> bool:
    """The id is an import path: package.module:name or package.module.Name."""
    module, separator, name = env_id.rpartition(":")
    path = f"{module}.{name}" if separator else env_id
    return "/" not in env_id and "." in path and all(part.isidentifier() for part in path.split("."))


def build_own(settings: EnvSettings, render: bool) -> Simulator:
    """The simulator of your environment.

    Raises:
        EnvError: nothing is there, it cannot be called with these kwargs, or what it makes is no environment.
    """
    where = settings.id.replace(":", ".")
    maker = import_object(where, "env.id")
    kwargs: dict[str, Any] = dict(settings.kwargs)
    if "render_mode" not in kwargs and accepts(maker, "render_mode") and (render or "image" in settings.observations):
        kwargs["render_mode"] = "rgb_array"
    try:
        inspect.signature(maker).bind(**kwargs)
    except TypeError as error:
        raise EnvError(f"env.kwargs = {settings.kwargs!r} does not fit {settings.id}: {error}") from error
    made = maker(**kwargs)
    if not isinstance(made, gym.Env):
        raise EnvError(f"{settings.id} made {type(made).__name__}, not a gymnasium.Env; see gymnasium's documentation")
    return wrap(made, settings)


def wrap(env: gym.Env, settings: EnvSettings) -> Simulator:
    """A simulator around a gymnasium environment; its MuJoCo scene is found if it has ``model`` and ``data``."""
    limit = time_limit(env)
    inner = without_time_limit(env)
    bare: Any = env.unwrapped
    scene = None
    if hasattr(bare, "model") and hasattr(bare, "data"):
        import mujoco

        if isinstance(bare.model, mujoco.MjModel) and isinstance(bare.data, mujoco.MjData):
            from genrl.envs.gym_scene import GymScene

            scene = GymScene(bare)
    return GymSimulator(inner, limit or DEFAULT_STEPS, scene=scene)


def time_limit(env: gym.Env) -> int | None:
    """The limit that a wrapper or the registration states."""
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, gym.wrappers.TimeLimit):
            return layer._max_episode_steps
        layer = layer.env
    spec = getattr(env, "spec", None)
    return None if spec is None else spec.max_episode_steps


def without_time_limit(env: gym.Env) -> gym.Env:
    """The environment without an outermost time limit, whose place `TaskEnv.max_steps` takes."""
    skipped = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)
    while isinstance(env, skipped):
        env = env.env
    return env


def accepts(maker: Any, name: str) -> bool:
    """A callable has an argument of this name, or takes any."""
    try:
        found = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return False
    return name in found or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())
