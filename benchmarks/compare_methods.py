"""How much compute a method needs to reach a level of the judge, and what it costs in diversity.

    python benchmarks/compare_methods.py CONFIG [CONFIG ...] --seeds 0 1 2 --levels 0.95 0.98 --out runs/compare

Every config is trained with every seed (finished runs are reused), evaluated every ``--every`` iterations on the same
500 samples of the 20-step deterministic sampler, and stopped ``--after`` iterations past the highest level. Printed per
run and as a table over seeds: thousands of forward-equivalents (a backward counts two) until the judge first reaches a
level, and the spread there and at the end. "First reach" on a fixed set of samples is slightly optimistic, equally for
every method.
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

SPREAD = ("spread_std", "spread_nn", "spread_rec")


class StopAfter:
    """Ends a loop some iterations after the judge has reached a level."""

    def __init__(self, loop: Loop, level: float, after: int):
        self.loop, self.level, self.after, self.reached = loop, level, after, -1
        self.evaluate = loop._evaluate
        loop._evaluate = self  # type: ignore[method-assign]

    def __call__(self, **flags: bool) -> None:
        self.evaluate(**flags)
        rows = [r for r in read_metrics(self.loop.run_dir) if r["kind"] == "eval"]
        if self.reached < 0 and rows[-1]["eval/judge"] >= self.level:
            self.reached = self.loop.iteration
        if self.reached >= 0 and self.loop.iteration >= self.reached + self.after:
            self.loop._stop = "finished"


def run(config: str, seed: int, arguments: argparse.Namespace) -> Path:
    """Train one config with one seed, unless that has been done."""
    folder = Path(arguments.out) / Path(config).stem / f"seed{seed}"
    if (folder / "summary.json").is_file():
        return folder
    overrides = [
        f"run_dir={folder}",
        f"name={Path(config).stem}-seed{seed}",
        f"seed={seed}",
        f"trainer.iterations={arguments.iterations}",
        f"evaluation.every={arguments.every}",
        "evaluation.train_sampler=ends",
        "trainer.checkpoint_every=0",
        "trainer.tensorboard=false",
        *arguments.set,
    ]
    loaded = load_config(config, overrides)
    loop = Loop(**build(loaded), config=loaded.raw)
    StopAfter(loop, max(arguments.levels), arguments.after)
    loop.run(resume="never")
    return folder


def reach(folder: Path, level: float) -> dict[str, Any] | None:
    """The first evaluation at or above a level, with its cost."""
    rows = read_metrics(folder)
    cost = {r["iteration"]: r["cost/forward_equivalents"] / 1000 for r in rows if r["kind"] == "train"} | {0: 0.0}
    for row in rows:
        if row["kind"] == "eval" and row["eval/judge"] >= level:
            return {"iteration": row["iteration"], "cost": cost[row["iteration"]], **row}
    return None


def last(folder: Path) -> dict[str, Any]:
    return [r for r in read_metrics(folder) if r["kind"] == "eval"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--levels", type=float, nargs="+", default=[0.95, 0.98])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--after", type=int, default=20)
    parser.add_argument("--out", default="runs/compare")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="changes to every config")
    arguments = parser.parse_args()
    folders = {c: [run(c, seed, arguments) for seed in arguments.seeds] for c in arguments.configs}
    for config, runs in folders.items():
        print(f"\n{Path(config).stem}")
        for folder in runs:
            cells = [_cell(folder, level) for level in arguments.levels]
            print(f"  {folder.name}: " + "; ".join(cells) + f"; end {_end(folder)}")
    heads = [f"to {level:g}: k forwards | std / nn / rec there" for level in arguments.levels]
    print("\n| method | " + " | ".join(heads) + " | judge at the end | std / nn / rec at the end |")
    print("|" + "---|" * (3 + 2 * len(arguments.levels)))
    for config, runs in folders.items():
        print("| " + " | ".join([Path(config).stem, *_row(runs, arguments.levels)]) + " |")


def _cell(folder: Path, level: float) -> str:
    found = reach(folder, level)
    if found is None:
        return f"{level:g} never"
    return f"{level:g} at it {found['iteration']} ({found['cost']:.1f} k) {_spread(found)}"


def _end(folder: Path) -> str:
    row = last(folder)
    return f"it {row['iteration']} judge {row['eval/judge']:.3f} {_spread(row)}"


def _spread(row: dict[str, Any]) -> str:
    return " / ".join(f"{row[f'eval/{name}']:.3f}".lstrip("0") for name in SPREAD)


def _row(runs: list[Path], levels: list[float]) -> list[str]:
    cells: list[str] = []
    for level in levels:
        found = [reach(folder, level) for folder in runs]
        costs = [f"{f['cost']:.0f}" if f else "never" for f in found]
        there = [f for f in found if f]
        mean = f"{statistics.mean(f['cost'] for f in there):.0f} " if there and len(there) == len(found) else ""
        cells += [f"{mean}({', '.join(costs)})", _mean_spread(there)]
    ends = [last(folder) for folder in runs]
    cells.append(f"{statistics.mean(r['eval/judge'] for r in ends):.3f}")
    return [*cells, _mean_spread(ends)]


def _mean_spread(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    return " / ".join(f"{statistics.mean(r[f'eval/{name}'] for r in rows):.3f}".lstrip("0") for name in SPREAD)


if __name__ == "__main__":
    main()
