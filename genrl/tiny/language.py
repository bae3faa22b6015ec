"""Tiny language models that newer pipelines use as text encoders, each with its tokenizer or processor.

Their weights start ten times larger than usual: the pipelines read hidden states that no norm has rescaled, and
embeddings of size 0.02 would hardly reach the denoiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genrl.tiny.parts import WIDTH
from genrl.tiny.tokenizers import WORDS, gemma_tokenizer, llama_tokenizer, qwen_tokenizer

# Sizes that every model here shares: two heads of 16.
DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 37,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def qwen3(layers: int) -> tuple[Any, Any]:
    """(tokenizer, Qwen3ForCausalLM), the encoder of Z-Image and FLUX.2 klein."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = qwen_tokenizer()
    config = Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=layers, head_dim=16, **DECODER)
    return tokenizer, Qwen3ForCausalLM(config)


def qwen_vl(words: Sequence[str] = WORDS) -> tuple[Any, Any]:
    """(tokenizer, Qwen2_5_VLForConditionalGeneration): two layers, images in patches of 14 x 14 merged by 2 x 2."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = qwen_tokenizer(words)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    text = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},  # half a head
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        **DECODER,
    }
    vision = {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 37,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    return tokenizer, Qwen2_5_VLForConditionalGeneration(config)


def mistral3(layers: int) -> tuple[Any, Any]:
    """(PixtralProcessor, Mistral3ForConditionalGeneration), the encoder of FLUX.2 dev.

    Its chat template leaves the system message out: FLUX.2's has some 200 words, which a tokenizer of characters
    would make longer than the sequence, and the prompt after it would be cut off.
    """
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralImageProcessor, PixtralProcessor

    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]})
    template = (
        "{% for message in messages %}{% if message['role'] != 'system' %}{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}[IMG]{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = template
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessor(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8}),
        tokenizer=tokenizer,
        patch_size=8,
        spatial_merge_size=2,
        chat_template=template,
    )
    text = {
        "model_type": "mistral",
        "vocab_size": len(tokenizer),
        "num_hidden_layers": layers,
        "head_dim": 16,
        **DECODER,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": WIDTH,
        "intermediate_size": 37,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=processor.image_token_id, spatial_merge_size=2
    )
    return processor, Mistral3ForConditionalGeneration(config)


def gemma2() -> tuple[Any, Any]:
    """(tokenizer, Gemma2Model), the encoder of Sana."""
    from transformers import Gemma2Config, Gemma2Model

    tokenizer = gemma_tokenizer()
    config = Gemma2Config(vocab_size=len(tokenizer), num_hidden_layers=2, head_dim=16, **DECODER)
    return tokenizer, Gemma2Model(config)


def llama(layers: int) -> tuple[Any, Any]:
    """(tokenizer, LlamaModel), the encoder of HunyuanVideo."""
    from transformers import LlamaConfig, LlamaModel

    tokenizer = llama_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=layers, pad_token_id=tokenizer.pad_token_id, **DECODER
    )
    return tokenizer, LlamaModel(config)
