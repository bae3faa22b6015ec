"""Every recipe for a large model builds and trains one iteration as its tiny twin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from genrl.cli import main
from genrl.config import load_config
from genrl.tiny_twin import tiny_twin

ROOT = Path(__file__).parents[1]
RECIPES = [path for folder in ("images", "videos") for path in sorted((ROOT / "configs" / folder).glob("*.yaml"))]
RECIPES = [path for path in RECIPES if path.stem != "task"]


@pytest.fixture(autouse=True)
def beside_the_prompt_files(monkeypatch, tmp_path_factory):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GENRL_CACHE", str(tmp_path_factory.getbasetemp() / "recipes-cache"))


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_recipe_trains_as_its_tiny_twin(recipe, tmp_path):
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--tiny", f"run_dir={run}", "evaluation.train_sampler=never"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (train,) = [row for row in rows if row["kind"] == "train"]
    assert summary["status"] == "finished"
    assert train["grad/norm"] > 0 and train["ratio/first_step_gap"] < 1e-4
    assert rows[-1]["eval/weight_change"] > 0
    files = list((run / "checkpoints" / "step-000001" / "model").rglob("*lora_weights.safetensors"))
    assert files and any(bool(value.any()) for name, value in load_file(files[0]).items() if "lora_B" in name)
    assert (run / "report.html").stat().st_size > 1000


def test_a_twin_keeps_what_the_command_line_sets():
    config = load_config(RECIPES[0], ["trainer.iterations=3", "algorithm.minibatches=1"])
    twin = tiny_twin(config, ["trainer.iterations", "algorithm.minibatches"]).raw
    assert twin["trainer"]["iterations"] == 3 and twin["algorithm"]["init_args"]["minibatches"] == 1
    assert twin["trainer"]["group_size"] == 2 and twin["run_dir"].endswith("-tiny")
    model = twin["generator"]["init_args"]["model"]
    assert Path(model, "model_index.json").is_file()
    assert config.raw["trainer"]["group_size"] > 2  # the recipe itself is left as it was


def test_a_twin_has_samples_for_every_process(monkeypatch):
    for world, expected in (("1", 2), ("2", 2), ("3", 6), ("8", 8)):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert tiny_twin(load_config(RECIPES[0]), []).raw["trainer"]["group_size"] == expected
    given = tiny_twin(load_config(RECIPES[0], ["trainer.group_size=4"]), ["trainer.group_size"])
    assert given.raw["trainer"]["group_size"] == 4
