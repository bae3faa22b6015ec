"""From a path to demonstrations, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from genrl.envs.data.actions import ActionRepresentation, OutOfBounds, apply_bounds
from genrl.envs.data.convert import Layout
from genrl.envs.data.episodes import DataError, Demonstrations, Episode, validation_indices
from genrl.envs.data.formats import FormatName, open_reader
from genrl.envs.data.reading import Key, Reader, read_episode, select_keys

BadEpisodes = Literal["stop", "skip"]


def open_demonstrations(
    path: str | Path,
    format: FormatName = "auto",
    obs: Sequence[str] | None = None,
    max_episodes: int | None = None,
    filter_key: str | None = None,
    *,
    rename: Mapping[str, str] | None = None,
    action_key: str | None = None,
    action_representation: Mapping[str, str] | None = None,
    action_bounds: tuple[float, float] | None = None,
    out_of_bounds: OutOfBounds = "stop",
    image_layout: Layout = "auto",
    bad_episodes: BadEpisodes = "stop",
    simulator_states: bool = False,
    episodes: Sequence[str] | None = None,
) -> Demonstrations:
    """Reads demonstrations of any known format into memory; every fault of the file is found here and not in training.

    Args:
        path: file or folder.
        format: ``"auto"`` recognises robomimic, LeRobot, Minari, zarr and OGBench.
        obs: observations to read, by their name in genrl or in the file, in the order in which a policy gets them; None
            reads all. Only these are decoded.
        max_episodes: read exactly this many, the first of the file (of the filter key).
        filter_key: named subset: a mask of robomimic, a split of LeRobot.
        rename: {name in the file: name in genrl}, for an environment that calls its observations otherwise.
        action_key: which array holds the actions; None takes the format's own (robomimic: ``actions``).
        action_representation: overrides what the file says, {"frame": ..., "rotation": ...}.
        action_bounds: least and greatest action that the environment accepts, where the file does not say.
        out_of_bounds: what to do with actions outside: ``"stop"``, ``"clip"`` or ``"rescale"``, see `apply_bounds`.
        image_layout: ``"HWC"`` or ``"CHW"`` where shapes alone do not say.
        bad_episodes: ``"skip"`` leaves broken episodes out and lists them in the notes; ``"stop"`` is an error.
        simulator_states: also read the states of the simulator.
        episodes: names of the episodes to read, in this order, instead of all.

    Returns:
        Demonstrations; `meta` says where they come from and what was done to them.

    Raises:
        FileNotFoundError: nothing is at the path.
        DataError: anything that is wrong with the data, with file, episode and key.
    """
    for name, value, allowed in (("bad_episodes", bad_episodes, BadEpisodes), ("image_layout", image_layout, Layout)):
        if value not in get_args(allowed):
            raise ValueError(f"{name} = {value!r} is unknown; choose one of {', '.join(get_args(allowed))}")
    if out_of_bounds not in get_args(OutOfBounds):
        raise ValueError(
            f"out_of_bounds = {out_of_bounds!r} is unknown; choose one of {', '.join(get_args(OutOfBounds))}"
        )
    if max_episodes is not None and max_episodes < 1:
        raise ValueError(f"max_episodes = {max_episodes} must be at least 1; null reads all")
    if isinstance(obs, str):
        raise ValueError(f'obs = {obs!r} must be a list of names, for instance ["{obs}"]')
    with open_reader(path, format) as (format_name, reader):
        try:
            names = choose_episodes(reader, filter_key) if episodes is None else list(episodes)
            selected = select_keys(reader, obs, rename or {})
            used_key = action_key or reader.action_key
            read, skipped = _read_all(
                reader, names, selected, used_key, max_episodes, image_layout, bad_episodes, simulator_states
            )
            meta = reader.meta(used_key)
        except (OSError, KeyError, AttributeError, TypeError) as error:
            # A file of the right kind with something else inside than the format has there.
            raise DataError(
                f"does not hold what {format_name} data hold ({type(error).__name__}: {error})", path
            ) from error
        version = reader.version
    meta |= {"path": str(path), "format": format_name, "version": version, "filter_key": filter_key}
    meta |= {"observations": {name: key.name for name, key in selected.items()}, "action_key": used_key}
    stated = action_representation or meta.get("action_representation")
    meta["action_representation"] = ActionRepresentation.from_dict(stated).to_dict()
    notes = list(meta.get("notes", ()))
    if skipped:
        notes.append(f"broken episodes left out ({len(skipped)}): {'; '.join(skipped)}")
    data = Demonstrations.of(read, {**meta, "notes": notes})
    return _within_bounds(data, action_bounds, out_of_bounds)


def choose_episodes(reader: Reader, filter_key: str | None) -> list[str]:
    """Names of all episodes, or of those of a filter key, in the order of the file.

    Raises:
        DataError: no episodes, an absent filter key (existing ones are listed), or one that names unknown episodes.
    """
    names = reader.names()
    if not names:
        raise DataError("there are no episodes in it", reader.path)
    if filter_key is None:
        return names
    masks = reader.masks()
    if filter_key not in masks:
        there = ", ".join(sorted(masks)) or "none"
        raise DataError(
            f"there is no filter key {filter_key!r}; existing ones: {there}. Leave filter_key out and set "
            "validation_fraction to split by seed, or make one with robomimic's split_train_val.py",
            reader.path,
            key=f"mask/{filter_key}",
        )
    members = set(masks[filter_key])
    if unknown := sorted(members - set(names)):
        raise DataError(f"names episodes that do not exist: {unknown[:5]}", reader.path, key=f"mask/{filter_key}")
    if not members:
        raise DataError("selects no episode", reader.path, key=f"mask/{filter_key}")
    return [name for name in names if name in members]


@dataclass(frozen=True)
class DemonstrationFile:
    """Demonstrations from a file or folder: the part `data:` of a configuration.

    Args:
        path: robomimic, LeRobot, Minari, zarr or OGBench data.
        format: see `open_demonstrations`, as are the next nine arguments.
        obs: observations to read.
        max_episodes: number of *training* episodes, exactly; validation episodes are taken from the others.
        filter_key: named subset to train on.
        rename: {name in the file: name in genrl}.
        action_key: array of the actions.
        action_representation: {"frame": ..., "rotation": ...}.
        action_bounds: least and greatest action of the environment.
        out_of_bounds: ``"stop"``, ``"clip"`` or ``"rescale"``.
        image_layout: ``"auto"``, ``"HWC"`` or ``"CHW"``.
        bad_episodes: ``"stop"`` or ``"skip"``.
        validation_fraction: share of the episodes that is held out, drawn by `split_seed`; at least one. 0 for none.
        validation_filter_key: named subset that is held out instead.
        split_seed: of the draw.

    Raises:
        ValueError: a fraction outside [0, 1), or both ways to hold out episodes.

    Example:
        >>> DemonstrationFile("lift.hdf5", obs=["robot0_eef_pos"], max_episodes=10, validation_fraction=0.02).split_seed
        0
    """

    path: str
    format: FormatName = "auto"
    obs: list[str] | None = None
    max_episodes: int | None = None
    filter_key: str | None = None
    rename: dict[str, str] | None = None
    action_key: str | None = None
    action_representation: dict[str, str] | None = None
    action_bounds: tuple[float, float] | None = None
    out_of_bounds: OutOfBounds = "stop"
    image_layout: Layout = "auto"
    bad_episodes: BadEpisodes = "stop"
    validation_fraction: float = 0.0
    validation_filter_key: str | None = None
    split_seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction = {self.validation_fraction} must lie in [0, 1); 0 holds nothing out"
            )
        if self.validation_fraction and self.validation_filter_key:
            raise ValueError("give validation_fraction or validation_filter_key, not both")

    def load(self) -> Demonstrations:
        """The training episodes."""
        return self.load_split()[0]

    def load_split(self) -> tuple[Demonstrations, Demonstrations | None]:
        """(training, validation) episodes; None where nothing is held out. The two never share an episode.

        Raises:
            DataError: see `open_demonstrations`; also if fewer than `max_episodes` are left for training.
        """
        with open_reader(self.path, self.format) as (_, reader):
            names = choose_episodes(reader, self.filter_key)
            held_out: list[str] = []
            if self.validation_filter_key:
                held_out = choose_episodes(reader, self.validation_filter_key)
                if shared := sorted(set(names) & set(held_out)) if self.filter_key else []:
                    both = f"{self.filter_key!r} and {self.validation_filter_key!r}"
                    raise DataError(f"filter keys {both} share episodes {shared[:5]}", self.path)
            elif self.validation_fraction:
                held_out = [names[i] for i in validation_indices(len(names), self.validation_fraction, self.split_seed)]
        training = [name for name in names if name not in set(held_out)]
        if not training:
            raise DataError("all episodes are held out for validation; none are left for training", self.path)
        if self.max_episodes is not None and len(training) < self.max_episodes:
            raise DataError(
                f"max_episodes = {self.max_episodes} training episodes were asked for; there are {len(names)}, of "
                f"which {len(names) - len(training)} are held out for validation",
                self.path,
            )
        if not held_out:
            return self._open(training, self.max_episodes), None
        if self.out_of_bounds == "rescale":
            return self._rescaled(training, held_out)
        return self._open(training, self.max_episodes), self._open(held_out, None)

    def _rescaled(self, training: list[str], held_out: list[str]) -> tuple[Demonstrations, Demonstrations]:
        """Both parts with one factor, or their losses would be in different units."""
        together = self._open([*training, *held_out], None)
        place = {episode.name: i for i, episode in enumerate(together.episodes)}
        train, rest = ([place[name] for name in names if name in place] for names in (training, held_out))
        if not rest or not train or (self.max_episodes is not None and len(train) < self.max_episodes):
            raise DataError(
                f"{len(train)} training and {len(rest)} validation episodes can be used, which is too few", self.path
            )
        return together.select(train[: self.max_episodes]), together.select(rest)

    def _open(self, episodes: list[str], limit: int | None) -> Demonstrations:
        arguments = {name: value for name, value in vars(self).items() if name not in OWN_ARGUMENTS}
        data = open_demonstrations(**arguments, max_episodes=limit, episodes=episodes)
        return replace(data, meta={**data.meta, "filter_key": self.filter_key})


OWN_ARGUMENTS = ("max_episodes", "filter_key", "validation_fraction", "validation_filter_key", "split_seed")


def _read_all(
    reader: Reader,
    names: list[str],
    selected: Mapping[str, Key],
    action_key: str,
    limit: int | None,
    layout: Layout,
    bad_episodes: BadEpisodes,
    simulator_states: bool,
) -> tuple[list[Episode], list[str]]:
    """Good episodes, at most `limit`, and one sentence for each that was left out."""
    read: list[Episode] = []
    skipped: list[str] = []
    for name in names:
        if limit is not None and len(read) == limit:
            break
        try:
            read.append(read_episode(reader, name, selected, action_key, layout, simulator_states))
        except DataError as error:
            if bad_episodes == "stop":
                raise
            reason = error.problem.partition(";")[0]  # without the remedy
            skipped.append(f"{name} ({f'{error.key!r}: ' if error.key else ''}{reason})")
    if limit is not None and len(read) < limit:
        reason = f"; {len(skipped)} are broken: {'; '.join(skipped)}" if skipped else ""
        raise DataError(f"max_episodes = {limit} were asked for, but there are {len(read)}{reason}", reader.path)
    if not read:
        raise DataError(f"no episode can be used: {'; '.join(skipped)}", reader.path)
    return read, skipped


def _within_bounds(data: Demonstrations, given: tuple[float, float] | None, how: OutOfBounds) -> Demonstrations:
    meta: dict[str, Any] = dict(data.meta)
    low, high = given if given is not None else (meta.get("action_low"), meta.get("action_high"))
    if low is None or high is None:
        return data
    try:
        lows, highs = (np.broadcast_to(np.asarray(x, np.float64), data.action_dim) for x in (low, high))
    except ValueError as error:
        sizes = f"{np.size(low)} and {np.size(high)}"
        raise DataError(
            f"bounds have {sizes} numbers, actions {data.action_dim}", meta["path"], key="actions"
        ) from error
    if not (lows < highs).all():
        raise ValueError(f"action_bounds = {low} to {high}: the least action must lie below the greatest")
    try:
        episodes, report = apply_bounds(data.episodes, lows, highs, how)
    except DataError as error:
        raise error.located(meta["path"]) from error
    meta |= {"action_low": lows.tolist(), "action_high": highs.tolist()}
    if report:
        meta["out_of_bounds"] = {"how": how, **report}
        listed = "; ".join(report["violations"])
        meta["notes"] = [*meta["notes"], f"actions outside the bounds were treated by {how}: {listed}"]
    return replace(data, episodes=tuple(episodes), meta=meta)
