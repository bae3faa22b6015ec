"""Rows of environments that play stretches of actions, in this process or in a few processes.

A stretch is what a policy executes before it looks again: sending it whole costs one message instead of one a step, and
a process steps several rows per message, so that simulators, not messages, take the time. A row without an episode is
not simulated.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np

from genrl.envs.settings import EnvError, EnvSettings, success_parameters


class SuccessTracker:
    """Follows a success rule step by step.

    Args:
        rule: see `genrl.envs.episode_success`.

    Attributes:
        certain: success has been reached and no further step can change that (never with ``"final"``).
        first: index of the first step whose flag was set, None without one.
    """

    def __init__(self, rule: str) -> None:
        self.kind, self.needed = success_parameters(rule)
        self.steps, self._count, self._latest = 0, 0, False
        self.certain = False
        self.first: int | None = None

    def add(self, flag: bool) -> bool:
        """Take the flag of the next step; returns `certain`."""
        if flag and self.first is None:
            self.first = self.steps
        self.steps += 1
        self._latest = flag
        self._count = self._count + 1 if flag else (0 if self.kind == "hold" else self._count)
        if self.kind != "final" and self._count >= self.needed:
            self.certain = True
        return self.certain

    @property
    def success(self) -> bool:
        """Success if the episode ended here."""
        return self._latest if self.kind == "final" else self.certain


@dataclass(frozen=True)
class Start:
    """Begin an episode: reset with this seed."""

    row: int
    seed: int


@dataclass(frozen=True)
class Play:
    """Execute actions [k, A] until they or the episode end; with None the row's expert acts, `steps` times."""

    row: int
    actions: np.ndarray | None
    steps: int = 1


@dataclass
class Stretch:
    """What came of a command.

    Args:
        obs: {name: [m, *shape]}, after each of the m executed steps; after a start, m = 1, the first observation.
        rewards: [m], float64. flags: [m], success at each step. actions: [m, A] that an expert took, else None.
        ended: "", or why the episode ended: ``"success"``, ``"terminated"``, ``"truncated"``.
        success, success_step: under the rule, so far; after a start, whether the goal is reached already.
    """

    row: int
    obs: dict[str, np.ndarray]
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    actions: np.ndarray | None = None
    ended: str = ""
    success: bool = False
    success_step: int | None = None


class RowError(RuntimeError):
    """An environment raised, or the expert that acts beside it; `row` says whose, `original` is what was raised."""

    def __init__(self, row: int, steps: int, by_expert: bool, original: BaseException, trace: str) -> None:
        super().__init__(f"{type(original).__name__}: {original}")
        self.row, self.steps, self.by_expert, self.original, self.trace = row, steps, by_expert, original, trace

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.loads(pickle.dumps(self.original))
            original = self.original
        except Exception:  # exceptions of simulators need not survive the way between processes
            original = RuntimeError(f"{type(self.original).__name__}: {self.original}")
        return RowError, (self.row, self.steps, self.by_expert, original, self.trace)


class EnvRow:
    """One environment; it is made by the first start.

    Args:
        settings: of the environment.
        stop_at_success: end an episode as soon as its success is certain.
        expert: acts where `Play` has no actions.
    """

    def __init__(self, settings: EnvSettings, stop_at_success: bool, expert: Any = None) -> None:
        self.settings, self.stop_at_success = settings, stop_at_success
        self.expert = copy.deepcopy(expert)
        self.env: Any = None
        self.steps = 0
        self._by_expert = False  # the expert is being asked

    def do(self, command: Start | Play) -> Stretch:
        """Carry out a command.

        Raises:
            RowError: the environment or the expert raised.
        """
        try:
            return self._start(command) if isinstance(command, Start) else self._play(command)
        except Exception as error:
            raise RowError(command.row, self.steps, self._by_expert, error, traceback.format_exc()) from error

    def _start(self, command: Start) -> Stretch:
        if self.env is None:
            self.env = self.settings.make()
        obs, info = self.env.reset(seed=command.seed)
        self.steps, self.obs, self.tracker = 0, obs, SuccessTracker(self.env.success_rule)
        if self.expert is not None:
            self._by_expert = True
            self.expert.reset(command.seed)
            self._by_expert = False
        seen = {name: np.array(value)[None] for name, value in obs.items()}
        return Stretch(command.row, seen, success=bool(info.get("success", False)))

    def _play(self, command: Play) -> Stretch:
        seen, rewards, taken, ended = [], [], [], ""
        for i in range(command.steps if command.actions is None else len(command.actions)):
            if command.actions is None:
                self._by_expert = True
                action = checked_action(self.expert(self.obs, self.env), self.env, "the expert")
                self._by_expert = False
            else:
                action = command.actions[i]
            self.obs, reward, terminated, truncated, info = self.env.step(action)
            self.steps += 1
            seen.append(self.obs)
            rewards.append(float(reward))
            taken.append(action)
            certain = self.tracker.add(bool(info["success"]))
            if certain and self.stop_at_success:
                ended = "success"
            elif terminated or truncated:
                ended = "terminated" if terminated else "truncated"
            if ended:
                break
        return Stretch(
            row=command.row,
            obs={name: np.stack([obs[name] for obs in seen]) for name in self.obs},
            rewards=np.array(rewards),
            actions=np.stack(taken) if command.actions is None else None,
            ended=ended,
            success=self.tracker.success,
            success_step=self.tracker.first,
        )

    def close(self) -> None:
        """Free the environment."""
        if self.env is not None:
            self.env.close()


def checked_action(action: Any, env: Any, who: str) -> np.ndarray:
    """An action as float32 [A].

    Raises:
        EnvError: another size, or numbers that are not finite.
    """
    found = np.asarray(action, np.float32)
    if found.shape != env.action_space.shape or not np.isfinite(found).all():
        size = env.action_space.shape[0]
        raise EnvError(f"{who} gave {np.array2string(found, threshold=8)} as action; expected {size} finite numbers")
    return found


class Pool(Protocol):
    """Rows in groups that are asked together; `groups` lists their rows."""

    groups: list[list[int]]

    def send(self, group: int, commands: Sequence[Start | Play]) -> None:
        """Ask the rows of a group; its answer must have been received before it is asked again."""

    def receive(self) -> tuple[int, list[Stretch]]:
        """The answer of whichever group has one."""

    def close(self) -> None: ...


class LocalPool:
    """All rows in this process, as one group.

    Args:
        rows: their number. first: an environment for the first row, which is left open. The others: see `EnvRow`.
    """

    def __init__(
        self, settings: EnvSettings, rows: int, stop_at_success: bool, expert: Any = None, first: Any = None
    ) -> None:
        self.rows = [EnvRow(settings, stop_at_success, expert) for _ in range(rows)]
        self.rows[0].env = self._first = first
        self.groups = [list(range(rows))]
        self._answer: list[Stretch] = []

    def send(self, group: int, commands: Sequence[Start | Play]) -> None:
        """Carry out the commands."""
        self._answer = [self.rows[command.row].do(command) for command in commands]

    def receive(self) -> tuple[int, list[Stretch]]:
        """What came of them."""
        return 0, self._answer

    def close(self) -> None:
        """Free the environments."""
        for row in self.rows:
            if self._first is None or row.env is not self._first:
                row.close()


class ProcessPool:
    """Rows in several processes, each with a group of them.

    Args:
        rows: their number. workers: processes, at most one a row. context: see `make_vec`. The others: see `EnvRow`.

    Raises:
        WorkerDiedError: when a process ends unasked.
    """

    def __init__(
        self,
        settings: EnvSettings,
        rows: int,
        workers: int,
        stop_at_success: bool,
        expert: Any = None,
        context: str | None = None,
    ) -> None:
        from genrl.envs.vector import default_context

        self.groups = [list(range(rows))[i::workers] for i in range(min(workers, rows))]
        start = context or default_context(settings)
        method = multiprocessing.get_context(start)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for group in self.groups:
            ours, theirs = method.Pipe()
            # A forked process has copies of our ends; while one is open, nobody notices that this process is gone.
            inherited = [*self._pipes, ours] if start == "fork" else []
            process = method.Process(  # type: ignore[attr-defined]
                target=_serve, args=(theirs, inherited, settings, group, stop_at_success, expert), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def send(self, group: int, commands: Sequence[Start | Play]) -> None:
        """Ask a process."""
        try:
            self._pipes[group].send(list(commands))
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            raise self._dead(group) from error

    def receive(self) -> tuple[int, list[Stretch]]:
        """The answer of the process that is ready first."""
        ready = wait(self._pipes)
        group = self._pipes.index(ready[0])  # type: ignore[arg-type]
        try:
            answer = self._pipes[group].recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._dead(group) from error
        if isinstance(answer, BaseException):
            raise answer
        return group, answer

    def _dead(self, group: int) -> RuntimeError:
        from genrl.envs.vector import HINTS, WorkerDiedError

        process = self._processes[group]
        process.join(timeout=2)
        hint = HINTS.get(process.exitcode, "try backend sync to see the error")
        rows = ", ".join(map(str, self.groups[group]))
        return WorkerDiedError(f"the process of rows {rows} ended with exit code {process.exitcode}: {hint}")

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()  # a process that is still answering sees that nobody listens
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
                process.join(timeout=5)


def _serve(
    pipe: Connection,
    inherited: list[Connection],
    settings: EnvSettings,
    group: list[int],
    stop_at_success: bool,
    expert: Any,
) -> None:
    """A process of a `ProcessPool`: carries out lists of commands until it is sent None or its parent is gone."""
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    rows = {row: EnvRow(settings, stop_at_success, expert) for row in group}
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (commands := pipe.recv()) is not None:
            try:
                answer: Any = [rows[command.row].do(command) for command in commands]
            except RowError as error:
                answer = error
            pipe.send(answer)
    for each in rows.values():
        each.close()
