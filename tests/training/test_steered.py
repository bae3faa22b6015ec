"""Samples that are steered by the reward of a finished run."""

import json

import pytest
import torch
import toy
import yaml

from genrl.algorithms import ParticleSteering
from genrl.cli import main
from genrl.config import build, load_config
from genrl.prompts import Prompt
from genrl.training import Loop
from genrl.training.evaluation import evaluate_run, load_run, sample_run
from genrl.training.steered import steered_samples, trained_score


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steered")
    tree = {
        "run_dir": str(folder / "run"),
        "generator": {"class_path": "toy.ToyGenerator", "init_args": {"hidden": 12}},
        "prompts": {"class_path": "toy.ToyPrompts"},
        "reward": {"class_path": "toy.HalfBrightness"},
        "algorithm": {"class_path": "genrl.algorithms.PolicyGradient", "init_args": {"steps": 4}},
        "trainer": {"iterations": 1, "prompts_per_iteration": 2, "group_size": 4, "device": "cpu", "cpu_threads": 1},
        "evaluation": {
            "every": 0,
            "samples_per_prompt": 2,
            "steps": 8,
            "gauges": {"dark": {"class_path": "toy.Darkness"}},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(folder / "config.yaml")
    Loop(**build(config), config=config.raw).run()
    return folder / "run"


PROMPTS = [Prompt("p3", {"half": 1}), Prompt("p4", {"half": 0})]


def test_the_reward_rises_with_strength_and_not_without(run):
    parts = load_run(run, "start")
    rewards = [
        steered_samples(parts, PROMPTS, 16, ParticleSteering(8, strength), seed=1).values for strength in (0.0, 40.0)
    ]
    assert rewards[0]["before"]["reward"] == rewards[1]["before"]["reward"]
    assert rewards[1]["steered"]["reward"] > rewards[1]["before"]["reward"] + 0.08
    assert rewards[0]["steering"]["resampled"] == 0 and rewards[0]["steering"]["ess"] == 1
    assert rewards[1]["steered"]["dark"] < rewards[1]["before"]["dark"]  # gauges are there


def test_samples_are_reproducible_and_do_not_depend_on_the_batch(run):
    parts, steering = load_run(run), ParticleSteering(4, 10.0)
    whole = steered_samples(parts, PROMPTS, 5, steering, seed=3)
    parts["evaluation"].batch = 9  # two systems at once
    parted = steered_samples(parts, PROMPTS, 5, steering, seed=3)
    assert torch.equal(whole.after.media, parted.after.media) and torch.equal(whole.before.media, parted.before.media)
    assert not torch.equal(whole.after.media, steered_samples(parts, PROMPTS, 5, steering, seed=4).after.media)
    best = steered_samples(parts, PROMPTS, 5, steering, seed=3, pick="best")
    score = [trained_score(parts["reward"], s.after.media, s.after.prompts) for s in (whole, best)]
    assert bool((score[1] >= score[0] - 1e-6).all()) and float(score[1].mean()) > float(score[0].mean())


def test_the_start_of_a_run_is_the_untrained_generator(run):
    start = load_run(run, "start")
    assert torch.equal(toy.weights_of(start["generator"]), toy.weights_of(toy.ToyGenerator(hidden=12)))
    assert evaluate_run(run, "start", samples_per_prompt=2)["iteration"] == 0


def test_the_command_writes_pictures_and_says_what_it_did(run, tmp_path, capsys):
    command = ["sample", str(run), "--checkpoint", "start", "-n", "2", "--out", str(tmp_path / "out"), "--prompt", "p3"]
    assert main([*command, "--steer", "reward", "--particles", "3", "--steer-strength", "40"]) == 0
    said = capsys.readouterr().out
    values = json.loads((tmp_path / "out" / "steering.json").read_text())
    assert f"{values['before']['reward']:.4g} -> {values['steered']['reward']:.4g}" in said and "FlowSDE" in said
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "grid.png", "prompt000-000.png", "prompt000-001.png", "steering.json",
    ]  # fmt: skip
    assert main([*command, "--particles", "3"]) == 2
    assert "add --steer reward" in capsys.readouterr().err


def test_a_deterministic_training_sampler_is_steered_with_ddim(run):
    parts = load_run(run)
    parts["algorithm"].sampler.eligible = ()
    found = steered_samples(parts, PROMPTS, 2, ParticleSteering(2))
    assert "DDIM(eta=1.0) with 8 steps" in found.values["sampler"]
    assert sample_run(run, n=1, steering=ParticleSteering(2), out=run / "steered").name == "grid.png"
