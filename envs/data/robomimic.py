"""robomimic's HDF5 files: read, and written so that robomimic reads them.

    data                      attrs: env_args (JSON), total
      demo_0                  attrs: num_samples, model_file
        obs/<key>             [T, ...], images height x width x channels
        next_obs/<key>        [T, ...], often left out to save space
        actions, rewards, dones, states
    mask/<filter key>         names of demos

What genrl adds: attrs ``genrl`` of data (JSON), ``seed`` and ``success`` of a demo, ``layout`` of images.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.data.actions import representation_of_robomimic
from genrl.envs.data.episodes import DataError, Demonstrations, Episode
from genrl.envs.data.reading import Extras, Key, Reader, natural_order

name = "robomimic"
description = "robomimic HDF5 (.hdf5, .h5): data/demo_i/{obs,actions,...}"
GYM_TYPE = 2  # robomimic's number for environments with the interface of gym
END_MEANING = "1 where the episode ended or the task succeeded (depends on the file)"


def require_h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError('reading and writing HDF5 files needs h5py: pip install "genrl[data]"') from error
    return h5py


def open_hdf5(path: Path) -> Any:
    """An HDF5 file for reading; DataError if it is none or damaged."""
    h5py = require_h5py()
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"is no readable HDF5 file ({error}); copy it again if it was cut off", path) from error


def is_hdf5(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"
    return False


def detect(path: Path) -> bool:
    if not path.is_file() or not is_hdf5(path):
        return False
    with contextlib.suppress(DataError), open_hdf5(path) as file:
        return "data" in file
    return path.suffix in (".hdf5", ".h5")  # a damaged file: opening it says what is wrong


@contextlib.contextmanager
def open(path: Path) -> Iterator[Reader]:
    with open_hdf5(path) as file:
        yield RobomimicReader(path, file)


class RobomimicReader:
    """See `genrl.envs.data.reading.Reader`."""

    version, action_key = "", "actions"

    def __init__(self, path: Path, file: Any):
        self.path, self.file = path, file
        if not hasattr(file.get("data"), "keys"):
            raise DataError(f"has no group 'data' but {sorted(file)}; it is no robomimic file", path)
        self.data = file["data"]

    def names(self) -> list[str]:
        return sorted((name for name in self.data if hasattr(self.data[name], "keys")), key=natural_order)

    def masks(self) -> dict[str, list[str]]:
        if "mask" not in self.file:
            return {}
        return {key: [_text(entry) for entry in self.file["mask"][key][()]] for key in self.file["mask"]}

    def contents(self) -> list[Key]:
        names = self.names()
        if not names:
            return []
        roles = {"rewards": "reward", "dones": "end", "states": "simulator"}
        found: list[Key] = []
        for entry, item in self.data[names[0]].items():
            if hasattr(item, "keys"):
                for key in item:
                    if entry == "obs":
                        layout = _text(item[key].attrs.get("layout", "auto"))
                        found.append(Key(f"obs/{key}", "observation", key, layout))  # type: ignore[arg-type]
                    elif entry == "next_obs":
                        meaning = "observation after the step; only the last one of an episode is read"
                        found.append(Key(f"next_obs/{key}", "other", meaning=meaning))
                    else:
                        found.append(Key(f"{entry}/{key}", "other"))
            elif entry == "actions":
                found.append(Key(entry, "action"))
            elif entry in roles:
                meaning = END_MEANING if entry == "dones" else ""
                found.append(Key(entry, roles[entry], meaning=meaning))  # type: ignore[arg-type]
            else:
                found.append(Key(entry, "other"))
        return found

    def check(self, name: str) -> None:
        demo = self._demo(name)
        if "obs" not in demo:
            raise DataError(
                f"has no group 'obs' but {sorted(demo)}. Files of recorded states hold no observations: make them with "
                "robomimic's dataset_states_to_obs, or collect with `genrl collect`",
                key="obs",
            )
        declared = demo.attrs.get("num_samples")
        if declared is not None and "actions" in demo and int(declared) != len(demo["actions"]):
            raise DataError(
                f"num_samples is {int(declared)}, but there are {len(demo['actions'])} steps", key="actions"
            )

    def array(self, name: str, key: str) -> np.ndarray:
        demo = self._demo(name)
        if key not in demo or hasattr(demo[key], "keys"):
            raise DataError(
                f"is missing; there are {sorted(demo)} and observations {sorted(demo.get('obs', []))}", key=key
            )
        return demo[key][()]

    def final(self, name: str, key: str) -> np.ndarray | None:
        demo = self._demo(name)
        place = f"next_{key}"  # obs/... -> next_obs/...
        repeated = bool(demo.attrs.get("final_repeated", False))
        return demo[place][-1] if place in demo and len(demo[place]) and not repeated else None

    def extras(self, name: str) -> Extras:
        demo = self._demo(name)
        known = ("num_samples", "seed", "success", "rewards_stored", "terminated_stored", "final_repeated")
        rewards = demo["rewards"][()] if "rewards" in demo and demo.attrs.get("rewards_stored", True) else None
        success = demo.attrs.get("success")
        if success is None and rewards is not None and self._sparse():
            success = bool((rewards > 0).any())
        stored = "dones" in demo and bool(demo.attrs.get("terminated_stored", False))
        return Extras(
            rewards=rewards,
            # robomimic writes dones by three different rules; only genrl's own are known to be terminations.
            terminated=demo["dones"][()] if stored else None,
            success=None if success is None else bool(success),
            seed=int(demo.attrs["seed"]) if "seed" in demo.attrs else None,
            attrs={key: _plain(value) for key, value in demo.attrs.items() if key not in known},
        )

    def states(self, name: str) -> np.ndarray | None:
        demo = self._demo(name)
        return demo["states"][()] if "states" in demo else None

    def meta(self, action_key: str) -> dict[str, Any]:
        env_args = self._env_args()
        meta: dict[str, Any] = dict(json.loads(_text(self.data.attrs.get("genrl", "{}"))))
        if env_args:
            meta.setdefault("env_args", env_args)
        if "action_representation" not in meta:
            representation = representation_of_robomimic(env_args, action_key)
            meta["action_representation"] = representation.to_dict()
            if env_args.get("type") == 1 and representation.frame == "delta":
                meta["action_low"], meta["action_high"] = -1.0, 1.0  # what robosuite's delta controllers accept
        return meta

    def close(self) -> None:
        self.file.close()

    def _demo(self, name: str) -> Any:
        if name not in self.data:
            raise DataError(f"there is no such episode; the file has {len(self.data)}")
        return self.data[name]

    def _env_args(self) -> dict[str, Any]:
        text = _text(self.data.attrs.get("env_args", "{}"))
        try:
            return dict(json.loads(text))
        except (json.JSONDecodeError, TypeError, ValueError) as error:
            raise DataError(f"attribute env_args is no JSON object ({error})", self.path, key="data") from error

    def _sparse(self) -> bool:
        kwargs = self._env_args().get("env_kwargs", {})
        return kwargs.get("reward_shaping") is False


def write_robomimic(
    path: str | Path, demonstrations: Demonstrations, masks: Mapping[str, list[str]] | None = None
) -> Path:
    """Writes demonstrations in robomimic's layout; robomimic's SequenceDataset reads them, and so does genrl, exactly.

    Episodes are called demo_0, demo_1, ... . `next_obs` is observations shifted within the episode; without a final
    observation its last step is repeated and marked (attribute ``final_repeated``). robomimic needs `rewards` and
    `dones`: missing ones are zeros, and a 1 at the end. The file appears under its name only when it is complete.

    Args:
        path: file to make; its folder is created. An existing file is replaced.
        demonstrations: with any meta that is plain JSON; ``env_args`` become robomimic's.
        masks: {filter key: names of episodes in `demonstrations`}.

    Raises:
        DataError: a mask with an unknown episode, meta that is no JSON.
    """
    h5py = require_h5py()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new_names = {episode.name or str(i): f"demo_{i}" for i, episode in enumerate(demonstrations.episodes)}
    meta = {k: v for k, v in demonstrations.meta.items() if k not in ("path", "format", "version", "env_args", "masks")}
    try:
        env_args = json.dumps(demonstrations.meta.get("env_args") or _env_args_of(meta))
        text = json.dumps(meta)
    except TypeError as error:
        raise DataError(f"meta of the demonstrations is not plain JSON ({error})", path, key="meta") from error
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with h5py.File(partial, "w") as file:
            data = file.create_group("data")
            data.attrs["total"] = demonstrations.transitions
            data.attrs["env_args"] = env_args
            data.attrs["genrl"] = text
            for i, episode in enumerate(demonstrations.episodes):
                _write_episode(data.create_group(f"demo_{i}"), episode)
            for key, members in (masks or {}).items():
                if unknown := sorted(set(members) - set(new_names)):
                    raise DataError(
                        f"mask {key!r} names episodes that do not exist: {unknown}", path, key=f"mask/{key}"
                    )
                names = np.array([new_names[member].encode() for member in members], dtype="S")
                file.create_dataset(f"mask/{key}", data=names)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _write_episode(group: Any, episode: Episode) -> None:
    group.attrs["num_samples"] = len(episode)
    following, valid = episode.next_obs()
    for prefix, arrays in (("obs", episode.obs), ("next_obs", following)):
        for key, array in arrays.items():
            image = array.ndim == 4
            stored = np.moveaxis(array, 1, -1) if image else array
            # Pictures are compressed one by one, since windows are read at random places.
            options = {"compression": "gzip", "compression_opts": 1, "chunks": (1, *stored.shape[1:])} if image else {}
            dataset = group.create_dataset(f"{prefix}/{key}", data=stored, **options)
            if image:
                dataset.attrs["layout"] = "HWC"
    group.create_dataset("actions", data=episode.actions)
    rewards = np.zeros(len(episode), np.float32) if episode.rewards is None else episode.rewards
    group.create_dataset("rewards", data=rewards)
    ends = episode.terminated
    dones = np.arange(len(episode)) == len(episode) - 1 if ends is None else ends
    group.create_dataset("dones", data=dones.astype(np.int64))
    if episode.states is not None:
        group.create_dataset("states", data=episode.states)
    group.attrs["rewards_stored"] = episode.rewards is not None
    group.attrs["terminated_stored"] = ends is not None
    group.attrs["final_repeated"] = not bool(valid[-1])
    if episode.success is not None:
        group.attrs["success"] = episode.success
    if episode.seed is not None:
        group.attrs["seed"] = episode.seed
    for key, value in episode.attrs.items():
        group.attrs[key] = value


def _env_args_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    env = dict(meta.get("env") or {})
    return {"env_name": env.get("id", ""), "type": GYM_TYPE, "env_kwargs": env}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else _text(value) if isinstance(value, bytes) else value
