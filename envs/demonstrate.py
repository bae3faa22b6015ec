"""One demonstration of an expert, and many of them in one process or several."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from genrl.envs.data.episodes import Episode
from genrl.envs.experts import Expert, ExpertError, expert
from genrl.envs.rollout import SuccessTracker, checked_action
from genrl.envs.settings import EnvSettings

NOISE = 0x6E6F6973  # keeps the noise apart from what else is drawn from a seed


@dataclass(frozen=True)
class Demonstrating:
    """How an expert demonstrates.

    Args:
        env: the task.
        expert: ``"auto"`` or an import path, see `genrl.envs.expert`.
        noise: standard deviation of what is added to executed actions, in units of half the action range. It takes the
            robot off the expert's path, and the labels show how to come back.
        noise_label: which action is the demonstration's: ``"clean"``, what the expert wanted, or ``"executed"``.
        after_success: steps recorded beyond the success, in which the expert holds it.
    """

    env: EnvSettings
    expert: str = "auto"
    noise: float = 0.0
    noise_label: Literal["clean", "executed"] = "clean"
    after_success: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", EnvSettings.of(self.env))
        if not 0 <= self.noise < float("inf"):
            raise ExpertError(f"noise = {self.noise} must be 0 or positive; 0.1 is a tenth of half the action range")
        if self.noise_label not in ("clean", "executed"):
            raise ExpertError(f"noise_label = {self.noise_label!r} is unknown; allowed are 'clean' and 'executed'")
        if self.after_success < 0:
            raise ExpertError(f"after_success = {self.after_success} must be 0 or more steps")


def demonstrate(env: Any, acting: Expert, settings: Demonstrating, seed: int) -> Episode:
    """One episode from the start state of a seed.

    It ends `after_success` steps after a success that lasts, by the task's own end, or by the time limit.

    Args:
        env: a `TaskEnv`. acting: the expert. settings: how. seed: of the reset, the expert's choices and the noise.

    Returns:
        The episode; `success` is None in a task without a notion of success.

    Raises:
        ExpertError: the expert raised or gave an action that cannot be executed; names seed and step.
    """
    obs, _ = env.reset(seed=seed)
    low, high = env.action_space.low, env.action_space.high
    half = np.where(np.isfinite(high - low), (high - low) / 2, 1.0)
    rng = np.random.default_rng([seed, NOISE])
    tracker, held = SuccessTracker(env.success_rule), 0
    seen, rewards, ends = [], [], []
    actions: list[np.ndarray] = []
    try:
        acting.reset(seed)
    except Exception as error:
        raise ExpertError(f"the expert's reset failed with seed {seed} ({type(error).__name__}: {error})") from error
    while True:
        try:
            clean = checked_action(acting(obs, env), env, "it")
        except Exception as error:
            where = f"seed {seed} at step {len(actions)}"
            raise ExpertError(f"the expert failed with {where} ({type(error).__name__}: {error})") from error
        executed = clean
        if settings.noise:
            executed = np.clip(clean + settings.noise * half * rng.standard_normal(len(clean)), low, high)
            executed = executed.astype(np.float32)
        seen.append(obs)
        actions.append(clean if settings.noise_label == "clean" else executed)
        try:
            obs, reward, terminated, truncated, info = env.step(executed)
        except Exception as error:
            where = f"{settings.env.id} failed with seed {seed} at step {len(actions) - 1}"
            raise ExpertError(f"{where} ({type(error).__name__}: {error})") from error
        rewards.append(reward)
        ends.append(bool(terminated))
        tracker.add(bool(info["success"]))
        held = held + 1 if tracker.success else 0
        if terminated or truncated or held > settings.after_success:
            break
    return Episode(
        obs={name: np.stack([each[name] for each in seen]) for name in obs},
        actions=np.stack(actions).astype(np.float32),
        rewards=np.array(rewards, np.float32),
        terminated=np.array(ends),
        success=tracker.success if env.has_success else None,
        name=f"seed_{seed}",
        seed=seed,
        final_obs=dict(obs),
    )


def attempts(settings: Demonstrating, seeds: range, workers: int) -> Iterator[Episode]:
    """The demonstrations of these seeds, in their order; equal for any number of processes.

    Args:
        settings: how. seeds: one attempt each; those beyond what the caller takes may be tried in vain.
        workers: processes; 1 stays in this one.

    Raises:
        ExpertError: see `demonstrate`.
        WorkerDiedError: a process ended.
    """
    if workers == 1:
        acting = expert(settings.env, settings.expert)
        with contextlib.closing(settings.env.make()) as env:
            for seed in seeds:
                yield demonstrate(env, acting, settings, seed)
        return
    import multiprocessing

    from genrl.envs.vector import WorkerDiedError, default_context

    context = multiprocessing.get_context(default_context(settings.env))
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(settings,))
    pending: list[Future[Episode]] = []
    waiting = iter(seeds)
    try:
        while True:
            for seed in itertools.islice(waiting, 2 * workers - len(pending)):
                pending.append(pool.submit(_attempt, seed))
            if not pending:
                return
            yield pending.pop(0).result()
    except BrokenProcessPool as error:
        raise WorkerDiedError(
            "a process that collects demonstrations ended, usually for memory; use fewer workers, or 1 to see why"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_HERE: dict[str, Any] = {}  # of a process: its environment and expert


def _prepare(settings: Demonstrating) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    _HERE.update(settings=settings, acting=expert(settings.env, settings.expert))


def _attempt(seed: int) -> Episode:
    if "env" not in _HERE:
        _HERE["env"] = _HERE["settings"].env.make()
    return demonstrate(_HERE["env"], _HERE["acting"], _HERE["settings"], seed)


def start_facts(env: Any) -> Mapping[str, Any]:
    """What a file of demonstrations says about its environment."""
    low, high = env.action_space.low, env.action_space.high
    facts: dict[str, Any] = {"versions": env.versions()}
    if env.family == "robosuite":
        from genrl.envs.experts.robosuite import env_args_of

        facts["env_args"] = env_args_of(env)
    if np.isfinite(low).all() and np.isfinite(high).all():
        facts |= {"action_low": low.tolist(), "action_high": high.tolist()}
    return facts
