"""A bandit with two right answers: which policies keep both, and which go between them.

    python benchmarks/two_modes.py --seeds 0 1 2

A state s in [-1, 1] has the right actions (s + 1, s/2) / 2 and (s - 1, s/2) / 2, each half of the time, with a standard
deviation of 0.05. Printed for every policy, after training on 2000 demonstrations of one step:

- on a mode: share of sampled actions within three standard deviations of a right answer (of perfect samples: 98.9 %);
- coverage: twice the share of the rarer mode among those, averaged over states (1: both modes, 0: one mode only);
- between: share within 0.25 of the middle of the two, which is never right.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from genrl import policies
from genrl.envs.data import Demonstrations, Episode
from genrl.networks import MLPBackbone
from genrl.training import Imitation, PolicyEvaluationSettings, PolicyTrainerSettings

DEVIATION, HALF = 0.05, np.float32([0.5, 0.0])
POLICIES = {
    "regression": lambda **a: policies.RegressionPolicy(**a),
    "flow, 1 Euler step": lambda **a: policies.FlowPolicy(steps=1, **a),
    "flow, 10 Euler steps": lambda **a: policies.FlowPolicy(steps=10, **a),
    "diffusion, 100 steps": lambda **a: policies.DiffusionPolicy(**a),
    "MeanFlow": lambda **a: policies.MeanFlowPolicy(**a),
    "one-step flow (OFP)": lambda **a: policies.OneStepFlowPolicy(**a),
    "drifting": lambda **a: policies.DriftingPolicy(**a),
    "consistency": lambda **a: policies.ConsistencyPolicy(**a),
}


def middle(state: np.ndarray) -> np.ndarray:
    """Halfway between the two right actions [N, 2] of states [N, 1]."""
    return np.concatenate([state / 2, state / 4], 1)


class TwoModes:
    """Demonstrations of one step each."""

    def __init__(self, episodes: int = 2000):
        self.episodes = episodes

    def load(self) -> Demonstrations:
        rng = np.random.default_rng(0)
        state = rng.uniform(-1, 1, (self.episodes, 1)).astype(np.float32)
        side = rng.choice([-1, 1], (self.episodes, 1)).astype(np.float32)
        action = middle(state) + side * HALF + DEVIATION * rng.normal(size=(self.episodes, 2)).astype(np.float32)
        made = [Episode({"state": s[None]}, a[None].astype(np.float32)) for s, a in zip(state, action, strict=True)]
        return Demonstrations.of(made, {"path": "two modes", "format": "synthetic"})


def measure(policy: policies.ChunkPolicy, per_state: int = 400) -> dict[str, float]:
    """Shares over 25 states."""
    state = np.linspace(-0.9, 0.9, 25, dtype=np.float32)[:, None]
    rows = torch.from_numpy(state).repeat_interleave(per_state, 0)[:, None]  # [N, 1, 1]
    action = policy.act({"state": rows}, torch.Generator().manual_seed(1))[:, 0].numpy()
    offset = (action - middle(rows[:, 0].numpy())).reshape(25, per_state, 2)
    right, left = (np.linalg.norm(offset - s * HALF, axis=-1) < 3 * DEVIATION for s in (1, -1))
    hits = np.maximum(right.sum(1) + left.sum(1), 1)
    return {
        "on a mode": float((right | left).mean()),
        "coverage": float((2 * np.minimum(right.sum(1), left.sum(1)) / hits).mean()),
        "between": float((np.linalg.norm(offset, axis=-1) < 0.25).mean()),
    }


def train(name: str, seed: int, iterations: int, folder: Path) -> dict[str, float]:
    """One policy, measured with its moving average."""
    chunking = policies.Chunking(horizon=1, n_obs_steps=1, n_action_steps=1)
    policy = POLICIES[name](network=MLPBackbone(width=128, depth=2), chunking=chunking)
    trainer = PolicyTrainerSettings(iterations=iterations, checkpoint_every=0, tensorboard=False, cpu_threads=1)
    run = Imitation(name, folder, seed, policy, TwoModes(), None, trainer, PolicyEvaluationSettings())
    run.run()
    with run.optimization.evaluated_weights():
        return measure(policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=2000)
    options = parser.parse_args()
    table = ["| policy | NFE | on a mode | coverage | between |", "|---|---|---|---|---|"]
    for name in options.policies:
        with tempfile.TemporaryDirectory() as folder:
            found = [train(name, seed, options.iterations, Path(folder) / str(seed)) for seed in options.seeds]
        cells = ["/".join(f"{100 * one[key]:.0f}" for one in found) for key in ("on a mode", "coverage", "between")]
        table.append(f"| {name} | {POLICIES[name]().nfe} | " + " | ".join(cells) + " |")
    print("\n".join(table))


if __name__ == "__main__":
    main()
