"""Prompts from a data set of the `datasets` library: by hub id, or saved on disk."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Prompt
from .files import image_or_text
from .split import HeldOut, check_limits, split_prompts, without_held_out


class HuggingFaceDataset:
    """A data set by hub id, by a folder of data files, or by a folder that `save_to_disk` wrote.

    Args:
        path: id or folder.
        name: configuration of the data set.
        split: the part to train on.
        held_out: share that is held out (below 1), number (from 1), or the name of another split; decided by the text,
            which is never on both sides.
        prompt: column of the text.
        columns: metadata key -> column, e.g. {"text": "target"}; null keeps all other columns under their names.
            Columns of images become PIL images, decoded when they are used; "image" is an image condition.
        revision: of the hub's repository.
        max_train, max_held_out: keep the first so many; null keeps all.

    Needs the extra `datasets`: pip install "genrl[datasets]".

    Raises:
        ValueError: a split or column does not exist, a prompt is no text, or a side of the split is empty.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        held_out: HeldOut = 0.05,
        prompt: str = "prompt",
        columns: dict[str, str] | None = None,
        revision: str | None = None,
        max_train: int | None = None,
        max_held_out: int | None = None,
    ) -> None:
        check_limits(held_out, max_train, max_held_out)
        self.path, self.name, self.revision = path, name, revision
        self.prompt, self.columns = prompt, columns
        table = self._load(split)
        # A held-out share needs all texts; otherwise what lies beyond the limit need not be read.
        if isinstance(held_out, str):
            self.held_out = self._read(self._load(held_out), max_held_out)
            train = without_held_out(self._read(table), self.held_out, path, image_or_text)
            self.train = train[:max_train]
        else:
            found = self._read(table)
            self.train, self.held_out = split_prompts(found, held_out, max_train, max_held_out, path, image_or_text)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a small data set of made-up prompts that has the same splits and columns."""
        import datasets

        if Path(arguments["path"]).expanduser().exists():
            return arguments
        from PIL import Image

        held_out, columns = arguments.get("held_out", 0.05), arguments.get("columns") or {}
        texts = [f"a small picture of {what}, number {i}" for i in range(8) for what in ("a cat", "a boat", "a hill")]
        table: dict[str, list[Any]] = {arguments.get("prompt", "prompt"): texts}
        for key, column in columns.items():
            blank = Image.new("RGB", (32, 32), "gray")
            table[column] = [blank] * len(texts) if key == "image" else [text.rpartition(" ")[2] for text in texts]
        splits = [arguments.get("split", "train"), *([held_out] if isinstance(held_out, str) else [])]
        # One of the splits has other texts: what is held out is not trained on.
        parts = {
            split: datasets.Dataset.from_dict({c: v[i :: len(splits)] for c, v in table.items()})
            for i, split in enumerate(splits)
        }
        path = folder / "prompts"
        datasets.DatasetDict(parts).save_to_disk(str(path))
        few = held_out if isinstance(held_out, str) else 4
        return {**arguments, "path": str(path), "name": None, "revision": None, "held_out": few}

    def _load(self, split: str) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                'HuggingFaceDataset needs datasets. Install it with: pip install "genrl[datasets]"'
            ) from error
        folder = Path(self.path).expanduser()
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            saved = datasets.load_from_disk(str(folder))
            if not isinstance(saved, Mapping):
                return saved  # one split, saved alone
            if split not in saved:
                raise ValueError(f"{self.path} has no split {split!r}; its splits are {', '.join(saved)}")
            return saved[split]
        return datasets.load_dataset(self.path, self.name, split=split, revision=self.revision)

    def _read(self, table: Any, limit: int | None = None) -> list[Prompt]:
        wanted = self.columns if self.columns is not None else {c: c for c in table.column_names if c != self.prompt}
        for column in (self.prompt, *wanted.values()):
            if column not in table.column_names:
                raise ValueError(
                    f"{self.path} has no column {column!r}; its columns are {', '.join(table.column_names)}"
                )
        table = table.select_columns(list(dict.fromkeys((self.prompt, *wanted.values()))))
        images = [c for c, feature in table.features.items() if type(feature).__name__ == "Image"]
        for column in images:
            table = table.cast_column(column, type(table.features[column])(decode=False))
        rows = table if limit is None else table.select(range(min(limit, len(table))))
        return [self._entry(row, wanted, images, i) for i, row in enumerate(rows)]

    def _entry(self, row: dict[str, Any], wanted: Mapping[str, str], images: list[str], number: int) -> Prompt:
        text = row[self.prompt]
        if not isinstance(text, str):
            raise ValueError(f"{self.path}: {self.prompt!r} of row {number} is {text!r:.60}; a prompt is a string")
        values = {key: _open(row[c]) if c in images else row[c] for key, c in wanted.items()}
        # A column that has no value in a row is written as None by Arrow.
        return Prompt(text, {key: value for key, value in values.items() if value is not None})


def _open(encoded: dict[str, Any] | None) -> Any:
    """A PIL image that reads its pixels when they are asked for, or the path of a file."""
    if encoded is None:
        return None
    if encoded.get("bytes") is None:
        return encoded["path"]
    from PIL import Image

    return Image.open(io.BytesIO(encoded["bytes"]))
