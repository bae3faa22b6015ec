"""Success of every policy on several tasks: the same network, demonstrations and number of updates for all.

    python benchmarks/policy_table.py --tasks push-v3:20 hammer-v3:10 --seeds 0 1 2 --out runs/table

A cell is what these two commands give, and is skipped when its result is already there:

    genrl train configs/policies/METHOD.yaml env.id=metaworld/TASK data.episodes=N seed=S evaluation.episodes=0 \
        run_dir=OUT/TASK-N/METHOD-S
    genrl evaluate OUT/TASK-N/METHOD-S --episodes 50 --videos 0

`--only tables` prints what there is. Several processes may share the work: `--part 0/2` and `--part 1/2`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

METHODS = (
    "regression",
    "flow_one_step",
    "flow",
    "diffusion",
    "mean_flow",
    "one_step_flow",
    "drifting",
    "consistency",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK:DEMONSTRATIONS")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("runs/table"))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="for every run")
    parser.add_argument("--part", default="0/1", help="which part of the cells, I/N")
    parser.add_argument("--only", choices=("cells", "tables"), help="measure, or print what there is")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    cells = [(t, m, s) for s in options.seeds for t in options.tasks for m in options.methods]
    if options.only != "tables":
        for number, (task, method, seed) in enumerate(cells):
            if number % parts == part:
                measure(task, method, seed, options)
    if options.only != "cells" and part == 0:
        print_table(options)


def measure(task: str, method: str, seed: int, options: argparse.Namespace) -> None:
    """Train and evaluate one cell."""
    from genrl.cli import main as genrl

    name, demonstrations = task.split(":")
    run_dir = options.out / task.replace(":", "-") / f"{method}-{seed}"
    result = run_dir / "evaluation-100000.json"
    if result.is_file():
        return
    began = time.time()
    train = [f"configs/policies/{method}.yaml", f"env.id=metaworld/{name}", f"data.episodes={demonstrations}"]
    train += [f"seed={seed}", "evaluation.episodes=0", "trainer.tensorboard=false", f"run_dir={run_dir}", *options.set]
    evaluate = ["evaluate", str(run_dir), "--episodes", str(options.episodes), "--videos", "0"]
    for command in (["train", *train], evaluate):
        if code := genrl(command):
            sys.exit(f"genrl {' '.join(command)} failed with exit code {code}")
        if json.loads((run_dir / "summary.json").read_text())["status"] != "finished":
            sys.exit(f"{run_dir} was interrupted; the same command goes on with it")
    summary = json.loads(result.read_text())["summary"]
    print(f"## {task} {method} seed {seed}: {summary['success_rate']:.2f}, {time.time() - began:.0f} s", flush=True)


def print_table(options: argparse.Namespace) -> None:
    """Markdown: success over all seeds with Wilson's interval, and the mean over tasks."""
    from genrl.statistics import wilson_interval

    heads = [task.replace("-v3", "").replace(":", ", ") for task in options.tasks]
    print("| policy | NFE | act, ms | " + " | ".join(heads) + " | mean |")
    print("|---" * (len(heads) + 4) + "|")
    for method in options.methods:
        cells, shares, latency, calls = [], [], [], "–"
        for task in options.tasks:
            folder = options.out / task.replace(":", "-")
            files = [folder / f"{method}-{seed}" / "evaluation-100000.json" for seed in options.seeds]
            found = [json.loads(file.read_text()) for file in files if file.is_file()]
            for file in files:
                timing = file.with_name("evaluation-100000.timing.json")
                if timing.is_file():
                    latency.append(json.loads(timing.read_text())["latency"]["p50_ms"])
            if not found:
                cells.append("–")
                continue
            calls = str(found[0]["policy"]["nfe"])
            n = sum(len(one["episodes"]) for one in found)
            share = sum(one["summary"]["successes"] for one in found) / n
            low, high = wilson_interval(share, n)
            each = "/".join(f"{100 * one['summary']['success_rate']:.0f}" for one in found)
            cells.append(f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}] ({each})")
            shares.append(share)
        mean = f"{100 * sum(shares) / len(shares):.1f}" if shares else "–"
        fast = f"{sorted(latency)[len(latency) // 2]:.2f}" if latency else "–"
        print(f"| {method} | {calls} | {fast} | " + " | ".join(cells) + f" | {mean} |")


if __name__ == "__main__":
    main()
