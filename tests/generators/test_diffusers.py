"""Every family of pipelines is driven by its own code: no family has code here or in the generator."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pipelines import PROMPTS, encode, image_of, make, native, sample, shared

from genrl import tiny
from genrl.algorithms import PolicyGradient
from genrl.algorithms.base import Batch
from genrl.diffusion import RowNoise
from genrl.generators import DiffusersGenerator
from genrl.prompts import Prompt
from genrl.training import EvaluationSettings, Loop, TrainerSettings

families = pytest.mark.parametrize("family", tiny.FAMILIES)


@families
def test_euler_sampling_equals_the_pipelines_own(family):
    generator = make(family)
    x1, media = sample(generator, family, steps=4)
    expected = native(family, x1, steps=4)
    assert media.shape == expected.shape and media.dtype == torch.float32
    assert media.min() >= 0 and media.max() <= 1 and media.std() > 0.01
    torch.testing.assert_close(media, expected, atol=5e-6, rtol=0)


@families
def test_a_policy_gradient_step_starts_at_ratio_one_and_moves_every_trained_weight_only(family):
    generator, algorithm = shared(family), PolicyGradient(steps=4)  # on both sides of Wan 2.2's boundary
    everything = torch.nn.ModuleList(p for p in generator.pipe.components.values() if isinstance(p, torch.nn.Module))
    before = {name: value.clone() for name, value in everything.state_dict().items()}
    algorithm.configure(generator)
    rows, groups = torch.arange(4), torch.tensor([0, 0, 1, 1])
    noise = RowNoise.of(("test",), rows), RowNoise.of(("test", "group"), groups)
    batch = Batch(encode(generator, family)[groups], rows, groups, *noise, seed=0, iteration=0)
    rollout = algorithm.rollout(generator.velocity, generator, batch)
    x0 = rollout.x0.requires_grad_()
    brightness = generator.decode(x0).flatten(1).mean(1)
    assert torch.autograd.grad(brightness.sum(), x0)[0].flatten(1).any(1).all()
    rollout = replace(rollout, advantage=(brightness - brightness.mean()).detach(), x0=x0.detach())
    for unit in (units := algorithm.units(rollout, batch)):
        loss, metrics = algorithm.loss(generator.velocity, rollout, unit, units)
        assert metrics[f"step_{unit[0]}/gap_max"] == 0
        (loss * 1e3).sum().backward()
    still = [p for p in generator.trainable() if p.grad is None or not p.grad.any()]
    with torch.no_grad():
        for p in still:  # such as text queries of a last block, whose text goes nowhere: they have no effect
            p.add_(1)
    assert metrics == algorithm.loss(generator.velocity, rollout, unit, units)[1]
    assert 2 * len(still) < len(generator.trainable()) and not any(
        m.training for part in everything for m in part.modules()
    )
    torch.optim.SGD(generator.trainable(), 1e-3).step()
    generator.module.zero_grad()
    changed = {name for name, value in everything.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(".policy." in name for name in changed)


@families
def test_rows_of_a_batch_are_computed_as_alone_whatever_their_prompts_and_times(family):
    generator = shared(family)
    cond = encode(generator, family)
    x = generator.initial_latents(cond, RowNoise.of(("x",), [5, 6]).initial)
    alone = generator.initial_latents(cond[1:], RowNoise.of(("x",), [6]).initial)
    assert x.shape[1:] == generator.latent_shape and torch.equal(x[1:], alone)
    t = torch.tensor([0.9, 0.35])  # off every grid, and on either side of Wan 2.2's boundary
    with torch.no_grad():
        for times in (t, t[1:].expand(2)):
            together = generator.velocity(x, times, cond)
            rows = [generator.velocity(x[i : i + 1], times[i : i + 1], cond[i : i + 1]) for i in (0, 1)]
            assert together.dtype == torch.float32 and not torch.allclose(rows[0], rows[1], atol=1e-2)
            torch.testing.assert_close(together, torch.cat(rows), atol=2e-5, rtol=1e-5)


def test_a_pipeline_that_is_named_nowhere_trains_in_a_loop(tmp_path):
    from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

    from genrl.tiny.parts import image_vae, t5

    prompts = [Prompt(text, {}) for text in PROMPTS]
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, sample_size=16,
        cross_attention_dim=16, caption_channels=32, norm_num_groups=8,
    )  # fmt: skip
    pipe = PixArtAlphaPipeline(*t5(), image_vae(4, 0.2), transformer, DPMSolverMultistepScheduler())
    sizes = {"height": 32, "width": 32, "use_resolution_binning": False, "clean_caption": False}
    loop = Loop(
        "new", tmp_path, 0, DiffusersGenerator(pipe, call=sizes), SimpleNamespace(train=prompts, held_out=prompts),
        lambda media, prompts, metadata: media.flatten(1).mean(1), PolicyGradient(steps=3),
        TrainerSettings(iterations=1, prompts_per_iteration=2, group_size=2, tensorboard=False, device="cpu"),
        EvaluationSettings(every=0, samples_per_prompt=1, steps=2, train_sampler="never"),
    )  # fmt: skip
    assert loop.run().weight_change > 0


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("sd3", {"guidance_scale": 1.0}),
        ("sd3", {"guidance_scale": 5.0, "negative_prompt": "blue"}),
        ("flux", {"guidance_scale": 9.0}),
        ("flux", {"call": {"true_cfg_scale": 3.0}, "negative_prompt": "blue"}),
        ("sd15", {"scheduler": "DDIMScheduler", "guidance_scale": 2.0}),
    ],
)
def test_guidance_is_the_pipelines(family, call):
    x1, media = sample(make(family, **call), family, steps=2)
    plain = {**call, **call.get("call", {})}
    expected = native(family, x1, 2, **{k: v for k, v in plain.items() if k not in ("call", "scheduler")})
    torch.testing.assert_close(media, expected, atol=5e-6, rtol=0)
    assert not torch.allclose(media, sample(make(family), family, steps=2)[1], atol=1e-4)


@pytest.mark.parametrize("family", ["flux_kontext", "wan_i2v", "flux2"])
def test_image_conditions_are_encoded_once_and_matter(family, tmp_path):
    generator, image = make(family), image_of("wan_i2v")
    image.save(tmp_path / "a.png")
    image.rotate(180).save(tmp_path / "b.png")
    cond = generator.encode(PROMPTS[:1] * 2, [{"image": str(tmp_path / f"{name}.png")} for name in "ab"])
    x, calls = generator.initial_latents(cond, lambda shape: torch.ones(shape)), []
    with torch.no_grad():
        v = generator.velocity(x, torch.tensor([0.5, 0.5]), cond)
        generator.pipe.vae.encoder.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(generator.velocity(x, torch.tensor([0.5, 0.5]), cond), v) and not calls
    assert not torch.allclose(v[0], v[1], atol=1e-3)
    with pytest.raises(ValueError, match="needs an image"):
        shared("wan_i2v").encode(["a dog"])
    with pytest.raises(ValueError, match="takes none"):
        shared("sd3").encode(["a dog"], [{"image": image}])


def test_what_does_not_fit_is_refused_with_a_remedy(monkeypatch):
    for settings, message in (
        ({"call": {"steps": 3}}, "call.steps cannot be given to StableDiffusion3Pipeline"),
        ({"train": ["unet"]}, r"train = \['unet'\].*\['transformer'\]"),
        ({"reference": "ema"}, "allowed are base, start"),
        ({"lora": None, "adapters": {"a": "b"}}, "need lora settings"),
    ):
        with pytest.raises(ValueError, match=message):
            make("sd3", **settings)
    with pytest.raises(RuntimeError, match="call prepare"):
        DiffusersGenerator("anything").trainable()
    pipe = tiny.pipeline("sd3")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"no prepare_latents, scheduler\.step"):
        patch.delattr(type(pipe), "prepare_latents")
        patch.delattr(type(pipe.scheduler), "step")
        DiffusersGenerator(pipe)
    with pytest.raises(ValueError, match="latents have shape"):
        shared("sd3").velocity(torch.zeros(1, 16, 8, 8), torch.ones(1), shared("sd3").encode(["a"]))


def test_tiny_arguments_keep_the_recipe_and_shrink_the_model(tmp_path):
    recipe = {"model": "stabilityai/stable-diffusion-3.5-medium", "height": 1024, "guidance_scale": 1.5}
    small = DiffusersGenerator(**DiffusersGenerator.tiny_arguments(recipe, tmp_path))
    small.prepare("cpu")
    assert (small.call["height"], small.call["guidance_scale"]) == (32, 1.5)
