"""ImageReward against its network written down by hand, on a tiny file with the publisher's names."""

from __future__ import annotations

import warnings
from math import sqrt

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genrl.rewards import ImageReward, check_reward, score
from genrl.rewards.image_reward import ImageRewardNetwork

PROMPTS = ["a red cat", "two dogs!", "snow"]


def pictures(count=3, height=32, width=32):
    noise = torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))
    return (noise * 255).round() / 255


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return ImageReward.tiny_arguments({}, tmp_path_factory.mktemp("image_reward"))


@pytest.fixture(scope="module")
def reward(arguments):
    found = ImageReward(**arguments)
    found.prepare("cpu", progress=False)
    return found


@pytest.fixture(scope="module")
def state(arguments):
    return torch.load(f"{arguments['checkpoint']}/ImageReward.pt")


def by_hand(state, pixels, ids, mask):
    """One layer of ViT, one of BERT with cross-attention, the head; one attention head each."""

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name, x, eps):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)

    def attend(q, k, v, mask=None):
        logits = q @ k.transpose(1, 2) / sqrt(q.shape[-1])
        return (logits if mask is None else logits.masked_fill(mask[:, None] == 0, -torch.inf)).softmax(-1) @ v

    vit, block = "blip.visual_encoder.", "blip.visual_encoder.blocks.0."
    x = F.conv2d(pixels, state[f"{vit}patch_embed.proj.weight"], state[f"{vit}patch_embed.proj.bias"], stride=8)
    x = torch.cat([state[f"{vit}cls_token"].expand(len(pixels), -1, -1), x.flatten(2).transpose(1, 2)], 1)
    x = x + state[f"{vit}pos_embed"]
    qkv = linear(f"{block}attn.qkv", norm(f"{block}norm1", x, 1e-6)).chunk(3, -1)
    x = x + linear(f"{block}attn.proj", attend(*qkv))
    hidden = F.gelu(linear(f"{block}mlp.fc1", norm(f"{block}norm2", x, 1e-6)))
    image = norm(f"{vit}norm", x + linear(f"{block}mlp.fc2", hidden), 1e-6)

    bert = "blip.text_encoder.embeddings."
    y = state[f"{bert}word_embeddings.weight"][ids] + state[f"{bert}position_embeddings.weight"][: ids.shape[1]]
    y = norm(f"{bert}LayerNorm", y, 1e-12)
    layer = "blip.text_encoder.encoder.layer.0."
    for kind, other, seen in (("attention", None, mask), ("crossattention", image, None)):
        other = y if other is None else other
        q = linear(f"{layer}{kind}.self.query", y)
        k, v = linear(f"{layer}{kind}.self.key", other), linear(f"{layer}{kind}.self.value", other)
        y = norm(
            f"{layer}{kind}.output.LayerNorm", y + linear(f"{layer}{kind}.output.dense", attend(q, k, v, seen)), 1e-12
        )
    hidden = F.gelu(linear(f"{layer}intermediate.dense", y))
    y = norm(f"{layer}output.LayerNorm", y + linear(f"{layer}output.dense", hidden), 1e-12)
    value = linear("mlp.layers.2", linear("mlp.layers.0", y[:, 0]))[:, 0]
    return (value - 0.16717362830052426) / 1.0333394966054072


def test_equals_the_network_by_hand(reward, state, arguments):
    from transformers import AutoTokenizer

    media = pictures()
    tokenizer = AutoTokenizer.from_pretrained(arguments["tokenizer"])
    tokens = tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
    pixels = reward._network.pixels(media)
    expected = by_hand(state, pixels, tokens["input_ids"], tokens["attention_mask"])
    found = reward(media, PROMPTS, [{}] * 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.std() > 0.01


def test_images_are_prepared_as_the_package_does():
    from PIL import Image
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor
    from transformers import BlipTextConfig, BlipVisionConfig

    from genrl.rewards.image_reward import ImageRewardNetwork

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    pixels = ImageRewardNetwork(BlipVisionConfig(**sizes, image_size=224), BlipTextConfig(**sizes), [8, 1]).pixels
    normalise = Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    transform = Compose([Resize(224, InterpolationMode.BICUBIC), CenterCrop(224), ToTensor(), normalise])
    media = (F.interpolate(pictures(2, 8, 10), (250, 301), mode="bilinear") * 255).round() / 255
    arrays = (media.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)
    expected = torch.stack([transform(Image.fromarray(array)) for array in arrays])
    assert (pixels(media) - expected).abs().max() < 2 / 255 / 0.26


def test_every_weight_of_the_file_is_needed(state):
    for name in state:
        with pytest.raises((ValueError, RuntimeError, KeyError)):
            ImageRewardNetwork.of_state({key: value for key, value in state.items() if key != name})
    extra = state | {
        "blip.text_proj.weight": torch.zeros(1),
        "blip.text_encoder.embeddings.position_ids": torch.arange(5),
    }
    ImageRewardNetwork.of_state(extra)


def test_layers_and_heads_are_counted_from_the_file(state):
    text = {name.replace("layer.0.", f"layer.{i}."): value for name, value in state.items() for i in range(11)}
    network = ImageRewardNetwork.of_state(text)
    assert len(network.text.encoder.layer) == 11 and len(network.vision.encoder.layers) == 1
    assert network.text.config.num_attention_heads == 1 and network.vision.config.image_size == 32


def test_checker_gradient_batch_size_and_video(reward, arguments):
    assert check_reward(reward) == []
    media = pictures().requires_grad_()
    before = score(reward, media, PROMPTS, gradients=True)["image_reward"]
    (gradient,) = torch.autograd.grad(before.sum(), media)
    with torch.no_grad():
        moved = (media + 0.01 * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).clamp(0, 1)
    assert (score(reward, moved, PROMPTS)["image_reward"] > before).all()
    video = pictures(6).unflatten(0, (2, 3))
    expected = torch.stack([reward(video[:, i], PROMPTS[:2], [{}] * 2) for i in range(3)]).mean(0)
    small = ImageReward(**arguments, batch_size=2)
    for one in (reward, small):
        torch.testing.assert_close(one(video, PROMPTS[:2], [{}] * 2), expected, rtol=0, atol=1e-5)
    every_second = ImageReward(**arguments, frame_stride=2)(video, PROMPTS[:2], [{}] * 2)
    torch.testing.assert_close(every_second, reward(video[:, ::2], PROMPTS[:2], [{}] * 2), rtol=0, atol=1e-5)


def test_bfloat16_is_close(reward, arguments):
    half = ImageReward(**arguments, dtype="bfloat16")(pictures(), PROMPTS, [{}] * 3)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, reward(pictures(), PROMPTS, [{}] * 3), rtol=0, atol=0.05)


def test_long_prompts_are_cut_with_one_warning(arguments):
    fresh, long = ImageReward(**arguments), "very long prompt " * 5
    with pytest.warns(UserWarning, match="ImageReward: 1 of 2 prompts have more than 35 tokens"):
        first = fresh(pictures(2), ["cat", long], [{}] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fresh(pictures(2), ["cat", long + "more"], [{}] * 2), first)


def test_what_cannot_be_loaded_is_named(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"cannot load 'THUDM/ImageReward'.*HF_HUB_OFFLINE is set"):
        ImageReward().prepare("cpu", progress=False)
    with pytest.raises(OSError, match="cannot load 'nobody/bert'"):
        ImageReward(arguments["checkpoint"], tokenizer="nobody/bert").prepare("cpu", progress=False)
    torch.save({"state_dict": {"a.weight": torch.zeros(1)}}, tmp_path / "other.pt")
    with pytest.raises(OSError, match="there is no BLIP"):
        ImageReward(str(tmp_path / "other.pt"), arguments["tokenizer"]).prepare("cpu", progress=False)
    with pytest.raises(ValueError, match="batch_size is 0"):
        ImageReward(batch_size=0)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        ImageReward(dtype="int8")


def test_loading_leaves_the_random_state_alone(arguments):
    before = torch.get_rng_state()
    ImageReward(**arguments).prepare("cpu", progress=False)
    assert torch.equal(torch.get_rng_state(), before)
