"""Scripted experts: who can demonstrate which task, and your own by import path."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from genrl.envs.settings import EnvError, EnvSettings

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv

__all__ = ["Expert", "ExpertError", "expert", "list_experts"]

FAMILIES = {
    "metaworld": "genrl.envs.experts.metaworld",
    "maze": "genrl.envs.experts.maze",
    "robotics": "genrl.envs.experts.fetch",
    "robosuite": "genrl.envs.experts.robosuite",
    "ogbench": "genrl.envs.experts.ogbench",
}


class ExpertError(EnvError):
    """No such expert, or one that cannot be used; the message lists those that exist."""


class Expert(Protocol):
    """Acts in a `TaskEnv` of which it may look at everything.

    ``reset(seed)`` starts an episode (the environment has been reset just before); the seed decides about whatever the
    expert chooses at random. ``expert(obs, env)`` returns the action [A] for the current step, within the bounds of
    ``env.action_space``.
    """

    def reset(self, seed: int) -> None: ...

    def __call__(self, obs: Mapping[str, np.ndarray], env: TaskEnv) -> np.ndarray: ...


def list_experts(family: str | None = None) -> list[str]:
    """Ids of the environments with a scripted expert, of one family or of all whose simulator is installed.

    Raises:
        ExpertError: the family has no experts.
        MissingExtraError: the family's simulator is not installed.
    """
    if family is None:
        found = []
        for name in FAMILIES:
            try:
                found += list_experts(name)
            except EnvError:  # not installed: nothing to list
                continue
        return found
    return [f"{family}/{name}" for name in _module(family).list_experts()]


def expert(env: str | Mapping[str, Any] | EnvSettings, name: str = "auto") -> Expert:
    """The expert of a task.

    Args:
        env: id of the environment, or its settings.
        name: ``"auto"`` takes the scripted expert of the environment. Anything else is the import path of your own: a
            class (made without arguments), a function or an object that is called as ``expert(obs, env)``;
            its ``reset()`` or ``reset(seed)`` is optional.

    Raises:
        ExpertError: the environment has no scripted expert, or the import path leads to none.
    """
    if name != "auto":
        return _own(name)
    env_id = EnvSettings.of(env).id
    family, _, task = env_id.partition("/")
    known = list_experts(family) if family in FAMILIES else []
    if env_id in known:
        return _module(family).build(task)
    raise ExpertError(f"{env_id} has no scripted expert{_instead(env_id, known)}")


def _module(family: str) -> Any:
    if family not in FAMILIES:
        raise ExpertError(f"{family} has no scripted experts; families that have: {', '.join(FAMILIES)}")
    from genrl.envs.make import family_module

    family_module(family)  # names the extra if the simulator is missing
    return importlib.import_module(FAMILIES[family])


def _instead(env_id: str, known: list[str]) -> str:
    own = 'give the import path of your own (expert: "my_lab.experts.Pusher"), or open a demonstration file'
    if not known:
        return f"; families that have some: {', '.join(FAMILIES)} (genrl.envs.list_experts()). Or {own}"
    near = difflib.get_close_matches(env_id, known, 3, 0.5)
    shown = known if len(known) <= 12 else near or known[:6]
    more = "" if len(known) <= 12 else f" (of {len(known)}: genrl.envs.list_experts({env_id.partition('/')[0]!r}))"
    return f"; experts: {', '.join(shown)}{more}. Or {own}"


def _own(path: str) -> OwnExpert:
    from genrl.parts import ConfigError, import_object

    try:
        found = import_object(path.replace(":", "."), "expert")
    except ConfigError as error:
        raise ExpertError(f'{error} (expert: "auto" takes the scripted expert of the environment)') from error
    if inspect.isclass(found):
        try:
            found = found()
        except TypeError as error:
            raise ExpertError(
                f"expert {path} cannot be made without arguments ({error}); give the path of a function that makes one"
            ) from error
        if not callable(found):
            raise ExpertError(f"expert {path} makes an object that cannot be called as expert(obs, env)")
    return OwnExpert(found)


def own_source(path: str) -> Path | None:
    """The file of a user's expert, None if it has none.

    Raises:
        ExpertError: the import path leads to no expert.
    """
    call = _own(path).call
    try:
        file = inspect.getsourcefile(call if inspect.isfunction(call) else type(call))
    except TypeError:
        return None
    return None if file is None else Path(file)


class OwnExpert:
    """A user's callable with the methods that `Expert` has.

    Args:
        call: called as ``call(obs, env)``; its ``reset`` is called with the seed if it takes an argument.
    """

    def __init__(self, call: Any) -> None:
        self.call = call
        self._reset = getattr(call, "reset", None)
        self._seeded = False
        if self._reset is not None:
            self._seeded = any(
                p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
                for p in inspect.signature(self._reset).parameters.values()
            )

    def reset(self, seed: int) -> None:
        """Start an episode."""
        if self._reset is not None:
            self._reset(*((seed,) if self._seeded else ()))

    def __call__(self, obs: Mapping[str, np.ndarray], env: TaskEnv) -> np.ndarray:
        return self.call(obs, env)
