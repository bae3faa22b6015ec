"""`RenderedTextGenerator`: two-digit strings on paper, 16x24 pixels, for rewards that read text."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genrl.generators.recipe import BaseRecipe
from genrl.generators.token_dit import PathName, TokenDiTGenerator
from genrl.prompts import Prompt

HEIGHT, WIDTH = 16, 24
STRINGS = tuple(f"{number:02d}" for number in range(100))
_PROMPT = re.compile(r'\s*the text "([0-9]{2})"\s*', re.IGNORECASE)


def text_prompt(text: str) -> str:
    """The prompt for a two-digit string, e.g. 'the text "42"'."""
    return f'the text "{text}"'


def text_of(prompt: str) -> str:
    """The two digits that a prompt asks for.

    Raises:
        ValueError: for any other form than 'the text "42"'.
    """
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(f"prompt {prompt!r} is not of the form 'the text \"42\"' with two digits 0-9 in double quotes")
    return match.group(1)


def render_text(text: str, rng: np.random.Generator) -> np.ndarray:
    """Print a string with a random size, shift, ink and paper.

    The font is the one inside Pillow (Aileron), so that no font has to be installed.

    Args:
        text: what to print; two digits fit.
        rng: source of the variations.

    Returns:
        float32 [1, 16, 24] in [0, 1], dark on light.
    """
    from PIL import Image, ImageDraw, ImageFont

    paper, ink = int(rng.integers(220, 256)), int(rng.integers(0, 70))
    image = Image.new("L", (WIDTH, HEIGHT), paper)
    center = (WIDTH / 2 + rng.uniform(-1.0, 1.0), HEIGHT / 2 + rng.uniform(-1.0, 1.0))
    font = ImageFont.load_default(float(rng.uniform(13.0, 16.0)))
    ImageDraw.Draw(image).text(center, text, fill=ink, font=font, anchor="mm")
    return np.asarray(image, dtype=np.float32)[None] / 255.0


class RenderedTextGenerator(TokenDiTGenerator):
    """Printed two-digit strings from prompts such as 'the text "42"'.

    The base (0.54 M parameters) is trained on renderings of all hundred strings, with the two characters as tokens that
    modulate the blocks and that the patches attend to. It takes minutes instead of the digits' seconds: use it for
    rewards that read (OCR).

    Args:
        dim: width of the transformer, a multiple of `heads` and of 4.
        depth: blocks.
        heads: attention heads.
        patch: side of a patch; 4 gives 24 patches.
        base_steps: steps of base training, 64 images each. After 2200 (160 CPU seconds) rapidocr reads 66 % of the
            samples of 20 ODE steps exactly, and its mean score 1 - edit distance / 2 is 0.80.
        base_seed: seed of base training and of the renderings.
        renderings: images of each string.
        path: "rectified_flow" or "vp".
        guidance_scale: w of classifier-free guidance, in sampling and training alike; None for none.
        lora: None trains all weights; a dictionary such as {"rank": 8, "alpha": 16} trains an adapter.
        cache_dir: where trained bases are kept; by default $GENRL_CACHE or ~/.cache/genrl.
    """

    latent_shape = (1, HEIGHT, WIDTH)
    base_name = "rendered-text"

    def __init__(
        self,
        dim: int = 96,
        depth: int = 3,
        heads: int = 4,
        patch: int = 4,
        base_steps: int = 2200,
        base_seed: int = 0,
        renderings: int = 50,
        path: PathName = "rectified_flow",
        guidance_scale: float | None = None,
        lora: dict[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ):
        network = {
            "in_channels": 1,
            "size": [HEIGHT, WIDTH],
            "patch": patch,
            "dim": dim,
            "depth": depth,
            "heads": heads,
            "vocabulary": 21,
            "max_tokens": 2,
            "tokens_in_context": True,
            "max_frequency": 100.0,
        }
        config = {
            "dim": dim,
            "depth": depth,
            "heads": heads,
            "patch": patch,
            "base_steps": base_steps,
            "base_seed": base_seed,
            "renderings": renderings,
            "path": path,
            "guidance_scale": guidance_scale,
            "lora": lora,
        }
        self._renderings = renderings
        recipe = BaseRecipe(steps=base_steps, seed=base_seed)
        super().__init__(network, recipe, path, guidance_scale, lora, cache_dir, config)

    def encode(self, prompts: Sequence[str]) -> Tensor:
        tokens = [_tokens(text_of(prompt)) for prompt in prompts]
        return torch.tensor(tokens, dtype=torch.long, device=self._device).reshape(len(tokens), 2)

    def base_config(self) -> dict[str, Any]:
        return {**super().base_config(), "renderings": self._renderings}

    def training_data(self) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(self._recipe.seed)
        texts = [text for text in STRINGS for _ in range(self._renderings)]
        images = np.stack([render_text(text, rng) for text in texts])  # [N, 1, 16, 24]
        return torch.from_numpy(images), torch.tensor([[_tokens(text)] for text in texts])


def _tokens(text: str) -> list[int]:
    """Token ids [2]: 1 to 10 in the first place, 11 to 20 in the second; 0 is padding.

    Their own ids per place let the sum that modulates the blocks carry the order, which the base learns sooner than to
    look the characters up in the context alone.
    """
    return [int(text[0]) + 1, int(text[1]) + 11]


class TextPrompts:
    """Prompts for two-digit strings; metadata {"text": "42"}.

    Args:
        train: number of strings to train on, drawn with `seed`.
        held_out: number of other strings to evaluate on.
        seed: of the draw.

    Raises:
        ValueError: when there are not that many of the hundred strings.
    """

    def __init__(self, train: int = 10, held_out: int = 10, seed: int = 0):
        if train < 1 or held_out < 0 or train + held_out > len(STRINGS):
            raise ValueError(
                f"train={train} and held_out={held_out} ask for {train + held_out} strings; there are {len(STRINGS)}, "
                "and train needs at least one"
            )
        order = np.random.default_rng(seed).permutation(len(STRINGS))[: train + held_out]
        prompts = [Prompt(text_prompt(STRINGS[index]), {"text": STRINGS[index]}) for index in order]
        self.train = prompts[:train]
        self.held_out = prompts[train:]
