from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genrl.rewards import HPSv2, ImageReward, PickScore, check_reward, score
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


class FakeImageReward(torch.nn.Module):
    """The interface of the package's model: a tokenizer, and a reward of (ids, mask, pixels)."""

    def __init__(self):
        super().__init__()
        self.blip = SimpleNamespace(tokenizer=self.tokenize)
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 3))
        self.sizes = []

    @staticmethod
    def tokenize(prompts, padding=None, truncation=False, max_length=None, return_tensors=None):
        ids = [[ord(letter) for letter in prompt] for prompt in prompts]
        if not truncation:
            return {"input_ids": ids}
        ids = torch.tensor([(line + [0] * max_length)[:max_length] for line in ids])
        tokens = SimpleNamespace(input_ids=ids, attention_mask=(ids > 0).long())
        tokens.to = lambda device: tokens
        return tokens

    def score_gard(self, prompt_ids, prompt_attention_mask, image):
        assert prompt_ids.shape[1] == 35 and image.shape[1:] == (3, 224, 224)
        self.sizes.append(len(image))
        text = (prompt_ids * prompt_attention_mask).float().mean(1)
        return ((image.mean((2, 3)) * self.weight).sum(1) + 0.01 * text)[:, None]


@pytest.fixture
def fake_package(monkeypatch):
    loaded = []

    def load(name, device, med_config):
        loaded.append((name, device, med_config, FakeImageReward()))
        return loaded[-1][-1]

    monkeypatch.setitem(sys.modules, "ImageReward", SimpleNamespace(load=load))
    return loaded


def test_image_reward_calls_the_package_on_prepared_images(fake_package):
    reward = ImageReward("weights.pt", med_config="med.json", batch_size=2)
    reward.prepare("cpu", progress=False)
    media = pictures(3, 40, 57)
    values = score(reward, media, PROMPTS)["image_reward"]
    (name, device, med_config, network) = fake_package[0]
    assert (name, device, med_config, network.sizes) == ("weights.pt", "cpu", "med.json", [2, 1])
    assert not network.training and not network.weight.requires_grad
    tokens = network.tokenize(PROMPTS, truncation=True, max_length=35)
    expected = network.score_gard(tokens.input_ids, tokens.attention_mask, reward.pixels(media))[:, 0]
    torch.testing.assert_close(values, expected)


def test_image_reward_prepares_images_as_the_package_does(fake_package):
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

    normalise = Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    transform = Compose([Resize(224, InterpolationMode.BICUBIC), CenterCrop(224), ToTensor(), normalise])
    media = torch.nn.functional.interpolate(pictures(2, 8, 10), (250, 301), mode="bilinear")
    media = (media * 255).round() / 255
    expected = torch.stack([transform(image) for image in as_pil(media)])
    assert (ImageReward.pixels(media) - expected).abs().max() < 2 / 255 / 0.26


def test_image_reward_scores_videos_and_passes_gradients(fake_package):
    reward = ImageReward(batch_size=3)
    assert check_reward(reward) == []
    video = pictures(6).unflatten(0, (2, 3))
    expected = torch.stack([reward(video[:, i], PROMPTS[:2], [{}] * 2) for i in range(3)]).mean(0)
    torch.testing.assert_close(reward(video, PROMPTS[:2], [{}] * 2), expected)
    with pytest.warns(UserWarning, match="ImageReward: 1 of 2 prompts have more than 35 tokens"):
        ImageReward()(pictures(2), ["short", "l" * 50], [{}] * 2)


def test_image_reward_without_its_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    with pytest.raises(ImportError, match="image-reward"):
        ImageReward().prepare("cpu", progress=False)
    monkeypatch.delitem(sys.modules, "ImageReward")
    (tmp_path / "ImageReward.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"is installed, but its import fails: .*a_module_that_is_not_there"):
        ImageReward().prepare("cpu", progress=False)


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
