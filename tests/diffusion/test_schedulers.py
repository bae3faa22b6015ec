"""Schedulers of diffusers are mapped to a path and a grid that they really follow, or refused."""

import logging

import pytest
import torch

from genrl.diffusion import RectifiedFlow, VariancePreserving
from genrl.diffusion.schedulers import choose_path

diffusers = pytest.importorskip("diffusers")
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@pytest.mark.parametrize(
    ("name", "settings", "path", "prediction"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, RectifiedFlow, "velocity"),
        ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}, RectifiedFlow, "velocity"),
        ("UniPCMultistepScheduler", FLOW, RectifiedFlow, "velocity"),
        ("DDIMScheduler", {"prediction_type": "v_prediction"}, VariancePreserving, "v_prediction"),
        ("DDIMScheduler", {"set_alpha_to_one": False}, VariancePreserving, "epsilon"),
        ("DDPMScheduler", {"prediction_type": "sample"}, VariancePreserving, "sample"),
    ],
)  # fmt: skip
def test_schedulers_keep_their_grid_and_get_their_path(name, settings, path, prediction):
    scheduler = getattr(diffusers, name)(**settings)
    chosen, found, kind = choose_path(scheduler)
    assert chosen is scheduler and type(found) is path and kind == prediction
    if "set_alpha_to_one" in settings:
        assert float(found.alphas_cumprod(torch.zeros(()))) == pytest.approx(float(scheduler.alphas_cumprod[0]))


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "PNDMScheduler", "LMSDiscreteScheduler"])
def test_schedulers_that_rescale_or_repeat_become_ddim_and_say_what_was_guessed(name, caplog):
    scheduler = getattr(diffusers, name)(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    with caplog.at_level(logging.WARNING):
        chosen, _, _ = choose_path(scheduler)
    assert type(chosen).__name__ == "DDIMScheduler" and not chosen.config.clip_sample
    torch.testing.assert_close(chosen.alphas_cumprod, scheduler.alphas_cumprod)
    assert "set_alpha_to_one" in caplog.text and name in caplog.text


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("EDMEulerScheduler", {}),
        ("MiniMaxH3Scheduler", {}),  # its velocity has the other sign
        ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
        ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}),
    ],
)
def test_schedulers_that_step_otherwise_are_refused(name, settings):
    if not hasattr(diffusers, name):
        pytest.skip("not in this version")
    with pytest.raises(ValueError, match=r"choose scheduler='FlowMatchEulerDiscreteScheduler'"):
        choose_path(getattr(diffusers, name)(**settings))
    assert (
        choose_path(getattr(diffusers, name)(**settings), "FlowMatchEulerDiscreteScheduler") if not settings else True
    )


def test_a_name_that_is_no_scheduler_is_refused_with_close_ones():
    with pytest.raises(ValueError, match=r"generator\.scheduler='DDIMSchedular'.*did you mean DDIMScheduler"):
        choose_path(diffusers.DDIMScheduler(), "DDIMSchedular")
    with pytest.raises(ValueError, match=r"mean FlowMatchEulerDiscreteScheduler, DDIMScheduler\?"):
        choose_path(diffusers.DDIMScheduler(), "FooScheduler")
