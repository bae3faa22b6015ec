"""Prompts: the text that conditions a generator, with what a reward needs to know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Prompt:
    """A text and its metadata, e.g. `Prompt("a handwritten seven", {"label": 7})`."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """What a run draws prompts from: any object with these two lists.

    Two entries with the same text are two prompts, and have groups of their own.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
