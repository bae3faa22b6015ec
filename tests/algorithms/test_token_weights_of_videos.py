"""Token weights on the built-in video model: TVRL's configuration in small, and chunk weights of a causal model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from genrl.config import build, load_config
from genrl.training import Loop

ROOT = Path(__file__).parents[2]
SMALL = [
    "generator.init_args.base_steps=1",
    "generator.init_args.videos=32",
    "generator.init_args.depth=1",
    "generator.init_args.dim=16",
    "generator.init_args.heads=2",
    "algorithm.init_args.steps=3",
    "trainer.prompts_per_iteration=2",
    "trainer.group_size=4",
    "trainer.checkpoint_every=1",
    "trainer.preview_every=0",
    "trainer.tensorboard=false",
    "evaluation.every=0",
    "evaluation.samples_per_prompt=1",
    "evaluation.steps=2",
    "evaluation.train_sampler=never",
    "evaluation.gauges={}",
    "prompts.init_args.motions=[left]",
]
RECIPE = "{class_path: genrl.rewards.video_questions.AnswererRecipe, init_args: {steps: 2, videos: 64}}"
CRITIC = [
    f"reward.init_args.recipe={RECIPE}",
    f"algorithm.init_args.token_weights.init_args.questions.init_args.recipe={RECIPE}",
]


def loop(run_dir: Path, iterations: int, changes: list[str], config: str = "tvrl.yaml") -> Loop:
    overrides = [f"run_dir={run_dir}", "name=tvrl", f"trainer.iterations={iterations}", *SMALL, *changes]
    loaded = load_config(ROOT / "configs/moving_digits" / config, overrides)
    return Loop(**build(loaded), config=loaded.raw)


def weights(run: Loop) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.generator.trainable()])


@pytest.mark.parametrize("surrogate", ["PPOClip", "Guard"])
def test_tvrl_trains_a_video_model_and_resumes_exactly(tmp_path, surrogate):
    changes = [*CRITIC, f"algorithm.init_args.surrogate=genrl.objectives.{surrogate}"]
    whole = loop(tmp_path / "whole", 2, changes)
    whole.run(resume="never")
    loop(tmp_path / "parts", 1, changes).run(resume="never")
    second = loop(tmp_path / "parts", 2, changes)
    second.run(resume="require")
    assert torch.equal(weights(whole), weights(second))
    rows = toy.rows(tmp_path / "whole", "train")
    assert all(0 < row["token_weights/effective_share"] < 1 for row in rows)
    assert all(row["ratio/first_step_gap"] == 0 and row["grad/norm"] > 0 for row in rows)
    assert list((tmp_path / "whole/samples").glob("credit-iteration-000002.*"))


def test_no_credit_is_the_baseline(tmp_path):
    uniform = loop(tmp_path / "a", 1, [*CRITIC, "algorithm.init_args.token_weights.init_args.lam=0"])
    plain = loop(tmp_path / "b", 1, CRITIC[:1], "grpo_video.yaml")
    uniform.run(resume="never")
    plain.run(resume="never")
    assert torch.equal(weights(uniform), weights(plain))


def test_a_causal_model_trains_with_chunk_weights_on_one_step_a_sample(tmp_path):
    part: dict[str, Any] = {"class_path": "genrl.algorithms.ChunkWeights", "init_args": {"a": -1.0}}
    changes = [
        CRITIC[0],
        "generator.init_args.kind=causal",
        f"algorithm.init_args.token_weights={part}",
        "algorithm.init_args.transitions_per_sample=1",
        "algorithm.init_args.anchor=recompute",
    ]
    run = loop(tmp_path / "run", 1, changes, "grpo_video.yaml")
    run.run(resume="never")
    (row,) = toy.rows(tmp_path / "run", "train")
    own = run.algorithm.token_weights._weights(run.generator).flatten()  # [F], five chunks of two frames
    assert own.shape == (10,) and float(own[-1] / own[0]) == pytest.approx(5)
    assert row["token_weights/effective_share"] == pytest.approx(float(1 / own.square().mean()))
    assert row["ratio/first_step_gap"] == 0 and row["grad/norm"] > 0
