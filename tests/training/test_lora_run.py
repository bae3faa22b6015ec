"""Adapters in the loop: what is trained, what is frozen, what is saved."""

import json

import pytest
import torch

from genrl.algorithms import PolicyGradient
from genrl.generators import DigitPrompts, DigitsGenerator
from genrl.training import EvaluationSettings, Loop, TrainerSettings

TINY = {"dim": 16, "depth": 1, "heads": 2, "base_steps": 3, "lora": {"rank": 2, "alpha": 6}}


def brightness(media, prompts, metadata):
    return media.flatten(1).mean(1)


def make(run_dir, cache, iterations):
    trainer = TrainerSettings(
        iterations=iterations, prompts_per_iteration=4, group_size=4, checkpoint_every=1, tensorboard=False
    )
    evaluation = EvaluationSettings(every=0, samples_per_prompt=2, steps=3, train_sampler="never")
    algorithm = PolicyGradient(steps=3, kl_weight=0.1)
    generator = DigitsGenerator(**TINY, cache_dir=cache)
    return Loop("lora", run_dir, 0, generator, DigitPrompts(), brightness, algorithm, trainer, evaluation)


def metrics(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows if row["kind"] != "event"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_only_the_adapter_is_trained_and_the_reference_is_the_frozen_base(tmp_path, cache):
    loop = make(tmp_path, cache, 2)
    loop.generator.prepare("cpu", progress=False)
    network = loop.generator._network
    frozen = {n: p.clone() for n, p in network.named_parameters() if not p.requires_grad}
    assert loop.run().weight_change > 0
    trained = {n for n, p in network.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert all(torch.equal(dict(network.named_parameters())[name], value) for name, value in frozen.items())
    rows = [row for row in metrics(tmp_path) if row["kind"] == "train"]
    # The adapter starts as a no-op, so the first update has no distance to the base; later ones do.
    assert rows[1]["kl/reference"] > 0


def test_a_resumed_adapter_run_equals_a_straight_one(tmp_path, cache):
    make(tmp_path / "straight", cache, 3).run()
    make(tmp_path / "resumed", cache, 1).run()
    make(tmp_path / "resumed", cache, 3).run()
    straight, resumed = (
        [row for row in metrics(tmp_path / name) if row["kind"] == "train"] for name in ("straight", "resumed")
    )
    assert straight == resumed


def test_what_is_exported_samples_like_what_was_trained(tmp_path, cache):
    loop = make(tmp_path, cache, 2)
    loop.run()
    loaded = DigitsGenerator.from_pretrained(tmp_path / "checkpoints" / "step-000002" / "model")
    cond = loaded.encode(["number 3", "number 4"])
    x, t = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, 0.9])
    with torch.no_grad():
        assert torch.equal(loaded.velocity(x, t, cond), loop.generator.velocity(x, t, cond))
