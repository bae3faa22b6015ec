"""Several environments at once, in this process or in one process each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from genrl.envs.gl import gl_in_use
from genrl.envs.make import make_env
from genrl.envs.settings import EnvError, EnvSettings

WORKER_BYTES = 600 * 2**20  # memory that one process with a simulator and a renderer takes


class WorkerDiedError(RuntimeError):
    """A process with an environment ended; the message gives its exit code and what that usually means."""


def make_vec(
    env: str | Mapping[str, Any] | EnvSettings,
    n_envs: int | None = None,
    seed: int = 0,
    backend: Literal["sync", "async"] = "sync",
    context: Literal["fork", "spawn", "forkserver"] | None = None,
    render: bool = False,
    **changes: Any,
) -> RowVectorEnv:
    """N environments with one batched interface, which give exactly what single environments give.

    No row resets itself. Start rows with ``reset(seed=[...], options={"reset_mask": mask})``; a row that has ended, or
    was stopped with `halt`, is not simulated: it repeats its last observation and flags with reward 0 until its reset.

    Args:
        env: id, settings or a dict of them.
        n_envs: N; None takes the number of cores, or fewer if the memory does not suffice.
        seed: rows of a ``reset()`` without seeds start from seed, seed + 1, ...
        backend: ``"sync"`` steps the rows one after the other, ``"async"`` in a process each. On two cores the
            processes win about a third for tasks of half a millisecond a step and lose for faster ones.
        context: how processes start; None forks, or spawns where forking is unsafe (the environment renders, or this
            process uses OpenGL or CUDA). Spawning needs ``if __name__ == "__main__":`` in your script.
        render: videos will be wanted, see `make_env`.
        **changes: settings to replace.

    Raises:
        EnvError: no such environment, or ``n_envs`` or ``backend`` out of range.
        WorkerDiedError: a process ended while its environment was made.
    """
    settings = EnvSettings.of(env, **changes)
    n_envs = default_n_envs() if n_envs is None else n_envs
    if n_envs < 1:
        raise EnvError(f"n_envs = {n_envs} is too small; the least is 1, and None takes the number of cores")
    makers = [partial(Row, settings, render)] * n_envs
    if backend == "sync":
        return SyncRows(makers, seed)
    if backend != "async":
        raise EnvError(f'backend = {backend!r} is unknown; allowed: "sync", "async"')
    context = context or default_context(settings)
    if context == "fork" and settings.renders and gl_in_use():
        raise EnvError(
            f"{settings.id} draws in every row, and this process has drawn with OpenGL already, which no fork of it "
            'can go on with; use context="spawn", or make the rows before anything is drawn here'
        )
    return AsyncRows(makers, seed, context)


def default_n_envs() -> int:
    """Usable cores, or as many processes as the free memory holds, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = _free_memory()
    return max(1, cores if free is None else min(cores, int(free // WORKER_BYTES)))


def _free_memory() -> int | None:
    """Bytes that processes can still take, None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return values.get("MemAvailable")
    except (OSError, ValueError, IndexError):
        return None


def default_context(settings: EnvSettings) -> Literal["fork", "spawn"]:
    """``"spawn"`` where a forked process would inherit a GL or CUDA context, or where there is no fork."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    return "spawn" if settings.renders or gl_in_use() or cuda or not hasattr(os, "fork") else "fork"


class Row(gym.Wrapper):
    """An environment that stands still once its episode has ended or was halted.

    Args:
        settings: of the environment.
        render: see `make_env`.
    """

    def __init__(self, settings: EnvSettings, render: bool = False) -> None:
        super().__init__(make_env(settings, render=render))
        self._still: tuple | None = None  # what `step` repeats
        self._last: tuple | None = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        obs, info = self.env.reset(**kwargs)
        self._still, self._last = None, (obs, False, False)
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, or, when standing still, the last observation and flags with reward 0."""
        if self._still is not None:
            obs, terminated, truncated = self._still
            return obs, 0.0, terminated, truncated, {"success": False, "still": True}
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._last = (obs, terminated, truncated)
        if terminated or truncated:
            self._still = self._last
        return obs, float(reward), terminated, truncated, info

    def halt(self, stop: bool = True) -> None:
        """Stand still until the next reset."""
        if stop:
            self._still = self._last


class RowVectorEnv(VectorEnv):
    """What both backends share: rows of `make_vec`."""

    def halt(self, mask: np.ndarray) -> None:
        """Stop simulating the rows of a mask [N] until their next reset."""
        raise NotImplementedError

    def render_row(self, row: int) -> np.ndarray:
        """The current picture [H, W, 3] uint8 of one row."""
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        """Versions of the packages that decide about results."""
        return self.call("versions")[0]


def _reset_arguments(seed: Any, options: dict | None, n: int, default: int) -> tuple[list[int | None], dict | None]:
    """Seeds as Python integers, and options that gymnasium may take apart."""
    options = None if options is None else dict(options)
    if options and "reset_mask" in options:
        options["reset_mask"] = np.asarray(options["reset_mask"])
    if seed is None:
        seed = default
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + row for row in range(n)], options
    return [None if value is None else int(value) for value in seed], options


class SyncRows(SyncVectorEnv, RowVectorEnv):
    """Rows in this process, stepped one after the other.

    Args:
        makers: one a row.
        seed: of the first row where `reset` gets none.
    """

    def __init__(self, makers: Sequence[Callable[[], gym.Env]], seed: int = 0) -> None:
        self._seed = seed
        super().__init__(makers, autoreset_mode=AutoresetMode.DISABLED)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start rows: all, or those of ``options["reset_mask"]`` [N]; seeds one a row, or the first row's."""
        seeds, options = _reset_arguments(seed, options, self.num_envs, self._seed)
        return super().reset(seed=seeds, options=options)  # type: ignore[arg-type]

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all rows that run."""
        self._autoreset_envs[:] = False  # rows that ended stand still; gymnasium would refuse the step
        return super().step(actions)

    def halt(self, mask: np.ndarray) -> None:
        """Stop simulating the rows of a mask [N] until their next reset."""
        for env, stop in zip(self.envs, mask, strict=True):
            env.halt(bool(stop))  # type: ignore[attr-defined]

    def render_row(self, row: int) -> np.ndarray:
        """The current picture [H, W, 3] uint8 of one row."""
        return self.envs[row].render()  # type: ignore[return-value]


class AsyncRows(AsyncVectorEnv, RowVectorEnv):
    """Rows in a process each; a process that dies is reported with its exit code.

    Args:
        makers: one a row.
        seed: of the first row where `reset` gets none.
        context: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
    """

    def __init__(self, makers: Sequence[Callable[[], gym.Env]], seed: int, context: str) -> None:
        self._seed = seed
        with self._watched():
            super().__init__(makers, context=context, autoreset_mode=AutoresetMode.DISABLED)

    def _watched(self) -> _Watch:
        return _Watch(self)

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None) -> None:
        """Start rows: all, or those of ``options["reset_mask"]`` [N]; seeds one a row, or the first row's."""
        seeds, options = _reset_arguments(seed, options, self.num_envs, self._seed)
        with self._watched():
            super().reset_async(seed=seeds, options=options)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the rows that start."""
        with self._watched():
            return super().reset_wait(timeout)

    def step_async(self, actions: Any) -> None:
        """Send each row its action."""
        with self._watched():
            super().step_async(actions)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Wait for the rows' steps."""
        with self._watched():
            return super().step_wait(timeout)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a method in all rows."""
        with self._watched():
            super().call_async(name, *args, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the results of `call_async`."""
        with self._watched():
            return super().call_wait(timeout)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the processes; those that still answer are asked, and none is waited for in vain."""
        try:
            super().close_extras(timeout, terminate)
        except PIPE_ERRORS:
            self._state = AsyncState.DEFAULT
            super().close_extras(terminate=True)

    def halt(self, mask: np.ndarray) -> None:
        """Stop simulating the rows of a mask [N] until their next reset."""
        self._ask([row for row, stop in enumerate(mask) if stop], "halt")

    def render_row(self, row: int) -> np.ndarray:
        """The current picture [H, W, 3] uint8 of one row."""
        return self._ask([row], "render")[0]

    def _ask(self, rows: Sequence[int], method: str) -> list[Any]:
        self._assert_is_running()
        with self._watched():
            for row in rows:
                self.parent_pipes[row].send(("_call", (method, (), {})))
            answers = [self.parent_pipes[row].recv() for row in rows]
        successes = [True] * self.num_envs
        for row, (_, success) in zip(rows, answers, strict=True):
            successes[row] = success
        self._raise_if_errors(successes)
        return [result for result, _ in answers]


PIPE_ERRORS = (EOFError, BrokenPipeError, ConnectionResetError)
HINTS = {
    -9: "the system killed it, usually for memory: use fewer n_envs",
    -11: "it crashed in native code, usually in OpenGL: try renderer: rays, or backend sync to see where",
    -6: "it aborted in native code: try backend sync to see the message",
    1: 'it failed while starting; scripts that spawn processes need `if __name__ == "__main__":`. Try backend sync',
}


class _Watch:
    """Turns the broken pipe of a dead process into a message that says which process and why."""

    def __init__(self, rows: AsyncRows) -> None:
        self.rows = rows

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, PIPE_ERRORS):
            return
        dead = []
        for index, process in enumerate(getattr(self.rows, "processes", [])):
            process.join(timeout=0.5)
            if process.exitcode is not None:
                hint = HINTS.get(process.exitcode, "try backend sync to see the error")
                dead.append(f"the process of row {index} ended with exit code {process.exitcode}: {hint}")
        # Without this the destructor would wait for answers of dead processes.
        if hasattr(self.rows, "_state"):
            self.rows._state = AsyncState.DEFAULT
            self.rows.close(terminate=True)
        raise WorkerDiedError("; ".join(dead) or f"a process of the environments ended: {error}") from error
