"""What a configuration says about an environment (`env:` in YAML)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv

Box3 = tuple[tuple[float, float, float], tuple[float, float, float]]
PICTURES = ("image", "depth", "points")  # observations that need a renderer; also <camera>_image and <camera>_depth


class EnvError(ValueError):
    """An environment that cannot be made or used; the message names what was given, what is allowed and the remedy."""


@dataclass(frozen=True)
class EnvSettings:
    """One task, what the policy sees of it, and when an episode ends.

    Args:
        id: ``family/name`` (``"metaworld/pick-place-v3"``; `genrl.envs.list_envs` lists them), or the import path of
            your own environment class or factory (``"my_lab.envs:make_env"``).
        observations: of ``"state"``, ``"image"``, ``"depth"`` and ``"points"``, the family's own names (robosuite:
            ``"robot0_eef_pos"`` ...), and pictures of further cameras (``"agentview_image"``, ``"agentview_depth"``).
        max_steps: length at which an episode is cut; None takes the family's usual length.
        image_size: height and width of ``image`` and ``depth``, and of the depth picture behind ``points``.
        camera: name of the camera; None takes the family's usual one.
        points: N, number of points of a cloud.
        point_colors: points are [x, y, z, r, g, b] (colours in [0, 1]) instead of [x, y, z].
        crop: lowest and highest corner of the part of space that points are taken from, in metres; None takes the
            family's usual workspace, or everything where there is none.
        point_method: ``"fps"`` spreads the points evenly (farthest-point sampling), ``"random"`` draws them.
        depth_range: metres that become 0 and 255 in ``depth``; None takes the range of the family's workspace.
        success: rule that makes one success of an episode's flags: ``"any"``, ``"final"``, ``"hold:K"`` (K steps in a
            row) or ``"count:K"`` (K steps in all); None takes the family's rule.
        renderer: ``"egl"`` or ``"osmesa"`` (OpenGL without a display), ``"rays"`` (ray casting without OpenGL), or
            ``"auto"``: what MUJOCO_GL says, else the first of these that works. ``"auto"`` never casts rays for
            ``image`` observations, since their colours differ from OpenGL's.
        render_size: height and width of the pictures of `TaskEnv.render` (videos).
        sites: draw the markers (goals, for example) that have no body.
        kwargs: passed to the simulator's constructor.

    Raises:
        EnvError: a value out of its range.
    """

    id: str
    observations: tuple[str, ...] = ("state",)
    max_steps: int | None = None
    image_size: int = 84
    camera: str | None = None
    points: int = 512
    point_colors: bool = False
    crop: Box3 | None = None
    point_method: Literal["fps", "random"] = "fps"
    depth_range: tuple[float, float] | None = None
    success: str | None = None
    renderer: Literal["auto", "egl", "osmesa", "rays"] = "auto"
    render_size: int = 256
    sites: bool = True
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise EnvError(f'env.id = {self.id!r} must be "family/name" or the import path of an environment')
        if isinstance(self.observations, str) or not self.observations:
            raise EnvError(
                f"env.observations = {self.observations!r} must be a list of names; "
                'for example ["state"] or ["points", "state"]'
            )
        object.__setattr__(self, "observations", tuple(str(name) for name in self.observations))
        if len(set(self.observations)) != len(self.observations):
            raise EnvError(f"env.observations = {list(self.observations)} names one observation twice")
        for name in ("image_size", "points", "render_size"):
            if getattr(self, name) < 1:
                raise EnvError(f"env.{name} = {getattr(self, name)} is too small; the least is 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise EnvError(
                f"env.max_steps = {self.max_steps} is too small; the least is 1, null takes the usual length"
            )
        for name, allowed in (("renderer", ("auto", "egl", "osmesa", "rays")), ("point_method", ("fps", "random"))):
            if getattr(self, name) not in allowed:
                raise EnvError(f"env.{name} = {getattr(self, name)!r} is unknown; allowed: {', '.join(allowed)}")
        self._check_ranges()
        if self.success is not None:
            success_parameters(self.success)
        object.__setattr__(self, "kwargs", dict(self.kwargs))

    def _check_ranges(self) -> None:
        if self.crop is not None:
            low, high = self.crop
            if len(low) != 3 or len(high) != 3 or not all(a < b for a, b in zip(low, high, strict=True)):
                raise EnvError(
                    f"env.crop = {self.crop!r} must be the lowest and the highest corner, [[x, y, z], [x, y, z]] in "
                    "metres, with the first below the second in all three"
                )
            corners = tuple(tuple(float(value) for value in corner) for corner in self.crop)
            object.__setattr__(self, "crop", corners)
        if self.depth_range is not None:
            if len(self.depth_range) != 2 or not 0 <= self.depth_range[0] < self.depth_range[1]:
                raise EnvError(f"env.depth_range = {self.depth_range!r} must be [near, far] in metres, 0 <= near < far")
            object.__setattr__(self, "depth_range", tuple(float(value) for value in self.depth_range))

    @classmethod
    def of(cls, env: str | Mapping[str, Any] | EnvSettings, **changes: Any) -> EnvSettings:
        """Settings from an id, a dict or settings, with some of them changed.

        Raises:
            EnvError: an unknown setting; the message names the nearest one.
        """
        if isinstance(env, EnvSettings):
            values = {setting.name: getattr(env, setting.name) for setting in dataclasses.fields(cls)}
        elif isinstance(env, str):
            values = {"id": env}
        elif isinstance(env, Mapping):
            values = dict(env)
        else:
            raise EnvError(f"an environment is given by an id, a dict or EnvSettings, not by {type(env).__name__}")
        return cls.from_dict({**values, **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EnvSettings:
        """Settings from what `to_dict` gave, or from YAML.

        Raises:
            EnvError: an unknown or missing setting.
        """
        known = [setting.name for setting in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise EnvError(f"env has no setting {name!r}{hint} (settings: {', '.join(known)})")
        if "id" not in values:
            raise EnvError('env needs an id, for example "metaworld/pick-place-v3"')
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values (lists, not tuples) for YAML and JSON; `from_dict` gives the same settings."""
        return {setting.name: _plain(getattr(self, setting.name)) for setting in dataclasses.fields(self)}

    @property
    def renders(self) -> bool:
        """Some observation needs a renderer."""
        return any(picture_of(name) is not None for name in self.observations)

    def make(self, render: bool = False) -> TaskEnv:
        """The environment; ``render=True`` also prepares an environment of yours for videos."""
        from genrl.envs.make import make_env

        return make_env(self, render=render)


def picture_of(name: str) -> tuple[str, str | None] | None:
    """Kind and camera of an observation: ``"image"`` gives ("image", None), ``"front_depth"`` ("depth", "front").

    None for the camera is the usual one; None in all is an observation that is no picture.
    """
    if name in PICTURES:
        return name, None
    camera, _, kind = name.rpartition("_")
    return (kind, camera) if camera and kind in ("image", "depth") else None


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def success_parameters(rule: str) -> tuple[str, int]:
    """Kind and number of steps of a success rule: ``"hold:10"`` gives ("hold", 10), ``"any"`` ("count", 1).

    Raises:
        EnvError: no such rule.
    """
    kind, _, steps = rule.partition(":")
    if rule == "any":
        return "count", 1
    if rule == "final":
        return "final", 1
    if kind in ("hold", "count") and steps.isdigit() and int(steps) >= 1:
        return kind, int(steps)
    raise EnvError(
        f'success rule {rule!r} is unknown; allowed: "any", "final", "hold:K" (K steps in a row), '
        '"count:K" (K steps in all), with K >= 1'
    )


def episode_success(flags: Any, rule: str) -> bool:
    """Success of an episode from the flags ``info["success"]`` of its steps, [T], under a rule.

    Args:
        flags: one flag a step, in order; without a step there is no success.
        rule: ``"any"``, ``"final"`` (of the last step), ``"hold:K"`` (K steps in a row, at any time) or ``"count:K"``
            (K steps in all, the rule of DAPG for the Adroit hand).
    """
    kind, steps = success_parameters(rule)
    flags = [bool(flag) for flag in flags]
    if kind == "final":
        return bool(flags) and flags[-1]
    if kind == "count":
        return sum(flags) >= steps
    run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        if run >= steps:
            return True
    return False
