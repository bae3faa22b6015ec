"""What a reward is, how the loop calls one, and a checker for rewards of your own.

A reward is any callable `(media, prompts, metadata) -> [B]` or `-> {name: [B]}`. Nothing has to be registered or
inherited. Media are float32 in [0, 1], [B, C, H, W], or [B, F, C, H, W] for video; values are a float tensor or
a list or array of numbers; NaN, or None in a list, means "not scored" (the sample then contributes nothing), and inf
is an error.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

UNBOUNDED = (-math.inf, math.inf)
_SLACK = 1e-4  # how far rounding in a decoder may carry a pixel out of [0, 1]
_SHOWN = 3  # prompts and values that an error lists


class Reward(Protocol):
    """A score per sample.

    `differentiable` says whether gradients reach `media`; `range` is (lowest, highest) value. A class without them is
    taken as not differentiable and unbounded. A method `prepare(device, progress=True)` is optional: it loads or
    trains what the reward needs, is called once before the run, and may be called again.

    `__call__(media [B, C, H, W] in [0, 1], prompts: Sequence[str] of length B, metadata: Sequence[dict] of length B)`
    returns a float tensor [B], or a dict name -> [B]; a list, tuple or numpy array of B numbers stands for the tensor.
    """

    differentiable: bool
    range: tuple[float, float]

    # Positional-only and untyped on purpose: a config may then name any callable of three arguments, whatever it
    # calls them and however it annotates them.
    def __call__(self, media: Any, prompts: Any, metadata: Any, /) -> Any: ...


class SetMetric(Protocol):
    """A number about a whole set of samples, such as its diversity; it has no value per sample."""

    def measure(self, media: Any, prompts: Any, metadata: Any, /) -> Any:
        """`(media, prompts, metadata)` as for a reward, over the whole evaluation set; returns dict name -> float."""


class RewardError(RuntimeError):
    """A reward failed or returned something that cannot be used. `.reward`, `.prompts` say which one and where."""

    def __init__(self, problem: str, reward: str, prompts: Sequence[str], remedy: str = "") -> None:
        shown = ", ".join(repr(prompt) for prompt in prompts[:_SHOWN]) + (", ..." if len(prompts) > _SHOWN else "")
        super().__init__(f"reward {reward!r} {problem} (prompts: {shown or 'none'}). {remedy}".rstrip())
        self.reward = reward
        self.prompts = list(prompts)


def reward_name(reward: Any) -> str:
    """The name under which a single reward is logged: its `name`, or its class or function in snake case.

    `NaN` and names with a version are one word: `AllNaN` is `all_nan`, `HPSv2Score` is `hpsv2_score`.
    """
    name = getattr(reward, "name", None)
    if isinstance(name, str) and name:
        return name
    name = getattr(reward, "__name__", None) or type(reward).__name__
    name = re.sub(r"[A-Z]+v\d+|([A-Z])[a-z]\1(?![a-z])", lambda word: word.group().capitalize(), name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A clause for an error message: the known name that was probably meant, or the list of all."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"


def check_media(media: Any) -> Tensor:
    """Media as float32, after checking rank, dtype and range.

    Raises:
        TypeError: not a tensor, or integers (uint8 in 0..255 read as [0, 1] gives rewards hundreds of times too big).
        ValueError: a rank other than 4 or 5, an empty batch, NaN, or values outside [0, 1] by more than rounding.
    """
    if not isinstance(media, Tensor):
        raise TypeError(f"media is {type(media).__name__}; rewards take a float tensor [B, C, H, W] in [0, 1].")
    if not media.is_floating_point():
        raise TypeError(f"media has dtype {media.dtype}; rewards take floats in [0, 1]. Divide uint8 by 255 first.")
    if media.dim() not in (4, 5) or media.numel() == 0:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; rewards take [B, C, H, W] or [B, F, C, H, W], not empty. "
            "Add or remove dimensions first."
        )
    low, high = media.detach().amin().item(), media.detach().amax().item()
    if math.isnan(low) or math.isnan(high):
        raise ValueError("media contains NaN; rewards take values in [0, 1]. The generator has probably diverged.")
    if low < -_SLACK or high > 1 + _SLACK:
        raise ValueError(
            f"media lies in [{low:.4g}, {high:.4g}]; rewards take [0, 1]. Map [-1, 1] by (x + 1) / 2 and clamp in the "
            "generator's decode()."
        )
    return media.float()


def score_one(
    reward: Any, name: str, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]
) -> dict[str, Tensor]:
    """Call one reward on media that were checked, and check what it returns; names are `name` or `name/inner`.

    A dict keeps its own names if `name` is empty. Values stay on their device and keep their graph.
    """
    label = name or reward_name(reward)
    version = media._version
    try:
        result = reward(media, prompts, [dict(entry) for entry in metadata])
    except RewardError:
        raise
    except Exception as error:
        problem = f"({type(reward).__name__}) raised {type(error).__name__}: {error}"
        raise RewardError(problem, label, prompts) from error
    if media._version != version:  # autograd counts every change in place
        raise RewardError(
            "changed its media in place, which other rewards and gauges see too", label, prompts, "Work on a copy."
        )
    named = result if isinstance(result, dict) else {"": result}
    if not named:
        raise RewardError("returned an empty dict", label, prompts, "Return at least one entry of shape [B].")
    checked = {}
    for inner, values in named.items():
        full = f"{name}/{inner}" if name and inner else name or inner or label
        checked[full] = _check_values(values, full, media, prompts)
    return checked


def _check_values(values: Any, name: str, media: Tensor, prompts: Sequence[str]) -> Tensor:
    batch = media.shape[0]
    remedy = (
        f"Return a float tensor of shape [{batch}], or a list of {batch} numbers: one value a sample, NaN where there "
        "is no score."
    )
    if isinstance(values, (list, tuple, np.ndarray)):
        try:
            values = _as_tensor(values, media.device)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = f"returned a {type(values).__name__} that holds no plain numbers ({error})"
            raise RewardError(problem, name, prompts, remedy) from error
    if not isinstance(values, Tensor):
        raise RewardError(f"returned {type(values).__name__}", name, prompts, remedy)
    if tuple(values.shape) != (batch,):
        raise RewardError(f"returned shape {tuple(values.shape)} for {batch} samples", name, prompts, remedy)
    if not values.is_floating_point():
        raise RewardError(f"returned dtype {values.dtype}", name, prompts, remedy)
    values = values.float()
    infinite = values.detach().isinf().nonzero().flatten().tolist()
    if infinite:
        shown = ", ".join(f"{values[i].item()}" for i in infinite[:_SHOWN])
        problem = f"returned {shown} for {len(infinite)} of {batch} samples"
        raise RewardError(problem, name, [prompts[i] for i in infinite], "NaN means 'not scored'; inf is an error.")
    return values


def _as_tensor(values: Any, device: torch.device) -> Tensor:
    """Numbers, or None for NaN, as float32."""
    numbers = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(numbers, (list, tuple)):  # an array without dimensions
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    numbers = [math.nan if number is None else number for number in numbers]
    if any(isinstance(number, Tensor) for number in numbers):  # which may carry gradients
        return torch.stack([torch.as_tensor(number, dtype=torch.float32, device=device) for number in numbers])
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def joined(parts: Sequence[dict[str, Tensor]], prompts: Sequence[str]) -> dict[str, Tensor]:
    """The scores of several batches as those of one.

    Raises:
        RewardError: a batch has other names than the first.
    """
    names = sorted(parts[0])
    for part in parts[1:]:
        check_same_names(names, part, prompts)
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def check_same_names(names: Sequence[str], others: Iterable[str], prompts: Sequence[str]) -> None:
    """Raise RewardError unless two batches were scored under the same names."""
    differing = sorted(set(names) ^ set(others))
    if differing:
        remedy = "Return every name in every batch, NaN where there is no score."
        raise RewardError("was returned for some batches and not for others", differing[0], prompts, remedy)


def score(
    reward: Any,
    media: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[dict] | None = None,
    gradients: bool = False,
) -> dict[str, Tensor]:
    """Score a batch: the entry that the training loop and the evaluation use.

    Args:
        reward: a `Reward`, a `Compose`, or a plain function of (media, prompts, metadata).
        media: [B, C, H, W] or [B, F, C, H, W], float in [0, 1].
        prompts, metadata: one entry a sample; metadata may be None.
        gradients: keep the graph and the device (for rewards that are differentiated through).

    Returns:
        name -> [B] float32, on the CPU and without graph unless `gradients`. NaN = not scored.

    Raises:
        RewardError: the reward raised, or returned a wrong type, shape, dtype, or inf.
        TypeError, ValueError: the media or the lengths are wrong (see `check_media`).
    """
    media = check_media(media)
    batch = media.shape[0]
    metadata = [{} for _ in range(batch)] if metadata is None else metadata
    for what, items in (("prompts", prompts), ("metadata", metadata)):
        if isinstance(items, str) or len(items) != batch:
            raise ValueError(f"{what} has {len(items)} entries for {batch} samples; give one entry a sample.")
    with torch.set_grad_enabled(gradients):
        result = score_one(reward, "", media, prompts, metadata)
    return result if gradients else {name: values.detach().cpu() for name, values in result.items()}
