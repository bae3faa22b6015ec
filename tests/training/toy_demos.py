"""Demonstrations and policies small enough for tests of the training loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from genrl.envs.data import Demonstrations, Episode
from genrl.networks import MLPBackbone
from genrl.policies import Chunking, FlowPolicy
from genrl.training import Imitation, PolicyEvaluationSettings, PolicyTrainerSettings


class ToyDemonstrations:
    """Episodes whose action is a linear function of the state.

    Args:
        episodes: number of them.
        validation_fraction: share that is held out.
        broken: put NaN into the actions of the loss, to see training fail.
    """

    def __init__(self, episodes: int = 6, validation_fraction: float = 0.0):
        self.episodes, self.validation_fraction = episodes, validation_fraction

    def load(self) -> Demonstrations:
        rng = np.random.default_rng(0)
        made = []
        for i in range(self.episodes):
            state = rng.normal(size=(12 + i, 3)).astype(np.float32)
            actions = state[:, :2] * np.float32([0.5, -0.25]) + np.float32(0.1)
            made.append(Episode({"state": state}, actions.astype(np.float32), name=f"demo_{i}"))
        return Demonstrations.of(made, {"path": "toy", "format": "toy", "version": "1"})


def make_policy(**changes: Any) -> FlowPolicy:
    chunking = Chunking(horizon=4, n_obs_steps=2, n_action_steps=2)
    return FlowPolicy(network=MLPBackbone(width=16, depth=1), chunking=chunking, **changes)


def make_imitation(folder: Path, policy: Any = None, data: Any = None, **changes: Any) -> Imitation:
    """A short run; `trainer` and `evaluation` are dicts of settings."""
    trainer = {"iterations": 20, "batch_size": 16, "log_every": 5, "checkpoint_every": 5, "warmup_updates": 4}
    trainer |= {"tensorboard": False, "cpu_threads": 1, **changes.pop("trainer", {})}
    evaluation = PolicyEvaluationSettings(**changes.pop("evaluation", {}))
    return Imitation(
        "toy",
        folder,
        changes.pop("seed", 0),
        make_policy() if policy is None else policy,
        ToyDemonstrations() if data is None else data,
        trainer=PolicyTrainerSettings(**trainer),
        evaluation=evaluation,
        **changes,
    )


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def without_times(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in found]


def weights(run: Imitation) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.optimization.parameters])
