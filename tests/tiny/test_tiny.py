"""Tiny twins: every family runs, reloads exactly, and its denoiser depends on everything it is given."""

from __future__ import annotations

import contextlib
import functools
import inspect
import subprocess
import sys

import pytest
import torch

import genrl.tiny as tiny
from genrl.tiny.families import DENOISERS, enliven, networks
from genrl.tiny.tokenizers import byte_characters, learn_merges

PROMPT, OTHER = "a red cat", "the number 5"
# Schedulers of the published checkpoints: class and the settings that matter.
SCHEDULERS = {
    "sd15": ("PNDMScheduler", {"beta_schedule": "scaled_linear", "steps_offset": 1, "prediction_type": "epsilon"}),
    "sdxl": ("EulerDiscreteScheduler", {"timestep_spacing": "leading", "beta_end": 0.012}),
    "sd3": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": False}),
    "flux": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True, "max_shift": 1.15}),
    "flux_kontext": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "flux2": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "flux2_klein": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "qwenimage": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True, "shift_terminal": 0.02}),
    "zimage": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "sana": ("DPMSolverMultistepScheduler", {"prediction_type": "flow_prediction", "flow_shift": 3.0}),
    "wan": ("UniPCMultistepScheduler", {"use_flow_sigmas": True, "flow_shift": 3.0}),
    "wan22": ("UniPCMultistepScheduler", {"use_flow_sigmas": True}),
    "wan_i2v": ("UniPCMultistepScheduler", {"use_flow_sigmas": True}),
    "ltx": ("FlowMatchEulerDiscreteScheduler", {"shift_terminal": 0.1, "base_shift": 0.95}),
    "hunyuanvideo": ("FlowMatchEulerDiscreteScheduler", {"shift": 7.0}),
    "cogvideox": ("CogVideoXDDIMScheduler", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
}
VIDEOS = ("wan", "wan22", "wan_i2v", "ltx", "hunyuanvideo", "cogvideox")


@functools.cache
def twin(family: str):
    """The family's twin, one a session; no test changes it."""
    return tiny.pipeline(family)


def run(pipeline, family: str, prompt: str = PROMPT, output: str = "pt", **more):
    """Two steps of the pipeline's own call with noise of seed 0: tensor [B, ...]."""
    arguments = {**tiny.call_arguments(family), **more}
    if (image := tiny.condition_image(family)) is not None:
        arguments.setdefault("image", image)
    noise = torch.Generator().manual_seed(0)
    return pipeline(prompt=prompt, num_inference_steps=2, generator=noise, output_type=output, **arguments)[0]


def first_tensor(output) -> torch.Tensor:
    """The tensor of a denoiser's output: a tensor, a tuple of it, or (Z-Image) a list of one a sample."""
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


@contextlib.contextmanager
def recorded(network):
    """Calls of a network while the context lasts: a list of (bound arguments, output tensor)."""
    calls = []

    def note(module, args, kwargs, output):
        calls.append((inspect.signature(module.forward).bind(*args, **kwargs), first_tensor(output)))

    handle = network.register_forward_hook(note, with_kwargs=True)
    yield calls
    handle.remove()


def change(a: torch.Tensor, b: torch.Tensor) -> float:
    """Standard deviation of the difference over that of `a`."""
    return float((a - b).std() / a.std())


def realign(pipeline) -> None:
    """Copy every weight into memory of its own.

    Loaded weights lie in the mapped file, at addresses that vectorised kernels read in other portions; sums then
    differ in the last bit.
    """
    for module in networks(pipeline).values():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()


def test_families():
    assert set(tiny.FAMILIES) == set(SCHEDULERS) and len(tiny.FAMILIES) == 16
    for call in (tiny.pipeline, tiny.call_arguments, tiny.saved_pipeline, tiny.condition_image):
        with pytest.raises(ValueError, match=r"unknown family 'sd4'.*flux_kontext"):
            call("sd4")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_twin_runs_and_is_in_eval_mode(family):
    before = torch.get_rng_state()
    pipeline = twin(family)
    assert torch.equal(torch.get_rng_state(), before)
    media = run(pipeline, family)
    size = (9, 3, 32, 32) if family in VIDEOS else (3, 32, 32)
    assert media.shape == (1, *size)
    assert media.isfinite().all() and media.std() > 0.03
    assert run(pipeline, family, output="latent").isfinite().all()
    for name, network in networks(pipeline).items():
        assert not any(module.training for module in network.modules()), name
        assert all(parameter.dtype == torch.float32 for parameter in network.parameters()), name
    scheduler, settings = SCHEDULERS[family]
    assert type(pipeline.scheduler).__name__ == scheduler
    assert {name: pipeline.scheduler.config[name] for name in settings} == settings


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_weights_depend_on_the_seed_alone(family):
    torch.rand(3)
    again, other = tiny.pipeline(family), tiny.pipeline(family, seed=1)
    for name, network in networks(twin(family)).items():
        state, same = network.state_dict(), networks(again)[name].state_dict()
        assert all(torch.equal(state[key], same[key]) for key in state), name
        differs = networks(other)[name].state_dict()
        assert any(not torch.equal(state[key], differs[key]) for key in state), name


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_denoiser_depends_on_prompt_time_and_latents(family):
    pipeline = twin(family)
    denoiser = next(getattr(pipeline, name) for name in DENOISERS if hasattr(pipeline, name))
    with recorded(denoiser) as calls:
        run(pipeline, family)
    with recorded(denoiser) as other_calls:
        run(pipeline, family, OTHER)
    (call, output), (_, other) = calls[0], other_calls[0]
    assert 0.2 < output.std() < 2
    assert change(output, other) > 0.005  # measured: 0.01 to 0.7
    times = "timestep" if "timestep" in call.arguments else "t"
    latents = next(iter(call.arguments))
    for name, value in ((times, halved(call.arguments[times])), (latents, halved(call.arguments[latents]))):
        changed = inspect.signature(denoiser.forward).bind(*call.args, **call.kwargs)
        changed.arguments[name] = value
        with torch.no_grad():
            assert change(output, first_tensor(denoiser(*changed.args, **changed.kwargs))) > 0.05, name


def halved(value):
    """Half of a tensor or of a list of them; 0.3 instead of 0, at which Z-Image starts."""
    if isinstance(value, list):
        return [halved(item) for item in value]
    return value / 2 if value.any() else value + 0.3


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_saved_twin_loads_exactly(family, tmp_path):
    from diffusers import DiffusionPipeline

    folder = tiny.saved_pipeline(family, tmp_path / "twin")
    loaded = DiffusionPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(twin(family))
    assert tiny.family_of(str(folder)) == family
    realign(loaded)
    realign(twin(family))
    assert torch.equal(run(loaded, family), run(twin(family), family))


def test_saved_twin_is_made_once_and_completed(tmp_path, monkeypatch):
    monkeypatch.setenv("GENRL_CACHE", str(tmp_path))
    folder = tiny.saved_pipeline("sana")
    assert folder.parent == tmp_path and tiny.saved_pipeline("sana") == folder
    weights = tmp_path / "own" / "vae" / "diffusion_pytorch_model.safetensors"
    tiny.saved_pipeline("sana", tmp_path / "own")
    made = weights.stat().st_mtime_ns
    tiny.saved_pipeline("sana", tmp_path / "own")
    assert weights.stat().st_mtime_ns == made
    (tmp_path / "own" / ".complete").unlink()  # as a killed process leaves it
    weights.unlink()
    tiny.saved_pipeline("sana", tmp_path / "own")
    assert weights.exists()


def test_both_experts_are_called():
    pipeline = twin("wan22")
    with recorded(pipeline.transformer) as large, recorded(pipeline.transformer_2) as small:
        run(pipeline, "wan22")
    assert all(call.arguments["timestep"].min() >= 875 for call, _ in large) and large
    assert all(call.arguments["timestep"].max() < 875 for call, _ in small) and small


@pytest.mark.parametrize("family", ["flux_kontext", "wan_i2v"])
def test_condition_image_matters(family):
    image = tiny.condition_image(family)
    plain, turned = run(twin(family), family), run(twin(family), family, image=image.rotate(90))
    assert (plain - turned).abs().max() > 1e-3
    assert tiny.condition_image("flux") is None


def test_qwen_image_drops_its_template_and_no_prompt():
    pipeline = twin("qwenimage")
    before = pipeline.prompt_template_encode.split("{}")[0]
    assert len(pipeline.tokenizer(before).input_ids) == pipeline.prompt_template_encode_start_idx == 34


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_prompts_are_not_cut(family):
    """A prompt of usual length that differs in its last letter differs for the denoiser."""
    text = 'a sign in the street with the text "OPEN 24 H", photo '
    with recorded(next(getattr(twin(family), name) for name in DENOISERS if hasattr(twin(family), name))) as calls:
        run(twin(family), family, text + "1", output="latent")
        run(twin(family), family, text + "2", output="latent")
    assert not torch.equal(calls[0][1], calls[len(calls) // 2][1])


@pytest.mark.parametrize(
    ("model", "family"),
    {
        "stable-diffusion-v1-5/stable-diffusion-v1-5": "sd15",
        "runwayml/stable-diffusion-v1-5": "sd15",
        "CompVis/stable-diffusion-v1-4": "sd15",
        "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
        "stabilityai/stable-diffusion-3-medium-diffusers": "sd3",
        "stabilityai/stable-diffusion-3.5-medium": "sd3",
        "stabilityai/Stable-Diffusion-3.5-large": "sd3",
        "black-forest-labs/FLUX.1-dev": "flux",
        "black-forest-labs/FLUX.1-schnell": "flux",
        "black-forest-labs/FLUX.1-Kontext-dev": "flux_kontext",
        "black-forest-labs/FLUX.2-dev": "flux2",
        "black-forest-labs/FLUX.2-klein-base-4B": "flux2_klein",
        "Qwen/Qwen-Image": "qwenimage",
        "Tongyi-MAI/Z-Image-Turbo": "zimage",
        "Efficient-Large-Model/Sana_1600M_1024px_diffusers": "sana",
        "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": "sana",
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan",
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "wan22",
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": "wan_i2v",
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers": "wan_i2v",
        "Lightricks/LTX-Video": "ltx",
        "hunyuanvideo-community/HunyuanVideo": "hunyuanvideo",
        "THUDM/CogVideoX-2b": "cogvideox",
        "zai-org/CogVideoX-5b": "cogvideox",
    }.items(),
)
def test_family_of(model, family):
    assert tiny.family_of(model) == family


@pytest.mark.parametrize("model", ["Qwen/Qwen-Image-Edit", "black-forest-labs/FLUX.1-Fill-dev", "gpt2", "nothing/here"])
def test_other_pipelines_have_no_twin(model):
    with pytest.raises(ValueError, match=f"{model}.*sd3: stabilityai/stable-diffusion-3"):
        tiny.family_of(model)


def test_call_arguments_are_copies():
    tiny.call_arguments("hunyuanvideo")["prompt_template"]["crop_start"] = 7
    assert tiny.call_arguments("hunyuanvideo")["prompt_template"]["crop_start"] == 0


def test_merges_make_one_token_of_each_word():
    words = ["the", "texture", "text", "quantity", "and", "an", "aaaa"]
    merges = learn_merges(words)
    for word in words:
        pieces = list(word)
        for best in merges:  # in order of rank, as byte-pair encoding applies them
            i = 0
            while i + 1 < len(pieces):
                if (pieces[i], pieces[i + 1]) == best:
                    pieces[i : i + 2] = ["".join(best)]
                i += 1
        assert pieces == [word]
    assert len(byte_characters()) == 256


def test_zero_weights_come_alive_and_biases_stay():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    for parameter in layers[0].parameters():
        torch.nn.init.zeros_(parameter)
    kept = layers[2].weight.clone()
    enliven(layers)
    assert layers[0].weight.std() > 0.02 and not layers[0].bias.any()
    assert torch.equal(layers[2].weight, kept) and torch.equal(layers[1].weight, torch.ones(8))


def test_import_is_light():
    code = "import sys, genrl.tiny; print([m for m in ('diffusers', 'transformers', 'open_clip') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
