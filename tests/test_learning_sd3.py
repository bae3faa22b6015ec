"""The example that fine-tunes a small Stable Diffusion 3: its parts fit, and the LoRA works in plain diffusers."""

import runpy
from pathlib import Path

import pytest
import torch

from genrl.config import build, load_config
from genrl.training import Loop

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "sd3_digits"


@pytest.fixture(scope="module")
def example():
    return {
        name: runpy.run_path(str(EXAMPLE / f"{name}.py"), run_name="example") for name in ("make_pipeline", "compare")
    }


@pytest.fixture(scope="module")
def base(example, tmp_path_factory):
    """A pipeline after a moment of training, which is enough to see the losses fall."""
    make = example["make_pipeline"]
    pipe = make["random_pipeline"]()
    images, labels = make["pictures"]()
    assert make["train_vae"](pipe.vae, images, 30, progress=False) < images.var() / 2
    losses = make["train_transformer"](pipe, images, labels, 30, progress=False)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    folder = tmp_path_factory.mktemp("sd3") / "base"
    pipe.save_pretrained(folder)
    return folder


def test_words_have_tokens_of_their_own_and_prompts_fit(example):
    make = example["make_pipeline"]
    pipe = make["random_pipeline"]()
    for text in ("this is the number 7 in ink", "a picture of a handwritten seven"):
        words = len(text.split())
        for tokenizer in (pipe.tokenizer, pipe.tokenizer_2, pipe.tokenizer_3):
            assert len(tokenizer.tokenize(text)) == words < make["LENGTH"] - 1


def test_plain_diffusers_draws_what_genrl_draws_before_and_after_training(example, base, tmp_path):
    changes = [
        f"generator.model={base}",
        f"run_dir={tmp_path / 'run'}",
        "trainer.iterations=2",
        "trainer.prompts_per_iteration=4",
        "trainer.group_size=4",
        "trainer.tensorboard=false",
        "evaluation.every=0",
        "evaluation.steps=4",
        "evaluation.samples_per_prompt=2",
        "evaluation.train_sampler=never",
    ]
    config = load_config(EXAMPLE / "guard.yaml", changes)
    summary = Loop(**build(config), config=config.raw).run()
    found = example["compare"]["compare"](tmp_path / "run")
    scores = found["scores"]["diffusers"]
    for model, measured in (("base", summary.before), ("LoRA", summary.after)):
        assert found["apart"][model] < 1e-4
        assert scores[model]["reward"].mean().item() == pytest.approx(measured["eval/correct"], abs=1e-4)
        assert scores[model]["judge"].mean().item() == pytest.approx(measured["eval/judge"], abs=1e-6)
    assert not torch.equal(scores["base"]["reward"], scores["LoRA"]["reward"])
