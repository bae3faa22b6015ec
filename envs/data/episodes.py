"""Demonstrations in memory: episodes of observations and actions with what is known about where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from genrl.networks.encoders import ObsSpec


class DataError(ValueError):
    """A data set that cannot be used. The message names file, episode and key, what is wrong and what to do."""

    def __init__(self, problem: str, file: object = None, episode: str | None = None, key: str | None = None):
        self.problem, self.file, self.episode, self.key = problem, file, episode, key
        place = [
            str(file) if file is not None else "",
            f"episode {episode}" if episode else "",
            f"key {key!r}" * bool(key),
        ]
        where = ", ".join(part for part in place if part)
        super().__init__(f"{where}: {problem}" if where else problem)

    def located(self, file: object, episode: str | None = None) -> DataError:
        """The same error with the file and the episode that the raiser did not know."""
        return DataError(self.problem, self.file or file, self.episode or episode, self.key)


@dataclass(frozen=True)
class Episode:
    """One demonstration of T steps; action t was taken after observation t.

    Args:
        obs: {name: [T, *shape]}, float32 [T, D] states and [T, N, 3 or 6] point clouds, uint8 [T, C, H, W] images.
        actions: float32 [T, A].
        rewards: float32 [T], or None where the file has none.
        terminated: bool [T], True where the task ended and nothing follows, which is not a time limit; or None.
        success: whether the demonstration reached its goal, None if the file does not say.
        name: the episode's name in its file.
        seed: of the reset that started it, if known.
        final_obs: {name: shape} the observation after the last action, if it was stored.
        states: [T, S] states of the simulator. They restore a scene and are never an input of a policy.
        attrs: what else the file keeps with the episode, such as a simulator's model.

    Raises:
        DataError: no steps, lengths that differ, a wrong type, NaN or infinite numbers; with the key and the step.
    """

    obs: Mapping[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray | None = None
    terminated: np.ndarray | None = None
    success: bool | None = None
    name: str = ""
    seed: int | None = None
    final_obs: Mapping[str, np.ndarray] | None = None
    states: np.ndarray | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = len(self.actions)
        if self.actions.ndim != 2 or self.actions.shape[-1] < 1:
            self._fail(
                f"actions have shape {self.actions.shape}; expected [T, A] with at least one dimension", "actions"
            )
        if steps == 0:
            self._fail("the episode has no steps; remove it from the file, or leave it out with bad_episodes: skip")
        if not self.obs:
            self._fail("the episode has no observations; choose at least one with obs=[...]")
        arrays = {**self.obs, "actions": self.actions, "rewards": self.rewards, "states": self.states}
        for key, array in {**arrays, "terminated": self.terminated}.items():
            if array is not None and len(array) != steps:
                self._fail(f"{len(array)} steps, but there are {steps} actions; every key needs one entry a step", key)
        for key, array in arrays.items():
            if array is None or array.dtype == np.uint8:
                continue
            if array.dtype.kind != "f":
                self._fail(f"dtype {array.dtype}; expected float32, or uint8 for images", key)
            # A sum is NaN or infinite if any element is: one pass without a temporary array in the usual case.
            if not np.isfinite(array.sum(dtype=np.float64)) and not np.isfinite(array).all():
                step = int(np.argwhere(~np.isfinite(array))[0][0])
                remedy = "repair the file, or leave such episodes out with bad_episodes: skip"
                self._fail(f"NaN or infinite values, first at step {step}; {remedy}", key)

    def __len__(self) -> int:
        return len(self.actions)

    def next_obs(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """({name: [T, *shape]}, valid [T]): the observation after each action, never that of another episode.

        Without a stored `final_obs` the last step repeats its own observation and is marked invalid.
        """
        shifted = {}
        for name, array in self.obs.items():
            last = array[-1] if self.final_obs is None else self.final_obs[name]
            shifted[name] = np.concatenate([array[1:], last[None].astype(array.dtype, copy=False)])
        valid = np.ones(len(self), dtype=bool)
        valid[-1] = self.final_obs is not None
        return shifted, valid

    def _fail(self, problem: str, key: str | None = None) -> None:
        raise DataError(problem, episode=self.name or None, key=key)


@dataclass(frozen=True)
class Summary:
    """What a data set contains, for a person who is about to train on it.

    Attributes:
        lengths: (shortest, mean, longest) episode. rewards: (least, greatest) of any step, None without rewards.
        successes: episodes that succeeded, of the `judged` ones whose file says so. terminated: episodes that ended
            by the task and not by a time limit, None if unknown. notes: what deserves attention.
    """

    episodes: int
    transitions: int
    action_dim: int
    lengths: tuple[int, float, int]
    rewards: tuple[float, float] | None
    successes: int
    judged: int
    terminated: int | None
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) pairs for a table."""
        low, mean, high = self.lengths
        success = f"{self.successes} of {self.judged}" if self.judged else "not recorded"
        return [
            ("episodes", str(self.episodes)),
            ("transitions", str(self.transitions)),
            ("episode length", f"{low} to {high}, mean {mean:.1f}"),
            ("action dimensions", str(self.action_dim)),
            ("reward of a step", "{:g} to {:g}".format(*self.rewards) if self.rewards else "not recorded"),
            ("successful episodes", success),
            ("ended by the task", "not recorded" if self.terminated is None else str(self.terminated)),
            *(("note", note) for note in self.notes),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{what}: {value}" for what, value in self.rows())


@dataclass(frozen=True)
class Demonstrations:
    """Episodes of one task with equal observations and actions.

    Args:
        episodes: at least one.
        specs: {name: ObsSpec} in the order in which a policy gets them.
        action_dim: A.
        meta: plain JSON values: ``path``, ``format``, ``version``, ``env`` (settings of the environment) or
            ``env_args`` (of robomimic), ``action_representation``, ``action_low`` and ``action_high``, ``notes``, ...

    Raises:
        DataError: no episodes, or one whose keys or shapes differ from the specs.
    """

    episodes: Sequence[Episode]
    specs: Mapping[str, ObsSpec]
    action_dim: int
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "episodes", tuple(self.episodes))
        if not self.episodes:
            raise DataError("there are no episodes", self.meta.get("path"))
        for episode in self.episodes:
            self._check(episode)

    @staticmethod
    def of(episodes: Sequence[Episode], meta: Mapping[str, Any] | None = None) -> Demonstrations:
        """Demonstrations whose specs are those of the first episode."""
        if not episodes:
            raise DataError("there are no episodes", (meta or {}).get("path"))
        first = episodes[0]
        specs = {name: spec_of(array) for name, array in first.obs.items()}
        return Demonstrations(tuple(episodes), specs, first.actions.shape[1], dict(meta or {}))

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def transitions(self) -> int:
        """Number of steps of all episodes."""
        return sum(len(episode) for episode in self.episodes)

    def select(self, indices: Sequence[int]) -> Demonstrations:
        """The episodes at these positions, in this order."""
        return replace(self, episodes=tuple(self.episodes[int(i)] for i in indices))

    def split(self, fraction: float, seed: int = 0) -> tuple[Demonstrations, Demonstrations]:
        """(training, validation) episodes, drawn by seed; both in the order of the file.

        Raises:
            ValueError: see `validation_size`.
        """
        held_out = validation_indices(len(self), fraction, seed)
        rest = [i for i in range(len(self)) if i not in set(held_out)]
        return self.select(rest), self.select(held_out)

    def arrays(self) -> dict[str, np.ndarray]:
        """{name: [N, *shape]} over all episodes and ``"action"``: N [.., A], what `Normalizer.fit` takes.

        Images need no statistics, so only the first of each is in it.
        """
        joined: dict[str, np.ndarray] = {}
        for name, spec in self.specs.items():
            if spec.kind == "image":
                joined[name] = self.episodes[0].obs[name][:1]
            else:
                joined[name] = np.concatenate([episode.obs[name] for episode in self.episodes])
        joined["action"] = np.concatenate([episode.actions for episode in self.episodes])
        return joined

    def summary(self) -> Summary:
        """Lengths, rewards and successes; notes on what may surprise."""
        lengths = [len(episode) for episode in self.episodes]
        rewards = [episode.rewards for episode in self.episodes if episode.rewards is not None]
        judged = [episode.success for episode in self.episodes if episode.success is not None]
        ends = [bool(episode.terminated.any()) for episode in self.episodes if episode.terminated is not None]
        notes = list(self.meta.get("notes", ()))
        if judged and not any(judged):
            notes.append("no episode succeeded: a policy that imitates these will not succeed either")
        if not judged:
            notes.append("the file does not say which episodes succeeded")
        if rewards and np.ptp(np.concatenate(rewards)) == 0:
            notes.append(f"every step has the same reward, {rewards[0][0]:g}: rewards say nothing about success")
        return Summary(
            episodes=len(lengths),
            transitions=sum(lengths),
            action_dim=self.action_dim,
            lengths=(min(lengths), float(np.mean(lengths)), max(lengths)),
            rewards=(float(min(r.min() for r in rewards)), float(max(r.max() for r in rewards))) if rewards else None,
            successes=sum(judged),
            judged=len(judged),
            terminated=sum(ends) if ends else None,
            notes=tuple(notes),
        )

    def _check(self, episode: Episode) -> None:
        def fail(problem: str, key: str) -> None:
            raise DataError(problem, self.meta.get("path"), episode.name or None, key)

        if set(episode.obs) != set(self.specs):
            differing = sorted(set(episode.obs) ^ set(self.specs))
            fail(f"observations are {sorted(episode.obs)}; the data set has {sorted(self.specs)}", differing[0])
        for name, spec in self.specs.items():
            if episode.obs[name].shape[1:] != spec.shape:
                found, expected = episode.obs[name].shape[1:], spec.shape
                fail(f"shape {found} a step; expected {expected} as in the first episode or the specification", name)
            if (episode.obs[name].dtype == np.uint8) != (spec.kind == "image"):
                fail(f"dtype {episode.obs[name].dtype} for an observation of kind {spec.kind}", name)
        if episode.actions.shape[1] != self.action_dim:
            fail(f"{episode.actions.shape[1]} action dimensions; the data set has {self.action_dim}", "actions")


def spec_of(array: np.ndarray) -> ObsSpec:
    """The specification of an observation array [T, *shape] in genrl's form."""
    kinds = {2: "state", 3: "points", 4: "image"}
    if array.ndim not in kinds or (array.ndim == 4) != (array.dtype == np.uint8):
        raise DataError(
            f"an observation is {array.dtype} {array.shape}; expected float32 [T, D] or [T, N, 3 or 6], "
            "or uint8 [T, C, H, W]"
        )
    return ObsSpec(array.shape[1:], kinds[array.ndim])  # type: ignore[arg-type]


def validation_indices(total: int, fraction: float, seed: int = 0) -> list[int]:
    """Sorted positions of the validation episodes, drawn by seed.

    Raises:
        ValueError: a fraction outside (0, 1), or one that leaves no episode on either side.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation_fraction = {fraction} must lie in (0, 1)")
    size = max(1, round(fraction * total))
    if size >= total:
        raise ValueError(f"validation_fraction = {fraction} of {total} episodes leaves none for training")
    return sorted(np.random.default_rng(seed).permutation(total)[:size].tolist())
