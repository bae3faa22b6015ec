"""Minari data sets in HDF5 (read directly) and Arrow (read by Minari itself).

metadata.json                       spaces, data_format, env_spec
main_data.hdf5 / episode_i          attrs: total_steps, seed
  observations [T + 1, ...]         one more than actions; nested groups for dictionaries
  actions, rewards, terminations, truncations, infos
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.data.episodes import DataError
from genrl.envs.data.reading import Extras, Key, Reader, natural_order
from genrl.envs.data.robomimic import open_hdf5

name = "minari"
description = "Minari (folder with data/main_data.hdf5, Arrow or Parquet): observations, actions, terminations"
TABLES = ("arrow", "parquet")
MAIN_FILE, METADATA = "main_data.hdf5", "metadata.json"
SUCCESS = ("infos/success", "infos/is_success")
ENDS = {
    "terminations": "True where the task ended: nothing follows",
    "truncations": "True where a limit cut the episode: something would follow",
}


def detect(path: Path) -> bool:
    return _folder(path) is not None


@contextlib.contextmanager
def open(path: Path) -> Iterator[Reader]:
    folder = _folder(path)
    if folder is None:
        raise DataError(f"is no Minari data set: there is no {METADATA} with {MAIN_FILE} or tables beside it", path)
    file = folder / METADATA
    try:
        metadata = dict(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise DataError(f"is no JSON object ({error})", file) from error
    form = metadata.get("data_format", "hdf5")
    if form == "hdf5":
        with open_hdf5(folder / MAIN_FILE) as episodes:
            yield MinariReader(path, metadata, episodes)
    elif form in TABLES:
        yield MinariReader(path, metadata, TableEpisodes(folder, form, metadata))
    else:
        raise DataError(
            f"stores its episodes as {form!r}; known are hdf5, {', '.join(TABLES)}", file, key="data_format"
        )


class TableEpisode(dict[str, Any]):
    """One episode as nested dictionaries of arrays, with the attributes that HDF5 has."""

    attrs: dict[str, Any]


class TableEpisodes(Mapping[str, Any]):
    """Episodes of an Arrow or Parquet data set; the last one read is kept."""

    def __init__(self, folder: Path, form: str, metadata: Mapping[str, Any]):
        try:
            import pyarrow.dataset  # noqa: F401
        except ImportError as error:
            raise ImportError(f'Minari\'s {form} files need pyarrow: pip install "genrl[data]"') from error
        self.folder, self.form = folder, form
        self.spaces = {"observations": metadata.get("observation_space"), "actions": metadata.get("action_space")}
        self.numbers = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
        self._last: tuple[str, TableEpisode] | None = None

    def __getitem__(self, name: str) -> TableEpisode:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._read(self.folder / name.rpartition("_")[2]))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return (f"episode_{number}" for number in self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def _read(self, folder: Path) -> TableEpisode:
        import pyarrow
        import pyarrow.dataset as dataset

        try:
            files = dataset.dataset(str(folder), format=self.form, ignore_prefixes=["_", ".", METADATA])
            table = files.to_table().combine_chunks()
            attrs = json.loads((folder / METADATA).read_text())
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"cannot be read ({error}); copy it again if it was cut off", folder) from error
        episode = TableEpisode()
        episode.attrs = attrs
        for key in table.column_names:
            space = json.loads(self.spaces.get(key) or "{}")
            values = _column(table[key].combine_chunks(), space)
            episode[key] = values if key in ("observations", "infos") else _cut(values, int(attrs["total_steps"]))
        return episode


class MinariReader:
    """See `genrl.envs.data.reading.Reader`; `episodes` maps names to groups or dictionaries."""

    action_key = "actions"

    def __init__(self, path: Path, metadata: dict[str, Any], episodes: Any):
        self.path, self.metadata, self.episodes = path, metadata, episodes
        self.version = str(metadata.get("minari_version", ""))
        self.observations = self._space("observation_space")

    def names(self) -> list[str]:
        return sorted(self.episodes, key=natural_order)

    def masks(self) -> dict[str, list[str]]:
        return {}

    def contents(self) -> list[Key]:
        names = self.names()
        if not names:
            return []
        episode, found = self.episodes[names[0]], []
        for key in _leaves(episode):
            top, _, inner = key.partition("/")
            if top == "observations":
                space = _inner_space(self.observations, inner)
                if space.get("type") == "Text":
                    found.append(Key(key, "other", meaning="text, not read"))
                    continue
                picture = len(space.get("shape", ())) == 3 and space.get("dtype") == "uint8"
                found.append(Key(key, "observation", inner.replace("/", ".") or ("image" if picture else "state")))
            elif top == "actions":
                found.append(Key(key, "action"))
            elif top == "rewards":
                found.append(Key(key, "reward"))
            elif top in ENDS:
                found.append(Key(key, "end", meaning=ENDS[top]))
            elif top != "id":
                found.append(Key(key, "end" if key in SUCCESS else "other"))
        return found

    def check(self, name: str) -> None:
        declared = getattr(self.episodes[name], "attrs", {}).get("total_steps")
        rewards = _leaf(self.episodes[name], "rewards")
        if declared is not None and rewards is not None and int(declared) != len(rewards):
            raise DataError(f"total_steps is {int(declared)}, but there are {len(rewards)} rewards", key="rewards")

    def array(self, name: str, key: str) -> np.ndarray:
        stored = self._stored(name, key)
        return stored[: self._steps(name)] if key.startswith("observations") else stored

    def final(self, name: str, key: str) -> np.ndarray | None:
        stored, steps = self._stored(name, key), self._steps(name)
        if len(stored) not in (steps, steps + 1):
            raise DataError(f"{len(stored)} observations for {steps} actions; expected one more than actions", key=key)
        return stored[steps] if len(stored) > steps else None

    def extras(self, name: str) -> Extras:
        episode = self.episodes[name]
        success = next((flags for key in SUCCESS if (flags := _leaf(episode, key)) is not None), None)
        seed = getattr(episode, "attrs", {}).get("seed")
        return Extras(
            rewards=_whole(_leaf(episode, "rewards")),
            terminated=_whole(_leaf(episode, "terminations")),
            success=None if success is None else bool(np.any(_whole(success))),
            seed=None if seed is None else int(seed),
        )

    def states(self, name: str) -> np.ndarray | None:
        return None

    def meta(self, action_key: str) -> dict[str, Any]:
        meta: dict[str, Any] = {"dataset_id": self.metadata.get("dataset_id")}
        space = _inner_space(self._space("action_space"), action_key.partition("/")[2])
        if space.get("type") == "Box":
            meta["action_low"], meta["action_high"] = space["low"], space["high"]
        with contextlib.suppress(TypeError, ValueError):
            meta["env_spec"] = json.loads(self.metadata["env_spec"]) if self.metadata.get("env_spec") else None
        return meta

    def close(self) -> None:
        """The file is closed by `open`."""

    def _space(self, key: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self.metadata.get(key, "{}")))
        except (TypeError, ValueError) as error:
            raise DataError(f"is no space in JSON ({error})", self.path, key=key) from error

    def _steps(self, name: str) -> int:
        actions = _leaf(self.episodes[name], "actions")
        if actions is None:
            raise DataError("is missing", key="actions")
        while hasattr(actions, "keys"):  # dictionaries of actions all have one entry a step
            actions = next(iter(actions.values()))
        return len(actions)

    def _stored(self, name: str, key: str) -> np.ndarray:
        leaf = _leaf(self.episodes[name], key)
        if leaf is None:
            raise DataError(f"is missing; there are {', '.join(_leaves(self.episodes[name]))}", key=key)
        if hasattr(leaf, "keys"):
            raise DataError(f"is a group of {sorted(leaf)}; choose one, for instance {key}/{sorted(leaf)[0]}", key=key)
        stored = np.asarray(leaf[()] if hasattr(leaf, "attrs") else leaf)
        shape = tuple(_inner_space(self.observations, key.partition("/")[2]).get("shape", ()))
        compressed = key.startswith("observations") and len(shape) in (2, 3) and stored.shape[1:] != shape
        return _pictures(stored, key) if compressed else stored


def _folder(path: Path) -> Path | None:
    """The folder with metadata.json, given itself, its parent (the data set) or the HDF5 file in it."""
    for folder in (path, path / "data", path.parent if path.name == MAIN_FILE else path):
        if (folder / METADATA).is_file():
            with contextlib.suppress(OSError, ValueError):
                if (folder / MAIN_FILE).is_file() or '"data_format"' in (folder / METADATA).read_text():
                    return folder
    return None


def _leaf(episode: Any, key: str) -> Any:
    """The entry at a path of names, or None."""
    for part in key.split("/"):
        if not hasattr(episode, "keys") or part not in episode:
            return None
        episode = episode[part]
    return episode


def _leaves(episode: Any, prefix: str = "") -> list[str]:
    found = []
    for key in episode:
        item = episode[key]
        found += _leaves(item, f"{prefix}{key}/") if hasattr(item, "keys") else [f"{prefix}{key}"]
    return found


def _inner_space(space: dict[str, Any], inner: str) -> dict[str, Any]:
    for part in filter(None, inner.split("/")):
        spaces = space.get("subspaces", {})
        if isinstance(spaces, list):
            spaces = {f"_index_{i}": item for i, item in enumerate(spaces)}
        space = spaces.get(part, {})
    return space


def _column(column: Any, space: dict[str, Any]) -> Any:
    """A column as an array [rows, *shape], bytes as objects, a struct as a dictionary."""
    if hasattr(column, "field"):
        fields = {column.type.field(i).name: column.field(i) for i in range(column.type.num_fields)}
        tuples = isinstance(space.get("subspaces"), list)
        return {
            f"_index_{name}" if tuples else name: _column(
                values, _inner_space(space, f"_index_{name}" if tuples else name)
            )
            for name, values in fields.items()
        }
    rows = len(column)
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        column = column.flatten()
    values = column.to_numpy(zero_copy_only=False)
    shape = space.get("shape")
    return values.reshape(rows, *shape) if shape and len(values) != rows else values


def _cut(values: Any, steps: int) -> Any:
    return {name: _cut(inner, steps) for name, inner in values.items()} if isinstance(values, dict) else values[:steps]


def _whole(stored: Any) -> np.ndarray | None:
    return None if stored is None else np.asarray(stored[()] if hasattr(stored, "attrs") else stored)


def _pictures(stored: np.ndarray, key: str) -> np.ndarray:
    """Minari keeps images as JPEG, one array of bytes a step."""
    from PIL import Image, UnidentifiedImageError

    try:
        return np.stack([np.asarray(Image.open(io.BytesIO(bytes(data)))) for data in stored])
    except (UnidentifiedImageError, OSError, ValueError, TypeError) as error:
        raise DataError(f"pictures cannot be decoded ({error})", key=key) from error
