"""What `evaluate` can run: policies over action chunks, policies of yours, and scripted experts.

An actor serves many rows, each in its own episode. `start` tells it that an episode begins, `plan` gives it what each
row has seen since and gets what each row shall do next: a chunk policy answers with all the actions that it executes
before it looks again, others with one action.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from genrl.envs.latency import Latency, measure_latency
from genrl.envs.settings import EnvError
from genrl.envs.stac import StacSettings

if TYPE_CHECKING:
    from genrl.policies.base import ChunkPolicy
    from genrl.policies.chunking import ChunkExecutor

Observation = Mapping[str, np.ndarray]


class RowPolicy(Protocol):
    """The interface of a policy of yours that remembers something within an episode.

    Rows run side by side in different episodes. What it draws at random should depend on the episode only: then results
    do not depend on how many rows there are.
    """

    def start(self, row: int, episode: int, obs: Observation) -> None:
        """Episode number `episode` begins in a row; obs {name: [*shape]} is its first observation."""

    def act(self, obs: Observation, active: np.ndarray) -> np.ndarray:
        """Actions [N, A] for observations {name: [N, *shape]}; rows that are not active [N] are ignored."""
        ...


class Actor(Protocol):
    """See the module."""

    def start(self, row: int, episode: int, obs: Observation) -> None: ...

    def plan(self, news: Mapping[int, Observation]) -> dict[int, np.ndarray | None]:
        """Actions [k, A] of each row, from {row: {name: [m, *shape]}} seen since its last plan (m = 0 after a start).

        None lets the expert in the row's process act.
        """
        ...

    def consistency_of(self, row: int) -> list[float] | None:
        """D_t of the row's episode, where temporal consistency is scored."""

    def latency(self) -> Latency | None: ...

    def describe(self) -> dict[str, Any]: ...


class Buffers:
    """The newest observation of every row, {name: [N, *shape]}."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.arrays: dict[str, np.ndarray] = {}

    def put(self, row: int, obs: Observation, index: int | None = None) -> None:
        for name, value in obs.items():
            value = value if index is None else value[index]
            if name not in self.arrays:
                self.arrays[name] = np.zeros((self.rows, *value.shape), value.dtype)
            self.arrays[name][row] = value


class ChunkActor:
    """A `ChunkPolicy` in a `ChunkExecutor`.

    Args:
        policy: in evaluation mode.
        rows: N. seed: of its noise.
        stac: also draw chunks to score temporal consistency.
    """

    def __init__(self, policy: ChunkPolicy, rows: int, seed: int, stac: StacSettings | None = None) -> None:
        from genrl.policies.chunking import ChunkExecutor

        self.policy, self.seed, self.stac = policy, seed, stac
        self.executor: ChunkExecutor = ChunkExecutor(policy, rows, seed)
        self.buffers = Buffers(rows)
        self.firsts: list[dict[str, np.ndarray]] = []  # some first observations, to measure the latency on
        self.consistency = None if stac is None else _Consistency(policy, stac, seed)

    def start(self, row: int, episode: int, obs: Observation) -> None:
        """An episode begins."""
        self.executor.start(row, episode, obs)
        self.buffers.put(row, obs)
        if len(self.firsts) < 20:
            self.firsts.append({name: np.array(obs[name]) for name in self.policy.specs})
        if self.consistency is not None:
            self.consistency.start(row, episode)

    def plan(self, news: Mapping[int, Observation]) -> dict[int, np.ndarray | None]:
        """Predict for all these rows."""
        for row, obs in news.items():
            if len(next(iter(obs.values()))) > 1:
                self.executor.executed(row, {name: value[:-1] for name, value in obs.items()})
            if len(next(iter(obs.values()))):
                self.buffers.put(row, obs, -1)
        chunking, rows = self.policy.chunking, sorted(news)
        before = self.executor.last_chunks[rows] if self.consistency is not None else None
        active = np.zeros(self.buffers.rows, dtype=bool)
        active[rows] = True
        actions = self.executor.act(self.buffers.arrays, active)
        if self.consistency is not None and before is not None:
            for row, chunk in zip(rows, before, strict=True):
                self.consistency.look(row, self.executor.history([row]), chunk)
        if chunking.ensembling is not None:
            return {row: actions[row][None] for row in rows}
        chunks = self.executor.last_chunks.numpy()
        return {row: chunks[row, chunking.first : chunking.last].copy() for row in rows}

    def consistency_of(self, row: int) -> list[float] | None:
        """D_t of the row's episode."""
        return None if self.consistency is None else self.consistency.steps[row]

    def latency(self) -> Latency | None:
        """`act` on one observation in CPU memory, until its actions are in CPU memory."""
        repeat = self.policy.chunking.n_obs_steps
        inputs = [
            {name: torch.from_numpy(value)[None].expand(repeat, *value.shape)[None] for name, value in first.items()}
            for first in self.firsts
        ]
        if not inputs:
            return None
        start = time.perf_counter()
        self.policy.act(inputs[0])
        calls = int(min(100, max(10, 2.0 / (time.perf_counter() - start + 1e-6))))  # slow policies: about 2 seconds
        return measure_latency(lambda obs: self.policy.act(obs).cpu(), inputs, str(self.policy.device), calls)

    def describe(self) -> dict[str, Any]:
        """What a result file says about the policy."""
        from dataclasses import asdict

        return {
            "class": type(self.policy).__name__,
            "fingerprint": fingerprint(self.policy),
            "nfe": self.policy.nfe,
            "chunking": asdict(self.policy.chunking),
            "seed": self.seed,
        }


class _Consistency:
    """Draws chunks at every replanning and scores them against the last ones."""

    def __init__(self, policy: ChunkPolicy, settings: StacSettings, seed: int) -> None:
        self.policy, self.settings, self.seed = policy, settings, seed
        self.steps: dict[int, list[float]] = {}
        self._samples: dict[int, torch.Tensor | None] = {}
        self._episode: dict[int, int] = {}
        self._predictions: dict[int, int] = {}

    def start(self, row: int, episode: int) -> None:
        self.steps[row], self._samples[row], self._predictions[row] = [], None, 0
        self._episode[row] = episode

    def look(self, row: int, history: Mapping[str, torch.Tensor], chunk: torch.Tensor) -> None:
        """After a prediction from a history {name: [1, n_obs_steps, *shape]}; `chunk` [H, A] is the one before it."""
        n, device, chunking = self.settings.samples, self.policy.device, self.policy.chunking
        obs = {name: value.to(device).expand(n, *value.shape[1:]) for name, value in history.items()}
        first = self._predictions[row] == 0
        previous = None if first else chunk.to(device).expand(n, *chunk.shape)  # for warm starts
        samples = self.policy.predict(obs, self._noise(row), previous).to("cpu", torch.float64)
        last = self._samples[row]
        if last is not None:
            self.steps[row].append(self.settings.score(last, samples, chunking.n_action_steps, chunking.first))
        self._samples[row] = samples
        self._predictions[row] += 1

    def _noise(self, row: int) -> Callable[[int, tuple[int, ...]], torch.Tensor]:
        from genrl.diffusion import derive_seed

        episode, prediction = self._episode[row], self._predictions[row]

        def noise(step: int, shape: tuple[int, ...]) -> torch.Tensor:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "stac", episode, prediction, step))
            return torch.randn(shape, generator=generator)

        return noise


class ActActor:
    """Any object with the `act` of a chunk policy: observations {name: [1, n_obs_steps, *shape]} to actions [1, k, A].

    Each row is asked by itself, with a generator of its own for each prediction: rows do not disturb each other.

    Args:
        policy: `act(obs)` or `act(obs, generator=...)` on tensors; `n_obs_steps` (or `chunking.n_obs_steps`) says how
            many observations it sees, 1 if it does not say; `specs`, if there are some, names those it wants.
        seed: of the generators.
    """

    def __init__(self, policy: Any, seed: int) -> None:
        self.policy, self.seed = policy, seed
        self.history = history_of(policy)
        self._takes_generator = "generator" in inspect.signature(policy.act).parameters
        self._seen: dict[int, list[Observation]] = {}
        self._episode: dict[int, int] = {}
        self._predictions: dict[int, int] = {}
        self.firsts: list[dict[str, torch.Tensor]] = []

    def start(self, row: int, episode: int, obs: Observation) -> None:
        """An episode begins."""
        self._seen[row] = [dict(obs)] * self.history
        self._episode[row], self._predictions[row] = episode, 0
        if len(self.firsts) < 20:
            self.firsts.append(self._stacked(row))

    def plan(self, news: Mapping[int, Observation]) -> dict[int, np.ndarray | None]:
        """One prediction for each of these rows."""
        plans: dict[int, np.ndarray | None] = {}
        for row, obs in news.items():
            fresh = [{n: v[i] for n, v in obs.items()} for i in range(len(next(iter(obs.values()))))]
            self._seen[row] = [*self._seen[row], *fresh][-self.history :]
            plans[row] = self._ask(self._stacked(row), (self._episode[row], self._predictions[row]))
            self._predictions[row] += 1
        return plans

    def _ask(self, obs: dict[str, torch.Tensor], place: tuple[int, int]) -> np.ndarray:
        from genrl.diffusion import derive_seed

        if not self._takes_generator:
            given = self.policy.act(obs)
        else:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "act", *place))
            given = self.policy.act(obs, generator=generator)
        found = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
        if found.ndim != 3 or len(found) != 1:
            raise EnvError(f"act gave an array of shape {found.shape} for one observation; expected [1, k, A]")
        return found[0]

    def _stacked(self, row: int) -> dict[str, torch.Tensor]:
        names = getattr(self.policy, "specs", None) or self._seen[row][0]
        return {name: torch.from_numpy(np.stack([seen[name] for seen in self._seen[row]]))[None] for name in names}

    def consistency_of(self, row: int) -> None:
        """Whole chunks are not seen."""

    def latency(self) -> Latency | None:
        """`act` on one observation in CPU memory."""
        return measure_latency(lambda obs: self._ask(obs, (0, 0)), self.firsts) if self.firsts else None

    def describe(self) -> dict[str, Any]:
        """What a result file says about the policy."""
        return {"class": type(self.policy).__name__, "nfe": getattr(self.policy, "nfe", None), "seed": self.seed}


def history_of(policy: Any) -> int:
    """Observations that a policy sees at once, 1 if it does not say."""
    chunking = getattr(policy, "chunking", None)
    return int(getattr(policy, "n_obs_steps", None) or getattr(chunking, "n_obs_steps", None) or 1)


class StepActor:
    """A policy of yours, asked at every step: a `RowPolicy`, or a function from {name: [n, *shape]} to [n, A].

    Also robomimic's rollout interface: ``start_episode()`` and a call with the observation {name: [*shape]} of one row.

    Args:
        policy: the policy. rows: N.
    """

    def __init__(self, policy: Any, rows: int) -> None:
        self.policy, self.buffers = policy, Buffers(rows)
        self.remembers = hasattr(policy, "start") and hasattr(policy, "act")
        self.single = serves_one_row(policy)
        if self.single and rows > 1:
            raise EnvError(f"a policy with start_episode() serves one environment at a time, not {rows}")
        self.firsts: list[dict[str, np.ndarray]] = []

    def start(self, row: int, episode: int, obs: Observation) -> None:
        """An episode begins."""
        self.buffers.put(row, obs)
        if self.single:
            self.policy.start_episode()
        elif self.remembers:
            self.policy.start(row, episode, obs)
        elif len(self.firsts) < 20:
            self.firsts.append({name: np.array(value)[None] for name, value in obs.items()})

    def plan(self, news: Mapping[int, Observation]) -> dict[int, np.ndarray | None]:
        """One action for each of these rows."""
        for row, obs in news.items():
            if len(next(iter(obs.values()))):
                self.buffers.put(row, obs, -1)
        rows = sorted(news)
        if self.single:
            actions = _rows_of([self.policy({name: value[0] for name, value in self.buffers.arrays.items()})], 1)
        elif self.remembers:
            active = np.zeros(self.buffers.rows, dtype=bool)
            active[rows] = True
            given = self.policy.act({name: value.copy() for name, value in self.buffers.arrays.items()}, active)
            actions = _rows_of(given, self.buffers.rows)[rows]
        else:
            actions = _rows_of(self.policy({n: v[rows] for n, v in self.buffers.arrays.items()}), len(rows))
        return {row: action[None] for row, action in zip(rows, actions, strict=True)}

    def consistency_of(self, row: int) -> None:
        """There are no chunks."""

    def latency(self) -> Latency | None:
        """A call with one observation, for functions; unknown for policies that remember."""
        if self.remembers or self.single or not self.firsts:
            return None
        return measure_latency(lambda obs: np.asarray(self.policy(obs)), self.firsts)

    def describe(self) -> dict[str, Any]:
        """What a result file says about the policy."""
        return {"class": getattr(self.policy, "__qualname__", type(self.policy).__qualname__), "nfe": None}


class ExpertActor:
    """A scripted expert, which acts in the process of its row.

    Args:
        name: as given to `genrl.envs.expert`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, row: int, episode: int, obs: Observation) -> None:
        """The row's process knows."""

    def plan(self, news: Mapping[int, Observation]) -> dict[int, np.ndarray | None]:
        """Go on."""
        return dict.fromkeys(news, None)

    def consistency_of(self, row: int) -> None:
        """There are no chunks."""

    def latency(self) -> Latency | None:
        """Not measured."""
        return None

    def describe(self) -> dict[str, Any]:
        """What a result file says about the policy."""
        return {"class": "expert" if self.name == "auto" else self.name, "nfe": None}


def serves_one_row(policy: Any) -> bool:
    """Whether a policy has robomimic's rollout interface."""
    return callable(policy) and hasattr(policy, "start_episode")


def _rows_of(actions: Any, rows: int) -> np.ndarray:
    if isinstance(actions, torch.Tensor):
        actions = actions.detach().cpu().numpy()
    found = np.asarray(actions)
    if found.ndim != 2 or len(found) != rows:
        raise EnvError(f"the policy gave an array of shape {found.shape} for {rows} observations; expected [{rows}, A]")
    return found


def fingerprint(policy: torch.nn.Module) -> str:
    """16 hex digits of everything that acting depends on: weights and statistics, without teachers."""
    import hashlib

    from genrl.policies.teacher import Teacher

    teachers = tuple(f"{name}." for name, module in policy.named_modules() if isinstance(module, Teacher))
    digest = hashlib.sha256()
    for name, value in sorted(policy.state_dict().items()):
        if not teachers or not name.startswith(teachers):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
