"""The environment that a robomimic file was recorded in, from its ``env_args``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from genrl.envs.make import FAMILIES, MissingExtraError, list_envs, make_env, unknown
from genrl.envs.settings import EnvError, EnvSettings

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv

ROBOSUITE_TYPE, GYM_TYPE = 1, 2  # robomimic's numbers for kinds of environments
# Settings of robosuite that say how to draw, or that are ours to decide.
DROPPED = (
    "has_renderer",
    "has_offscreen_renderer",
    "use_camera_obs",
    "camera_depths",
    "camera_names",
    "camera_heights",
    "camera_widths",
    "camera_segmentations",
    "render_gpu_device_id",
    "render_camera",
    "render_collision_mesh",
    "render_visual_mesh",
    "ignore_done",
    "horizon",
    "gripper_visualization",
    "renderer",
    "renderer_config",
)


class EnvVersionWarning(UserWarning):
    """The data come from another version of the simulator than the installed one, so that results may differ."""


def settings_from_env_args(env_args: Mapping[str, Any], **changes: Any) -> EnvSettings:
    """Settings of the environment that a robomimic file names.

    robosuite's controller settings are kept, those of versions before 1.5 in today's form: ``control_delta`` becomes
    ``input_type`` (delta or absolute, in the world's frame), and the physics step is the one those versions used.

    Args:
        env_args: attribute ``env_args`` of a file, decoded: env_name, type, env_kwargs, env_version.
        **changes: settings to replace, for example ``observations``.

    Raises:
        EnvError: no such environment here.

    Warns:
        EnvVersionWarning: the file names another version of robosuite than the installed one.
    """
    name, kwargs = str(env_args.get("env_name", "")), dict(env_args.get("env_kwargs") or {})
    if env_args.get("type", GYM_TYPE) != ROBOSUITE_TYPE:
        if "id" in kwargs:  # written by genrl
            return EnvSettings.of(kwargs, **changes)
        return EnvSettings.of(_known_id(name), **changes)
    version = str(env_args.get("env_version", "") or "")
    _compare_version(version)
    values: dict[str, Any] = {"id": f"robosuite/{name}"}
    if kwargs.get("camera_heights"):
        heights = kwargs["camera_heights"]
        values["image_size"] = int(heights[0] if isinstance(heights, (list, tuple)) else heights)
    kept = {key: copy.deepcopy(value) for key, value in kwargs.items() if key not in DROPPED}
    if kept.get("controller_configs"):
        kept["controller_configs"] = todays_controller(kept["controller_configs"])
    if version and _older(version, (1, 5)):
        kept.setdefault("lite_physics", False)
    return EnvSettings.of({**values, "kwargs": kept}, **changes)


def make_env_from_env_args(env_args: Mapping[str, Any], **changes: Any) -> TaskEnv:
    """The environment that a robomimic file names; see `settings_from_env_args`."""
    return make_env(settings_from_env_args(env_args, **changes))


def todays_controller(config: Any) -> Any:
    """A controller's settings of robosuite before 1.5 in the form of 1.5; newer ones unchanged."""
    if isinstance(config, (list, tuple)):
        return [todays_controller(item) for item in config]
    config = dict(config)
    if "control_delta" in config:
        config["input_type"] = "delta" if config.pop("control_delta") else "absolute"
        config.setdefault("input_ref_frame", "world")
    if "damping" in config and "damping_ratio" not in config:
        config["damping_ratio"] = config.pop("damping")
    if "damping_limits" in config and "damping_ratio_limits" not in config:
        config["damping_ratio_limits"] = config.pop("damping_limits")
    if "type" in config and "body_parts" not in config:
        config = {"interpolation": None, "ramp_ratio": 0.2, **config}
        return {"type": "BASIC", "body_parts": {"right": {**config, "gripper": {"type": "GRIP"}}}}
    if "arms" in config.get("body_parts", {}):  # the nested form of robosuite's own files
        parts = dict(config["body_parts"])
        config["body_parts"] = {**parts.pop("arms"), **parts}
    return config


def _known_id(name: str) -> str:
    if "/" in name:
        return name
    for family in FAMILIES:
        try:
            ids = list_envs(family)
        except MissingExtraError:
            continue
        if f"{family}/{name}" in ids:
            return f"{family}/{name}"
    raise unknown(name)


def _compare_version(version: str) -> None:
    try:
        installed = metadata.version("robosuite")
    except metadata.PackageNotFoundError as error:
        raise EnvError(
            'the data come from robosuite, which is not installed; pip install "genrl[robosuite]"'
        ) from error
    if version and version != installed:
        warnings.warn(
            f"the data come from robosuite {version}, installed is {installed}: physics and observations changed "
            "between versions, so success rates may not match published ones",
            EnvVersionWarning,
            stacklevel=3,
        )


def _older(version: str, than: tuple[int, int]) -> bool:
    parts = version.split(".")
    try:
        return (int(parts[0]), int(parts[1])) < than
    except (ValueError, IndexError):
        return False
