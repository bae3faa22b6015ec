"""The front of reward against diversity, at equal compute.

    python benchmarks/reward_diversity_front.py CONFIG [CONFIG ...] --seeds 0 1 2 --budget 100 --out runs/front \\
        --svg front.svg

Every config is trained with every seed until it has spent ``--budget`` thousand forward-equivalents (a backward counts
two; finished runs are reused) and evaluated ``--marks`` times on the way, on the same 500 samples of the 20-step
deterministic sampler. Printed: judge and spread at each mark, and for levels of the judge the largest spread at which a
run reaches them, interpolated along its path. The picture has judge to the right and spread upwards: a small dot for
every evaluation, a line through the means over seeds, and a large dot at the end; up and to the right is better.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from genrl.config import build, load_config
from genrl.report.data import read_metrics
from genrl.training import Loop

SPREAD = ("spread_std", "spread_nn", "spread_rec")
COLOURS = ("#d1495b", "#2e6f95", "#3f8f4f", "#8d5bb5", "#c98a1b", "#555555", "#00a3a3", "#a0522d")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 620, 420, 60, 50, 20, 20
Row = dict[str, Any]


class AtMarks:
    """Evaluates a loop when its compute passes a mark and ends it at the last one."""

    def __init__(self, loop: Loop, budget: float, marks: int):
        self.loop, self.budget, self.width = loop, budget, budget / marks
        self.next = self.width
        self.evaluate = loop._evaluate
        loop._evaluate = self  # type: ignore[method-assign]

    def __call__(self, first: bool = False, last: bool = False) -> None:
        over = self.loop.cost >= self.budget
        if first or last or self.loop.cost >= self.next:
            self.evaluate(first=first, last=last or over)
            while self.next <= self.loop.cost:
                self.next += self.width
        if over:
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
        "trainer.iterations=100000",
        "evaluation.every=1",
        "evaluation.train_sampler=never",
        "trainer.checkpoint_every=0",
        "trainer.preview_every=0",
        "trainer.tensorboard=false",
        *arguments.set,
    ]
    loaded = load_config(config, overrides)
    loop = Loop(**build(loaded), config=loaded.raw)
    AtMarks(loop, 1000 * arguments.budget, arguments.marks)
    loop.run(resume="never")
    return folder


def path_of(folder: Path, budget: float = float("inf")) -> list[Row]:
    """The evaluations of a run up to a budget, each with its compute in thousands."""
    rows = read_metrics(folder)
    cost = {r["iteration"]: r["cost/forward_equivalents"] / 1000 for r in rows if r["kind"] == "train"} | {0: 0.0}
    path = [{**r, "cost": cost[r["iteration"]]} for r in rows if r["kind"] == "eval"]
    return path[: 1 + next((i for i, row in enumerate(path) if row["cost"] >= budget), len(path))]


def mean_path(paths: list[list[Row]], spread: str) -> list[tuple[float, float]]:
    """(judge, spread) over the seeds, mark by mark."""
    keys = ("eval/judge", f"eval/{spread}")
    return [tuple(statistics.mean(row[key] for row in rows) for key in keys) for rows in zip(*paths, strict=False)]  # type: ignore[misc]


def spread_at(path: list[Row], level: float, spread: str) -> float | None:
    """The largest spread at which a run's path crosses a level of the judge, between evaluations in a straight line."""
    points = [(row["eval/judge"], row[f"eval/{spread}"]) for row in path]
    found = []
    for (x0, y0), (x1, y1) in pairwise(points):
        if min(x0, x1) <= level <= max(x0, x1) and x0 != x1:
            found.append(y0 + (level - x0) / (x1 - x0) * (y1 - y0))
    return max(found, default=None)


def picture(paths: dict[str, list[list[Row]]], spread: str) -> str:
    """The front as SVG."""
    every = [(r["eval/judge"], r[f"eval/{spread}"]) for runs in paths.values() for run in runs for r in run]
    (x0, x1), (y0, y1) = (
        (min(c) - 0.02 * (max(c) - min(c)), max(c) + 0.02 * (max(c) - min(c))) for c in zip(*every, strict=True)
    )

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - TOP),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for i in range(6):
        x, y = x0 + i / 5 * (x1 - x0), y0 + i / 5 * (y1 - y0)
        px, py = at(x, y)
        parts.append(f'<path d="M{px:.1f} {TOP}V{HEIGHT - BOTTOM}M{LEFT} {py:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:.3f}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:.3f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 12}" text-anchor="middle">judge (held out)</text>')
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(spread)}</text>'
    )
    for i, (name, runs) in enumerate(paths.items()):
        colour = COLOURS[i % len(COLOURS)]
        for row in (row for run in runs for row in run):
            px, py = at(row["eval/judge"], row[f"eval/{spread}"])
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2" fill="{colour}" opacity=".35"/>')
        line = [at(*point) for point in mean_path(runs, spread)]
        drawn = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in line)
        parts.append(f'<path d="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{line[-1][0]:.1f}" cy="{line[-1][1]:.1f}" r="5" fill="{colour}"/>')
        y = HEIGHT - BOTTOM - 14 - 16 * (len(paths) - 1 - i)
        parts.append(f'<circle cx="{LEFT + 14}" cy="{y - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 24}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=float, default=100, help="thousands of forward-equivalents")
    parser.add_argument("--marks", type=int, default=8, help="evaluations on the way")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.95, 0.98])
    parser.add_argument("--spread", default="spread_std", help="gauge on the vertical axis")
    parser.add_argument("--out", default="runs/front")
    parser.add_argument("--svg", help="where the picture goes")
    parser.add_argument("--steering", help="JSON of benchmarks/steering_front.py, drawn into the picture")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="changes to every config")
    arguments = parser.parse_args()
    folders = {Path(c).stem: [run(c, seed, arguments) for seed in arguments.seeds] for c in arguments.configs}
    paths = {name: [path_of(folder, arguments.budget) for folder in runs] for name, runs in folders.items()}
    for name, runs in paths.items():
        print(f"\n{name}: thousands of forward-equivalents, judge, std / nn / rec (means over seeds)")
        for rows in zip(*runs, strict=False):
            print(f"  {statistics.mean(r['cost'] for r in rows):6.1f}  {_mean(rows, 'judge')}  {_spreads(rows)}")
    heads = [f"{arguments.spread} at judge {level:g} (seeds)" for level in arguments.levels]
    print("\n| method | judge at the end (seeds) | std / nn / rec at the end | " + " | ".join(heads) + " |")
    print("|" + "---|" * (3 + len(heads)))
    for name, runs in paths.items():
        ends = [rows[-1] for rows in runs]
        judges = ", ".join(f"{r['eval/judge']:.3f}".lstrip("0") for r in ends)
        cells = []
        for level in arguments.levels:
            found = [spread_at(rows, level, arguments.spread) for rows in runs]
            shown = ", ".join("never" if f is None else f"{f:.3f}".lstrip("0") for f in found)
            there = [f for f in found if f is not None]
            cells.append(f"{statistics.mean(there):.3f} ({shown})".lstrip("0") if there else "never")
        print(f"| {name} | {_mean(ends, 'judge')} ({judges}) | {_spreads(ends)} | " + " | ".join(cells) + " |")
    if arguments.svg:
        steered = json.loads(Path(arguments.steering).read_text()) if arguments.steering else {}
        Path(arguments.svg).write_text(picture(paths | steered, arguments.spread))
        print(f"\nwritten: {arguments.svg}")


def _mean(rows: Any, name: str) -> str:
    return f"{statistics.mean(r[f'eval/{name}'] for r in rows):.3f}".lstrip("0")


def _spreads(rows: Any) -> str:
    return " / ".join(_mean(rows, name) for name in SPREAD)


if __name__ == "__main__":
    main()
