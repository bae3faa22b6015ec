"""Prompts: the text that conditions a generator, what a reward needs to know about it, and where they come from."""

from __future__ import annotations

from .base import Prompt, PromptSource
from .files import JsonLines, PromptList, TextFile
from .hub import HuggingFaceDataset
from .images import ImageFolder
from .split import HeldOut, hash_position, split_prompts

__all__ = [
    "HeldOut",
    "HuggingFaceDataset",
    "ImageFolder",
    "JsonLines",
    "Prompt",
    "PromptList",
    "PromptSource",
    "TextFile",
    "hash_position",
    "split_prompts",
]
