"""Families that make images from the hidden states of a language model; `genrl.tiny.images` has the others."""

from __future__ import annotations

from typing import Any

from genrl.tiny.families import family
from genrl.tiny.language import gemma2, mistral3, qwen3, qwen_vl
from genrl.tiny.parts import WIDTH, image_vae
from genrl.tiny.tokenizers import WORDS


def flux2_parts(width: int, guidance_embeds: bool) -> dict[str, Any]:
    """Denoiser, scheduler and autoencoder of FLUX.2, for text features of this width."""
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel

    transformer = Flux2Transformer2DModel(
        in_channels=16,  # 2 x 2 latents of 4 channels
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=width,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    vae = AutoencoderKLFlux2(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {"transformer": transformer, "scheduler": scheduler, "vae": vae}


# The text features are the hidden states of three layers side by side: (10, 20, 30) in FLUX.2 dev, all three here.
FLUX2_LAYERS = (1, 2, 3)


@family(
    "Flux2Pipeline",
    "black-forest-labs/FLUX.2-dev",
    height=32,
    width=32,
    max_sequence_length=64,
    text_encoder_out_layers=FLUX2_LAYERS,
)
def flux2() -> Any:
    """FLUX.2 dev: Mistral 3 as text encoder, guidance embedded."""
    from diffusers import Flux2Pipeline

    processor, text_encoder = mistral3(len(FLUX2_LAYERS))
    parts = flux2_parts(len(FLUX2_LAYERS) * WIDTH, guidance_embeds=True)
    return Flux2Pipeline(tokenizer=processor, text_encoder=text_encoder, **parts)


@family(
    "Flux2KleinPipeline",
    "black-forest-labs/FLUX.2-klein-*",
    height=32,
    width=32,
    max_sequence_length=64,
    text_encoder_out_layers=FLUX2_LAYERS,
)
def flux2_klein() -> Any:
    """FLUX.2 klein base: Qwen 3 as text encoder, classifier-free guidance."""
    from diffusers import Flux2KleinPipeline

    tokenizer, text_encoder = qwen3(len(FLUX2_LAYERS))
    parts = flux2_parts(len(FLUX2_LAYERS) * WIDTH, guidance_embeds=False)
    return Flux2KleinPipeline(tokenizer=tokenizer, text_encoder=text_encoder, is_distilled=False, **parts)


# The words of Qwen-Image's own prompt template. The pipeline drops its first 34 tokens by count, which is right only
# if each of these words is one token, as in the real vocabulary.
QWEN_IMAGE_WORDS = (
    *("system", "user", "assistant", "Describe", "the", "image", "by", "detailing", "color", "shape", "size"),
    *("texture", "quantity", "text", "spatial", "relationships", "of", "objects", "and", "background"),
)


@family(
    "QwenImagePipeline",
    "Qwen/Qwen-Image",
    "Qwen/Qwen-Image-2512",
    height=32,
    width=32,
    max_sequence_length=64,
    negative_prompt=" ",
)
def qwenimage() -> Any:
    """Qwen-Image: Qwen2.5-VL as text encoder, a video autoencoder for images, true classifier-free guidance."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    tokenizer, text_encoder = qwen_vl(words=[*WORDS, *QWEN_IMAGE_WORDS])
    transformer = QwenImageTransformer2DModel(
        in_channels=16,  # 2 x 2 latents of 4 channels
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0, 0.1, -0.1, 0.2],
        latents_std=[1.0, 1.5, 0.8, 1.2],
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    return QwenImagePipeline(
        transformer=transformer, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
    )


@family("ZImagePipeline", "Tongyi-MAI/Z-Image*", height=32, width=32, max_sequence_length=64)
def zimage() -> Any:
    """Z-Image: Qwen 3 as text encoder; image and text in one stream."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    tokenizer, text_encoder = qwen3(layers=2)
    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 32, 32],
    )
    return ZImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(16, scaling=0.3611, shift=0.1159),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


@family(
    "SanaPipeline",
    "Efficient-Large-Model/Sana_600M_*",
    "Efficient-Large-Model/Sana_1600M_*",
    "Efficient-Large-Model/SANA1.5_*",
    height=32,
    width=32,
    max_sequence_length=64,
    complex_human_instruction=[],  # a page of instructions before the prompt
    use_resolution_binning=False,  # else the picture is made at 512 or 1024
)
def sana() -> Any:
    """Sana: linear attention, Gemma 2, a deep-compression autoencoder, flow matching solved by DPM-Solver++."""
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    tokenizer, text_encoder = gemma2()
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        sample_size=16,
    )
    blocks: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        blocks |= {
            f"{side}_block_types": "ResBlock",
            f"{side}_block_out_channels": (8, 8),
            f"{side}_layers_per_block": (1, 1),
            f"{side}_qkv_multiscales": ((), ()),
        }
    vae = AutoencoderDC(latent_channels=4, attention_head_dim=2, scaling_factor=0.41407, **blocks)
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return SanaPipeline(
        transformer=transformer, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
    )
