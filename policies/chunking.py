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
            drawn = {
                pair: torch.randn(
                    (size, *shape[1:]),
                    generator=torch.Generator().manual_seed(derive_seed(self.seed, "act", *pair, block)),
                )
                for pair in dict.fromkeys(self.pairs)  # padding repeats a row
            }
            self._block = block, torch.stack([drawn[pair] for pair in self.pairs])
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
        # Arrays, since their small look-ups cost a tenth of those of tensors.
        self._history = {
            name: np.zeros(
                (rows, chunking.n_obs_steps, *spec.shape), dtype=np.uint8 if spec.kind == "image" else np.float32
            )
            for name, spec in specs.items()
        }
        self._chunks = np.zeros((rows, chunking.horizon, policy.action_dim), dtype=np.float32)
        self.predicted = np.zeros(rows, dtype=bool)
        self._cursor = np.full(rows, chunking.last)  # index in the chunk of the next action
        self._episode = np.full(rows, -1)
        self._predictions = np.zeros(rows, dtype=int)  # made so far in the row's episode
        self._ensemble = None if chunking.ensembling is None else _Ensemble(policy, rows, chunking.ensembling)

    @property
    def last_chunks(self) -> Tensor:
        """The newest predicted chunk of each row, [N, H, A] on the CPU, in the units of the data; not a copy."""
        return torch.from_numpy(self._chunks)

    def start(self, row: int, episode: int, obs: Mapping[str, Any]) -> None:
        """A new episode in a row: its history is the first observation, repeated.

        Args:
            row: 0 <= row < N. episode: number of the episode, >= 0, which decides the noise.
            obs: {name: [*shape]}, the observation after reset.
        """
        for name, buffer in self._history.items():
            buffer[row] = _array(obs, name, buffer.shape[2:], buffer.dtype)
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
            ObservationError: a missing name, a wrong shape, NaN or inf.
        """
        running = np.ones(self.rows, dtype=bool) if active is None else np.asarray(active, dtype=bool)
        idle = running & (self._episode < 0)
        if idle.any():
            raise ValueError(f"row {int(idle.argmax())} is active but has no episode; call start(row, episode, obs)")
        rows = running.nonzero()[0]
        arrays = True
        for name, buffer in self._history.items():
            newest = _array(obs, name, (self.rows, *buffer.shape[2:]), buffer.dtype)
            if buffer.dtype.kind == "f" and not np.isfinite(newest[rows]).all():
                row = int(rows[~np.isfinite(newest[rows]).reshape(len(rows), -1).all(1)][0])
                raise ObservationError(
                    f"observation {name!r} of row {row} holds NaN or inf; a sensor or the simulator failed, and no "
                    "action follows from that"
                )
            arrays = arrays and not isinstance(obs[name], Tensor)
            if buffer.shape[1] > 1:
                buffer[rows, :-1] = buffer[rows, 1:]
            buffer[rows, -1] = newest[rows]
        self.predicted = running & (self._cursor >= self.policy.chunking.last)
        if self.predicted.any():
            self._predict(self.predicted.nonzero()[0])
        actions = np.zeros((self.rows, self.policy.action_dim), dtype=np.float32)
        if self._ensemble is not None:
            actions[rows] = self._ensemble.action(rows)
        else:
            actions[rows] = self._chunks[rows, self._cursor[rows]]
        self._cursor[rows] += 1
        return actions if arrays else torch.from_numpy(actions)

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
                newest = _array(seen, name, (steps, *buffer.shape[2:]), buffer.dtype)[steps - kept :]
                buffer[row] = np.concatenate([buffer[row, kept:], newest])
        self._cursor[row] += steps

    def history(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """What a prediction of these rows would see now: {name: [len(rows), n_obs_steps, *shape]}, a copy."""
        return {name: torch.from_numpy(buffer[list(rows)]) for name, buffer in self._history.items()}

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
            self._ensemble.add(rows, self._chunks[rows])

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
        obs = {name: torch.from_numpy(buffer[source]).to(device) for name, buffer in self._history.items()}
        noise = EpisodeNoise(self.seed, self._episode[source].tolist(), self._predictions[source].tolist())
        previous = torch.from_numpy(self._chunks[source]).to(device) if continued else None
        chunks = self.policy.predict(obs, noise, previous).to("cpu", torch.float32).numpy()
        self._chunks[list(batch.values())] = chunks[list(batch)]


class _Ensemble:
    """ACT's temporal ensembling (Zhao et al. 2023): the weighted mean of all predictions for the present step."""

    def __init__(self, policy: ChunkPolicy, rows: int, weight: float):
        self.first = policy.chunking.first
        self.reach = policy.chunking.horizon - self.first  # predictions that can cover one step
        # Of the predictions made at the last steps, newest first: [N, reach, H, A].
        self.past = np.zeros((rows, self.reach, policy.chunking.horizon, policy.action_dim), dtype=np.float32)
        self.count = np.zeros(rows, dtype=int)
        # [count, age]: weights exp(-m i) with i = 0 the oldest, normalised.
        self.table = np.zeros((self.reach + 1, self.reach), dtype=np.float32)
        for count in range(1, self.reach + 1):
            values = np.array([math.exp(-weight * (count - 1 - age)) for age in range(count)])
            self.table[count, :count] = values / values.sum()

    def forget(self, row: int) -> None:
        self.count[row] = 0

    def add(self, rows: np.ndarray, chunks: np.ndarray) -> None:
        self.past[rows, 1:] = self.past[rows, :-1]
        self.past[rows, 0] = chunks
        self.count[rows] = np.minimum(self.count[rows] + 1, self.reach)

    def action(self, rows: np.ndarray) -> np.ndarray:
        weights = self.table[self.count[rows]]  # [N, reach]
        total = np.zeros((len(rows), self.past.shape[-1]), dtype=np.float32)
        for age in range(self.reach):  # in a fixed order, so that sums do not depend on the number of rows
            total += weights[:, age, None] * self.past[rows, age, self.first + age]
        return total


def _array(obs: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if name not in obs:
        raise ObservationError(f"observation {name!r} is missing; found are {list(obs)}")
    given = obs[name]
    value = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if value.shape != shape:
        raise ObservationError(f"observation {name!r} has shape {list(value.shape)}; expected {list(shape)}")
    if dtype == np.uint8 and value.dtype != np.uint8:
        raise ObservationError(f"observation {name!r} is {value.dtype}; images are uint8 [C, H, W], 0 to 255")
    return value
