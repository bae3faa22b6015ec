"""Receding-horizon execution of a policy in many environments that start and end at different times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genrl.diffusion import derive_seed
from genrl.networks import ObservationError
from genrl.policies.base import ChunkPolicy

NOISE_BLOCK = 16  # steps of a sampler whose noise is drawn by one generator


class EpisodeNoise:
    """Noise that depends on (seed, episode, number of the prediction in it, step of the sampler) and on nothing else.

    Args:
        seed: of the evaluation.
        episodes, predictions: one pair per row.
    """

    def __init__(self, seed: int, episodes: Sequence[int], predictions: Sequence[int]):
        self.seed, self.pairs = seed, list(zip(episodes, predictions, strict=True))
        self._block: tuple[int, Tensor] | None = None

    def __call__(self, step: int, shape: tuple[int, ...]) -> Tensor:
        """[rows, ...] float32 on the CPU, where it is the same for every device that the policy runs on."""
        block = step // NOISE_BLOCK  # -1 for the start noise, which has a block of its own
        size = 1 if block < 0 else NOISE_BLOCK
        if self._block is None or self._block[0] != block or self._block[1].shape[2:] != shape[1:]:
            rows = [
                torch.randn(
                    (size, *shape[1:]),
                    generator=torch.Generator().manual_seed(derive_seed(self.seed, "act", *pair, block)),
                )
                for pair in self.pairs
            ]
            self._block = block, torch.stack(rows)
        return self._block[1][:, step % size]


class ChunkExecutor:
    """Runs a policy for N rows: history, chunks, execution of a part of each, ensembling, warm starts.

    Every row predicts when its own chunk is used up. Predictions are computed in padded batches of one fixed size, at a
    place that the episode's number decides, so the actions of an episode are the same, bit for bit, however many rows
    run beside it.

    Args:
        policy: a configured policy; it is used in evaluation mode (set by the caller).
        rows: N.
        seed: of the noise, see `EpisodeNoise`.
        batch: size of the padded batches; None predicts exactly the rows that need it, which is faster for few rows,
            but then results can depend on their number in the last bits.

    Attributes:
        last_chunks: the newest predicted chunk of each row, [N, H, A] on the CPU, in the units of the data.
        predicted: whether the last `act` predicted a new chunk, bool [N].

    Example:
        >>> executor = ChunkExecutor(policy, rows=2)  # doctest: +SKIP
        >>> for row in range(2):  # doctest: +SKIP
        ...     executor.start(row, episode=row, obs={"state": state[row]})
        >>> actions = executor.act({"state": state}, active=np.array([True, True]))  # doctest: +SKIP
    """

    def __init__(self, policy: ChunkPolicy, rows: int, seed: int = 0, batch: int | None = 16):
        if rows < 1:
            raise ValueError(f"rows = {rows}; at least 1 is needed")
        if batch is not None and batch < 1:
            raise ValueError(f"batch = {batch}; give the size of the padded batches, or None for none")
        self.policy, self.rows, self.seed, self.batch = policy, rows, seed, batch
        chunking, specs = policy.chunking, policy.specs
        if not specs:
            raise ValueError("the policy has no networks yet; call configure(...) or load it with load_policy")
        self._history = {
            name: torch.zeros(
                (rows, chunking.n_obs_steps, *spec.shape),
                dtype=torch.uint8 if spec.kind == "image" else torch.float32,
            )
            for name, spec in specs.items()
        }
        self.last_chunks = torch.zeros(rows, chunking.horizon, policy.action_dim)
        self.predicted = np.zeros(rows, dtype=bool)
        self._cursor = np.full(rows, chunking.last)  # index in the chunk of the next action
        self._episode = np.full(rows, -1)
        self._predictions = np.zeros(rows, dtype=int)  # made so far in the row's episode
        self._ensemble = None if chunking.ensembling is None else _Ensemble(policy, rows, chunking.ensembling)

    def start(self, row: int, episode: int, obs: Mapping[str, Any]) -> None:
        """A new episode in a row: its history is the first observation, repeated.

        Args:
            row: 0 <= row < N. episode: number of the episode, >= 0, which decides the noise.
            obs: {name: [*shape]}, the observation after reset.
        """
        for name, buffer in self._history.items():
            buffer[row] = _tensor(obs, name, tuple(buffer.shape[2:]), buffer.dtype)
        self._episode[row], self._predictions[row] = episode, 0
        self._cursor[row] = self.policy.chunking.last
        if self._ensemble is not None:
            self._ensemble.forget(row)

    def act(self, obs: Mapping[str, Any], active: Any = None) -> Any:
        """The next action of every active row.

        Args:
            obs: {name: [N, *shape]}, the newest observations; in the first call after `start` those given there.
            active: bool [N], rows that run; the others keep their state and get zeros. None: all.

        Returns:
            [N, A] float32: an array if the observations are arrays, else a tensor.

        Raises:
            ValueError: an active row was never started.
            ObservationError: a missing name or a wrong shape.
        """
        running = np.ones(self.rows, dtype=bool) if active is None else np.asarray(active, dtype=bool)
        idle = running & (self._episode < 0)
        if idle.any():
            raise ValueError(f"row {int(idle.argmax())} is active but has no episode; call start(row, episode, obs)")
        index = torch.from_numpy(running.nonzero()[0])
        arrays = True
        for name, buffer in self._history.items():
            newest = _tensor(obs, name, (self.rows, *buffer.shape[2:]), buffer.dtype)
            arrays = arrays and not isinstance(obs[name], Tensor)
            buffer[index] = torch.cat([buffer[index, 1:], newest[index, None]], 1)
        self.predicted = running & (self._cursor >= self.policy.chunking.last)
        if self.predicted.any():
            self._predict(self.predicted.nonzero()[0])
        if self._ensemble is not None:
            actions = self._ensemble.action(index)
        else:
            actions = self.last_chunks[index, torch.from_numpy(self._cursor[running])]
        self._cursor[running] += 1
        result = torch.zeros(self.rows, self.policy.action_dim)
        result[index] = actions
        return result.numpy() if arrays else result

    def executed(self, row: int, seen: Mapping[str, Any]) -> None:
        """The row has executed m further actions of its chunk by itself: one call instead of m of `act`.

        Args:
            row: with at least m actions left to execute in its chunk.
            seen: {name: [m, *shape]}, the observations after those actions but the newest, which `act` gets.

        Raises:
            ValueError: the chunk has fewer actions left, or they are ensembled at every step.
        """
        steps = len(next(iter(seen.values())))
        left = self.policy.chunking.last - int(self._cursor[row])
        if steps > left or self._ensemble is not None:
            raise ValueError(f"row {row} has {left} actions of its chunk left and cannot have executed {steps} more")
        for name, buffer in self._history.items():
            kept = min(steps, buffer.shape[1] - 1)  # `act` adds one more
            if kept:
                newest = _tensor(seen, name, (steps, *buffer.shape[2:]), buffer.dtype)[steps - kept :]
                buffer[row] = torch.cat([buffer[row, kept:], newest])
        self._cursor[row] += steps

    def history(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """What a prediction of these rows would see now: {name: [len(rows), n_obs_steps, *shape]}, a copy."""
        return {name: buffer[list(rows)] for name, buffer in self._history.items()}

    def _predict(self, rows: np.ndarray) -> None:
        """New chunks for these rows."""
        warm = self.policy.chunking.warm_start is not None
        groups = [rows]
        if warm:  # they start from other noise levels
            first = self._predictions[rows] == 0
            groups = [rows[first], rows[~first]]
        for group, continued in zip(groups, (False, warm), strict=False):
            for batch in self._batches(group):
                self._predict_batch(batch, continued)
        self._predictions[rows] += 1
        self._cursor[rows] = self.policy.chunking.first
        if self._ensemble is not None:
            self._ensemble.add(torch.from_numpy(rows), self.last_chunks)

    def _batches(self, rows: np.ndarray) -> list[dict[int, int]]:
        """Batches as {place: row}."""
        if self.batch is None:
            return [dict(enumerate(rows.tolist()))] if len(rows) else []
        batches: list[dict[int, int]] = []
        for row in rows.tolist():
            place = int(self._episode[row]) % self.batch
            free = next((batch for batch in batches if place not in batch), None)
            if free is None:
                free = {}
                batches.append(free)
            free[place] = row
        return batches

    def _predict_batch(self, batch: dict[int, int], continued: bool) -> None:
        filler = next(iter(batch.values()))  # any real row: its numbers are harmless, and thrown away
        source = [batch.get(place, filler) for place in range(self.batch or len(batch))]
        device = self.policy.device
        obs = {name: buffer[source].to(device) for name, buffer in self._history.items()}
        noise = EpisodeNoise(self.seed, self._episode[source].tolist(), self._predictions[source].tolist())
        previous = self.last_chunks[source].to(device) if continued else None
        chunks = self.policy.predict(obs, noise, previous).to("cpu", torch.float32)
        places, rows = list(batch), list(batch.values())
        self.last_chunks[rows] = chunks[places]


class _Ensemble:
    """ACT's temporal ensembling (Zhao et al. 2023): the weighted mean of all predictions for the present step."""

    def __init__(self, policy: ChunkPolicy, rows: int, weight: float):
        self.first = policy.chunking.first
        self.reach = policy.chunking.horizon - self.first  # predictions that can cover one step
        # Of the predictions made at the last steps, newest first: [N, reach, H, A].
        self.past = torch.zeros(rows, self.reach, policy.chunking.horizon, policy.action_dim)
        self.count = torch.zeros(rows, dtype=torch.long)
        # [count, age]: weights exp(-m i) with i = 0 the oldest, normalised. Python's exp, since a vectorised one may
        # round by the place of a number in its tensor.
        table = torch.zeros(self.reach + 1, self.reach, dtype=torch.float64)
        for count in range(1, self.reach + 1):
            values = [math.exp(-weight * (count - 1 - age)) for age in range(count)]
            table[count, :count] = torch.tensor(values, dtype=torch.float64) / sum(values)
        self.table = table.float()

    def forget(self, row: int) -> None:
        self.count[row] = 0

    def add(self, rows: Tensor, chunks: Tensor) -> None:
        self.past[rows] = torch.cat([chunks[rows, None], self.past[rows, :-1]], 1)
        self.count[rows] = (self.count[rows] + 1).clamp(max=self.reach)

    def action(self, rows: Tensor) -> Tensor:
        weights = self.table[self.count[rows]]  # [N, reach]
        total = torch.zeros(len(rows), self.past.shape[-1])
        for age in range(self.reach):  # in a fixed order, so that sums do not depend on the number of rows
            total += weights[:, age, None] * self.past[rows, age, self.first + age]
        return total


def _tensor(obs: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if name not in obs:
        raise ObservationError(f"observation {name!r} is missing; found are {list(obs)}")
    given = obs[name]
    if isinstance(given, np.ndarray) and not given.flags.writeable:
        given = given.copy()  # torch warns of arrays that it could not write to
    value = torch.as_tensor(given)
    if tuple(value.shape) != shape:
        raise ObservationError(f"observation {name!r} has shape {list(value.shape)}; expected {list(shape)}")
    if dtype == torch.uint8 and value.dtype != torch.uint8:
        raise ObservationError(
            f"observation {name!r} is {value.dtype}; images are uint8 [C, H, W] with values 0 to 255"
        )
    return value.to("cpu", dtype)
