"""Families that make video: 9 frames of 32 x 32. See `genrl.tiny.images` for the form of a builder."""

from __future__ import annotations

from typing import Any

from genrl.tiny.families import family
from genrl.tiny.language import llama
from genrl.tiny.parts import WIDTH, clip, t5

SIZE: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 9}


def wan_transformer(**more: Any) -> Any:
    """WanTransformer3DModel of two heads of 12 and two layers, for latents of 16 channels."""
    from diffusers import WanTransformer3DModel

    sizes: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": WIDTH,
        "freq_dim": 64,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return WanTransformer3DModel(**{**sizes, **more})


def wan_parts(flow_shift: float = 3.0) -> dict[str, Any]:
    """Text encoder, autoencoder (4 times fewer frames, 8 times smaller sides) and scheduler of Wan."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler

    tokenizer, text_encoder = t5(multilingual=True)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)
    return {"tokenizer": tokenizer, "text_encoder": text_encoder, "vae": vae, "scheduler": scheduler}


@family("WanPipeline", "Wan-AI/Wan2.1-T2V-*", max_sequence_length=64, **SIZE)
def wan() -> Any:
    """Wan 2.1 text-to-video."""
    from diffusers import WanPipeline

    return WanPipeline(transformer=wan_transformer(), **wan_parts())


@family("WanPipeline", "Wan-AI/Wan2.2-T2V-*", two_experts=True, max_sequence_length=64, **SIZE)
def wan22() -> Any:
    """Wan 2.2 text-to-video: `transformer` for times above 0.875, `transformer_2` below."""
    from diffusers import WanPipeline

    return WanPipeline(
        transformer=wan_transformer(), transformer_2=wan_transformer(), boundary_ratio=0.875, **wan_parts()
    )


@family(
    "WanImageToVideoPipeline",
    "Wan-AI/Wan2.1-I2V-*",
    "Wan-AI/Wan2.2-I2V-*",
    takes_image=True,
    max_sequence_length=64,
    **SIZE,
)
def wan_i2v() -> Any:
    """Wan 2.1 image-to-video: the first frame enters as latents, as a mask and as features of a CLIP image encoder."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    size = {"height": 32, "width": 32}
    return WanImageToVideoPipeline(
        # 16 channels of noise, 16 of the first frame, 4 of the mask
        transformer=wan_transformer(in_channels=36, image_dim=WIDTH, added_kv_proj_dim=24),
        image_encoder=CLIPVisionModel(vision),
        image_processor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size),
        **wan_parts(),
    )


@family("LTXPipeline", "Lightricks/LTX-Video", "Lightricks/LTX-Video-0.9.*", max_sequence_length=64, **SIZE)
def ltx() -> Any:
    """LTX-Video: T5, time and resolution dependent shift."""
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    tokenizer, text_encoder = t5()
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=WIDTH,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
    )
    vae.use_framewise_decoding = False
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
    )
    return LTXPipeline(
        transformer=transformer, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
    )


@family(
    "HunyuanVideoPipeline",
    "hunyuanvideo-community/HunyuanVideo",
    max_sequence_length=64,
    prompt_template={"template": "{}", "crop_start": 0},  # the real one writes some 95 tokens and drops them
    **SIZE,
)
def hunyuanvideo() -> Any:
    """HunyuanVideo: Llama and CLIP, embedded guidance."""
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )

    tokenizer, text_encoder = llama(layers=4)  # its second to last layers are read
    tokenizer_2, text_encoder_2 = clip()
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        guidance_embeds=True,
        text_embed_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    return HunyuanVideoPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
    )


@family(
    "CogVideoXPipeline",
    "THUDM/CogVideoX-2b",
    "THUDM/CogVideoX-5b",
    "THUDM/CogVideoX1.5-5B",
    "zai-org/CogVideoX-2b",
    "zai-org/CogVideoX-5b",
    "zai-org/CogVideoX1.5-5B",
    max_sequence_length=64,
    **SIZE,
)
def cogvideox() -> Any:
    """CogVideoX 2B: a diffusion model that predicts v, with zero signal at the first step."""
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    tokenizer, text_encoder = t5()
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=WIDTH,
        num_layers=2,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        max_text_seq_length=64,
    )
    vae = AutoencoderKLCogVideoX(
        latent_channels=4,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        snr_shift_scale=3.0,
        clip_sample=False,
    )
    return CogVideoXPipeline(
        transformer=transformer, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
    )
