"""Tiny random twins of the networks behind rewards: CLIP in both libraries, and a vision-language model.

Each function writes a folder from which the library's ordinary loading code reads, once, and returns where.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from genrl.tiny.families import require, seeded
from genrl.tiny.folders import saved

SIDE = 32  # of the images that the CLIP models see
WIDTH = 32
ANSWERS = ("yes", "no", "Yes", "No")  # words of a vision-language model's answers; a digit is one token anyway


def saved_clip(folder: str | os.PathLike[str] | None = None) -> Path:
    """A folder for `transformers.CLIPModel` and `CLIPProcessor`: images of 32 x 32, embeddings [B, 32]."""
    return saved("clip", write_clip, folder)


def write_clip(folder: Path) -> None:
    require("transformers", "rewards")
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    from genrl.tiny.tokenizers import clip_tokenizer

    tokenizer = clip_tokenizer()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **sizes,
    }
    vision = {"image_size": SIDE, "patch_size": 8, **sizes}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
    network(lambda: CLIPModel(config)).save_pretrained(folder)
    crop = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=crop)
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)


def saved_open_clip(folder: str | os.PathLike[str] | None = None) -> tuple[str, Path]:
    """(model name, weights) of a tiny CLIP with open_clip's own tokenizer: images of 32 x 32, embeddings [B, 32].

    The name has the form "local-dir:<folder>": `open_clip.create_model_and_transforms(name)` finds the weights in the
    folder by itself, and `open_clip.get_tokenizer(name)` the tokenizer.
    """
    path = saved("open-clip", write_open_clip, folder)
    return f"local-dir:{path}", path / "open_clip_model.safetensors"


def write_open_clip(folder: Path) -> None:
    require("open_clip", "rewards")
    import open_clip
    from safetensors.torch import save_file

    vision = {"image_size": SIDE, "layers": 2, "width": WIDTH, "head_width": 16, "patch_size": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": WIDTH, "heads": 2, "layers": 2}
    config = {"embed_dim": WIDTH, "vision_cfg": vision, "text_cfg": text}
    clip = network(lambda: open_clip.CLIP(**config))
    save_file(
        {name: value.contiguous() for name, value in clip.state_dict().items()}, folder / "open_clip_model.safetensors"
    )
    preprocessing = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": preprocessing}, indent=2)
    )


def saved_vlm(folder: str | os.PathLike[str] | None = None) -> Path:
    """A folder for `AutoModelForImageTextToText` and `AutoProcessor`: Qwen2.5-VL of two layers, images and video.

    Images are enlarged to 56 x 56 or reduced to 112 x 112 pixels, which makes 4 to 16 tokens. A digit is one token, and
    so is each word of `ANSWERS`, without a space before it and with one.
    """
    return saved("vlm", write_vlm, folder)


def write_vlm(folder: Path) -> None:
    require("transformers", "rewards")
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    from genrl.tiny.language import qwen_vl
    from genrl.tiny.tokenizers import CHAT_TEMPLATE, WORDS

    parts: dict[str, Any] = {}

    def build() -> Any:
        parts["tokenizer"], model = qwen_vl([*WORDS, *ANSWERS])
        return model

    network(build).save_pretrained(folder)
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}  # numbers of pixels, not sides
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        video_processor=Qwen2VLVideoProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 8 * 56 * 56}),
        tokenizer=parts["tokenizer"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def saved_text_model(folder: str | os.PathLike[str] | None = None) -> Path:
    """A folder for `AutoModelForCausalLM` and `AutoTokenizer`: Qwen3 of two layers with a chat template."""
    return saved("text", write_text_model, folder)


def write_text_model(folder: Path) -> None:
    require("transformers", "rewards")
    from genrl.tiny.language import qwen3
    from genrl.tiny.tokenizers import CHAT_TEMPLATE

    parts: dict[str, Any] = {}

    def build() -> Any:
        parts["tokenizer"], model = qwen3(2)
        return model

    network(build).save_pretrained(folder)
    parts["tokenizer"].chat_template = CHAT_TEMPLATE
    parts["tokenizer"].save_pretrained(folder)


def network(make: Callable[[], Any]) -> Any:
    """The module that `make` returns, with the weights of seed 0, in eval mode."""
    with seeded(0):
        return make().eval()
