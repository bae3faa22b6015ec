"""Replay buffers in zarr, formats 2 and 3, as folder or zip: those of Diffusion Policy, DP3 and their relatives.

data/<key>            [N, ...]  steps of all episodes in a row: state, action, img, point_cloud, ...
meta/episode_ends     [E]       where each episode ends, exclusive
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.data.episodes import DataError
from genrl.envs.data.reading import Extras, Key, Reader

name = "zarr"
description = "zarr replay buffer (folder or .zip): data/*, meta/episode_ends"
ENDS = "meta/episode_ends"
HEADERS = (".zarray", "zarr.json")  # of an array in format 2 and 3
ACTIONS, REWARDS = ("action", "actions"), ("reward", "rewards")
FLAGS = ("done", "dones", "terminal", "terminals", "success")
NAMES = {"img": "image", "point_cloud": "points"}


def detect(path: Path) -> bool:
    if path.is_dir():
        return (path / "data").is_dir() and any((path / ENDS / header).is_file() for header in HEADERS)
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                return any(f"{ENDS}/{header}" in file.namelist() for header in HEADERS)
    return path.suffix == ".zarr" or path.name.endswith(".zarr.zip")


@contextlib.contextmanager
def open(path: Path) -> Iterator[Reader]:
    try:
        import zarr
    except ImportError as error:
        raise ImportError('replay buffers in zarr need zarr: pip install "genrl[data]"') from error
    if path.is_file() and not zipfile.is_zipfile(path):
        raise DataError("is no zip file; a zarr replay buffer is a folder or a .zip, copied completely", path)
    store = None
    try:
        try:
            store = zarr.storage.ZipStore(str(path), mode="r") if path.is_file() else None
            root = zarr.open_group(store if store is not None else str(path), mode="r")
            reader = ZarrReader(path, root)
        except DataError:
            raise
        except Exception as error:  # zarr's versions share no class of errors
            third = (path / "zarr.json").is_file() and int(zarr.__version__.split(".")[0]) < 3
            remedy = "format 3 needs zarr >= 3: pip install -U zarr" if third else "copy it again if it is incomplete"
            raise DataError(f"is no readable zarr group ({type(error).__name__}: {error}); {remedy}", path) from error
        yield reader
    finally:
        if store is not None:
            store.close()


class ZarrReader:
    """See `genrl.envs.data.reading.Reader`."""

    def __init__(self, path: Path, root: Any):
        self.path, self.root = path, root
        self.version = str(getattr(getattr(root, "metadata", None), "zarr_format", 2))
        for place in ("data", ENDS):
            if place not in root:
                raise DataError(f"is missing; a replay buffer has data/* and {ENDS}", path, key=place)
        self.data = root["data"]
        self.ends = np.asarray(root[ENDS][:]).reshape(-1)
        if self.ends.dtype.kind not in "iu":
            raise DataError(f"dtype {self.ends.dtype}; expected whole numbers", path, key=ENDS)
        self.starts = np.concatenate([np.zeros(1, self.ends.dtype), self.ends[:-1]])
        if len(self.ends) and (np.diff(self.ends.astype(np.int64), prepend=0) < 0).any():
            raise DataError("must not decrease: each entry is where an episode ends", path, key=ENDS)
        self.arrays = sorted(key for key in self.data if hasattr(self.data[key], "shape"))
        self.action_key = next((key for key in ACTIONS if key in self.arrays), ACTIONS[0])
        self._note = ""
        for key in self.arrays:
            steps, needed = self.data[key].shape[0], int(self.ends[-1]) if len(self.ends) else 0
            if steps < needed:
                raise DataError(f"has {steps} steps, but the last episode ends at {needed}", path, key=f"data/{key}")
            if steps > needed:
                # An interrupted recording; Diffusion Policy's own buffer ignores it in the same way.
                self._note = f"{steps - needed} steps after the last episode are left out"

    def names(self) -> list[str]:
        return [str(i) for i in range(len(self.ends))]

    def masks(self) -> dict[str, list[str]]:
        return {}

    def contents(self) -> list[Key]:
        found = []
        for key in self.arrays:
            if key in ACTIONS:
                found.append(Key(key, "action"))
            elif key in REWARDS:
                found.append(Key(key, "reward"))
            elif key in FLAGS:
                found.append(Key(key, "end"))
            else:
                found.append(Key(key, "observation", NAMES.get(key, key)))
        return found

    def check(self, name: str) -> None:
        """Lengths were checked when the buffer was opened; an empty episode is found when its arrays are."""

    def array(self, name: str, key: str) -> np.ndarray:
        if key not in self.arrays:
            raise DataError(f"is missing; there are {', '.join(self.arrays)}", key=f"data/{key}")
        index = int(name)
        try:
            return np.asarray(self.data[key][int(self.starts[index]) : int(self.ends[index])])
        except Exception as error:  # of a codec, a missing file or a damaged one
            raise DataError(
                f"cannot be read ({type(error).__name__}: {error}); copy it again", key=f"data/{key}"
            ) from error

    def final(self, name: str, key: str) -> np.ndarray | None:
        return None

    def extras(self, name: str) -> Extras:
        rewards = next((self.array(name, key) for key in REWARDS if key in self.arrays), None)
        success = bool(np.any(self.array(name, "success"))) if "success" in self.arrays else None
        return Extras(rewards=rewards, success=success)

    def states(self, name: str) -> np.ndarray | None:
        return None

    def meta(self, action_key: str) -> dict[str, Any]:
        return {"notes": [self._note]} if self._note else {}

    def close(self) -> None:
        """The store is closed by `open`."""
