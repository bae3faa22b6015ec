"""Tiny random vision-language models whose processors differ from Qwen's, saved like real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from genrl.tiny.tokenizers import CHAT_TEMPLATE, WORDS, qwen_tokenizer

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


def qwen3_parts() -> tuple[Any, dict[str, Any], Any]:
    """Tokenizer, what both configurations share, and the processor; its video frames have their times as text."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = tokenizer_with()
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    shared: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()
    }
    shared["vision_config"] = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32,
        "num_position_embeddings": 64,
    }  # fmt: skip
    images = Qwen2VLImageProcessor(patch_size=8, size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64})
    videos = Qwen3VLVideoProcessor(patch_size=8, size={"shortest_edge": 4 * 32 * 32, "longest_edge": 8 * 64 * 64})
    thinking = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
    template = CHAT_TEMPLATE.removesuffix("{% endif %}") + thinking
    processor = Qwen3VLProcessor(images, tokenizer, videos, chat_template=template)
    return tokenizer, shared, processor


ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}


def qwen3_vl() -> tuple[Any, Any]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer, shared, processor = qwen3_parts()
    shared["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    text = text_config(tokenizer, head_dim=16, rope_parameters=ROPE)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, **shared)), processor


def qwen3_5() -> tuple[Any, Any]:
    """Every other layer is a linear attention, which runs over the sequence."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokenizer, shared, processor = qwen3_parts()
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    kinds = ["linear_attention", "full_attention"]
    rope = {**ROPE, "partial_rotary_factor": 1.0}
    text = text_config(tokenizer, head_dim=16, rope_parameters=rope, layer_types=kinds, **linear)
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, **shared)), processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": llava,
    "idefics3": idefics3,
    "paligemma": paligemma,
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_5,
}


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
