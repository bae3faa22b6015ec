"""What does not work with a pipeline is refused with the setting, its value and a remedy."""

import pytest
import torch
from pipelines import encode, make, shared

from genrl import tiny
from genrl.generators.pipeline_errors import check_sizes


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
