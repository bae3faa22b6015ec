"""OGBench's .npz files: flat arrays over all trajectories.

    observations, actions [N, ...]   terminals [N]: 1 at the last step of a trajectory
    rewards, masks [N]               of single-task data: mask 0 where the task is solved
    qpos, qvel, button_states [N]    of the simulator

`terminals` says where a trajectory was cut, `masks` where its return ends. They differ: trajectories go on after the
goal, so the steps that genrl calls terminated are those with mask 0, and without masks nothing is known of success.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.data.episodes import DataError
from genrl.envs.data.reading import Extras, Key, Reader

name = "ogbench"
description = "OGBench (.npz): observations, actions, terminals"
NEEDED = ("observations", "actions", "terminals")
SIMULATOR = ("qpos", "qvel", "button_states")
MEANINGS = {
    "terminals": "1 at the last step of a trajectory: where it was cut, not where it succeeded",
    "masks": "0 where the task is solved",
    "next_observations": "observation after the step; only the last one of a trajectory is read",
    "valids": "0 at the last step of a trajectory, which has no next observation",
}


def detect(path: Path) -> bool:
    if not path.is_file():
        return False
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                return {"observations.npy", "actions.npy"} <= set(file.namelist())
    return path.suffix == ".npz"


@contextlib.contextmanager
def open(path: Path) -> Iterator[Reader]:
    try:
        file = np.load(path, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"is no readable .npz file ({error}); copy it again if it was cut off", path) from error
    with file:
        yield OGBenchReader(path, file)


class OGBenchReader:
    """See `genrl.envs.data.reading.Reader`."""

    version, action_key = "", "actions"

    def __init__(self, path: Path, file: Any):
        self.path, self.file = path, file
        if missing := [key for key in NEEDED if key not in file]:
            raise DataError(f"is missing; the file has {', '.join(file)}", path, key=missing[0])
        self._arrays: dict[str, np.ndarray] = {}
        # Data prepared by ogbench with compact_dataset=True mark two steps as terminal; `valids` tell them apart.
        ends = self._array("valids") == 0 if "valids" in file else self._array("terminals") != 0
        if ends.ndim != 1:
            raise DataError(f"has shape {ends.shape}; expected [N]", path, key="terminals")
        self.ends = np.flatnonzero(ends) + 1
        if len(ends) and (not len(self.ends) or self.ends[-1] != len(ends)):
            self.ends = np.append(self.ends, len(ends))  # the last trajectory is not marked as ended
        self.starts = np.concatenate([[0], self.ends[:-1]]).astype(int)
        self.steps = len(ends)

    def names(self) -> list[str]:
        return [str(i) for i in range(len(self.ends))]

    def masks(self) -> dict[str, list[str]]:
        return {}

    def contents(self) -> list[Key]:
        found = []
        for key in self.file:
            if key == "observations":
                picture = self._array(key).dtype == np.uint8 and self._array(key).ndim == 4
                found.append(Key(key, "observation", "image" if picture else "state"))
            elif key == "actions":
                found.append(Key(key, "action"))
            elif key == "rewards":
                found.append(Key(key, "reward"))
            elif key in SIMULATOR:
                found.append(Key(key, "simulator"))
            else:
                role = "end" if key in ("terminals", "masks") else "other"
                found.append(Key(key, role, meaning=MEANINGS.get(key, "")))  # type: ignore[arg-type]
        return found

    def check(self, name: str) -> None:
        for key in self.file:
            if key in (*NEEDED, "rewards", "masks") and len(self._array(key)) != self.steps:
                raise DataError(f"{len(self._array(key))} steps, but terminals has {self.steps}", key=key)

    def array(self, name: str, key: str) -> np.ndarray:
        if key not in self.file:
            raise DataError(f"is missing; the file has {', '.join(self.file)}", key=key)
        return self._array(key)[self._slice(name)]

    def final(self, name: str, key: str) -> np.ndarray | None:
        if key != "observations" or "next_observations" not in self.file:
            return None
        return self._array("next_observations")[self._slice(name)][-1]

    def extras(self, name: str) -> Extras:
        solved = self.array(name, "masks") == 0 if "masks" in self.file else None
        return Extras(
            rewards=self.array(name, "rewards") if "rewards" in self.file else None,
            terminated=solved,
            success=None if solved is None else bool(solved.any()),
        )

    def states(self, name: str) -> np.ndarray | None:
        parts = [self.array(name, key) for key in SIMULATOR if key in self.file]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1) if parts else None

    def meta(self, action_key: str) -> dict[str, Any]:
        meta: dict[str, Any] = {"action_low": -1.0, "action_high": 1.0}  # of every environment of OGBench
        # cube-single-play-v0 holds data of the environment cube-single-v0
        kinds, task = "play|noisy|navigate|stitch|explore", r"-singletask(?:-task\d+)?"
        if match := re.fullmatch(rf"(.+?)-(?:{kinds})({task})?-(v\d+)(?:-val)?", self.path.stem):
            meta["env"] = {"id": f"ogbench/{match[1]}{match[2] or ''}-{match[3]}"}
        return meta

    def close(self) -> None:
        """The file is closed by `open`."""

    def _slice(self, name: str) -> slice:
        index = int(name)
        return slice(int(self.starts[index]), int(self.ends[index]))

    def _array(self, key: str) -> np.ndarray:
        """An array of the file, decompressed once."""
        if key not in self._arrays:
            try:
                self._arrays[key] = np.asarray(self.file[key])
            except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
                raise DataError(f"cannot be read ({error})", self.path, key=key) from error
        return self._arrays[key]
