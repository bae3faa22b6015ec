"""Environments from their ids."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from genrl.envs.gl import prepare_rendering
from genrl.envs.quiet import quiet
from genrl.envs.settings import EnvError, EnvSettings

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv


@dataclass(frozen=True)
class Family:
    """Where a family's module is, and what it needs.

    Args:
        module: has ``list_envs() -> tuple of names`` and ``build(name, settings) -> Simulator``.
        extra: the extra of the package that brings the simulator.
        title: for lists.
    """

    module: str
    extra: str
    title: str


FAMILIES = {
    "metaworld": Family("genrl.envs.metaworld", "metaworld", "Meta-World v3, 50 arm tasks"),
    "maze": Family("genrl.envs.maze", "robotics", "point and ant mazes, and TwoWays"),
    "robotics": Family("genrl.envs.robotics", "robotics", "Fetch arm and Shadow hand"),
    "adroit": Family("genrl.envs.adroit", "robotics", "Adroit hand: door, hammer, pen, relocate"),
    "kitchen": Family("genrl.envs.kitchen", "robotics", "FrankaKitchen"),
    "robosuite": Family("genrl.envs.robosuite", "robosuite", "manipulation with robomimic's names"),
    "ogbench": Family("genrl.envs.ogbench", "ogbench", "cube, scene, puzzle and mazes"),
    "pusht": Family("genrl.envs.pusht", "pusht", "push a T onto its outline"),
    "gymnasium": Family("genrl.envs.gymnasium_mujoco", "robotics", "MuJoCo locomotion"),
}


def list_families() -> dict[str, str]:
    """Name and title of each family of environments."""
    return {name: family.title for name, family in FAMILIES.items()}


def list_envs(family: str | None = None) -> list[str]:
    """Ids of the environments of a family, or of all families whose extra is installed.

    Raises:
        EnvError: no such family, or its extra is not installed.
    """
    if family is not None:
        module = family_module(family)
        return [f"{family}/{name}" for name in module.list_envs()]
    found: list[str] = []
    for name in FAMILIES:
        with contextlib.suppress(MissingExtraError):
            found += list_envs(name)
    return found


def make_env(env: str | Mapping[str, Any] | EnvSettings, *, render: bool = False, **changes: Any) -> TaskEnv:
    """The environment of an id, of settings, or of settings with changes.

    Args:
        env: ``"metaworld/pick-place-v3"``, `EnvSettings` or a dict of them.
        render: videos will be wanted; only an environment of your own needs to know.
        **changes: settings to replace: ``make_env("metaworld/reach-v3", observations=("points",))``.

    Raises:
        EnvError: no such environment (the message names the nearest), or its extra is not installed.

    Example:
        >>> env = make_env("metaworld/reach-v3", max_steps=100)
        >>> obs, info = env.reset(seed=0)
    """
    settings = EnvSettings.of(env, **changes)
    if "/" not in settings.id:
        return _make_own(settings, render)
    family, _, name = settings.id.partition("/")
    if family not in FAMILIES:
        raise unknown(settings.id)
    module = family_module(family, settings.renderer)
    if name not in module.list_envs():
        raise unknown(settings.id)
    from genrl.envs.base import TaskEnv

    try:
        with quiet():
            return TaskEnv(settings, module.build(name, settings), family)
    except TypeError as error:
        if not settings.kwargs:
            raise
        raise EnvError(f"env.kwargs = {settings.kwargs!r} does not fit {settings.id}: {error}") from error


def _make_own(settings: EnvSettings, render: bool) -> TaskEnv:
    prepare_rendering(settings.renderer)
    from genrl.envs.base import TaskEnv
    from genrl.envs.own import build_own, is_own

    if not is_own(settings.id):
        raise unknown(settings.id)
    return TaskEnv(settings, build_own(settings, render), "own")


def family_module(family: str, renderer: str = "auto") -> ModuleType:
    """The module of a family.

    Raises:
        EnvError: no such family.
        MissingExtraError: its simulator is not installed.
    """
    if family not in FAMILIES:
        raise unknown(f"{family}/")
    prepare_rendering(renderer)
    entry = FAMILIES[family]
    try:
        with quiet():
            return importlib.import_module(entry.module)
    except ImportError as error:
        raise MissingExtraError(
            f'{family} environments need a package that is not installed ({error}); pip install "genrl[{entry.extra}]"'
        ) from error


class MissingExtraError(EnvError):
    """A simulator is not installed; the message names the extra."""


def unknown(env_id: str) -> EnvError:
    """The error of an id that no family has: nearest names and how to list them."""
    family = env_id.rpartition("/")[0]
    if family in FAMILIES:
        ids = list_envs(family)
        how = f'genrl.envs.list_envs("{family}") lists its {len(ids)} environments'
    else:
        ids = list_envs()
        how = f"families: {', '.join(FAMILIES)}; genrl.envs.list_envs(family) lists the environments of one"
    near = _nearest(env_id, ids) or _nearest(env_id, list_envs())
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    return EnvError(f"no environment {env_id!r}{nearest}. {how}. Your own: the import path package.module:make_env")


def _nearest(env_id: str, ids: list[str]) -> list[str]:
    """At most three ids that resemble one, or whose names without the family do."""
    short = {known.partition("/")[2].lower(): known for known in ids}
    found = difflib.get_close_matches(env_id.rpartition("/")[2].lower(), short, 3, 0.6)
    return list(dict.fromkeys([*difflib.get_close_matches(env_id, ids, 3, 0.7), *(short[name] for name in found)]))[:3]
