from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.rewards import CLIPFrames, CLIPScore, OpenCLIPScore, RewardError, check_reward, score
from genrl.tiny import saved_clip, saved_open_clip

PROMPTS = ["a red cat", "two dogs", "a red cat", "snow", "the sea at night"]


def pictures(count=5, height=40, width=56, seed=0):
    """[N, 3, H, W] on the 8-bit grid."""
    noise = torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(seed))
    return (noise * 255).round() / 255


def as_pil(media):
    from PIL import Image

    return [Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)) for image in media]


def cosines(images, texts):
    return torch.nn.functional.cosine_similarity(images, texts, dim=-1)


@pytest.fixture(scope="module")
def clip_folder():
    return str(saved_clip())


@pytest.fixture(scope="module")
def clip(clip_folder):
    reward = CLIPScore(clip_folder)
    reward.prepare("cpu", progress=False)
    return reward


@pytest.fixture(scope="module")
def open_clip_model():
    return saved_open_clip()[0]


@pytest.fixture(scope="module")
def open_clip_score(open_clip_model):
    reward = OpenCLIPScore(open_clip_model, None)
    reward.prepare("cpu", progress=False)
    return reward


@pytest.fixture(params=["transformers", "open_clip"])
def reward(request, clip, open_clip_score):
    return {"transformers": clip, "open_clip": open_clip_score}[request.param]


def by_hand(folder, media, prompts):
    """Cosines [B] by transformers alone, on 8-bit images."""
    from transformers import CLIPModel, CLIPProcessor

    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    inputs = processor(text=prompts, images=as_pil(media), return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model(**inputs)
    return cosines(output.image_embeds, output.text_embeds)


def test_equals_transformers_called_by_hand(clip, clip_folder):
    same_size = pictures(height=32, width=32)
    expected = by_hand(clip_folder, same_size, PROMPTS)
    torch.testing.assert_close(clip(same_size, PROMPTS, [{}] * 5), expected, rtol=0, atol=1e-6)
    resized = pictures()  # the library resizes 8-bit images
    torch.testing.assert_close(
        clip(resized, PROMPTS, [{}] * 5), by_hand(clip_folder, resized, PROMPTS), rtol=0, atol=5e-3
    )


def test_features_equal_those_of_the_library_on_the_same_pixels(clip, clip_folder):
    from transformers import CLIPModel

    media = pictures()
    model = CLIPModel.from_pretrained(clip_folder).eval()
    with torch.no_grad():
        features = model.get_image_features(pixel_values=clip.encoder.model.pixels(media))
    features = getattr(features, "pooler_output", features)
    torch.testing.assert_close(clip.encoder.images(media), features / features.norm(dim=-1, keepdim=True))


def test_equals_open_clip_called_by_hand(open_clip_score, open_clip_model):
    import open_clip

    media = pictures(height=32, width=32)
    model, _, transform = open_clip.create_model_and_transforms(open_clip_model)
    tokens = open_clip.get_tokenizer(open_clip_model)(PROMPTS)
    with torch.no_grad():
        images = model.eval().encode_image(torch.stack([transform(image) for image in as_pil(media)]))
        expected = cosines(images, model.encode_text(tokens))
    torch.testing.assert_close(open_clip_score(media, PROMPTS, [{}] * 5), expected, rtol=0, atol=1e-6)


def test_scale_and_clamp(clip, clip_folder):
    media = pictures()
    raw = clip(media, PROMPTS, [{}] * 5)
    assert (raw < 0).any() and (raw > 0).any()
    published = CLIPScore(clip_folder, scale=2.5, clamp=True)
    torch.testing.assert_close(published(media, PROMPTS, [{}] * 5), 2.5 * raw.clamp(min=0))
    assert published.range == (0.0, 2.5) and clip.range == (-1.0, 1.0)


def test_nothing_is_found_by_the_checker(reward):
    assert check_reward(reward) == []


def test_a_gradient_step_raises_the_score(reward):
    media = pictures(3).requires_grad_()
    before = score(reward, media, PROMPTS[:3], gradients=True)[reward.name]
    (gradient,) = torch.autograd.grad(before.sum(), media)
    with torch.no_grad():
        moved = (media + 0.01 * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).clamp(0, 1)
    assert (score(reward, moved, PROMPTS[:3])[reward.name] > before).all()


def test_no_graph_and_no_trainable_weights(reward):
    assert not reward(pictures(), PROMPTS, [{}] * 5).requires_grad
    network = reward.encoder.model.module
    assert not network.training and not any(weight.requires_grad for weight in network.parameters())


def test_the_batch_size_changes_nothing(clip_folder, clip):
    media = pictures()
    expected = clip(media, PROMPTS, [{}] * 5)
    for size in (1, 2, 3):
        small = CLIPScore(clip_folder, batch_size=size)
        torch.testing.assert_close(small(media, PROMPTS, [{}] * 5), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_and_returns_float32(clip_folder, clip, dtype):
    media = pictures().requires_grad_()
    half = CLIPScore(clip_folder, dtype=dtype)
    values = half(media, PROMPTS, [{}] * 5)
    assert values.dtype == torch.float32 and next(half.encoder.model.module.parameters()).dtype != torch.float32
    torch.testing.assert_close(values, clip(media, PROMPTS, [{}] * 5), rtol=0, atol=0.03)
    assert torch.autograd.grad(values.sum(), media)[0].abs().sum() > 0


def test_autocast_of_the_caller_changes_nothing(reward):
    media = pictures()
    expected = reward(media, PROMPTS, [{}] * 5)
    fresh = type(reward).__new__(type(reward))
    fresh.__dict__.update(reward.__dict__)
    fresh.encoder._texts.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(fresh(media, PROMPTS, [{}] * 5), expected, rtol=0, atol=1e-6)


def test_a_video_scores_the_mean_of_its_frames(clip, clip_folder):
    video = pictures(2 * 5).unflatten(0, (2, 5))
    frames = torch.stack([clip(video[:, i], PROMPTS[:2], [{}] * 2) for i in range(5)], dim=1)
    torch.testing.assert_close(clip(video, PROMPTS[:2], [{}] * 2), frames.mean(1), rtol=0, atol=1e-6)
    every_second = CLIPScore(clip_folder, frame_stride=2)
    torch.testing.assert_close(every_second(video, PROMPTS[:2], [{}] * 2), frames[:, ::2].mean(1), rtol=0, atol=1e-6)


def test_frames_of_a_video_are_compared_with_the_prompt_and_with_each_other(clip, clip_folder):
    video = pictures(2 * 4).unflatten(0, (2, 4))
    named = CLIPFrames(clip_folder)(video, PROMPTS[:2], [{}] * 2)
    torch.testing.assert_close(named["alignment"], clip(video, PROMPTS[:2], [{}] * 2))
    features = clip.encoder.images(video.flatten(0, 1)).unflatten(0, (2, 4))
    expected = [np.mean([cosines(f[i], f[i + 1]).item() for i in range(3)]) for f in features]
    torch.testing.assert_close(named["consistency"], torch.tensor(expected), rtol=0, atol=1e-6, check_dtype=False)
    still = CLIPFrames(clip_folder)(video[:, :1].expand(-1, 4, -1, -1, -1), PROMPTS[:2], [{}] * 2)
    torch.testing.assert_close(still["consistency"], torch.ones(2))
    assert set(score(CLIPFrames(clip_folder), video, PROMPTS[:2])) == {"alignment", "consistency"}


def test_frames_need_two_frames(clip_folder):
    for media, stride in ((pictures(2), 1), (pictures(2).unflatten(0, (1, 2)), 2)):
        with pytest.raises(ValueError, match="two frames or more"):
            CLIPFrames(clip_folder, frame_stride=stride)(media, PROMPTS[:1], [{}])


def test_frames_by_open_clip(open_clip_model, open_clip_score):
    video = pictures(2 * 3).unflatten(0, (2, 3))
    named = CLIPFrames(open_clip_model)(video, PROMPTS[:2], [{}] * 2)
    torch.testing.assert_close(named["alignment"], open_clip_score(video, PROMPTS[:2], [{}] * 2))


def test_media_out_of_range_or_of_integers_are_refused(clip):
    with pytest.raises(TypeError, match="uint8"):
        score(clip, (pictures(2) * 255).byte(), PROMPTS[:2])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        score(clip, pictures(2) * 2 - 1, PROMPTS[:2])
    with pytest.raises(RewardError, match=r"\[N, 3, H, W\]"):
        score(clip, torch.rand(2, 4, 8, 8), PROMPTS[:2])


def test_long_prompts_are_cut_with_one_warning(clip_folder, open_clip_model):
    media, long = pictures(3), "a very long prompt " * 60
    for fresh in (CLIPScore(clip_folder), OpenCLIPScore(open_clip_model, None)):
        with pytest.warns(UserWarning, match="2 of 3 prompts have more than 77 tokens"):
            first = fresh(media, ["cat", long, long + "!"], [{}] * 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = fresh(media, [long + "?", long + "and more", long], [{}] * 3)
        torch.testing.assert_close(first[2:], again[2:])  # nothing beyond the context counts


def test_text_features_are_computed_once_a_prompt(clip_folder, monkeypatch):
    from genrl.rewards import encoders

    fresh = CLIPScore(clip_folder, batch_size=2)
    seen = []
    original = fresh.encoder._text_features
    monkeypatch.setattr(fresh.encoder, "_text_features", lambda prompts: seen.extend(prompts) or original(prompts))
    monkeypatch.setattr(encoders, "_KEPT_TEXTS", 3)
    fresh(pictures(), PROMPTS, [{}] * 5)
    assert seen == ["a red cat", "two dogs", "snow", "the sea at night"]
    fresh(pictures(3), ["a red cat", "snow", "snow"], [{}] * 3)
    assert len(seen) == 4 and list(fresh.encoder._texts) == ["the sea at night", "a red cat", "snow"]
    fresh(pictures(1), ["new"], [{}])
    fresh(pictures(2), ["a red cat", "snow"], [{}] * 2)
    assert seen[4:] == ["new"]  # what was used least recently was forgotten


def test_loading_leaves_the_random_state_alone(clip_folder, open_clip_model):
    state = torch.get_rng_state()
    CLIPScore(clip_folder).prepare("cpu", progress=False)
    OpenCLIPScore(open_clip_model, None).prepare("cpu", progress=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_missing_checkpoint_is_named_and_offline_mode_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for reward, name in (
        (CLIPScore("nobody/nothing"), "nobody/nothing"),
        (CLIPScore(str(tmp_path / "nowhere")), "nowhere"),
        (OpenCLIPScore("hf-hub:nobody/nothing", None), "nobody/nothing"),
        (OpenCLIPScore("ViT-B-32", "laion2b_s34b_b79k"), "laion2b_s34b_b79k"),
    ):
        with pytest.raises(OSError, match="HF_HUB_OFFLINE is set") as caught:
            reward.prepare("cpu", progress=False)
        assert name in str(caught.value) and type(reward).__name__ in str(caught.value)


def test_a_checkpoint_that_lacks_weights_is_refused(clip_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    state = load_file(folder / "model.safetensors")
    del state["visual_projection.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match=r"lacks weights.*visual_projection"):
        CLIPScore(str(folder)).prepare("cpu", progress=False)


def test_a_folder_without_processor_is_refused(clip_folder, tmp_path):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    for path in folder.glob("*processor*"):
        path.unlink()
    with pytest.raises(OSError, match="cannot load"):
        CLIPScore(str(folder)).prepare("cpu", progress=False)
    processor_elsewhere = CLIPScore(str(folder), processor=clip_folder)
    processor_elsewhere.prepare("cpu", progress=False)


def test_open_clip_without_weights_is_refused(open_clip_model, tmp_path):
    with pytest.raises(ValueError, match="has random weights"):
        OpenCLIPScore("ViT-B-32", None)
    with pytest.raises(ValueError, match="brings its weights"):
        OpenCLIPScore(open_clip_model, "laion2b_s32b_b79k")
    folder = shutil.copytree(open_clip_model.partition(":")[2], tmp_path / "open_clip")
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(OSError, match="could not be loaded"):
        OpenCLIPScore(f"local-dir:{folder}", None).prepare("cpu", progress=False)


def test_open_clip_names_that_do_not_exist():
    with pytest.raises(ValueError, match=r"no model 'ViT-B-23'; did you mean 'ViT-B-"):
        OpenCLIPScore("ViT-B-23", "openai").prepare("cpu", progress=False)
    with pytest.raises(ValueError, match="has no weights 'laion2b_s34b_b79'; did you mean 'laion2b_s34b_b79k'"):
        OpenCLIPScore("ViT-B-32", "laion2b_s34b_b79").prepare("cpu", progress=False)


def test_weights_of_another_activation_are_refused():
    with pytest.raises(ValueError, match="Use the model 'ViT-L-14-quickgelu'"):
        OpenCLIPScore("ViT-L-14", "openai").prepare("cpu", progress=False)


def test_a_bare_file_of_weights_says_what_is_assumed(open_clip_model, open_clip_score, monkeypatch, tmp_path):
    import open_clip

    folder, weights = open_clip_model.partition(":")[2], saved_open_clip()[1]
    config = json.loads(Path(folder, "open_clip_config.json").read_text())["model_cfg"]
    (tmp_path / "tiny-test-clip.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    with pytest.warns(UserWarning, match=r"holds weights only.*bicubic"):
        reward = OpenCLIPScore("tiny-test-clip", str(weights))
        reward.prepare("cpu", progress=False)
    media = pictures()
    torch.testing.assert_close(reward(media, PROMPTS, [{}] * 5), open_clip_score(media, PROMPTS, [{}] * 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = OpenCLIPScore("tiny-test-clip", str(weights), preprocess={"mean": (0.5,) * 3, "resize_mode": "squash"})
        told.prepare("cpu", progress=False)
    assert told.encoder.model.pixels.resize == "squash" and told.encoder.model.pixels.mean == (0.5, 0.5, 0.5)


def test_siglip_is_read_with_its_own_context_and_processor(tmp_path, clip_folder):
    from transformers import AutoTokenizer, SiglipConfig, SiglipImageProcessor, SiglipModel

    tokenizer = AutoTokenizer.from_pretrained(clip_folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config={**sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 20, "projection_size": 16},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SiglipModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    processor = SiglipImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path)
    media = pictures(3, 32, 32)
    ids = tokenizer(PROMPTS[:3], padding="max_length", max_length=20, return_tensors="pt")
    with torch.no_grad():
        output = model(**ids, **processor(images=as_pil(media), return_tensors="pt"))
    reward = CLIPScore(str(tmp_path))
    expected = cosines(output.image_embeds, output.text_embeds)
    torch.testing.assert_close(reward(media, PROMPTS[:3], [{}] * 3), expected, rtol=0, atol=1e-5)
    with pytest.warns(UserWarning, match="more than 20 tokens"):
        reward(media, ["a long prompt with many letters"] * 3, [{}] * 3)


def test_a_model_without_text_is_refused(tmp_path):
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTModel(ViTConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(OSError, match="ViTModel has no text features"):
        CLIPScore(str(tmp_path)).prepare("cpu", progress=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_media_and_model_may_be_on_different_devices(clip, clip_folder):
    media = pictures()
    expected, on_gpu = clip(media, PROMPTS, [{}] * 5), CLIPScore(clip_folder)
    on_gpu.prepare("cuda", progress=False)
    for device in ("cpu", "cuda"):
        values = on_gpu(media.to(device), PROMPTS, [{}] * 5)
        assert values.device.type == device
        torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dtype": "float64"}, "dtype is 'float64'; known: float32"),
        ({"frame_stride": 0}, "frame_stride is 0"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
)
def test_wrong_settings_are_refused_before_loading(arguments, message):
    with pytest.raises(ValueError, match=message):
        CLIPScore("nobody/nothing", **arguments)


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
def test_a_missing_library_names_the_extra(library, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, library, None)
    reward = CLIPScore("x/y") if library == "transformers" else OpenCLIPScore()
    with pytest.raises(ImportError, match=r'pip install "genrl\[rewards\]"'):
        reward.prepare("cpu", progress=False)


@pytest.mark.parametrize("kind", [CLIPScore, OpenCLIPScore, CLIPFrames])
def test_tiny_arguments_keep_the_other_settings(kind, tmp_path):
    arguments = kind.tiny_arguments({"model": "large", "frame_stride": 2, "dtype": "bfloat16"}, tmp_path)
    assert arguments["frame_stride"] == 2 and arguments["dtype"] == "bfloat16"
    video = pictures(2 * 4).unflatten(0, (2, 4))
    assert all(values.shape == (2,) for values in score(kind(**arguments), video, PROMPTS[:2]).values())
