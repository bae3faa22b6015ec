"""Which prompts are held out: a hash of each text decides, the same on every machine and in every run."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence

from .base import Prompt

HeldOut = int | float | str
_SHOWN = 3  # texts that a message lists


def hash_position(key: str) -> float:
    """A number in [0, 1) that belongs to a text: the first 52 bits of its SHA-256.

    Python's own `hash` differs from process to process.
    """
    return int(hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:13], 16) / 2**52


def split_prompts(
    prompts: Sequence[Prompt],
    held_out: float,
    max_train: int | None = None,
    max_held_out: int | None = None,
    origin: str = "the prompts",
    key: Callable[[Prompt], str] | None = None,
) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out), both in their given order.

    Args:
        prompts: equal keys are always on one side; two entries of one text stay two prompts.
        held_out: below 1 the share of texts that is held out; a prompt then never changes sides when others are added
            or removed. From 1, how many different texts are held out.
        max_train, max_held_out: the first so many of each side are kept.
        origin: names the source in messages.
        key: what decides the side of a prompt; its text if not given.

    Raises:
        ValueError: a side is empty, or a number makes no sense.
    """
    check_limits(held_out, max_train, max_held_out)
    keys = [key(prompt) if key else prompt.text for prompt in prompts]
    places = {k: hash_position(k) for k in keys}
    if not prompts:
        raise ValueError(f"{origin} holds no prompt")
    if held_out < 1:
        chosen = {k for k, place in places.items() if place < held_out}
    else:
        chosen = set(sorted(places, key=lambda k: (places[k], k))[: int(held_out)])
    train = [prompt for prompt, k in zip(prompts, keys, strict=True) if k not in chosen]
    kept = [prompt for prompt, k in zip(prompts, keys, strict=True) if k in chosen]
    for side, other, what, remedy in ((kept, train, "to evaluate on", "more"), (train, kept, "to train on", "fewer")):
        if not side:
            raise ValueError(
                f"{origin}: held_out = {held_out:g} leaves none of {len(places)} different prompts {what} (all "
                f"{len(other)} are on the other side); hold out {remedy}, such as held_out: "
                f"{max(1, min(len(places) - 1, math.ceil(len(places) / 10)))}, or add prompts"
            )
    return train[:max_train], kept[:max_held_out]


def check_limits(held_out: HeldOut, max_train: int | None, max_held_out: int | None) -> None:
    """Raise ValueError for numbers that make no sense."""
    for name, value in (("max_train", max_train), ("max_held_out", max_held_out)):
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value} must be at least 1; null sets no limit")
    if not isinstance(held_out, str) and not (0 < held_out < 1 or (held_out >= 1 and held_out == int(held_out))):
        raise ValueError(f"held_out = {held_out} must be a share below 1 or a whole number of prompts")


def without_held_out(
    train: list[Prompt], held_out: list[Prompt], origin: str, key: Callable[[Prompt], str] | None = None
) -> list[Prompt]:
    """The training prompts whose keys are not held out; the others are named in a warning.

    Raises:
        ValueError: none is left.
    """
    name = key or (lambda prompt: prompt.text)
    unseen = {name(prompt) for prompt in held_out}
    double = list(dict.fromkeys(name(prompt) for prompt in train if name(prompt) in unseen))
    if double:
        left = [prompt for prompt in train if name(prompt) not in unseen]
        shown = ", ".join(map(repr, double[:_SHOWN])) + (", ..." if len(double) > _SHOWN else "")
        if not left:
            raise ValueError(f"{origin}: all prompts to train on are held out as well ({shown}); add others")
        warnings.warn(
            f"{origin}: {len(double)} prompts are held out as well and not trained on ({shown})", stacklevel=3
        )
        return left
    return train
