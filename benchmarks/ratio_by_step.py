"""Log-ratios by timestep of finished runs: the left shift against its prediction, its spread, and what the clip cuts.

    python benchmarks/ratio_by_step.py runs/guard/flow_grpo_t6-* -- runs/guard/grpo_guard-*

Runs of a group (groups are parted by ``--``) are averaged, and each run over its iterations. The prediction of the mean
log-ratio is minus the exact KL of the step; that of its spread is sqrt(2 KL / D) in the mean reduction.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from genrl.report.data import read_metrics

COLUMNS = ("log_ratio_mean", "kl_old", "log_ratio_std", "normalized_mean", "normalized_std", "clip_fraction")


def by_step(runs: list[Path]) -> dict[int, dict[str, float]]:
    """step -> means over runs and iterations."""
    rows = [row for run in runs for row in read_metrics(run) if row["kind"] == "train"]
    steps = sorted({int(k.split("/")[0].removeprefix("step_")) for row in rows for k in row if k.startswith("step_")})
    found = {}
    for step in steps:
        prefix = f"step_{step}/"
        names = ("t", *COLUMNS)
        found[step] = {n: statistics.mean(r[prefix + n] for r in rows if prefix + n in r) for n in names}
    return found


def main() -> None:
    groups: list[list[Path]] = [[]]
    for argument in sys.argv[1:]:
        if argument == "--":
            groups.append([])
        else:
            groups[-1].append(Path(argument))
    for runs in groups:
        print(f"\n{', '.join(run.name for run in runs)}\n")
        print("| t | mean log-ratio | -KL | std of log-ratio | normalised mean | normalised std | clipped |")
        print("|---|---|---|---|---|---|---|")
        for values in by_step(runs).values():
            v = [f"{values[name] * 1e4:.2f}" for name in COLUMNS[:-1]]
            cells = [f"{values['t']:.3f}", v[0], f"-{v[1]}", *v[2:], f"{values['clip_fraction']:.2f}"]
            print("| " + " | ".join(cells) + " |")
        ends = [[r for r in read_metrics(run) if r["kind"] == "eval"][-1] for run in runs]
        names = ("correct", "judge", "spread_std", "spread_nn", "spread_rec")
        print("\nlog-ratios in units of 1e-4; at the end, mean over runs:", end=" ")
        print(", ".join(f"{n} {statistics.mean(e[f'eval/{n}'] for e in ends):.3f}" for n in names))


if __name__ == "__main__":
    main()
