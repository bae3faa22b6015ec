"""Two equally good ways around a wall: which policies know both, and which run into the wall.

    python benchmarks/two_ways.py --seeds 0 1 2 --out runs/two_ways

Every policy of configs/policies is trained on the same demonstrations in maze/TwoWays, half of which pass above the
wall and half below it, and then started `--repeats` times from each of `--starts` start states with different noise.
Printed: success with Wilson's 95 % interval, and coverage, which is twice the share of the rarer way among the
successes from one start state, averaged over start states (1: both ways equally often; 0: always the same; with 20
repeats a fair coin gives 0.82).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from policy_table import METHODS

from genrl.envs import make_env
from genrl.policies import ChunkExecutor, ChunkPolicy
from genrl.statistics import wilson_interval

FIRST = 100_000  # seed of the first start state
SETTINGS = (
    "env.id=maze/TwoWays",
    "env.max_steps=300",
    "data.episodes=100",
    "data.noise=0.1",
    "policy.chunking.horizon=16",
    "policy.chunking.n_action_steps=8",
    "evaluation.episodes=0",
    "trainer.tensorboard=false",
)


def trained(method: str, seed: int, out: Path, changes: list[str]) -> ChunkPolicy:
    """The policy of a method, trained unless it was before."""
    from genrl.config import build, load_config, run_class
    from genrl.training.policy_runs import load_policy_of

    folder = out / f"{method}-{seed}"
    if not (folder / "summary.json").is_file():
        overrides = [*SETTINGS, f"seed={seed}", f"run_dir={folder}", *changes]
        config = load_config(f"configs/policies/{method}.yaml", overrides)
        run_class(config)(**build(config), config=config.raw).run()
    return load_policy_of(folder)[0]


def ways(policy: ChunkPolicy, starts: int, repeats: int) -> np.ndarray:
    """1 for success above the wall, -1 below it, 0 for failure; [starts, repeats]."""
    found = np.zeros((starts, repeats), int)
    envs = [make_env("maze/TwoWays", max_steps=300) for _ in range(repeats)]
    for start in range(starts):
        executor = ChunkExecutor(policy, repeats, seed=start)
        states = []
        for row, env in enumerate(envs):
            states.append(env.reset(seed=FIRST + start)[0])
            executor.start(row, row, states[-1])
        side, active = np.zeros(repeats), np.ones(repeats, bool)
        while active.any():
            stacked = {name: np.stack([state[name] for state in states]) for name in states[0]}
            actions = np.asarray(executor.act(stacked, active))
            for row in np.flatnonzero(active):
                states[row], _, terminated, truncated, info = envs[row].step(actions[row])
                x, y = states[row]["state"][:2]
                if abs(x) < 0.5 and side[row] == 0:  # level with the wall
                    side[row] = np.sign(y)
                if info["success"] or terminated or truncated:
                    active[row] = False
                    found[start, row] = side[row] if info["success"] else 0
    for env in envs:
        env.close()
    return found


def coverage(found: np.ndarray) -> float:
    """See the beginning; 0 where no start succeeded twice."""
    up, down = (found == 1).sum(1), (found == -1).sum(1)
    several = up + down >= 2
    return float((2 * np.minimum(up, down) / np.maximum(up + down, 1))[several].mean()) if several.any() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/two_ways"))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="for every run")
    options = parser.parse_args()
    table = ["| policy | NFE | success, % | coverage by seed |", "|---|---|---|---|"]
    for method in options.methods:
        policies = [trained(method, seed, options.out, options.set) for seed in options.seeds]
        found = [ways(policy, options.starts, options.repeats) for policy in policies]
        share = float(np.mean([f != 0 for f in found]))
        low, high = wilson_interval(share, sum(f.size for f in found))
        each = "/".join(f"{100 * np.mean(f != 0):.0f}" for f in found)
        both = "/".join(f"{coverage(f):.2f}" for f in found)
        interval = f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
        row = f"| {method} | {policies[0].nfe} | {interval} ({each}) | {both} |"
        table.append(row)
        print(row, flush=True)
    print("\n".join(table))


if __name__ == "__main__":
    main()
