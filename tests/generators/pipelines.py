"""Tiny pipelines of every family as generators, built once, and their twins as diffusers runs them."""

import functools

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from genrl import tiny
from genrl.diffusion import Euler, Sampler
from genrl.diffusion.schedulers import choose_path
from genrl.generators import DiffusersGenerator
from genrl.tiny.families import REGISTRY

PROMPTS, LORA = ["a red cat", "the number 5"], {"rank": 2, "alpha": 8}


@functools.cache
def image_of(family):
    return Image.linear_gradient("L").resize((64, 64)).convert("RGB") if REGISTRY[family].takes_image else None


def make(family, **arguments):
    call = {**tiny.call_arguments(family), **arguments.pop("call", {})}
    generator = DiffusersGenerator(
        **{"model": str(tiny.saved_pipeline(family)), "lora": LORA, **arguments, "call": call}
    )
    generator.prepare("cpu", progress=False)
    return generator


@functools.cache
def shared(family):
    """One that tests must leave as it is, or change in its adapter only; its adapter has changed already."""
    generator = make(family)
    change(generator)
    return generator


def change(generator, size=0.05):
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in generator.trainable():
            p.add_(size * torch.randn(p.shape, generator=draw))


def encode(generator, family, prompts=PROMPTS):
    image = image_of(family)
    return generator.encode(prompts, None if image is None else [{"image": image}] * len(prompts))


def sample(generator, family, steps=3):
    """Start and media of an ODE sampling."""
    cond = encode(generator, family, PROMPTS[:1])
    x1 = generator.initial_latents(cond, torch.Generator().manual_seed(1))
    sampler = Sampler(Euler(), generator.schedule(steps), path=generator.path)
    return x1, generator.decode(sampler.rollout(generator.velocity, x1, cond).x0)


@torch.no_grad()
def native(family, x1, steps=3, pipe=None, **call):
    """What diffusers makes of the same start, with the scheduler's first-order step."""
    pipe = pipe or DiffusionPipeline.from_pretrained(tiny.saved_pipeline(family))
    scheduler, _, _ = choose_path(pipe.scheduler)
    first = {"solver_order": 1, "disable_corrector": [*range(steps)]}
    first = {key: first[key] for key in first.keys() & scheduler.config.keys()}
    pipe.scheduler = type(scheduler).from_config(scheduler.config, **first) if first else scheduler
    prepare = pipe.prepare_latents

    def given(*args, **kwargs):
        prepared = prepare(*args, **kwargs)
        return (x1, *prepared[1:]) if isinstance(prepared, tuple) else x1

    pipe.prepare_latents = given
    image = {} if image_of(family) is None else {"image": image_of(family)}
    call = {"num_inference_steps": steps, "output_type": "pt", **tiny.call_arguments(family), **image, **call}
    return pipe(prompt=PROMPTS[:1], **call)[0]
