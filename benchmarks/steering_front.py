"""Steering alone: reward, judge and spread of a run's samples at several strengths, without further training.

    python benchmarks/steering_front.py RUN --checkpoint start --particles 2 4 8 --out steering.json

Every system gives one sample; the first row of a table is without steering (from the same noise and sampler). The JSON
can be drawn into the front of reward against diversity (`reward_diversity_front.py --steering steering.json`), with
strength along the line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from genrl.algorithms import ParticleSteering
from genrl.training.evaluation import load_run
from genrl.training.steered import steered_samples

SHOWN = ("reward", "judge", "spread_std", "spread_nn", "spread_rec")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--checkpoint", default="start")
    parser.add_argument("--particles", type=int, nargs="+", default=[4])
    parser.add_argument("--strengths", type=float, nargs="+", default=[2.0, 6.0, 20.0, 60.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("-n", type=int, default=50, help="samples for each held-out prompt")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="JSON: {name: [one list of rows for each seed]}")
    arguments = parser.parse_args()
    run = load_run(arguments.run, arguments.checkpoint)
    found: dict[str, list[list[dict[str, Any]]]] = {}
    print("| K | strength | reward | judge | std / nn / rec | ancestors left |\n|---|---|---|---|---|---|")
    for size in arguments.particles:
        paths: list[list[dict[str, Any]]] = [[] for _ in arguments.seeds]
        for strength in arguments.strengths:
            for path, seed in zip(paths, arguments.seeds, strict=True):
                steering = ParticleSteering(size, strength)
                held_out = run["prompts"].held_out
                values = steered_samples(run, held_out, arguments.n, steering, steps=arguments.steps, seed=seed).values
                if not path:
                    path.append(_row(values["before"], 0.0, 1.0))
                path.append(_row(values["steered"], strength, values["steering"]["ancestors"]))
        found[f"steering alone, K = {size}"] = paths
        for rows in zip(*paths, strict=True):
            mean = {k: statistics.mean(row[k] for row in rows) for k in rows[0]}
            spread = " / ".join(f"{mean[f'eval/{name}']:.3f}".lstrip("0") for name in SHOWN[2:])
            print(
                f"| {size} | {mean['strength']:g} | {mean['eval/reward']:.3f} | {mean['eval/judge']:.3f} | {spread} | "
                f"{mean['ancestors']:.0%} |",
                flush=True,
            )
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1))


def _row(values: dict[str, Any], strength: float, ancestors: float) -> dict[str, Any]:
    return {**{f"eval/{name}": values[name] for name in SHOWN}, "strength": strength, "ancestors": ancestors}


if __name__ == "__main__":
    main()
