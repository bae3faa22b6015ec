"""A choice between two actions, one number long: what a one-step policy must not average."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from genrl.networks import MLPBackbone, ObsSpec
from genrl.policies import Chunking, ChunkPolicy, Draw, Normalizer

MODES, SPREAD = (-1.0, 1.0), 0.1
SPECS = {"state": ObsSpec((1,), "state")}


def train(cls: type[ChunkPolicy], updates: int, seed: int, lower: float = 0.5, **settings: Any) -> ChunkPolicy:
    """A small policy on actions that are N(-1, 0.1^2) with probability `lower`, else N(1, 0.1^2), in one state."""
    policy = cls(network=MLPBackbone(width=64, depth=2), chunking=Chunking(1, 1, 1), **settings)
    features = {"state": ("identity", (1,)), "action": ("identity", (1,))}
    policy.configure(SPECS, 1, Normalizer(features), seed=seed)
    parameters = policy.trained_parameters()
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    batch = 256
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * update / updates))
        sign = torch.where(torch.rand(batch, generator=generator) < lower, MODES[0], MODES[1])
        actions = sign + SPREAD * torch.randn(batch, generator=generator)
        data = {
            "obs": {"state": torch.zeros(batch, 1, 1)},
            "actions": actions[:, None, None],
            "valid": torch.ones(batch, 1, dtype=torch.bool),
        }
        optimizer.zero_grad()
        policy.loss(data, generator, update / updates)[0].backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        policy.after_update(update + 1)
    return policy.eval()


def sample(policy: ChunkPolicy, rows: int = 2000) -> Tensor:
    """Actions [rows] from independent noise."""
    obs = {"state": torch.zeros(rows, 1, 1)}
    return policy.predict(obs, Draw(torch.Generator().manual_seed(99)).noise).flatten()


def shares(actions: Tensor) -> tuple[float, float]:
    """Shares of the actions within 0.4 (four standard deviations) of the lower and of the upper mode."""
    lower, upper = (float(((actions - mode).abs() < 4 * SPREAD).float().mean()) for mode in MODES)
    return lower, upper
