from __future__ import annotations

import pytest
import torch

from genrl.rewards import AestheticScore, RewardError, check_reward, score
from genrl.rewards.aesthetic import linear_chain
from genrl.tiny import saved_clip


def pictures(count=3, side=32):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def network():
    """A head as published, smaller: linear layers with dropout between them, under `layers.`"""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = torch.nn.Sequential(
            torch.nn.Linear(32, 24), torch.nn.Dropout(0.2), torch.nn.Linear(24, 8), torch.nn.Linear(8, 1)
        )
    return torch.nn.ModuleDict({"layers": layers})


@pytest.fixture(scope="module")
def head(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "sac+logos+ava1-l14-linearMSE.pth"
    torch.save(network.state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def aesthetic(head):
    reward = AestheticScore(str(saved_clip()), head)
    reward.prepare("cpu", progress=False)
    return reward


def test_equals_a_chain_of_products_on_the_features_of_the_library(aesthetic, network):
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(saved_clip()).eval()
    media = pictures()
    with torch.no_grad():
        features = model.get_image_features(pixel_values=aesthetic.encoder.model.pixels(media))
        x = getattr(features, "pooler_output", features)
        x = x / x.norm(dim=-1, keepdim=True)
        for index in (0, 2, 3):
            layer = network["layers"][index]
            x = x @ layer.weight.T + layer.bias
    torch.testing.assert_close(aesthetic(media, [""] * 3, [{}] * 3), x[:, 0])


def test_equals_the_network_without_dropout(aesthetic, network):
    media = pictures()
    with torch.no_grad():
        expected = network["layers"].eval()(aesthetic.encoder.images(media))[:, 0]
    torch.testing.assert_close(aesthetic(media, [""] * 3, [{}] * 3), expected)


def test_layers_are_ordered_by_number_not_by_name():
    widths = (4, 3, 2, 5, 1)
    numbers = (0, 2, 9, 10)
    state = {}
    for i in reversed(range(4)):
        state[f"layers.{numbers[i]}.weight"] = torch.full((widths[i + 1], widths[i]), float(i))
        state[f"layers.{numbers[i]}.bias"] = torch.zeros(widths[i + 1])
    assert [layer[0].shape[1] for layer in linear_chain(state, "head")] == [4, 3, 2, 5]


def test_the_linear_head_and_safetensors(aesthetic, tmp_path):
    from safetensors.torch import save_file

    linear = {"weight": torch.linspace(-1, 1, 32)[None], "bias": torch.tensor([5.0])}
    save_file(linear, tmp_path / "linear.safetensors")
    torch.save(linear, tmp_path / "aesthetic-model.pth")
    expected = aesthetic.encoder.images(pictures()) @ linear["weight"][0] + 5
    for head in (tmp_path / "linear.safetensors", tmp_path):
        reward = AestheticScore(str(saved_clip()), str(head))
        torch.testing.assert_close(reward(pictures(), [""] * 3, [{}] * 3), expected)


def test_the_text_encoder_is_dropped(aesthetic):
    assert not any("text" in name for name, _ in aesthetic.encoder.model.module.named_parameters())
    with pytest.raises(ValueError, match="has no text encoder"):
        aesthetic.encoder.texts(["a"])


def test_checker_gradient_and_video(aesthetic):
    assert check_reward(aesthetic) == []
    media = pictures().requires_grad_()
    before = score(aesthetic, media, [""] * 3, gradients=True)["aesthetic"]
    (gradient,) = torch.autograd.grad(before.sum(), media)
    with torch.no_grad():
        moved = (media + 0.01 * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).clamp(0, 1)
    assert (score(aesthetic, moved, [""] * 3)["aesthetic"] > before).all()
    video = pictures(6).unflatten(0, (2, 3))
    expected = torch.stack([aesthetic(video[:, i], [""] * 2, [{}] * 2) for i in range(3)]).mean(0)
    torch.testing.assert_close(aesthetic(video, [""] * 2, [{}] * 2), expected)


def test_a_head_for_other_features_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(1, 768), "bias": torch.zeros(1)}, tmp_path / "head.pth")
    with pytest.raises(RewardError, match="the head reads 768 features, the model gives 32"):
        score(AestheticScore(str(saved_clip()), str(tmp_path / "head.pth")), pictures(), [""] * 3)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)},
        {
            "0.weight": torch.zeros(3, 4),
            "0.bias": torch.zeros(3),
            "1.weight": torch.zeros(1, 2),
            "1.bias": torch.ones(1),
        },
        {"0.weight": torch.zeros(1, 4)},
        {"0.weight": torch.zeros(1, 4, 1, 1), "0.bias": torch.zeros(1)},
    ],
    ids=["empty", "three outputs", "widths", "no bias", "convolution"],
)
def test_what_is_no_head_is_refused(state):
    with pytest.raises(ValueError, match="chain of linear layers"):
        linear_chain(state, "head.pth")


def test_a_missing_head_is_named_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"cannot load 'trl-lib/ddpo-aesthetic-predictor'.*HF_HUB_OFFLINE is set"):
        AestheticScore("nobody/nothing").prepare("cpu", progress=False)
    with pytest.raises(FileNotFoundError, match=r"has no file 'aesthetic-model.pth'"):
        AestheticScore("nobody/nothing", str(tmp_path)).prepare("cpu", progress=False)


def test_tiny_arguments(tmp_path):
    reward = AestheticScore(**AestheticScore.tiny_arguments({"frame_stride": 2, "head": "large"}, tmp_path))
    assert reward.frame_stride == 2
    assert reward(pictures(), [""] * 3, [{}] * 3).sub(5).abs().max() < 6
