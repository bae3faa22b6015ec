"""What a format's reader offers, and how its arrays become an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from genrl.envs.data.convert import Layout, to_actions, to_float32, to_observation
from genrl.envs.data.episodes import DataError, Episode

Role = Literal["observation", "action", "reward", "end", "simulator", "other"]
MEANINGS: dict[str, str] = {
    "observation": "observation, input of a policy",
    "action": "action, what a policy predicts",
    "reward": "reward of the step",
    "end": "how the episode ended",
    "simulator": "state of the simulator: restores a scene, is never an input of a policy",
    "other": "not read",
}


@dataclass(frozen=True)
class Key:
    """One array of a file.

    Args:
        name: in the file. role: what it is to genrl. as_name: the observation's name in genrl. layout: of its images,
            where the format declares it. meaning: overrides the role's own description.
    """

    name: str
    role: Role
    as_name: str = ""
    layout: Layout = "auto"
    meaning: str = ""

    @property
    def describe(self) -> str:
        return self.meaning or MEANINGS[self.role]


@dataclass(frozen=True)
class Extras:
    """What an episode has besides observations and actions; see `Episode`."""

    rewards: np.ndarray | None = None
    terminated: np.ndarray | None = None
    success: bool | None = None
    seed: int | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)


class Reader(Protocol):
    """An open file or folder of one format. Arrays are read when asked for, one episode and key at a time.

    Attributes:
        path: what was opened. version: of the format, as text; "" where it has none. action_key: the array of actions.
    """

    path: Path
    version: str
    action_key: str

    def names(self) -> list[str]:
        """Episodes in the order of the file."""
        ...

    def masks(self) -> dict[str, list[str]]:
        """Named subsets of the episodes; empty where the format has none."""
        ...

    def contents(self) -> list[Key]:
        """All arrays of the first episode."""
        ...

    def check(self, name: str) -> None:
        """Raises DataError for what is wrong with an episode beyond its arrays (lengths declared, time stamps)."""
        ...

    def array(self, name: str, key: str) -> np.ndarray:
        """[T, ...] as stored, time first. DataError if the episode lacks it."""
        ...

    def final(self, name: str, key: str) -> np.ndarray | None:
        """The observation after the last action, as stored, or None."""
        ...

    def extras(self, name: str) -> Extras:
        """Rewards and the like."""
        ...

    def states(self, name: str) -> np.ndarray | None:
        """States of the simulator, [T, S], or None."""
        ...

    def meta(self, action_key: str) -> dict[str, Any]:
        """Plain JSON values on where the data come from, see `Demonstrations`."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Format(Protocol):
    """How a format is recognised and opened."""

    name: str
    description: str

    def detect(self, path: Path) -> bool:
        """Whether the path is of this format, from names and headers alone."""
        ...

    def open(self, path: Path) -> AbstractContextManager[Reader]:
        """DataError if the path is not readable as this format, or of a version that is not read."""
        ...


def select_keys(reader: Reader, obs: Sequence[str] | None, rename: Mapping[str, str]) -> dict[str, Key]:
    """{name in genrl: key of the file} for the observations that are asked for, in that order; all if `obs` is None.

    An entry of `obs` is a name in genrl (after renaming) or in the file.

    Raises:
        DataError: an unknown name, listing those there are; two keys of one name.
    """
    known = [key for key in reader.contents() if key.role == "observation"]
    names = {key.name: rename.get(key.name, rename.get(key.as_name, key.as_name or key.name)) for key in known}
    if unknown := sorted(old for old in rename if not any(old in (key.name, key.as_name) for key in known)):
        raise DataError(f"rename names {unknown}; the observations are {sorted(names)}", reader.path)
    chosen: dict[str, Key] = {}
    wanted: Sequence[str] = list(names.values()) if obs is None else obs
    for name in wanted:
        matches = [key for key in known if name in (names[key.name], key.name, key.as_name)]
        if not matches:
            hint = "states of the simulator are no observations; " if name == "states" else ""
            raise DataError(
                f"there is no observation {name!r}; {hint}choose from {', '.join(names.values())}", reader.path
            )
        exact = [key for key in matches if names[key.name] == name] or matches
        if len(exact) > 1:
            both = [key.name for key in exact]
            raise DataError(f"{both} would all be called {name!r}; tell them apart with rename: {{...}}", reader.path)
        chosen[names[exact[0].name]] = exact[0]
    if not chosen:
        raise DataError("no observations are chosen; name at least one in obs=[...]", reader.path)
    return chosen


def read_episode(
    reader: Reader,
    name: str,
    selected: Mapping[str, Key],
    action_key: str,
    layout: Layout = "auto",
    simulator_states: bool = False,
) -> Episode:
    """One episode in genrl's form, with only the observations that are selected.

    Raises:
        DataError: for anything that is wrong with it; the file and the episode are named.
    """
    try:
        reader.check(name)
        obs, final = {}, {}
        for new_name, key in selected.items():
            declared = key.layout if layout == "auto" else layout
            array = reader.array(name, key.name)
            if not len(array):
                raise DataError("the episode has no steps", key=key.name)
            last = reader.final(name, key.name)
            joined = array if last is None else np.concatenate([array, np.asarray(last, array.dtype)[None]])
            converted = to_observation(joined, key.name, declared)  # together, so that both are converted alike
            obs[new_name] = converted[: len(array)]
            if last is not None:
                final[new_name] = converted[-1]
        extras = reader.extras(name)
        states = reader.states(name) if simulator_states else None
        return Episode(
            obs=obs,
            actions=to_actions(reader.array(name, action_key)),
            rewards=None if extras.rewards is None else _numbers(extras.rewards, "rewards"),
            terminated=None if extras.terminated is None else np.asarray(extras.terminated).reshape(-1).astype(bool),
            success=extras.success,
            name=name,
            seed=extras.seed,
            final_obs=final if len(final) == len(obs) else None,
            states=None if states is None else np.asarray(states, dtype=np.float64),
            attrs=extras.attrs,
        )
    except DataError as error:
        raise error.located(reader.path, name) from error
    except (OSError, KeyError, EOFError) as error:
        raise DataError(f"cannot be read ({type(error).__name__}: {error})", reader.path, name) from error


def _numbers(array: np.ndarray, key: str) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind not in "fiub":
        raise DataError(f"dtype {array.dtype}; expected one number a step", key=key)
    array = to_float32(array, key)
    return array.reshape(len(array), -1)[:, 0] if array.ndim > 1 else array


def natural_order(name: str) -> tuple[object, ...]:
    """Sorts demo_2 before demo_10."""
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits) if digits else -1
