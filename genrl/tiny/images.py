"""Families that make images from the text features of CLIP and T5.

A builder draws its weights from torch's default generator and returns the pipeline. Sizes are the smallest that the
architectures allow; schedulers have the settings of the published checkpoints.
"""

from __future__ import annotations

from typing import Any

from genrl.tiny.families import family
from genrl.tiny.parts import WIDTH, clip, image_vae, t5


@family(
    "StableDiffusion3Pipeline",
    "stabilityai/stable-diffusion-3-*",
    "stabilityai/stable-diffusion-3.5-*",
    height=32,
    width=32,
    max_sequence_length=64,
)
def sd3() -> Any:
    """Stable Diffusion 3 and 3.5: two CLIP encoders, T5, MMDiT with one dual-attention layer as in 3.5 medium."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    tokenizer, text_encoder = clip(projection=True)
    tokenizer_2, text_encoder_2 = clip(projection=True)
    tokenizer_3, text_encoder_3 = t5(2 * WIDTH)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * WIDTH,  # of T5; the CLIP encoders are concatenated and padded to it
        caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(16, scaling=1.5305, shift=0.0609),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
    )


def flux_parts() -> dict[str, Any]:
    """The parts of FLUX.1, which Kontext shares."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    tokenizer, text_encoder = clip()
    tokenizer_2, text_encoder_2 = t5()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,  # 2 x 2 latents of 4 channels
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),  # sum to the head's width
        guidance_embeds=True,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return {
        "transformer": transformer,
        "scheduler": scheduler,
        "vae": image_vae(4, scaling=0.3611, shift=0.1159),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "text_encoder_2": text_encoder_2,
        "tokenizer_2": tokenizer_2,
    }


@family(
    "FluxPipeline",
    "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.1-schnell",
    "black-forest-labs/FLUX.1-Krea-dev",
    height=32,
    width=32,
    max_sequence_length=64,
)
def flux() -> Any:
    """FLUX.1 dev and its kin, with an embedding of the guidance scale."""
    from diffusers import FluxPipeline

    return FluxPipeline(**flux_parts())


def unet(cross_attention_dim: int, **more: Any) -> Any:
    """The U-Net of Stable Diffusion 1 and XL, predicting noise of latents with 4 channels."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        cross_attention_dim=cross_attention_dim,
        **more,
    )


@family(
    "StableDiffusionPipeline",
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "runwayml/stable-diffusion-v1-5",
    "CompVis/stable-diffusion-v1-*",
    height=32,
    width=32,
)
def sd15() -> Any:
    """Stable Diffusion 1.5, without its safety checker."""
    from diffusers import PNDMScheduler, StableDiffusionPipeline

    tokenizer, text_encoder = clip()
    scheduler = PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    return StableDiffusionPipeline(
        unet=unet(WIDTH, attention_head_dim=8),
        scheduler=scheduler,
        vae=image_vae(4, scaling=0.18215, quant_conv=True),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@family(
    "StableDiffusionXLPipeline",
    "stabilityai/stable-diffusion-xl-base-*",
    "stabilityai/sdxl-turbo",
    height=32,
    width=32,
)
def sdxl() -> Any:
    """Stable Diffusion XL base: two CLIP encoders, whose pooled text and the picture's sizes join the time."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    tokenizer, text_encoder = clip()
    tokenizer_2, text_encoder_2 = clip(projection=True)
    network = unet(
        2 * WIDTH,  # both encoders, concatenated
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=WIDTH + 6 * 8,  # pooled text and six sizes
    )
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1
    )
    return StableDiffusionXLPipeline(
        unet=network,
        scheduler=scheduler,
        vae=image_vae(4, scaling=0.13025, quant_conv=True),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        add_watermarker=False,
    )


@family(
    "FluxKontextPipeline",
    "black-forest-labs/FLUX.1-Kontext-dev",
    takes_image=True,
    height=32,
    width=32,
    max_area=32 * 32,
    _auto_resize=False,  # else the condition is enlarged to about 1024 x 1024
    max_sequence_length=64,
)
def flux_kontext() -> Any:
    """FLUX.1 Kontext: FLUX.1 that sees the latents of a condition image as further tokens."""
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**flux_parts())
