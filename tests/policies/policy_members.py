"""All policies that there are, small, for tests that hold for each of them; append yours to MEMBERS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from genrl.networks import DiTBackbone, EncoderSettings, MLPBackbone, ObsSpec, UNetBackbone
from genrl.objectives import LogitNormalTimes, UniformTimes
from genrl.policies import (
    Chunking,
    ChunkPolicy,
    ConsistencyPolicy,
    DiffusionPolicy,
    DriftGuidance,
    DriftingPolicy,
    FlowIntervals,
    FlowPolicy,
    MeanFlowGuidance,
    MeanFlowPolicy,
    Normalizer,
    OneStepFlowPolicy,
    RegressionPolicy,
)

ACTION_DIM = 3
SPECS = {"state": ObsSpec((4,), "state"), "robot0.eef_pos": ObsSpec((2,), "state")}
PICTURES = {"cam": ObsSpec((3, 16, 16), "image"), "points": ObsSpec((8, 3), "points"), **SPECS}
CHUNKING = Chunking(horizon=8, n_obs_steps=2, n_action_steps=3)
NETWORKS = {
    "mlp": MLPBackbone(width=32, depth=2),
    "unet": UNetBackbone(widths=(8, 16), groups=2, time_dim=16),
    "dit": DiTBackbone(dim=16, depth=2, heads=2),
}


@dataclass(frozen=True)
class Member:
    """A policy with small settings.

    Args:
        name: of the test case. cls: the policy.
        settings: arguments of the policy beyond those of `ChunkPolicy`.
        updates, learning_rate: enough to learn one sample by heart with an MLP of width 64.
        tolerance: root mean square error of its actions then, in units of the normalised range [-1, 1].
        unused_input: the network never sees an x other than 0, so weights that x alone meets get no gradient.
    """

    name: str
    cls: type[ChunkPolicy]
    settings: dict[str, Any] = field(default_factory=dict)
    updates: int = 600
    learning_rate: float = 1e-2
    tolerance: float = 0.1
    unused_input: bool = False

    def build(
        self,
        network: str | Any = "mlp",
        chunking: Chunking = CHUNKING,
        specs: dict[str, ObsSpec] = SPECS,
        seed: int = 0,
        **settings: Any,
    ) -> ChunkPolicy:
        """A configured policy."""
        backbone = NETWORKS[network] if isinstance(network, str) else network
        policy = self.cls(network=backbone, chunking=chunking, **{"encoder": SMALL, **self.settings, **settings})
        configure(policy, specs, seed)
        return policy


SMALL = EncoderSettings(points_widths=(8, 16), points_features=8, image_features=8)

MEMBERS = [
    Member("flow", FlowPolicy, {"steps": 3}),
    Member("flow-heun", FlowPolicy, {"steps": 3, "solver": "heun"}),
    Member("flow-one-step", FlowPolicy, {"steps": 1}),
    Member("ddpm", DiffusionPolicy, {"train_steps": 10, "steps": 10}),
    Member("ddim", DiffusionPolicy, {"train_steps": 20, "steps": 4, "sampler": "ddim"}),
    Member("meanflow", MeanFlowPolicy),
    Member("meanflow-mp1", MeanFlowPolicy, {"guidance": MeanFlowGuidance(2.0, branch="mp1"), "steps": 2}),
    Member(
        "meanflow-guided",
        MeanFlowPolicy,
        {
            "guidance": MeanFlowGuidance(1.5, mix=0.2, dropout=0.5),
            "tangent": "model",
            "derivative": "difference",
            "end_times": LogitNormalTimes(-4.0, 1.6),
        },
    ),
    Member("onestep", OneStepFlowPolicy),
    Member(
        "onestep-guided",
        OneStepFlowPolicy,
        {
            "guidance_weight": 0.05,
            "dropout": 0.5,
            "steps": 2,
            "times": LogitNormalTimes(0.0, 1.0),
            "intervals": FlowIntervals(UniformTimes(), full_share=0.6),
        },
    ),
    Member("drifting", DriftingPolicy),
    Member(
        "drifting-guided",
        DriftingPolicy,
        {
            "particles": 4,
            "temperatures": (0.05, 0.2),
            "affinity": "both",
            "neighbours": 2,
            "bandwidth": 1.0,
            "guidance": DriftGuidance(1.2, negatives=2, source="network", dropout=0.3),
        },
    ),
    *(Member(variant, ConsistencyPolicy, {"variant": variant}) for variant in ("ct", "ict", "slct")),
    *(
        Member(variant, ConsistencyPolicy, {"variant": variant}, learning_rate=4e-3, tolerance=0.2)
        for variant in ("ect", "sct")
    ),
    Member("ct-two-steps", ConsistencyPolicy, {"variant": "ct", "steps": 2}),
    Member("flow-map", ConsistencyPolicy, {"variant": "flow_map"}),
    Member(
        "flow-map-guided",
        ConsistencyPolicy,
        {"variant": "flow_map", "guidance": 1.5, "dropout": 0.5, "derivative": "difference", "steps": 2},
    ),
    Member("regression", RegressionPolicy, updates=200, unused_input=True),
    Member("regression-l1", RegressionPolicy, {"distance": "l1"}, updates=400, unused_input=True),
]


def configure(policy: ChunkPolicy, specs: dict[str, ObsSpec] = SPECS, seed: int = 0) -> None:
    """Networks and a normaliser fitted on uneven random data."""
    rng = np.random.default_rng(7)
    arrays: dict[str, np.ndarray] = {"action": 3 * rng.uniform(-1, 1, size=(200, ACTION_DIM)) + 1}
    for name, spec in specs.items():
        if spec.kind == "image":
            arrays[name] = rng.integers(0, 256, size=(4, *spec.shape), dtype=np.uint8)
        else:
            arrays[name] = 2 * rng.normal(size=(200, *spec.shape)) - 5
    policy.configure(specs, ACTION_DIM, Normalizer.fit(arrays, policy.normalization.modes(specs)), seed=seed)


def make_batch(policy: ChunkPolicy, rows: int = 5, seed: int = 0) -> dict[str, Any]:
    """Raw data in the range of the normaliser; the second half of the first row is padding."""
    rng = np.random.default_rng(seed)
    obs = {}
    for name, spec in policy.specs.items():
        shape = (rows, policy.chunking.n_obs_steps, *spec.shape)
        if spec.kind == "image":
            obs[name] = torch.from_numpy(rng.integers(0, 256, size=shape, dtype=np.uint8))
        else:
            obs[name] = torch.from_numpy((2 * rng.normal(size=shape) - 5).astype(np.float32))
    horizon = policy.chunking.horizon
    actions = torch.from_numpy((3 * rng.uniform(-1, 1, size=(rows, horizon, ACTION_DIM)) + 1).astype(np.float32))
    valid = torch.ones(rows, horizon, dtype=torch.bool)
    valid[0, (horizon + 1) // 2 :] = False
    return {"obs": obs, "actions": actions, "valid": valid}


def awaken(policy: ChunkPolicy) -> ChunkPolicy:
    """Give zero-initialised weights values, so that outputs depend on everything."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            if not p.any():
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return policy


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fixed_noise(seed: int = 0):
    """(step, shape) -> noise that is the same in every call."""
    return lambda step, shape: torch.randn(shape, generator=generator(seed + 1000 * (step + 2)))
