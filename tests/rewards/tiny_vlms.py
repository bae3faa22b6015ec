"""Tiny random vision-language models whose processors differ from Qwen's, saved like real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from genrl.tiny.tokenizers import WORDS, qwen_tokenizer

ANSWERS = ("yes", "no", "Yes", "No")
CHAT = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c.type == 'image' %}<image>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def text_config(tokenizer: Any, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None}
    return {
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        **sizes,
        **ids,
        **more,
    }


def tokenizer_with(*special: str) -> Any:
    tokenizer = qwen_tokenizer([*WORDS, *ANSWERS])
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def llava() -> tuple[Any, Any]:
    """Crops, CLIP pixels [B, C, H, W]."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    tokenizer = tokenizer_with("<image>")
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=CHAT,
        num_additional_image_tokens=1,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **VISION},
        text_config={"model_type": "llama", **text_config(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config), processor


def idefics3() -> tuple[Any, Any]:
    """Splits an image into tiles, pixels [B, N, C, H, W]; SmolVLM's processor is of this kind."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
    )

    tokenizer = tokenizer_with("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    images = Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=CHAT)
    config = Idefics3Config(
        vision_config=VISION,
        text_config={"model_type": "llama", **text_config(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    return Idefics3ForConditionalGeneration(config), processor


def paligemma() -> tuple[Any, Any]:
    """No chat template; reads its prompt in both directions."""
    from transformers import (
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
        SiglipImageProcessor,
    )

    tokenizer = tokenizer_with()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    images = SiglipImageProcessor(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = PaliGemmaProcessor(images, tokenizer)
    config = PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False, **VISION},
        text_config={"model_type": "gemma", **text_config(tokenizer, head_dim=16)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=32,
    )
    return PaliGemmaForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {"llava": llava, "idefics3": idefics3, "paligemma": paligemma}


def saved_family(name: str, folder: Path) -> Path:
    """The folder of a model of a family, with larger weights than at a random start, so that differences show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, processor = FAMILIES[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    model.eval().save_pretrained(folder / name)
    processor.save_pretrained(folder / name)
    return folder / name
