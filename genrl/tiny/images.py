"""Families that make images. A builder draws its weights from torch's default generator and returns the pipeline.

Sizes are the smallest that the architectures allow; schedulers have the settings of the published checkpoints.
"""

from __future__ import annotations

from typing import Any

from genrl.tiny.families import family
from genrl.tiny.language import gemma2, mistral3, qwen3, qwen_vl
from genrl.tiny.parts import WIDTH, clip, image_vae, t5
from genrl.tiny.tokenizers import WORDS


@family(
    "stabilityai/stable-diffusion-3",
    height=32,
    width=32,
    max_sequence_length=16,
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
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
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


@family("black-forest-labs/FLUX.1", height=32, width=32, max_sequence_length=16)
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
    "stable-diffusion-v1-5/stable-diffusion-v1",
    "runwayml/stable-diffusion-v1",
    "CompVis/stable-diffusion-v1",
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
    "stabilityai/stable-diffusion-xl-base",
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
    "black-forest-labs/FLUX.1-Kontext",
    takes_image=True,
    height=32,
    width=32,
    max_area=32 * 32,
    _auto_resize=False,  # else the condition is enlarged to about 1024 x 1024
    max_sequence_length=16,
)
def flux_kontext() -> Any:
    """FLUX.1 Kontext: FLUX.1 that sees the latents of a condition image as further tokens."""
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**flux_parts())


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
    "black-forest-labs/FLUX.2-dev",
    height=32,
    width=32,
    max_sequence_length=32,
    text_encoder_out_layers=FLUX2_LAYERS,
)
def flux2() -> Any:
    """FLUX.2 dev: Mistral 3 as text encoder, guidance embedded."""
    from diffusers import Flux2Pipeline

    processor, text_encoder = mistral3(len(FLUX2_LAYERS))
    parts = flux2_parts(len(FLUX2_LAYERS) * WIDTH, guidance_embeds=True)
    return Flux2Pipeline(tokenizer=processor, text_encoder=text_encoder, **parts)


@family(
    "black-forest-labs/FLUX.2-klein",
    height=32,
    width=32,
    max_sequence_length=32,
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
    "system user assistant Describe the image by detailing color shape size texture quantity text spatial "
    "relationships of objects and background"
).split()


@family(
    "Qwen/Qwen-Image",
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


@family("Tongyi-MAI/Z-Image", height=32, width=32, max_sequence_length=32)
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
    "Efficient-Large-Model/Sana",
    height=32,
    width=32,
    max_sequence_length=32,
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
