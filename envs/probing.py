"""Does an environment keep what evaluations rely on? Seeds that fix everything, arrays that stay, numbers that fit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from genrl.envs.base import Observation, TaskEnv
from genrl.envs.make import make_env
from genrl.envs.settings import EnvSettings

PATIENCE = 2.0  # seconds for stepping beyond the end
KNOWN_FIXES = {
    "own": "draw everything from self.np_random after super().reset(seed=seed), reset controllers and goals too, "
    "and never use np.random.* or random.*"
}


@dataclass(frozen=True)
class Check:
    """One property.

    Args:
        name: what was checked.
        passed: it holds; None where it is for information only.
        detail: what was seen, and what to do where it does not hold.
    """

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class ProbeReport:
    """What `probe` found.

    Args:
        env: id.
        checks: in the order in which they were made.
        facts: specs, action bounds, length, success rule, versions.
    """

    env: str
    checks: tuple[Check, ...]
    facts: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """No check failed."""
        return all(check.passed is not False for check in self.checks)

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, "ok", "FAILED" or "note", and detail of each check."""
        words = {True: "ok", False: "FAILED", None: "note"}
        return [(check.name, words[check.passed], check.detail) for check in self.checks]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        checks = [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in self.checks]
        return {"env": self.env, "ok": self.ok, "checks": checks, "facts": dict(self.facts)}

    def __str__(self) -> str:
        lines = [f"{self.env}: {'all checks passed' if self.ok else 'SOME CHECKS FAILED'}"]
        lines += [f"  {word:6} {name}: {detail}" for name, word, detail in self.rows()]
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        return "\n".join(lines)


def probe(env: str | Mapping[str, Any] | EnvSettings | TaskEnv, steps: int = 20, seed: int = 0) -> ProbeReport:
    """Check an environment.

    - two resets with one seed give equal observations, also after an episode with another seed in between, and also
      after `steps` fixed actions (a simulator may forget to reset its controller, which shows only then);
    - different seeds give different starts;
    - observations have the shapes and types that were declared, and finite values;
    - an observation does not change when the environment goes on (it is a copy, not the simulator's buffer);
    - stepping on after the time limit raises nothing and resets nothing;
    - whether an episode can start in the goal (success at step 0), for information.

    Args:
        env: an environment, or what `make_env` takes (made here, and closed again).
        steps: fixed random actions per roll-out, at least 1.
        seed: of the first episode; the next two numbers are used too.

    Example:
        >>> report = probe("metaworld/reach-v3")
        >>> report.ok
        True
    """
    if isinstance(env, TaskEnv):
        return _probe(env, steps, seed)
    made = make_env(env)
    try:
        return _probe(made, steps, seed)
    finally:
        made.close()


def _probe(env: TaskEnv, steps: int, seed: int) -> ProbeReport:
    rng = np.random.default_rng(seed)
    low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
    actions = rng.uniform(low, high, (steps, len(low)))
    first = roll(env, seed, actions)
    other = roll(env, seed + 1, actions[::-1])
    again = roll(env, seed, actions)
    starts = [first.obs[0], other.obs[0], roll(env, seed + 2, actions[:0]).obs[0]]
    fix = KNOWN_FIXES.get(env.family, "")
    checks = [
        _same("same seed, same start", [first.obs[0]], [again.obs[0]], fix),
        _same(f"same seed, same {steps} steps", first.obs, again.obs, fix),
        _different(starts),
        _within(env, [*first.obs, *other.obs]),
        Check(
            "observations are copies",
            first.stable,
            "earlier observations stay as they were"
            if first.stable
            else "an observation changed when the environment stepped on: return obs.copy()",
        ),
        _after_end(env, seed, actions),
        _step_zero(env, first, other),
    ]
    facts = {
        "observations": {name: tuple(space.shape) for name, space in env.observation_space.items()},  # type: ignore
        "actions": f"{len(low)} numbers in [{low.min():g}, {high.max():g}]",
        "max_steps": env.max_steps,
        "success_rule": env.success_rule,
        "versions": env.versions(),
    }
    return ProbeReport(env.id, tuple(checks), facts)


@dataclass(frozen=True)
class Rollout:
    """Observations of an episode's start and steps, their flags, and whether kept arrays stayed as they were.

    Args:
        obs: [steps + 1] observations (copies).
        rewards: [steps]. success: [steps + 1] flags.
        stable: the arrays that the environment returned kept their values.
    """

    obs: list[Observation]
    rewards: list[float]
    success: list[bool]
    stable: bool


def roll(env: TaskEnv, seed: int, actions: np.ndarray) -> Rollout:
    """Reset with a seed and take the actions [steps, A], ended or not."""
    start, info = env.reset(seed=seed)
    returned = [start]
    copies, rewards, success = [_copy(start)], [], [bool(info["success"])]
    for action in actions:
        obs, reward, _, _, info = env.step(action)
        returned.append(obs)
        copies.append(_copy(obs))
        rewards.append(reward)
        success.append(bool(info["success"]))
    stable = all(_equal(kept, copy) for kept, copy in zip(returned, copies, strict=True))
    return Rollout(copies, rewards, success, stable)


def _copy(obs: Observation) -> Observation:
    return {name: np.array(value) for name, value in obs.items()}


def _equal(a: Observation, b: Observation) -> bool:
    return all(np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f") for name in a)


def _same(name: str, a: list[Observation], b: list[Observation], fix: str) -> Check:
    for step, (one, two) in enumerate(zip(a, b, strict=True)):
        for key in one:
            if not _equal({key: one[key]}, {key: two[key]}):
                gap = np.abs(one[key].astype(float) - two[key].astype(float)).max()
                return Check(name, False, f"{key} differs at step {step} by up to {gap:.3g}. {fix}".strip())
    return Check(name, True, "equal bit for bit")


def _different(starts: list[Observation]) -> Check:
    distinct = len({b"".join(value.tobytes() for value in obs.values()) for obs in starts})
    detail = f"{distinct} different starts of {len(starts)} seeds"
    if distinct == 1:
        detail += ": all episodes start alike, so a success rate can only be 0 or 1"
    return Check("seeds differ", distinct > 1, detail)


def _within(env: TaskEnv, observations: list[Observation]) -> Check:
    for obs in observations:
        for name, space in env.observation_space.items():  # type: ignore[attr-defined]
            value = obs.get(name)
            if value is None or value.shape != space.shape or value.dtype != space.dtype:
                found = "missing" if value is None else f"{value.dtype}{list(value.shape)}"
                detail = f"{name} is {found}, declared {space.dtype}{list(space.shape)}"
                return Check("observations as declared", False, detail)
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                return Check("observations as declared", False, f"{name} has values that are not finite")
    return Check("observations as declared", True, "shapes, types and finite values")


def _after_end(env: TaskEnv, seed: int, actions: np.ndarray) -> Check:
    """Step beyond `max_steps` and beyond the length that the simulator itself knows, as far as time allows."""
    name = "goes on after the time limit"
    limit, env.max_steps = env.max_steps, 2
    step, begin = 0, time.monotonic()
    try:
        env.reset(seed=seed)
        while step < 4 or (step < env.simulator.max_steps + 2 and time.monotonic() - begin < PATIENCE):
            truncated = env.step(actions[step % len(actions)])[3]
            step += 1
            if truncated != (step >= 2):
                return Check(name, False, f"truncated is {truncated} at step {step} with max_steps = 2")
    except Exception as error:  # whatever a simulator raises there is the finding
        return Check(name, False, f"{type(error).__name__} at step {step + 1}: {error}")
    finally:
        env.max_steps = limit
    return Check(name, True, f"truncated from the limit on, and nothing raised in {step} steps")


def _step_zero(env: TaskEnv, *rollouts: Rollout) -> Check:
    name = "success at step 0"
    if not env.has_success:
        detail = "no notion of success: no flag is ever set"
        if env.family == "own":
            detail += '. Steps report one as info["success"]'
        return Check(name, None, detail)
    early = sum(any(rollout.success[:2]) for rollout in rollouts)
    if early:
        return Check(name, None, f"{early} of {len(rollouts)} episodes start in the goal: they count as success")
    return Check(name, None, f"none of {len(rollouts)} episodes starts in the goal")
