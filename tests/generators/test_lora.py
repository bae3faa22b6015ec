import json

import pytest
import torch
from generator_members import TINY, change, sample
from safetensors.torch import load_file, save_file

from genrl.generators import DigitsGenerator
from genrl.networks import VelocityDiT

PROMPTS = ["a handwritten seven", "number 3"]


@pytest.fixture
def generator(cache):
    generator = DigitsGenerator(**TINY, cache_dir=cache, lora={"rank": 2, "alpha": 6})
    generator.prepare("cpu", progress=False)
    return generator


def test_an_untrained_adapter_equals_the_base_exactly(generator, cache):
    full = DigitsGenerator(**TINY, cache_dir=cache)
    full.prepare("cpu", progress=False)
    assert torch.equal(sample(generator, PROMPTS), sample(full, PROMPTS))
    assert len(generator.trainable()) == 8  # A and B of four layers
    assert sum(p.numel() for p in generator.trainable()) == 2 * (64 + 32 + 80 + 80)


def test_alpha_scales_the_update_and_survives_the_round_trip(generator, cache, tmp_path):
    change(generator)
    generator.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (2, 6)
    other = DigitsGenerator(**TINY, cache_dir=cache, lora={"rank": 2, "alpha": 2})
    other.prepare("cpu", progress=False)
    other.load_state_dict(generator.state_dict())
    assert not torch.allclose(sample(other, PROMPTS), sample(generator, PROMPTS))
    assert torch.equal(sample(DigitsGenerator.from_pretrained(tmp_path), PROMPTS), sample(generator, PROMPTS))
    with pytest.raises(ValueError, match="lora_alpha=6"):
        other.weights.load(tmp_path)


def test_peft_reads_the_folder_to_the_same_outputs(generator, tmp_path):
    from peft import PeftModel

    change(generator)
    generator.save_pretrained(tmp_path)
    base = VelocityDiT(**generator._network_config)
    base.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    model = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    cond = generator.encode(PROMPTS)
    x, t = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.3, 0.8])
    assert torch.equal(model(x, t, cond), generator.velocity(x, t, cond))


def test_an_adapter_that_changes_nothing_is_refused(generator, tmp_path):
    generator.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="changes nothing"):
        DigitsGenerator.from_pretrained(tmp_path)
    loaded = DigitsGenerator.from_pretrained(tmp_path, allow_noop=True)
    assert torch.equal(sample(loaded, PROMPTS), sample(generator, PROMPTS))


def test_an_adapter_with_other_names_is_refused(generator, tmp_path):
    change(generator)
    generator.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name.replace("qkv", "query"): p for name, p in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="missing"):
        DigitsGenerator.from_pretrained(tmp_path)


def test_unknown_settings_and_ranks_are_refused():
    with pytest.raises(ValueError, match="dropout"):
        DigitsGenerator(lora={"dropout": 0.1})
    with pytest.raises(ValueError, match="at least 1"):
        DigitsGenerator(lora={"rank": 0})
