"""Methods on the moving digits at equal numbers of iterations: rewards, an unseen judge, and how much moves.

    python benchmarks/compare_videos.py CONFIG [CONFIG ...] --iterations 60 --seeds 0 1 2 --out runs/videos

Every config is trained with every seed (finished runs are reused) and evaluated on its held-out prompts with fixed
noise, by the sampler that the generator is made for. Printed: the start, and per config mean and range over seeds at
the end. ``k forwards`` are thousands of forward-equivalents (a backward counts two): methods with equal ones have had
the same compute. A config may be given as ``NAME=CONFIG,key=value,...`` to compare settings of one.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from genrl.config import build, load_config
from genrl.report.data import read_metrics
from genrl.training import Loop

COLUMNS = ("reward", "judge/both", "judge/digit", "judge/motion", "judge/first_chunk", "judge/last_chunk", "dynamics")


def run(name: str, config: str, changes: list[str], seed: int, arguments: argparse.Namespace) -> Path:
    """Train one config with one seed, unless that has been done."""
    folder = Path(arguments.out) / name / f"seed{seed}"
    if (folder / "summary.json").is_file():
        return folder
    overrides = [
        f"run_dir={folder}",
        f"name={name}-seed{seed}",
        f"seed={seed}",
        f"trainer.iterations={arguments.iterations}",
        "evaluation.train_sampler=never",
        "trainer.checkpoint_every=0",
        "trainer.preview_every=0",
        "trainer.tensorboard=false",
        *arguments.set,
        *changes,
    ]
    loaded = load_config(config, overrides)
    Loop(**build(loaded), config=loaded.raw).run(resume="never")
    return folder


def evaluations(folder: Path) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The first and the last evaluation, and the thousands of forward-equivalents in between."""
    rows = read_metrics(folder)
    found = [row for row in rows if row["kind"] == "eval"]
    cost = max(row["cost/forward_equivalents"] for row in rows if row["kind"] == "train") / 1000
    return found[0], found[-1], cost


def cell(values: list[float]) -> str:
    """Mean, and lowest to highest where there are several."""
    mean = sum(values) / len(values)
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{mean:.3f}{spread}"


def named(text: str) -> tuple[str, str, list[str]]:
    """NAME=CONFIG,key=value,... -> name, config, changes."""
    config, *changes = text.split(",")
    name, _, path = config.rpartition("=")
    return name or Path(path).stem, path, changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), help="names of measured numbers")
    parser.add_argument("--out", default="runs/videos")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="changes to every config")
    arguments = parser.parse_args()
    print("| method | k forwards | " + " | ".join(arguments.columns) + " |")
    print("|" + "---|" * (2 + len(arguments.columns)))
    start = None
    for name, config, changes in map(named, arguments.configs):
        runs = [evaluations(run(name, config, changes, seed, arguments)) for seed in arguments.seeds]
        if start is None:
            start = runs[0][0]
            values = [cell([start.get(f"eval/{column}", float("nan"))]) for column in arguments.columns]
            print("| start | 0 | " + " | ".join(values) + " |")
        values = [
            cell([last.get(f"eval/{column}", float("nan")) for _, last, _ in runs]) for column in arguments.columns
        ]
        print(f"| {name} | {runs[0][2]:.0f} | " + " | ".join(values) + " |", flush=True)


if __name__ == "__main__":
    main()
