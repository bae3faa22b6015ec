"""Small data sets that tests of readers, windows and metrics share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from genrl.envs.data import Demonstrations, Episode


@dataclass(frozen=True)
class Chunks:
    """What ChunkDataset needs of a policy's chunking."""

    horizon: int = 4
    n_obs_steps: int = 2
    n_action_steps: int = 3


def toy_episode(length: int, number: int, rng: np.random.Generator, images: bool = False, **changes) -> Episode:
    """An episode whose state holds (episode, step), so that a gathered row says where it came from."""
    steps = np.arange(length)
    obs = {"state": np.stack([np.full(length, number), steps], 1).astype(np.float32)}
    if images:
        obs["image"] = rng.integers(0, 256, size=(length, 3, 8, 8), dtype=np.uint8)
    actions = np.stack([100 * number + steps, -steps], 1).astype(np.float32)
    defaults = {
        "rewards": (steps == length - 1).astype(np.float32),
        "terminated": steps == length - 1,
        "success": True,
        "name": f"demo_{number}",
        "seed": number,
    }
    return Episode(obs, actions, **(defaults | changes))


def toy_demonstrations(lengths=(5, 3, 7), images: bool = False, seed: int = 0, **meta) -> Demonstrations:
    rng = np.random.default_rng(seed)
    return Demonstrations.of([toy_episode(length, i, rng, images) for i, length in enumerate(lengths)], meta)
