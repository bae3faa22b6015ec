"""Real data, real reward: the main job at a size that fits a test."""

import json
from pathlib import Path

from genrl.config import build, load_config
from genrl.training import Loop

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "digits"


def test_a_generator_learns_what_its_reward_wants_and_the_unseen_judge_agrees(tmp_path):
    """Twelve iterations, judged on 500 samples under the same noise before and after.

    Measured gains for seeds 0, 1, 2: judge .090, .096, .102, proxy .149, .145, .162; the standard error of a difference
    of two such judge readings is about .015.
    """
    config = load_config(
        CONFIGS / "flow_grpo_t4.yaml",
        [
            f"run_dir={tmp_path / 'run'}",
            "trainer.iterations=12",
            "trainer.tensorboard=false",
            "evaluation.every=0",
            "evaluation.train_sampler=never",
        ],
    )
    summary = Loop(**build(config), config=config.raw).run()
    before, after = summary.before, summary.after
    assert summary.status == "finished"
    assert 0.7 < before["eval/judge"] < 0.93  # the base leaves room
    assert after["eval/judge"] > before["eval/judge"] + 0.045
    assert after["eval/correct"] > before["eval/correct"] + 0.07
    assert after["eval/spread_nn"] < before["eval/spread_nn"] + 0.03
    assert after["eval/spread_rec"] < before["eval/spread_rec"] + 0.03
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["ratio/first_step_gap"] == 0 for row in rows if row["kind"] == "train")
    assert (tmp_path / "run" / "report.html").stat().st_size > 20_000
