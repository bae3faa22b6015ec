"""What does not work with a pipeline is refused with the setting, its value and a remedy."""

import logging

import pytest
import torch
from pipelines import encode, make, shared

from genrl import tiny
from genrl.algorithms import PolicyGradient
from genrl.generators import DiffusersGenerator, LoraSettings
from genrl.generators.pipeline_errors import check_sizes
from genrl.training import TrainerSettings
from genrl.training.errors import TrainingError
from genrl.training.processes import make_accelerator
from genrl.training.seeding import Layout
from genrl.training.updater import Updater


def test_sizes_that_a_pipeline_does_not_keep_are_refused():
    for family, settings, message in (
        ("flux_kontext", {"call": {"max_area": 64 * 64}}, r"height=32.*works at height 64.*max_area: 1024"),
        ("wan", {"call": {"num_frames": 6}}, r"generator\.num_frames=6: it works at num_frames 5"),
        ("sd3", {"call": {"height": 30}}, r"StableDiffusion3Pipeline failed with height=30.*check generator\.height"),
    ):
        with pytest.raises(ValueError, match=message):
            make(family, **settings)
    generator = make("ltx", call={"num_frames": 8})  # known when it decodes, not before
    cond = encode(generator, "ltx")[:1]
    with pytest.raises(
        ValueError, match=r"LTXPipeline does not keep generator\.num_frames=8: it works at num_frames 5"
    ):
        generator.decode(generator.initial_latents(cond, None), cond)


def test_arguments_of_prepare_latents_may_count_latents():
    asked = {"height": 512, "width": 256}
    check_sizes(shared("sd3").pipe, asked, {"height": 64, "width": 32}, latents=True)
    with pytest.raises(ValueError, match="works at height 64, width 32"):
        check_sizes(shared("sd3").pipe, asked, {"height": 64, "width": 32})


def broken(*_):
    return torch.zeros(2) @ torch.zeros(3)


def test_a_failure_of_the_first_call_names_the_settings_and_a_later_one_is_left_alone():
    with pytest.raises(ValueError, match=r"FluxPipeline failed with .*max_sequence_length': 'long'.*check generator"):
        make("flux", call={"max_sequence_length": "long"})
    generator = make("sd3")
    cond = generator.encode(["a"])
    x = generator.initial_latents(cond, None)
    generator.pipe.transformer.pos_embed.register_forward_hook(broken)
    with pytest.raises(ValueError, match=r"failed with height=32.*size.*check generator\.call") as caught:
        generator.velocity(x, torch.ones(1), cond)
    assert isinstance(caught.value.__cause__, RuntimeError)
    generator = shared("sd3")
    generator.velocity(x, torch.ones(1), generator.encode(["a"]))
    hook = generator.pipe.transformer.pos_embed.register_forward_hook(broken)
    with pytest.raises(RuntimeError):
        generator.velocity(x, torch.ones(1), generator.encode(["a"]))
    hook.remove()


def test_unknown_arguments_are_answered_with_close_ones_and_negative_guidance_is_refused():
    for settings, message in (
        (
            {"call": {"max_sequence_lenght": 3}},
            r"call\.max_sequence_lenght cannot be given.*mean max_sequence_length\?$",
        ),
        ({"guidance_scale": -1.0}, r"generator\.guidance_scale=-1\.0 is negative"),
        ({"call": {"latents": None}}, r"generator\.call\.latents cannot be given"),
    ):
        with pytest.raises(ValueError, match=message):
            make("sd3", **settings)
    assert tiny.call_arguments("sd3")["height"] == 32


def test_what_cannot_be_loaded_is_named_with_a_remedy(tmp_path, monkeypatch):
    from diffusers import DiffusionPipeline
    from huggingface_hub import constants

    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for model, message in (
        (tmp_path / "empty", r"generator\.model='.*this folder holds no pipeline, it has no model_index"),
        (tiny.saved_pipeline("sd3") / "vae", "no pipeline but a single model"),
        (tmp_path / "none", r"generator\.model='.*the folder does not exist"),
        ("nobody/nothing", r"generator\.model='nobody/nothing'.*HF_HUB_OFFLINE is set.*hf auth login.*--tiny"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            DiffusersGenerator(str(model)).prepare("cpu")
    assert isinstance(caught.value.__cause__, OSError)

    (tmp_path / "empty" / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be loaded: reading it failed with .*check its files"):
        DiffusersGenerator(str(tmp_path / "empty")).prepare("cpu")

    def gated(*args, **kwargs):
        raise OSError("401: you are trying to access a gated repo")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"gated: accept its licence.*hf auth login"):
        patch.setattr(DiffusionPipeline, "from_pretrained", gated)
        DiffusersGenerator("owner/gated").prepare("cpu")
    with pytest.raises(ValueError, match=r"generator\.adapters\.style='.*the folder does not exist"):
        make("sd3", adapters={"style": str(tmp_path / "none")})
    with pytest.raises(ValueError, match=r"generator\.adapters\.style='nobody/nothing'.*could not be fetched"):
        make("sd3", adapters={"style": "nobody/nothing"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": "abc"}, r"generator\.lora\.rank must be an integer, got 'abc'"),
        ({"rank": 2.5}, r"generator\.lora\.rank must be an integer"),
        ({"alpha": True}, r"generator\.lora\.alpha must be a number"),
        ({"targets": "to_q"}, r"generator\.lora\.targets must be a list"),
    ],
)
def test_lora_settings_of_another_type_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LoraSettings.from_dict(values)


def test_libraries_do_not_chatter_when_adapters_are_read(tmp_path, capfd, caplog):
    shared("sd15").save_pretrained(tmp_path)
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        make("sd15", adapters={"style": str(tmp_path)}, attention_backend="native")
        make("sd15", lora=None).save_pretrained(tmp_path / "whole")
    written = capfd.readouterr().err + caplog.text
    assert not any(text in written for text in ("No LoRA keys", "experimental feature", "Writing model shards"))


@pytest.mark.parametrize("part", ["transformer", "text_encoder_3"])  # trained, and frozen
def test_a_part_that_drops_out_is_refused_before_anything_is_trained(part):
    generator = make("sd3")
    network = getattr(generator.pipe, part)
    network.dropped = torch.nn.Dropout(0.1)
    updater = Updater(generator, PolicyGradient(steps=3), TrainerSettings())
    network.eval()
    updater.prepare(make_accelerator(updater.settings), Layout(2, 2, 1, 1, 0))
    network.dropped.train()
    with pytest.raises(TrainingError, match="dropped is a dropout layer in training mode"):
        updater.prepare(make_accelerator(updater.settings), Layout(2, 2, 1, 1, 0))
