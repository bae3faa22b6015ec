"""Prompts: the text that conditions a generator, with what a reward needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A text and its metadata, e.g. `Prompt("a handwritten seven", {"label": 7})`."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
