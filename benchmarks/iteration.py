"""Where the time of an iteration goes: roll-out, rewards, update.

    python benchmarks/iteration.py [CONFIG ...] [--iterations 6]

Runs configurations in one process, one after the other, without evaluation and checkpoints between iterations, and
prints the median of each part over the iterations after the first. Rewards are computed while the next batch is drawn,
so "reward" is the time that is left to wait for them. "us per forward-equivalent" divides the iteration by its cost, a
backward counted as two forwards.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from pathlib import Path

import torch

from genrl.config import build, load_config
from genrl.training import Loop

DEFAULT = ["flow_grpo", "grpo_guard", "flow_grpo_fast", "diffusion_nft"]
PARTS = ("time/rollout", "time/reward", "time/update", "time/iteration")


def measure(config: Path, iterations: int) -> dict[str, float]:
    """Medians in seconds, and the cost of an iteration."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"run_dir={folder}/run", f"trainer.iterations={iterations}", "trainer.checkpoint_every=0",
            "trainer.preview_every=0", "trainer.cpu_threads=1", "trainer.tensorboard=false", "evaluation.every=0",
            "evaluation.samples_per_prompt=2", "evaluation.train_sampler=never",
        ]  # fmt: skip
        loaded = load_config(config, overrides)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            Loop(**build(loaded), config=loaded.raw).run(resume="never")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    found = {part: statistics.median(row[part] for row in rows[1:]) for part in PARTS}
    return {**found, "cost": rows[-1]["cost/forward_equivalents"] / iterations}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    folder = Path(__file__).resolve().parents[1] / "configs" / "digits"
    parser.add_argument("configs", nargs="*", type=Path, default=[folder / f"{name}.yaml" for name in DEFAULT])
    parser.add_argument("--iterations", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("configuration       roll-out   reward   update  iteration   us per forward-equivalent")
    for config in options.configs:
        found = measure(config, options.iterations)
        rollout, reward, update, whole = (found[part] for part in PARTS)
        print(
            f"{config.stem:<18} {rollout:>7.3f} s {reward:>6.3f} s {update:>6.3f} s {whole:>8.3f} s   "
            f"{1e6 * whole / found['cost']:>25.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
