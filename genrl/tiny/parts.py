"""Parts that several families share: text encoders with their tokenizers, and autoencoders."""

from __future__ import annotations

from typing import Any

from genrl.tiny.tokenizers import clip_tokenizer, t5_tokenizer

WIDTH = 32  # of every text encoder


def clip(projection: bool = False) -> tuple[Any, Any]:
    """(tokenizer, text model) of CLIP; with `projection` the class that SDXL and SD 3 use."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,  # where the text is pooled
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5(width: int = WIDTH, multilingual: bool = False) -> tuple[Any, Any]:
    """(tokenizer, encoder) of T5, or of UMT5."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    tokenizer = t5_tokenizer()
    kind, config = (UMT5EncoderModel, UMT5Config) if multilingual else (T5EncoderModel, T5Config)
    heads = 2
    sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 37, "num_layers": 2, "num_heads": heads}
    return tokenizer, kind(config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", **sizes))


def image_vae(channels: int, scaling: float, shift: float | None = None, quant_conv: bool = False) -> Any:
    """AutoencoderKL that halves height and width; latents [B, channels, H / 2, W / 2]."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=channels,
        scaling_factor=scaling,
        shift_factor=shift,
        use_quant_conv=quant_conv,
        use_post_quant_conv=quant_conv,
    )
