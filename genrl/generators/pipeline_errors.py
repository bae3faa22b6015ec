"""What a diffusers pipeline refuses, said in the words of the settings that it was given."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

SIZES = ("height", "width", "num_frames")  # settings of the generator's own, not of `call`
_SETTINGS = (*SIZES, "guidance_scale", "negative_prompt")
_RESIZING = {"_auto_resize": "false", "use_resolution_binning": "false"}  # arguments by which pipelines change sizes


class PipelineError(ValueError):
    """An error that names its setting already."""


def check_pipeline(pipe: Any) -> None:
    """ValueError names the calls that a pipeline lacks to be driven from outside."""
    scheduler, parameters = getattr(pipe, "scheduler", None), inspect.signature(type(pipe).__call__).parameters
    lacking = [name for name in ("prepare_latents", "encode_prompt") if not callable(getattr(pipe, name, None))]
    lacking += [f"scheduler.{n}" for n in ("set_timesteps", "step") if not callable(getattr(scheduler, n, None))]
    lacking += [f"argument {name}" for name in ("prompt", "num_inference_steps") if name not in parameters]
    if lacking:
        raise ValueError(f"{type(pipe).__name__} cannot be driven from outside: it has no {', '.join(lacking)}")


def check_arguments(kind: str, arguments: Mapping[str, Any], negative: str | None, known: Collection[str]) -> None:
    """ValueError for arguments that a pipeline does not take, with close ones, and for negative guidance.

    Args:
        kind: name of the pipeline's class.
        arguments: of every call; negative: a negative prompt.
        known: names that may be given.
    """
    wanted = {*arguments, *(() if negative is None else ("negative_prompt",))}
    if wrong := sorted(wanted - set(known)):
        close = dict.fromkeys(name for key in wrong for name in difflib.get_close_matches(key, known, 3, 0.5))
        hint = f"did you mean {', '.join(close)}?" if close else f"see the arguments of {kind}.__call__"
        raise ValueError(f"{', '.join(map(_setting, wrong))} cannot be given to {kind}; {hint}")
    for key, value in arguments.items():
        if key.endswith(("guidance_scale", "cfg_scale")) and isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"{_setting(key)}={value} is negative, which guides away from the prompt; give 0 or more")


def check_sizes(pipe: Any, asked: Mapping[str, Any], used: Mapping[str, Any], latents: bool = False) -> None:
    """PipelineError when a pipeline works at other sizes than the height, width and num_frames it was given.

    Args:
        pipe: the pipeline.
        asked: arguments of its call; used: sizes of its media, or arguments of its `prepare_latents`.
        latents: `used` may count latents instead of pixels.
    """
    both = {key: (asked[key], used[key]) for key in SIZES if key in asked and isinstance(used.get(key), int)}
    wrong = {key for key, (a, b) in both.items() if a != b}
    pixels = [both[key] for key in ("height", "width") if key in both]
    if latents and len(pixels) == 2 and all(b > 0 and a % b == 0 and a > b for a, b in pixels):
        wrong -= {"height", "width"}
    if not wrong:
        return
    parameters = inspect.signature(type(pipe).__call__).parameters
    remedy = {key: value for key, value in _RESIZING.items() if key in parameters and wrong & {"height", "width"}}
    if "max_area" in parameters and {"height", "width"} <= both.keys() and wrong & {"height", "width"}:
        remedy["max_area"] = str(both["height"][0] * both["width"][0])
    said = ", ".join(f"generator.{key}={both[key][0]}" for key in both if key in wrong)
    does = ", ".join(f"{key} {both[key][1]}" for key in both if key in wrong)
    call = ", ".join(f"{key}: {value}" for key, value in remedy.items())
    raise PipelineError(
        f"{type(pipe).__name__} does not keep {said}: it works at {does}; give what it works at"
        + (f", or set generator.call: {{{call}}}" if call else "")
    )


@contextmanager
def explained(pipe: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what goes wrong in a pipeline's first call is a ValueError that names the settings to check.

    A lack of memory stays what it is.
    """
    try:
        yield
    except (PipelineError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        call = {key: value for key, value in arguments.items() if key not in _SETTINGS}
        given = [f"{key}={arguments[key]}" for key in _SETTINGS if key in arguments] + [f"call={call}"]
        text = str(error) or type(error).__name__
        parameters = inspect.signature(type(pipe).__call__).parameters
        named = [key for key in (*_SETTINGS, *call) if key in parameters and key in text]
        check = ", ".join(_setting(key) for key in named) or "generator.call, and the sizes"
        raise PipelineError(f"{type(pipe).__name__} failed with {', '.join(given)}: {text}; check {check}") from error


def _setting(key: str) -> str:
    return f"generator.{key}" if key in _SETTINGS else f"generator.call.{key}"
