"""Plays one episode for each start state, in whatever rows are free."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from genrl.envs.actors import Actor
from genrl.envs.evaluation import EpisodeResult
from genrl.envs.rollout import Play, Pool, RowError, Start, Stretch
from genrl.envs.settings import EnvError

EXPERT_STEPS = 32  # steps that an expert acts before its process reports


class PolicyError(RuntimeError):
    """A policy raised or gave actions that cannot be executed; the message names episode, seed and step."""


@dataclass
class _Episode:
    """An episode in progress."""

    number: int
    seed: int
    start: str = ""  # fingerprint of the first observation, once there is one
    rewards: list[float] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)


class EpisodeRunner:
    """Lets an actor play episodes 0 to `episodes` - 1 in the rows of a pool.

    Args:
        actor: see `genrl.envs.actors`.
        pool: see `genrl.envs.rollout`.
        episodes: their number. seed: episode i starts from ``reset(seed=seed + i)``.
        action_shape: of the environment.
        has_success: the task has a notion of success.
        keep_actions: remember what was executed, for videos.

    Attributes:
        finished: results by number. actions: [T, A] by number. consistency: D_t by number, if the actor scores it.
        solved_at_start: seeds whose start state already is a success. steps: environment steps so far. seconds: spent
        in `run`.
    """

    def __init__(
        self,
        actor: Actor,
        pool: Pool,
        episodes: int,
        seed: int,
        action_shape: tuple[int, ...],
        has_success: bool = True,
        keep_actions: bool = False,
    ) -> None:
        self.actor, self.pool, self.episodes, self.seed = actor, pool, episodes, seed
        self.action_shape, self.has_success, self.keep_actions = action_shape, has_success, keep_actions
        self.finished: dict[int, EpisodeResult] = {}
        self.actions: dict[int, np.ndarray] = {}
        self.consistency: dict[int, list[float]] = {}
        self.running: dict[int, _Episode] = {}
        self.solved_at_start: list[int] = []
        self.steps, self.seconds = 0, 0.0

    def records(self) -> list[EpisodeResult]:
        """Results in the order of their seeds."""
        return [self.finished[number] for number in sorted(self.finished)]

    def run(self, advance: Callable[[], None]) -> None:
        """Play all episodes; `advance` is called after each.

        Raises:
            PolicyError: the policy failed.
            EnvError: the environment failed; the message names episode, seed and step.
        """
        waiting = iter(range(self.episodes))
        begun = time.perf_counter()
        try:
            rows = sorted(row for group in self.pool.groups for row in group)
            starts = {row: self._start(row, waiting) for row in rows}
            busy = 0
            for number, group in enumerate(self.pool.groups):
                commands = [start for row in group if (start := starts[row]) is not None]
                if commands:
                    self.pool.send(number, commands)
                    busy += 1
            while busy:
                number, stretches = self.pool.receive()
                following = self._react(stretches, waiting, advance)
                if following:
                    self.pool.send(number, following)
                else:
                    busy -= 1
        except RowError as error:
            episode = self.running[error.row]
            where = f"episode {episode.number} (seed {episode.seed}) at step {error.steps}"
            kind = PolicyError if error.by_expert else EnvError
            raise kind(
                f"{'the expert' if error.by_expert else 'the environment'} failed in {where}: {error}"
            ) from error
        finally:
            self.seconds += time.perf_counter() - begun

    def _start(self, row: int, waiting: Iterator[int]) -> Start | None:
        number = next(waiting, None)
        if number is None:
            self.running.pop(row, None)
            return None
        self.running[row] = _Episode(number, self.seed + number)
        return Start(row, self.seed + number)

    def _react(
        self, stretches: list[Stretch], waiting: Iterator[int], advance: Callable[[], None]
    ) -> list[Start | Play]:
        """What each row that has answered does next."""
        commands: list[Start | Play] = []
        news: dict[int, Mapping[str, np.ndarray]] = {}
        for stretch in stretches:
            row, episode = stretch.row, self.running[stretch.row]
            if not episode.start:
                if stretch.success:
                    self.solved_at_start.append(episode.seed)
                self._begin(row, episode, {name: value[0] for name, value in stretch.obs.items()})
                news[row] = {name: value[:0] for name, value in stretch.obs.items()}
                continue
            self.steps += len(stretch.rewards)
            episode.rewards += stretch.rewards.tolist()
            if stretch.actions is not None and self.keep_actions:
                episode.actions.append(stretch.actions)
            if not stretch.ended:
                news[row] = stretch.obs
                continue
            self._finish(stretch, episode)
            advance()
            command = self._start(row, waiting)
            if command is not None:
                commands.append(command)
        return commands + (self._plan(news) if news else [])

    def _begin(self, row: int, episode: _Episode, obs: Mapping[str, np.ndarray]) -> None:
        episode.start = fingerprint(obs)
        self._guard([row], lambda: self.actor.start(row, episode.number, obs))

    def _plan(self, news: Mapping[int, Mapping[str, np.ndarray]]) -> list[Start | Play]:
        plans = self._guard(list(news), lambda: self.actor.plan(news))
        commands: list[Start | Play] = []
        for row, actions in plans.items():
            checked = None if actions is None else self._checked(row, actions)
            if checked is not None and self.keep_actions:
                self.running[row].actions.append(checked)
            commands.append(Play(row, checked, EXPERT_STEPS))
        return commands

    def _finish(self, stretch: Stretch, episode: _Episode) -> None:
        number, length = episode.number, len(episode.rewards)
        self.finished[number] = EpisodeResult(
            episode=number,
            seed=episode.seed,
            success=stretch.success if self.has_success else None,
            success_step=stretch.success_step,
            total_reward=float(np.sum(np.array(episode.rewards, np.float64))),
            length=length,
            ended=stretch.ended,
            start=episode.start,
        )
        if self.keep_actions:
            self.actions[number] = np.concatenate(episode.actions)[:length]
        scores = self.actor.consistency_of(stretch.row)
        if scores is not None:
            self.consistency[number] = scores

    def _guard(self, rows: list[int], call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            where = "; ".join(self._place(row) for row in rows)
            raise PolicyError(f"the policy failed ({type(error).__name__}: {error}) in {where}") from error

    def _checked(self, row: int, actions: np.ndarray) -> np.ndarray:
        found = np.asarray(actions, np.float32)
        if found.ndim != 2 or found.shape[1:] != self.action_shape or not len(found):
            raise PolicyError(
                f"the policy gave actions of shape {found.shape[1:]} in {self._place(row)}; expected "
                f"{self.action_shape}"
            )
        good = np.isfinite(found).all(1)
        if not good.all():
            step = int(np.argmin(good))
            raise PolicyError(f"the policy gave {found[step]} in {self._place(row, step)}; actions must be finite")
        return found

    def _place(self, row: int, ahead: int = 0) -> str:
        episode = self.running[row]
        return f"episode {episode.number} (seed {episode.seed}) at step {len(episode.rewards) + ahead}"


def fingerprint(obs: Mapping[str, np.ndarray]) -> str:
    """16 hex digits of an observation."""
    digest = hashlib.sha256()
    for name in sorted(obs):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(obs[name]).tobytes())
    return digest.hexdigest()[:16]
