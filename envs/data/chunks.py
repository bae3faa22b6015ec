"""Windows over demonstrations: a history of observations and the chunk of actions that goes with it.

A window belongs to a *current* time step t of one episode of T steps. With horizon H and history n = n_obs_steps,

    observations   t - n + 1, ..., t                     before the episode's start: its first observation
    actions        t - n + 1, ..., t - n + H             outside the episode: its first or last action, not valid

so action 0 of a chunk belongs to the first observation of the history, and the slice that a policy executes,
[n - 1, n - 1 + n_action_steps), starts at the current step. Every step is the current one of one window, so there are

    N = sum over episodes of T                                                      windows.

`max_padding` = p leaves out windows with more than p padded actions at their end, but not an episode's first one:

    N = sum over episodes of max(1, min(T, T + p + n - H))                          (p = n_action_steps - 1 is the rule
                                                                                     of Diffusion Policy)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from genrl.envs.data.episodes import Demonstrations


class ChunkingLike(Protocol):
    """The part of `genrl.policies.Chunking` that windows depend on."""

    @property
    def horizon(self) -> int: ...
    @property
    def n_obs_steps(self) -> int: ...
    @property
    def n_action_steps(self) -> int: ...


@dataclass(frozen=True)
class Window:
    """Which steps one training sample is made of.

    Attributes:
        episode: position of the episode. name: its name. step: the current time step t.
        obs_steps: n_obs_steps time steps. action_steps: H time steps. valid: H flags, False where the action is padded.
        executed: positions within the chunk that a policy executes.
    """

    episode: int
    name: str
    step: int
    obs_steps: tuple[int, ...]
    action_steps: tuple[int, ...]
    valid: tuple[bool, ...]
    executed: tuple[int, ...]


class ChunkDataset:
    """All windows of a data set, gathered in batches without a loop over samples.

    Arrays are joined and copied to `device` once; images stay uint8. Nothing here is random: which windows form a batch
    is up to the caller.

    Args:
        demonstrations: episodes with equal observations and actions.
        chunking: horizon H, n_obs_steps and n_action_steps.
        device: where batches are made.
        max_padding: see the module; None uses every time step.

    Raises:
        ValueError: a horizon shorter than n_obs_steps - 1 + n_action_steps, and numbers below 1.

    Example:
        >>> from genrl.envs.data import Episode
        >>> from genrl.policies.base import Chunking
        >>> steps = np.arange(5, dtype=np.float32)[:, None]
        >>> toy = Demonstrations.of([Episode({"state": steps}, 10 * steps)])
        >>> data = ChunkDataset(toy, Chunking(horizon=4, n_obs_steps=2, n_action_steps=3))
        >>> batch = data.batch(torch.tensor([0, 4]))
        >>> batch["obs"]["state"].squeeze(-1).tolist()
        [[0.0, 0.0], [3.0, 4.0]]
        >>> batch["actions"].squeeze(-1).tolist()
        [[0.0, 0.0, 10.0, 20.0], [30.0, 40.0, 40.0, 40.0]]
        >>> batch["valid"].tolist()
        [[False, True, True, True], [True, True, False, False]]
    """

    def __init__(
        self,
        demonstrations: Demonstrations,
        chunking: ChunkingLike,
        device: str | torch.device = "cpu",
        max_padding: int | None = None,
    ):
        check_chunking(chunking)
        if max_padding is not None and max_padding < 0:
            raise ValueError(f"max_padding = {max_padding} must be at least 0; null uses every time step")
        self.chunking, self.device = chunking, torch.device(device)
        self.specs, self.action_dim = dict(demonstrations.specs), demonstrations.action_dim
        self.names = [episode.name for episode in demonstrations.episodes]
        self._obs = {name: self._joined([e.obs[name] for e in demonstrations.episodes]) for name in self.specs}
        self._actions = self._joined([episode.actions for episode in demonstrations.episodes])  # [sum T, A]
        lengths = np.array([len(episode) for episode in demonstrations.episodes])
        counts = lengths
        if max_padding is not None:
            full = lengths + max_padding + chunking.n_obs_steps - chunking.horizon
            counts = np.maximum(1, np.minimum(lengths, full))
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        episode = np.repeat(np.arange(len(lengths)), counts)  # [N]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # [N] current step
        self._episode = torch.from_numpy(episode).to(self.device)
        self._first = torch.from_numpy(starts[episode]).to(self.device)
        self._last = torch.from_numpy((starts + lengths - 1)[episode]).to(self.device)
        self._current = torch.from_numpy(starts[episode] + within).to(self.device)
        offset = 1 - chunking.n_obs_steps
        self._obs_offsets = torch.arange(offset, 1, device=self.device)
        self._action_offsets = torch.arange(offset, offset + chunking.horizon, device=self.device)

    def __len__(self) -> int:
        return len(self._current)

    def batch(self, indices: Tensor) -> dict[str, Any]:
        """Windows at these positions, in physical units.

        Args:
            indices: [B] integers in [0, len).

        Returns:
            ``{"obs": {name: [B, n_obs_steps, *shape]}, "actions": [B, H, A], "valid": bool [B, H]}``.

        Raises:
            IndexError: a position outside the data set.
        """
        indices = torch.as_tensor(indices)
        if (
            indices.device.type == "cpu"
            and len(indices)
            and not 0 <= int(indices.min()) <= int(indices.max()) < len(self)
        ):
            raise IndexError(f"windows {int(indices.min())} to {int(indices.max())} of a data set with {len(self)}")
        indices = indices.to(self.device)
        first, last = self._first[indices, None], self._last[indices, None]  # [B, 1]
        current = self._current[indices, None]
        obs_rows = (current + self._obs_offsets).clamp(min=first)  # [B, n]; never beyond the current step
        wanted = current + self._action_offsets  # [B, H]
        rows = wanted.clamp(min=first, max=last)
        obs = {name: array[obs_rows] for name, array in self._obs.items()}
        return {"obs": obs, "actions": self._actions[rows], "valid": rows == wanted}

    def window(self, index: int) -> Window:
        """Which steps of which episode window `index` consists of."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of a data set with {len(self)}")
        first, last, current = (int(x[index]) for x in (self._first, self._last, self._current))
        wanted = [current + int(offset) for offset in self._action_offsets]
        rows = [min(max(row, first), last) for row in wanted]
        episode, lead = int(self._episode[index]), self.chunking.n_obs_steps - 1
        return Window(
            episode=episode,
            name=self.names[episode],
            step=current - first,
            obs_steps=tuple(max(current + int(offset), first) - first for offset in self._obs_offsets),
            action_steps=tuple(row - first for row in rows),
            valid=tuple(row == want for row, want in zip(rows, wanted, strict=True)),
            executed=tuple(range(lead, lead + self.chunking.n_action_steps)),
        )

    def _joined(self, arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.device)


def check_chunking(chunking: ChunkingLike) -> None:
    """The rule of executed slices: the horizon reaches from the first observation to the last executed action.

    Raises:
        ValueError: if it does not, with the least horizon that does.
    """
    for name in ("horizon", "n_obs_steps", "n_action_steps"):
        if getattr(chunking, name) < 1:
            raise ValueError(f"chunking.{name} = {getattr(chunking, name)} is too small; the least is 1")
    least = chunking.n_obs_steps - 1 + chunking.n_action_steps
    if chunking.horizon < least:
        raise ValueError(
            f"chunking.horizon = {chunking.horizon} is too short: actions [{chunking.n_obs_steps - 1}, {least}) of a "
            f"chunk are executed (n_obs_steps = {chunking.n_obs_steps}, n_action_steps = {chunking.n_action_steps}). "
            f"Set horizon >= {least}, or n_action_steps <= {chunking.horizon - chunking.n_obs_steps + 1}"
        )


def print_windows(dataset: ChunkDataset, episode: int = 0) -> str:
    """A table of the windows of one episode: what each sample sees, predicts and executes.

    Padded actions stand in parentheses, executed ones are marked with a star. Returns the text that it prints.
    """
    chosen = [dataset.window(i) for i in torch.nonzero(dataset._episode == episode).flatten().tolist()]
    if not chosen:
        raise ValueError(f"there is no episode {episode}; the data set has {len(dataset.names)}")
    rows = [("step", "observations", "actions (padded) *executed")]
    for window in chosen:
        cells = []
        for place, (step, valid) in enumerate(zip(window.action_steps, window.valid, strict=True)):
            mark = "*" if place in window.executed else ""
            cells.append(f"{mark}{step}" if valid else f"{mark}({step})")
        rows.append((str(window.step), " ".join(map(str, window.obs_steps)), " ".join(cells)))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    text = "\n".join(f"{a:>{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
    print(text)
    return text
