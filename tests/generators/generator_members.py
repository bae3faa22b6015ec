"""Every generator there is, in a size that trains at once, and what the tests do with them."""

from itertools import pairwise

import torch

from genrl.generators import DigitsGenerator, RenderedTextGenerator

TINY = {"dim": 16, "depth": 1, "heads": 2, "base_steps": 3}
VARIANTS = {
    "digits": (DigitsGenerator, {}),
    "digits-guided": (DigitsGenerator, {"guidance_scale": 2.0}),
    "digits-vp": (DigitsGenerator, {"path": "vp"}),
    "digits-lora": (DigitsGenerator, {"lora": {"rank": 2, "alpha": 6}}),
    "digits-vp-lora": (DigitsGenerator, {"path": "vp", "lora": {"rank": 2, "alpha": 6}}),
    "text": (RenderedTextGenerator, {"renderings": 1}),
    "text-lora": (RenderedTextGenerator, {"renderings": 1, "lora": {"rank": 2, "alpha": 6}}),
}
PROMPTS = {"digits": ["a handwritten seven", "number 3"], "text": ['the text "07"', 'the text "70"']}


def change(generator) -> None:
    """Move every trainable parameter, as training would."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in generator.trainable():
            p.add_(0.1 * torch.randn(p.shape, generator=draw))


def sample(generator, prompts: list[str], steps: int = 3) -> torch.Tensor:
    """Media of a few deterministic steps under fixed noise."""
    cond = generator.encode(prompts)
    x = generator.initial_latents(cond, torch.Generator().manual_seed(1))
    times = torch.linspace(1, 0, steps + 1)
    with torch.no_grad():
        for t, t_next in pairwise(times):
            x0, eps = generator.path.x0_eps(x, generator.velocity(x, t.expand(len(x)), cond), t)
            x = generator.path.interpolate(x0, eps, t_next)
    return generator.decode(x)
