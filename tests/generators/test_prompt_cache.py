"""Prompts are encoded once; batches of them are what the pipeline itself makes."""

import pytest
import torch
from pipelines import PROMPTS, encode, make, sample

from genrl import tiny
from genrl.generators.prompt_cache import PromptCache


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if f not in ("qwenimage", "flux2", "flux2_klein")])
def test_joined_prompts_are_the_pipelines_batch(family):
    pipe = tiny.pipeline(family)
    cache = PromptCache(pipe)
    arguments = {"prompt": list(PROMPTS), "device": torch.device("cpu")}
    arguments |= {k: v for k, v in (("prompt_2", None), ("prompt_3", None)) if k in cache._signature.parameters}
    if "num_images_per_prompt" in cache._signature.parameters:
        arguments |= {"num_images_per_prompt": 1}
    if "do_classifier_free_guidance" in cache._signature.parameters:
        arguments |= {"do_classifier_free_guidance": True}
    with torch.no_grad():
        expected = pipe.encode_prompt(**{**arguments, "prompt": list(PROMPTS)})
    found = cache(**arguments)
    assert cache(**arguments) is found and len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["sd3", "zimage"])
def test_the_next_run_reads_prompts_from_disk_and_training_runs_no_text_encoder(family, tmp_path):
    reference, calls = sample(make(family), family)[1], []
    for run in range(2):
        generator = make(family, prompt_cache=str(tmp_path), offload_text_encoders=True)
        for encoder in generator._probe.texts.encoders:
            encoder.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(sample(generator, family)[1], reference) and bool(calls) == (run == 0)
        cond = encode(generator, family)[:1]
        calls.clear()
        generator.velocity(generator.initial_latents(cond, None), torch.tensor([0.5]), cond)
        assert not calls and generator._probe.texts.asleep


def test_other_encoders_and_other_arguments_are_other_entries(tmp_path):
    first, second = PromptCache(tiny.pipeline("wan", 0), tmp_path), PromptCache(tiny.pipeline("wan", 1), tmp_path)
    a, b = first(["a cat"], None, False), second(["a cat"], None, False)
    assert not torch.equal(a[0], b[0])
    assert first(["a cat"], None, False, max_sequence_length=8)[0].shape != a[0].shape
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ValueError, match=r"generator\.prompt_cache='.*give a folder"):
            make("sd3", prompt_cache=str(folder))
