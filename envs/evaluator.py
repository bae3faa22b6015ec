"""Success of a policy on a list of start states: one episode for each, whatever runs in parallel."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

import genrl
from genrl.envs.actors import ActActor, Actor, ChunkActor, ExpertActor, RowPolicy, StepActor, serves_one_row
from genrl.envs.episodes import EpisodeRunner
from genrl.envs.evaluation import EpisodeResult, Evaluation
from genrl.envs.film import Camera
from genrl.envs.latency import Latency
from genrl.envs.monitoring import calibrated_threshold, with_consistency
from genrl.envs.rollout import LocalPool, Pool, ProcessPool
from genrl.envs.settings import EnvError, EnvSettings
from genrl.envs.stac import StacSettings
from genrl.envs.vector import default_n_envs
from genrl.progress import progress_bar

MOST_ROWS = 16  # of a process: a padded batch of `ChunkExecutor`


def evaluate(
    policy: Any,
    env: str | Mapping[str, Any] | EnvSettings | None = None,
    episodes: int = 50,
    seed: int = 100_000,
    n_envs: int | None = None,
    backend: Literal["sync", "async"] = "sync",
    success: str | None = None,
    videos: int = 2,
    video_dir: str | os.PathLike[str] | None = None,
    stac: StacSettings | int | None = None,
    progress: bool = False,
    weights: str | None = None,
    checkpoint: str | None = None,
    source: str | None = None,
    policy_seed: int = 0,
    stop_at_success: bool = True,
    workers: int | None = None,
    cpu_threads: int = 1,
    out: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Run a policy from `episodes` start states and count successes.

    Episode i starts from ``reset(seed=seed + i)`` and is counted however it ends, so neither the number of parallel
    environments nor short episodes can change which start states count. The noise of a policy over action chunks
    depends on `policy_seed`, the episode and the prediction only. The result's main file is the same, byte for byte,
    for every `n_envs`, `backend` and `workers`.

    Args:
        policy: a `ChunkPolicy`; an object with the same ``act`` (an `OnnxPolicy`, or yours: see `ActActor`); a
            `RowPolicy` of yours (``start`` and ``act``), which may remember; a function from observations
            {name: [n, *shape]} to actions [n, A]; an object with robomimic's rollout interface (``start_episode`` and
            a call with the observation of one environment, which then is the only one); ``"expert"``, the scripted
            expert; or the import path of your own expert (see `genrl.envs.expert`).
        env: id or settings; None takes what the policy was trained for (``policy.task["env"]``).
        episodes: number of start states.
        seed: of the first. Demonstrations are collected from 0, training evaluates from 50,000, results from 100,000.
        n_envs: environments at once, never more than episodes; None takes 2 to 16 for each process, more the more
            there is to predict, as predictions for many rows cost no more and making an environment does.
        backend: ``"sync"`` steps them in this process, ``"async"`` in `workers` processes.
        success: rule that replaces the family's, see `EnvSettings.success`.
        videos: episodes to film, if `video_dir` is given: the first, then the worst (failures with the lowest
            return, then the longest successes). They are played again from their actions, so filming changes nothing.
        video_dir: where the videos go.
        stac: settings of the temporal-consistency score, or its number of chunk samples; chunk policies only.
        progress: show a progress bar on stderr.
        checkpoint: name of the checkpoint in the result: ``"best"``, ``"step-002000"`` ...
        weights: name of the weights in the result: ``"ema"``, ``"raw"`` ...
        source: where the policy comes from; goes into the timing file, since it may differ between equal evaluations.
        policy_seed: of the policy's noise.
        stop_at_success: end an episode once its success is certain. False plays on, for returns of whole episodes.
        workers: processes of ``"async"``; None takes one a core, or fewer if the memory does not suffice.
        cpu_threads: torch threads during the evaluation; another number may change results in the last bits.
        out: the result is written there, also when the evaluation is interrupted or fails: then with the episodes that
            have ended. That partial result is also an attribute ``partial`` of the exception.

    Raises:
        PolicyError: the policy raised, or gave NaN or a wrong shape; names episode, seed and step.
        EnvError: no such environment, observations or actions that do not fit the policy, numbers out of range.
        WorkerDiedError: a process ended.

    Example:
        >>> result = evaluate("expert", "metaworld/reach-v3", episodes=2)
        >>> result.successes
        2
    """
    stac = StacSettings(samples=stac) if isinstance(stac, int) and stac else stac or None
    settings = _settings(policy, env, success)
    _check_numbers(episodes=episodes, n_envs=n_envs, workers=workers, cpu_threads=cpu_threads)
    if videos < 0 or backend not in ("sync", "async"):
        raise EnvError(f'videos = {videos} must be 0 or more, and backend = {backend!r} "sync" or "async"')
    workers = 1 if backend == "sync" or serves_one_row(policy) else workers or default_n_envs()
    rows = 1 if serves_one_row(policy) else min(episodes, n_envs or workers * _rows_per_process(policy, episodes))
    threshold = calibrated_threshold(stac) if stac is not None and stac.calibration is not None else None
    film = bool(videos and video_dir is not None)
    with _acting(policy, cpu_threads), contextlib.closing(settings.make()) as probe:
        _check_fit(policy, probe)
        actor, acting = _actor(policy, settings, rows, policy_seed, stac)
        pool: Pool
        if backend == "sync":
            pool = LocalPool(settings, rows, stop_at_success, acting, first=probe)
        else:
            pool = ProcessPool(settings, rows, workers, stop_at_success, acting)
        runner = EpisodeRunner(actor, pool, episodes, seed, probe.action_space.shape, probe.has_success, film)
        facts = _facts(policy, settings, probe, stop_at_success, seed, episodes)
        facts["warnings"] = (*facts["warnings"], *_ignored_seed(probe, seed))
        facts["policy"] = {"weights": weights or "unnamed"} | ({"checkpoint": checkpoint} if checkpoint else {})
        timing = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "n_envs": rows,
            "backend": backend,
            "workers": workers,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "source": source,
        }
        try:
            with contextlib.ExitStack() as stack:
                camera = None
                with contextlib.closing(pool):
                    if film:  # after the processes have begun: they must not inherit a renderer
                        camera = stack.enter_context(contextlib.closing(Camera(settings, seed)))
                    with progress_bar(f"evaluating {settings.id}", episodes, progress) as advance:
                        runner.run(advance)
                names: tuple[str, ...] = ()
                if camera is not None and video_dir is not None:
                    names = camera.film(runner.records(), runner.actions, videos, video_dir)
            result = _result(runner, facts, timing, stac, threshold, names, actor.latency())
        except BaseException as error:
            _keep(error, _result(runner, facts, timing, stac, threshold, (), None), out)
            raise
    if out is not None:
        result.save(out)
    return result


def _ignored_seed(env: Any, seed: int) -> tuple[str, ...]:
    """A warning if resetting twice with one seed gives two start states."""
    first, second = (env.reset(seed=seed)[0] for _ in range(2))
    if all(np.array_equal(first[name], second[name]) for name in first):
        return ()
    return (
        f"reset(seed={seed}) of {env.settings.id} gave two different start states: its start states are random, so "
        "this result cannot be repeated or compared; draw everything in reset from self.np_random",
    )


def _facts(
    policy: Any,
    settings: EnvSettings,
    probe: Any,
    stop_at_success: bool,
    seed: int,
    episodes: int,
) -> dict[str, Any]:
    """What is known before the first episode."""
    return {
        "env": settings.to_dict(),
        "success_rule": probe.success_rule,
        "max_steps": probe.max_steps,
        "has_success": probe.has_success,
        "stop_at_success": stop_at_success,
        "seed": seed,
        "planned": episodes,
        "versions": {"genrl": genrl.__version__, "torch": torch.__version__, **probe.versions()},
        "warnings": _trained_elsewhere(policy, settings),
    }


def _result(
    runner: EpisodeRunner,
    facts: Mapping[str, Any],
    timing: Mapping[str, Any],
    stac: StacSettings | None,
    threshold: float | None,
    videos: tuple[str, ...],
    latency: Latency | None,
) -> Evaluation:
    records, alarm = runner.records(), None
    if stac is not None:
        stride = runner.actor.describe()["chunking"]["n_action_steps"]
        records, alarm = with_consistency(records, runner.consistency, stac, stride, threshold)
    speed = runner.steps / runner.seconds if runner.seconds else None
    changed = {
        "policy": {**runner.actor.describe(), **facts["policy"]},
        "warnings": (*facts["warnings"], *_equal_starts(records), *_solved_starts(runner)),
        "timing": {**timing, "seconds": runner.seconds, "steps": runner.steps, "steps_per_second": speed},
    }
    return Evaluation(**{**facts, **changed}, episodes=tuple(records), stac=alarm, videos=videos, latency=latency)


def _keep(error: BaseException, partial: Evaluation, out: str | os.PathLike[str] | None) -> None:
    """Attach what was measured to an exception, and write it."""
    error.partial = partial  # type: ignore[attr-defined]
    if out is not None and partial.episodes:
        error.add_note(f"{len(partial.episodes)} of {partial.planned} episodes are in {partial.save(out)}")


def _settings(policy: Any, env: Any, success: str | None) -> EnvSettings:
    if env is None:
        task = getattr(policy, "task", None) or {}
        env = task.get("env") if isinstance(task, Mapping) else None
        if env is None:
            raise EnvError('the policy does not say what it acts in; give env="family/name", for example')
    return EnvSettings.of(env) if success is None else EnvSettings.of(env, success=success)


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise EnvError(f"{name} = {value} is too small; the least is 1")


def _rows_per_process(policy: Any, episodes: int) -> int:
    """Balances the time to make environments (about 0.1 s each) and that of predictions (about 1 ms a network call)."""
    calls = getattr(policy, "nfe", 1) or 1
    return int(min(MOST_ROWS, max(2, round((0.2 * episodes * calls) ** 0.5))))


def _actor(policy: Any, settings: EnvSettings, rows: int, seed: int, stac: StacSettings | None) -> tuple[Actor, Any]:
    """The actor, and the expert that acts in the processes of the rows if it is one."""
    from genrl.policies.base import ChunkPolicy

    if isinstance(policy, ChunkPolicy):
        if stac is not None and policy.chunking.last >= policy.chunking.horizon:
            raise EnvError(
                "temporal consistency (stac) compares what two chunks predict for the same steps; with n_action_steps "
                f"= {policy.chunking.n_action_steps} of horizon {policy.chunking.horizon} there are none: leave it out"
            )
        return ChunkActor(policy, rows, seed, stac), None
    if stac is not None:
        raise EnvError("temporal consistency (stac) compares predicted chunks; this policy is no ChunkPolicy")
    if isinstance(policy, str):
        from genrl.envs.experts import expert

        name = "auto" if policy == "expert" else policy
        return ExpertActor(name), expert(settings, name)
    if hasattr(policy, "act") and not hasattr(policy, "start") and not serves_one_row(policy):
        return ActActor(policy, seed), None
    if not callable(policy) and not (hasattr(policy, "start") and hasattr(policy, "act")):
        methods = ", ".join(name for name in vars(RowPolicy) if not name.startswith("_"))
        raise EnvError(
            f"{type(policy).__name__} cannot be evaluated; give a ChunkPolicy, an object with act, or with {methods}, "
            'a function from observations to actions, or "expert"'
        )
    return StepActor(policy, rows), None


def _check_fit(policy: Any, env: Any) -> None:
    """Compare names, shapes and action size before anything runs."""
    specs, size = getattr(policy, "specs", None), getattr(policy, "action_dim", None)
    if not specs:
        return
    given = env.specs
    wrong = [
        f"{name} {list(spec.shape)} (the environment "
        + (f"gives {list(given[name].shape)})" if name in given else f"was made with {', '.join(given)})")
        for name, spec in specs.items()
        if name not in given or tuple(given[name].shape) != tuple(spec.shape)
    ]
    if wrong:
        raise EnvError(
            f"{env.id} does not give what the policy sees: {'; '.join(wrong)}. Set env.observations and sizes as in "
            "training, or leave env out to take the policy's own"
        )
    if size is not None and (size,) != env.action_space.shape:
        raise EnvError(f"the policy gives {size} numbers as action; {env.id} takes {env.action_space.shape[0]}")


@contextlib.contextmanager
def _acting(policy: Any, threads: int) -> Iterator[None]:
    """Evaluation mode and a fixed number of threads, both put back afterwards."""
    before, training = torch.get_num_threads(), getattr(policy, "training", False)
    torch.set_num_threads(threads)
    if isinstance(policy, torch.nn.Module):
        policy.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
        if isinstance(policy, torch.nn.Module):
            policy.train(training)


def _equal_starts(records: list[EpisodeResult]) -> tuple[str, ...]:
    if len(records) < 2 or len({record.start for record in records}) > 1:
        return ()
    return (
        f"all {len(records)} episodes start from the same observation (1 distinct start of {len(records)}): the "
        "success rate is that of one start state",
    )


def _solved_starts(runner: EpisodeRunner) -> tuple[str, ...]:
    solved = sorted(runner.solved_at_start)
    if not solved:
        return ()
    return (
        f"{len(solved)} start states are successes before the first action (seeds {', '.join(map(str, solved[:5]))})",
    )


def _trained_elsewhere(policy: Any, settings: EnvSettings) -> tuple[str, ...]:
    task = getattr(policy, "task", None)
    trained = task.get("env") if isinstance(task, Mapping) else None
    if not isinstance(trained, Mapping) or trained.get("id", settings.id) == settings.id:
        return ()
    return (f"the policy was trained for {trained['id']}",)
