from __future__ import annotations

import numpy as np
import pytest
import torch

from genrl.rewards import HPSv2, PickScore, check_reward, score
from genrl.tiny import saved_clip, saved_open_clip

PROMPTS = ["a red cat", "two dogs", "snow"]


def pictures(count=3, height=32, width=32):
    noise = torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))
    return (noise * 255).round() / 255


def as_pil(media):
    from PIL import Image

    return [Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)) for image in media]


@pytest.fixture(scope="module")
def pickscore():
    reward = PickScore(str(saved_clip()), processor=None)
    reward.prepare("cpu", progress=False)
    return reward


@pytest.fixture(scope="module")
def hps_arguments(tmp_path_factory):
    return HPSv2.tiny_arguments({}, tmp_path_factory.mktemp("hps"))


@pytest.fixture(scope="module")
def hps(hps_arguments):
    reward = HPSv2(**hps_arguments)
    reward.prepare("cpu", progress=False)
    return reward


def published_pickscore(prompt, image):
    """The steps of the model card."""
    from transformers import AutoModel, AutoProcessor

    processor, model = AutoProcessor.from_pretrained(saved_clip()), AutoModel.from_pretrained(saved_clip()).eval()
    options = {"padding": True, "truncation": True, "max_length": 77, "return_tensors": "pt"}
    with torch.no_grad():
        images = model.get_image_features(**processor(images=[image], return_tensors="pt"))
        texts = model.get_text_features(**processor(text=prompt, **options))
        images, texts = (getattr(output, "pooler_output", output) for output in (images, texts))
        images, texts = images / images.norm(dim=-1, keepdim=True), texts / texts.norm(dim=-1, keepdim=True)
        return (model.logit_scale.exp() * (texts @ images.T)[0]).item()


def test_pickscore_equals_the_model_card(pickscore):
    media = pictures()
    expected = [published_pickscore(prompt, image) for prompt, image in zip(PROMPTS, as_pil(media), strict=True)]
    assert pickscore(media, PROMPTS, [{}] * 3).tolist() == pytest.approx(expected, abs=1e-5)


def test_pickscore_divided_by_26(pickscore):
    media = pictures()
    divided = PickScore(str(saved_clip()), processor=None, scale=1 / 26)
    torch.testing.assert_close(divided(media, PROMPTS, [{}] * 3), pickscore(media, PROMPTS, [{}] * 3) / 26)
    assert divided.range == pytest.approx((-100 / 26, 100 / 26))


def published_hps(arguments, media, prompts):
    """Scores by open_clip alone, with the images prepared as in the package hpsv2: letterboxed floats."""
    import open_clip
    from torchvision.transforms import functional as V

    model, _, _ = open_clip.create_model_and_transforms(arguments["model"], load_weights=False)
    model.load_state_dict(torch.load(arguments["checkpoint"])["state_dict"])
    images = []
    for image in media:
        factor = 32 / max(image.shape[1:])
        high, wide = (round(side * factor) for side in image.shape[1:])
        small = V.resize(image, [high, wide], V.InterpolationMode.BICUBIC) if factor != 1 else image
        down, right = 32 - high, 32 - wide
        small = V.pad(small, [right // 2, down // 2, right - right // 2, down - down // 2])
        images.append(V.normalize(small, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD))
    with torch.no_grad():
        tokens = open_clip.get_tokenizer(arguments["model"])(prompts)
        features, texts, _ = model.eval()(torch.stack(images), tokens)
    return (features @ texts.T).diagonal()


@pytest.mark.parametrize("size", [(32, 32), (40, 57), (64, 48), (20, 20)])
def test_hps_equals_the_published_steps(hps, hps_arguments, size):
    media = pictures(3, *size)
    expected = published_hps(hps_arguments, media, PROMPTS)
    torch.testing.assert_close(hps(media, PROMPTS, [{}] * 3), expected, rtol=0, atol=1e-6)


def test_hps_times_100(hps, hps_arguments):
    printed = HPSv2(**hps_arguments, scale=100)
    torch.testing.assert_close(printed(pictures(), PROMPTS, [{}] * 3), 100 * hps(pictures(), PROMPTS, [{}] * 3))


def test_hps_weights_are_found_in_a_folder_by_version(hps, hps_arguments, tmp_path):
    folder = hps_arguments["checkpoint"].rpartition("/")[0]
    by_folder = HPSv2(checkpoint=folder, model=hps_arguments["model"])
    torch.testing.assert_close(by_folder(pictures(), PROMPTS, [{}] * 3), hps(pictures(), PROMPTS, [{}] * 3))
    with pytest.raises(FileNotFoundError, match=r"has no file 'HPS_v2_compressed\.pt'"):
        HPSv2(checkpoint=folder, version="v2.0", model=hps_arguments["model"]).prepare("cpu", progress=False)
    with pytest.raises(ValueError, match=r"version is 'v3'; known: v2.0, v2.1"):
        HPSv2(version="v3")


def test_hps_uses_the_weights_of_the_file_and_all_of_them(hps_arguments, tmp_path):
    state = torch.load(hps_arguments["checkpoint"])["state_dict"]
    changed = tmp_path / "changed.pt"
    torch.save({"state_dict": {name: value * 1.3 for name, value in state.items()}}, changed)
    other = HPSv2(checkpoint=str(changed), model=hps_arguments["model"])
    other.prepare("cpu", progress=False)
    for name, value in other.encoder.model.module.state_dict().items():
        torch.testing.assert_close(value, state[name] * 1.3)
    state.pop("visual.proj")
    torch.save({"state_dict": state}, changed)
    with pytest.raises(OSError, match="HPSv2 cannot load"):
        HPSv2(checkpoint=str(changed), model=hps_arguments["model"]).prepare("cpu", progress=False)


def test_hub_ids_are_named_when_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for reward, name in ((HPSv2(), "xswu/HPSv2"), (PickScore(), "yuvalkirstain/PickScore_v1")):
        with pytest.raises(OSError, match=f"cannot load '{name}'.*HF_HUB_OFFLINE is set"):
            reward.prepare("cpu", progress=False)


@pytest.mark.parametrize("kind", ["pickscore", "hps"])
def test_checker_gradient_batch_size_and_video(kind, request):
    reward = request.getfixturevalue(kind)
    assert check_reward(reward) == []
    media = pictures().requires_grad_()
    before = score(reward, media, PROMPTS, gradients=True)[reward.name]
    (gradient,) = torch.autograd.grad(before.sum(), media)
    with torch.no_grad():
        moved = (media + 0.01 * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).clamp(0, 1)
    assert (score(reward, moved, PROMPTS)[reward.name] > before).all()
    video = pictures(6).unflatten(0, (2, 3))
    expected = torch.stack([reward(video[:, i], PROMPTS[:2], [{}] * 2) for i in range(3)]).mean(0)
    torch.testing.assert_close(reward(video, PROMPTS[:2], [{}] * 2), expected, rtol=0, atol=1e-5)


def test_tiny_arguments_keep_the_other_settings(tmp_path):
    for kind in (PickScore, HPSv2):
        arguments = kind.tiny_arguments({"scale": 2.0, "dtype": "bfloat16"}, tmp_path)
        assert arguments["scale"] == 2.0 and arguments["dtype"] == "bfloat16"
        assert kind(**arguments)(pictures(), PROMPTS, [{}] * 3).shape == (3,)
    assert saved_open_clip(tmp_path / "open_clip")[0] == arguments["model"]
