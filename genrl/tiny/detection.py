"""A tiny random twin of OWL-ViT, a detector of objects that are named by text."""

from __future__ import annotations

import os
from pathlib import Path

from genrl.tiny.families import require
from genrl.tiny.folders import saved
from genrl.tiny.rewards import SIDE, WIDTH, network


def saved_detector(folder: str | os.PathLike[str] | None = None) -> Path:
    """A folder for `AutoModelForZeroShotObjectDetection` and `AutoProcessor`: images of 32 x 32, 16 boxes."""
    return saved("detector", write_detector, folder)


def write_detector(folder: Path) -> None:
    require("transformers", "rewards")
    from transformers import OwlViTConfig, OwlViTForObjectDetection, OwlViTImageProcessor, OwlViTProcessor

    from genrl.tiny.tokenizers import clip_tokenizer

    tokenizer = clip_tokenizer()
    tokenizer.model_max_length = 16  # as the real ones, whose text encoder has 16 positions
    sizes = {"hidden_size": WIDTH, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **sizes,
    }
    vision = {"image_size": SIDE, "patch_size": 8, **sizes}
    config = OwlViTConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
    network(lambda: OwlViTForObjectDetection(config)).save_pretrained(folder)
    images = OwlViTImageProcessor(size={"height": SIDE, "width": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    OwlViTProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
