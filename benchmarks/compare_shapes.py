"""Homing beside the objectives that it is compared with, on the 3D shapes.

    python benchmarks/compare_shapes.py --seeds 0 1 2 --out runs/shapes [--arms dho nft ...] [key=value ...]

Every arm is trained with every seed from the same base for the same number of iterations, hence of samples and scores
(finished runs are reused), and evaluated before and after on the same held-out pictures and the same noise. Printed as
a table, mean and standard error over seeds: what is trained (the reward), what is not (F-score and volume against the
whole object, distance between the samples of a picture), the standard deviation of rewards within groups in the last
iterations, the alarms that the run raised, and thousands of forward-equivalents.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from genrl.config import build, load_config
from genrl.report.data import read_metrics
from genrl.training import Loop

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "shapes"
ARMS: dict[str, tuple[str, list[str]]] = {
    "dho": ("dho", []),
    "dho, velocity space": ("dho", ["algorithm.space=velocity"]),
    "positives only": ("positives_shapes", []),
    "nft": ("nft_shapes", []),
    "awm": ("awm_shapes", []),
    "dpo": ("dpo_shapes", []),
    "grpo": ("grpo_shapes", []),
}
COLUMNS = {"reward": "reward", "fscore": "F-score", "volume": "volume IoU", "diversity_shape_distance": "diversity"}
LAST = 5  # iterations that the spread within groups is averaged over


def run(arm: str, seed: int, out: Path, changes: list[str]) -> Path:
    """Train one arm with one seed, unless that has been done."""
    config, own = ARMS[arm]
    folder = out / arm.replace(", ", "-").replace(" ", "_") / f"seed{seed}"
    if (folder / "summary.json").is_file():
        return folder
    overrides = [f"run_dir={folder}", f"name={folder.parent.name}-seed{seed}", f"seed={seed}"]
    overrides += ["evaluation.every=0", "trainer.checkpoint_every=0", "trainer.preview_every=0"]
    overrides += ["evaluation.train_sampler=never", "trainer.tensorboard=false", *own, *changes]
    loaded = load_config(CONFIGS / f"{config}.yaml", overrides)
    Loop(**build(loaded), config=loaded.raw).run(resume="never")
    return folder


def numbers(folder: Path) -> dict[str, float]:
    """Changes of the evaluated numbers, and what the run says of itself."""
    rows = read_metrics(folder)
    evaluated = [row for row in rows if row["kind"] == "eval"]
    trained = [row for row in rows if row["kind"] == "train"]
    found: dict[str, float] = {}
    for name in COLUMNS:
        key = f"eval/{name}"
        found[name] = evaluated[-1][key]
        found[f"{name} change"] = evaluated[-1][key] - evaluated[0][key]
        found[f"{name} before"] = evaluated[0][key]
    spread = [row["advantage/within_group_std"] for row in trained]
    found["spread before"] = spread[0]
    found["spread"] = statistics.mean(spread[-LAST:])
    found["alarms"] = sum(row.get("event") == "alarm" for row in rows)
    found["cost"] = trained[-1]["cost/forward_equivalents"] / 1000
    return found


def mean_and_error(values: list[float], signed: bool = False) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{'+' if signed else ''}.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to every arm")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/shapes"))
    arguments = parser.parse_args()
    table: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arguments.arms}
    for seed in arguments.seeds:
        for arm in arguments.arms:
            table[arm].append(numbers(run(arm, seed, arguments.out, arguments.changes)))
    print("\n| arm | " + " | ".join(COLUMNS.values()) + " | spread within groups | alarms | k forwards |")
    print("|" + "---|" * (len(COLUMNS) + 4))
    first = table[arguments.arms[0]][0]
    base = [f"{first[f'{name} before']:.3f}" for name in COLUMNS]
    print("| base | " + " | ".join([*base, f"{first['spread before']:.3f}", "", ""]) + " |")
    for arm, rows in table.items():
        cells = []
        for name in COLUMNS:
            change = mean_and_error([r[f"{name} change"] for r in rows], signed=True)
            cells.append(f"{statistics.mean(r[name] for r in rows):.3f} ({change})")
        cells.append(mean_and_error([r["spread"] for r in rows]))
        cells.append(", ".join(str(r["alarms"]) for r in rows))
        cells.append(f"{statistics.mean(r['cost'] for r in rows):.0f}")
        print(f"| {arm} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
