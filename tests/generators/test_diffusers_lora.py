"""What is trained in a pipeline: adapters and whole denoisers, their references, and what is saved of them."""

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines import LORA, PROMPTS, change, encode, make, native, sample, shared

from genrl import tiny
from genrl.generators import DiffusersGenerator, LoraSettings
from genrl.generators.lora import add_adapter


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_saved_adapter_gives_the_trained_output_in_plain_diffusers(family, tmp_path):
    generator = shared(family)
    x1, media = sample(generator, family, steps=2)
    generator.save_pretrained(tmp_path)
    pipe = DiffusionPipeline.from_pretrained(tiny.saved_pipeline(family))
    assert not torch.allclose(native(family, x1, 2), media, atol=1e-4)
    pipe.load_lora_weights(str(tmp_path))
    for folder in (path for path in tmp_path.iterdir() if path.is_dir()):
        pipe.load_lora_weights(str(folder), adapter_name="second", **{f"load_into_{folder.name}": True})
    torch.testing.assert_close(native(family, x1, 2, pipe=pipe), media, atol=5e-6, rtol=0)
    loaded = DiffusersGenerator.from_pretrained(tmp_path)
    assert torch.equal(sample(loaded, family, steps=2)[1], media)
    assert [n for n, p in loaded.module.named_parameters() if p.requires_grad] == list(generator.weights.named)


def test_alpha_and_targets_are_what_was_asked_for(tmp_path):
    generator = make("sd3", lora={"rank": 3, "alpha": 12, "targets": ["to_q", "ff.net.2"]})
    assert len(generator.trainable()) == 2 * (2 + 1 + 2)  # two blocks, one with a second attention
    change(generator)
    generator.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has rank 3 and alpha 12.*rank=3, alpha=3"):
        DiffusersGenerator.from_pretrained(tmp_path, lora={"rank": 3, "alpha": 3})
    with pytest.raises(ValueError, match=r"LoRA targets \['qkv'\] match no layer of transformer.*to_q"):
        make("sd3", lora={"rank": 2, "targets": ["qkv", "to_q"]})
    with pytest.raises(ValueError, match="takes no LoRA adapters; lora=None trains all"):
        add_adapter("prior", torch.nn.Linear(1, 1), LoraSettings(), 0)


def test_adapters_that_change_nothing_are_refused(tmp_path):
    make("sd3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="every lora_B is zero"):
        DiffusersGenerator.from_pretrained(tmp_path)
    DiffusersGenerator.from_pretrained(tmp_path, allow_noop=True)
    shared("flux").save_pretrained(tmp_path / "flux")
    with pytest.raises(ValueError, match="does not fit SanaPipeline"):
        make("sana", adapters={"policy": str(tmp_path / "flux")})
    with pytest.raises(FileNotFoundError, match=r"genrl\.json"):
        DiffusersGenerator.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("reference", ["base", "start"])
def test_the_reference_of_an_adapter_is_the_base_or_the_start(reference, tmp_path):
    first = make("sd3")
    change(first)
    first.save_pretrained(tmp_path)
    started = sample(first, "sd3")[1]
    adapters = {"style": str(tmp_path), "policy": str(tmp_path)}
    generator = make("sd3", adapters=adapters, reference=reference)
    both = sample(generator, "sd3")[1]
    assert not torch.allclose(both, started, atol=1e-4)  # the frozen adapter acts as well
    change(generator)
    flags = {n: p.requires_grad for n, p in generator.module.named_parameters()}
    assert all(flag == (".policy." in name) for name, flag in flags.items())
    changed = sample(generator, "sd3")[1]
    with generator.reference():
        inside = sample(generator, "sd3")[1]
    assert torch.equal(inside, both if reference == "start" else sample(make("sd3"), "sd3")[1])
    assert torch.equal(sample(generator, "sd3")[1], changed) and not torch.equal(changed, both)
    assert flags == {n: p.requires_grad for n, p in generator.module.named_parameters()}


@pytest.mark.parametrize("family", ["sd3", "sd15", "wan22"])
def test_a_new_policy_trains_beside_the_frozen_adapter_of_an_earlier_run(family, tmp_path):
    shared(family).save_pretrained(tmp_path / "style")
    generator = make(family, lora={"rank": 3, "alpha": 6}, adapters={"style": str(tmp_path / "style")})
    x1, styled = sample(generator, family, steps=2)
    assert torch.equal(styled, sample(shared(family), family, steps=2)[1])  # the new policy changes nothing yet
    frozen = {n: p.clone() for n, p in generator.module.named_parameters() if ".policy." not in n}
    assert any(".style." in name for name in frozen) and all(".policy." in name for name in generator.weights.named)
    cond = encode(generator, family, PROMPTS[:1])
    generator.velocity(x1, torch.tensor([0.5]), cond).square().sum().backward()
    torch.optim.SGD(generator.trainable(), 0.1).step()
    change(generator)
    trained = sample(generator, family, steps=2)[1]
    assert not torch.allclose(trained, styled, atol=1e-4)
    assert all(torch.equal(p, frozen[n]) for n, p in generator.module.named_parameters() if n in frozen)
    generator.save_pretrained(tmp_path / "policy")
    assert torch.equal(sample(DiffusersGenerator.from_pretrained(tmp_path / "policy"), family, steps=2)[1], trained)


@pytest.mark.parametrize("family", ["sd15", "wan22"])
def test_all_weights_are_trained_and_saved_as_a_pipeline(family, tmp_path):
    generator = make(family, lora=None)
    before = sample(generator, family)[1]
    state = {name: p.clone() for name, p in generator.state_dict().items()}
    change(generator, 0.01)
    x1, after = sample(generator, family)
    with generator.reference():  # first asked for when the weights have changed: read from the disk again
        assert torch.equal(sample(generator, family)[1], before)
    generator.save_pretrained(tmp_path)
    plain = native(family, x1, pipe=DiffusionPipeline.from_pretrained(tmp_path))
    torch.testing.assert_close(plain, after, atol=5e-6, rtol=0)
    assert torch.equal(sample(DiffusersGenerator.from_pretrained(tmp_path), family)[1], after)
    generator.load_state_dict(state)
    assert torch.equal(sample(generator, family)[1], before) and not torch.equal(before, after)


def test_a_pipeline_object_keeps_its_reference_if_asked_in_time():
    for early in (True, False):
        generator = make("sd3", model=tiny.pipeline("sd3"), lora=None)
        before = sample(generator, "sd3")[1]
        if early:
            with generator.reference():
                pass
        change(generator)
        if early:
            with generator.reference():
                assert torch.equal(sample(generator, "sd3")[1], before)
        else:
            with pytest.raises(RuntimeError, match="before the first update"), generator.reference():
                pass


def test_each_step_trains_the_expert_that_the_pipeline_chooses():
    generator = make("wan22", train=["transformer_2"], lora=LORA)
    assert {name.split(".")[0] for name in generator.weights.named} == {"transformer_2"}
    cond = encode(generator, "wan22", PROMPTS[:1])
    x = generator.initial_latents(cond, torch.Generator().manual_seed(0))
    for t, trained in ((0.95, False), (0.5, True)):
        generator.velocity(x, torch.tensor([t]), cond).sum().backward()
        assert trained == any(p.grad is not None and bool(p.grad.any()) for p in generator.trainable())
