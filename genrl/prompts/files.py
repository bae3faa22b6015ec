"""Prompts from text files and JSON lines, and prompts written in the configuration itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .base import Prompt
from .split import HeldOut, check_limits, split_prompts, without_held_out

Reader = Callable[[Path], list[Prompt]]


class PromptList:
    """Prompts that are written in the configuration.

    Args:
        train: texts to train on.
        held_out: other texts, to evaluate on.
    """

    def __init__(self, train: Sequence[str], held_out: Sequence[str]) -> None:
        if not train or not held_out:
            raise ValueError(f"{len(train)} prompts to train on and {len(held_out)} held out; give some of each")
        self.held_out = [Prompt(text) for text in held_out]
        self.train = without_held_out([Prompt(text) for text in train], self.held_out, "PromptList")


class TextFile:
    """One prompt a line. Blank lines and comments are skipped, spaces around a prompt are removed.

    Args:
        path: a UTF-8 file.
        held_out: share of the texts that is held out (below 1), their number (from 1), or the path of a second file.
            A text of both files is not trained on.
        comment: lines that start with this are no prompts; null reads every line.
        max_train, max_held_out: keep the first so many; null keeps all.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a side of the split is empty.
    """

    def __init__(
        self,
        path: str,
        held_out: HeldOut = 0.05,
        comment: str | None = "#",
        max_train: int | None = None,
        max_held_out: int | None = None,
    ) -> None:
        self.path, self.comment = path, comment
        self.train, self.held_out = read_split(self._read, path, held_out, max_train, max_held_out)

    def _read(self, file: Path) -> list[Prompt]:
        lines = read_lines(file)
        return [Prompt(line) for line in lines if not (self.comment and line.startswith(self.comment))]


class JsonLines:
    """One JSON object a line: the prompt under one key, everything else is its metadata.

    `{"prompt": "a sign that says \\"OPEN\\"", "text": "OPEN"}` suits `OCRReward`, `{"prompt": ..., "include": [...],
    "exclude": [...]}` suits `CompositionReward`. A path under "image" is an image condition, relative to the file.

    Args:
        path: a UTF-8 file.
        held_out: share that is held out (below 1), number (from 1), or the path of a second file; decided by the text,
            or by the image where there is one.
        prompt: the key of the text.
        keys: metadata that is kept; null keeps all.
        max_train, max_held_out: keep the first so many; null keeps all.

    Raises:
        FileNotFoundError: there is no such file, or an image is missing.
        ValueError: a line is no JSON object or lacks a key (with its number), or a side of the split is empty.
    """

    def __init__(
        self,
        path: str,
        held_out: HeldOut = 0.05,
        prompt: str = "prompt",
        keys: list[str] | None = None,
        max_train: int | None = None,
        max_held_out: int | None = None,
    ) -> None:
        self.path, self.prompt, self.keys = path, prompt, keys
        self.train, self.held_out = read_split(self._read, path, held_out, max_train, max_held_out, self._side)

    def _side(self, prompt: Prompt) -> str:
        """What decides the side: the path of the image from the file's folder, so that no image is on both sides."""
        image = prompt.metadata.get("image")
        return place_in(Path(self.path).expanduser().parent, image) if isinstance(image, str) else prompt.text

    def _read(self, file: Path) -> list[Prompt]:
        return [self._entry(record, where, file.parent) for where, record in read_json_lines(file)]

    def _entry(self, record: dict[str, Any], where: str, folder: Path) -> Prompt:
        for key in (self.prompt, *(self.keys or ())):
            if key not in record:
                raise ValueError(f"{where} has no key {key!r}; its keys are {', '.join(record) or 'none'}")
        text = record[self.prompt]
        if not isinstance(text, str):
            raise ValueError(f"{where}: {self.prompt!r} is {text!r:.60}; a prompt is a string")
        metadata = {k: v for k, v in record.items() if k != self.prompt and (self.keys is None or k in self.keys)}
        if isinstance(metadata.get("image"), str):
            metadata["image"] = existing_image(folder, metadata["image"], where)
        return Prompt(text, metadata)


def read_text(file: Path) -> str:
    """A UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: it has another encoding.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def read_lines(file: Path) -> list[str]:
    """The lines of a file that are not blank, without spaces around them."""
    return [line.strip() for line in read_text(file).split("\n") if line.strip()]


def read_json_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where it stands, object) for every line that is not blank.

    Raises:
        ValueError: a line is no JSON object; it is named by its number.
    """
    found = []
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not valid JSON ({error.msg} at column {error.colno}): {line:.60}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} is a {type(record).__name__}; every line must be a JSON object: {line:.60}")
        found.append((where, record))
    return found


def existing_image(folder: Path, name: str, where: str) -> str:
    """The path of an image that a file names relative to its folder."""
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{where} names the image {name!r}, but there is no file {path}")
    return str(path)


def place_in(folder: Path, path: str) -> str:
    """A path as seen from a folder: the same on every machine that has both."""
    return Path(os.path.relpath(path, folder)).as_posix()


def image_or_text(prompt: Prompt) -> str:
    """What decides the side of a prompt: the name of its image where it has one, so that no image is on both sides."""
    image = prompt.metadata.get("image")
    return Path(image).name if isinstance(image, (str, Path)) else prompt.text


def existing_file(path: str, what: str = "prompt file") -> Path:
    """`path` as a Path; FileNotFoundError says from where it was looked for."""
    file = Path(path).expanduser()
    if not file.is_file():
        place = "is a folder" if file.is_dir() else "does not exist"
        raise FileNotFoundError(f"{what} {path!r} {place}; relative paths start from the current folder, {Path.cwd()}")
    return file


def read_split(
    read: Reader,
    path: str,
    held_out: HeldOut,
    max_train: int | None,
    max_held_out: int | None,
    key: Callable[[Prompt], str] | None = None,
) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out) of one file that is split, or of two files."""
    check_limits(held_out, max_train, max_held_out)
    prompts = read(existing_file(path))
    if not isinstance(held_out, str):
        return split_prompts(prompts, held_out, max_train, max_held_out, path, key)
    others = read(existing_file(held_out, "file of held-out prompts"))
    for name, found in ((path, prompts), (held_out, others)):
        if not found:
            raise ValueError(f"{name} holds no prompt")
    return without_held_out(prompts, others, path, key)[:max_train], others[:max_held_out]
