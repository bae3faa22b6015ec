"""A synthetic run directory, in the layout that the training loop writes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

TIMES = [1.0, 0.9, 0.75, 0.6, 0.4, 0.2, 0.0]


def train_row(i: int, rng: random.Random, ratios: bool = True) -> dict[str, Any]:
    row: dict[str, Any] = {
        "iteration": i,
        "kind": "train",
        "reward/correct": 0.95 - 0.2 * math.exp(-i / 8) + rng.gauss(0, 0.01),
        "reward/correct_std": 0.15 * math.exp(-i / 20),
        "advantage/zero_std_groups": min(1.0, i / 60),
        "advantage/nan_share": 0.0,
        "loss/total": rng.gauss(0, 1e-4),
        "grad/norm": 0.4 + rng.random() * 0.2,
        "kl/reference": 2e-3 * i,
        "lr": 3e-4,
        "time/rollout": 0.8 + rng.random() * 0.1,
        "time/reward": 0.12,
        "time/update": 1.4 + rng.random() * 0.2,
        "time/iteration": 2.45,
        "cost/forward_equivalents": 1820.0 * i,
        "stats/dark_share": 0.61,
    }
    if ratios:
        row |= {"ratio/mean": 1.0, "ratio/min": 0.993, "ratio/max": 1.006, "ratio/clip_fraction": 0.2}
        row |= {"ratio/first_step_gap": 3e-8, "kl/old": 1.4e-4}
        for k, t in enumerate(TIMES[:-1]):
            kl = 1e-4 * (1 + k) ** 1.5 * (1 + i / 30)
            row |= {
                f"step_{k}/t": t,
                f"step_{k}/kl_old": kl,
                f"step_{k}/log_ratio_mean": -kl * (0.9 + 0.1 * rng.random()),
                f"step_{k}/log_ratio_std": math.sqrt(2 * kl / 64),
                f"step_{k}/normalized_mean": rng.gauss(0, 2e-5),
                f"step_{k}/normalized_std": 6e-4,
                f"step_{k}/clip_fraction": min(0.9, 0.02 * (1 + k) ** 2),
            }
    return row


def eval_row(i: int) -> dict[str, Any]:
    row: dict[str, Any] = {"iteration": i, "kind": "eval"}
    learned = 1 - math.exp(-i / 10)
    for prefix, offset in (("eval", 0.0), ("eval_train_sampler", -0.05)):
        for name, first, gain in (("correct", 0.845, 0.14), ("judge", 0.842, 0.135)):
            value = first + offset + gain * learned
            row |= {
                f"{prefix}/{name}": value,
                f"{prefix}/{name}_low": value - 0.02,
                f"{prefix}/{name}_high": value + 0.015,
            }
        row |= {f"{prefix}/spread_std": 0.335 - 0.05 * learned, f"{prefix}/spread_nn": 0.21 + 0.02 * learned}
        row[f"{prefix}/spread_rec"] = 0.24 + 0.015 * learned
    return row


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    return lambda name="flow_grpo_digits", **options: build_run(tmp_path / name, name, **options)


def build_run(
    folder: Path,
    name: str,
    *,
    iterations: int = 40,
    ratios: bool = True,
    summary: dict[str, Any] | None = None,
    events: tuple[dict[str, Any], ...] = (),
    config: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    rng = random.Random(seed)
    (folder / "samples").mkdir(parents=True)
    rows = [eval_row(0)]
    for i in range(1, iterations + 1):
        rows.append(train_row(i, rng, ratios))
        if i % 5 == 0:
            rows.append(eval_row(i))
    rows += events
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {
        "name": name,
        "method": "PolicyGradient(FlowSDE, clipped)",
        "command": ["genrl", "train", "configs/flow_grpo_digits.yaml", f"seed={seed}"],
        "versions": {"genrl": "0.1.0", "torch": "2.14.1", "python": "3.12.3"},
        "started": "2026-01-02T03:04:05",
        "processes": 1,
        "times": TIMES,
        "trained_steps": [0, 1, 2, 3, 4],
        "sizes": {"parameters": 251_904, "latent": [1, 8, 8], "samples_per_iteration": 96},
    }
    (folder / "run.json").write_text(json.dumps(about | (run or {})))
    settings = {"name": name, "seed": seed, "trainer": {"iterations": iterations, "group_size": 12}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | (config or {})))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    for i in range(0, iterations + 1, 10):
        grid = Image.frombytes("L", (90, 36), bytes(rng.randrange(256) for _ in range(90 * 36)))
        grid.save(folder / "samples" / f"iteration-{i:06d}.png")
    return folder
