from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from genrl.rewards import RewardError, check_reward, reward_name, score


class Returns:
    differentiable = False
    range = (0.0, 1.0)

    def __init__(self, value):
        self.value = value

    def __call__(self, media, prompts, metadata):
        return self.value(media) if callable(self.value) else self.value


def test_values_come_back_as_float32_on_the_cpu_without_graph(batch):
    media, prompts, metadata = batch
    result = score(Returns(lambda m: m.double().mean(dim=(1, 2, 3))), media.requires_grad_(), prompts, metadata)
    assert list(result) == ["returns"]
    assert result["returns"].dtype == torch.float32 and not result["returns"].requires_grad
    torch.testing.assert_close(result["returns"], media.detach().mean(dim=(1, 2, 3)))


@pytest.mark.parametrize(
    "value",
    [[1, None, 0.25, True], (1.0, math.nan, 0.25, 1), np.array([1, math.nan, 0.25, 1]), np.array([1, None, 0.25, 1.0])],
)
def test_lists_and_arrays_of_numbers_are_values_too(batch, value):
    found = score(Returns({"a": value, "b": torch.ones(4)}), *batch)
    assert found["a"].dtype == torch.float32
    torch.testing.assert_close(found["a"], torch.tensor([1.0, math.nan, 0.25, 1.0]), equal_nan=True)


def test_a_list_of_tensors_keeps_their_gradients(batch):
    media = batch[0].clone().requires_grad_()
    found = score(Returns(lambda m: [image.mean() for image in m]), media, *batch[1:], gradients=True)
    found["returns"].sum().backward()
    assert media.grad.abs().sum() > 0


def test_gradients_are_kept_on_request(batch):
    media, prompts, metadata = batch
    result = score(Returns(lambda m: m.mean(dim=(1, 2, 3))), media.requires_grad_(), prompts, metadata, gradients=True)
    result["returns"].sum().backward()
    torch.testing.assert_close(media.grad, torch.full_like(media, 1 / 64))


def test_nan_means_not_scored_and_passes(batch):
    values = torch.tensor([0.1, float("nan"), 0.3, 0.4])
    assert torch.equal(score(Returns(values), *batch)["returns"].isnan(), values.isnan())


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_inf_is_refused_naming_reward_prompt_and_value(batch, value):
    with pytest.raises(RewardError, match=rf"'returns' returned {value} for 1 of 4 .*'digit 2'") as caught:
        score(Returns(torch.tensor([0.0, 0.0, value, 0.0])), *batch)
    assert caught.value.reward == "returns" and caught.value.prompts == ["digit 2"]


def test_a_raising_reward_is_named_with_prompts_and_cause(batch):
    def crisp(media, prompts, metadata):
        raise KeyError("lens")

    with pytest.raises(
        RewardError, match=r"'crisp' .*raised KeyError: 'lens' \(prompts: 'digit 0', .*\.\.\.\)"
    ) as caught:
        score(crisp, *batch)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4, 1), r"shape \(4, 1\) for 4 samples"),
        (torch.zeros(3), r"shape \(3,\) for 4 samples"),
        (torch.tensor(0.0), r"shape \(\) for 4 samples"),
        (torch.zeros(4, dtype=torch.int64), "dtype torch.int64"),
        ([0.0] * 3, r"shape \(3,\) for 4 samples"),
        ([[0.0]] * 4, r"shape \(4, 1\) for 4 samples"),
        (np.zeros(5), r"shape \(5,\) for 4 samples"),
        (np.array(0.0), r"shape \(\) for 4 samples"),
        ([0.0, 1.0, "good", 0.0], "returned a list that holds no plain numbers"),
        ([0.0, 1.0, math.inf, 0.0], "returned inf for 1 of 4"),
        ("0123", "returned str"),
        ({}, "empty dict"),
        ({"a": torch.zeros(4), "b": torch.zeros(2)}, r"'b' returned shape \(2,\)"),
    ],
)
def test_a_wrong_result_is_named(batch, value, message):
    with pytest.raises(RewardError, match=message):
        score(Returns(value), *batch)


@pytest.mark.parametrize(
    ("media", "error", "message"),
    [
        (torch.full((4, 1, 8, 8), 200, dtype=torch.uint8), TypeError, "torch.uint8.*255"),
        (torch.full((4, 1, 8, 8), 200.0), ValueError, r"\[200, 200\]"),
        (torch.full((4, 1, 8, 8), -0.5), ValueError, r"\[-0.5, -0.5\]"),
        (torch.full((4, 1, 8, 8), float("nan")), ValueError, "NaN"),
        (torch.zeros(4, 8, 8), ValueError, r"shape \(4, 8, 8\)"),
        (torch.zeros(0, 1, 8, 8), ValueError, "not empty"),
        ([0.0], TypeError, "list"),
    ],
)
def test_media_out_of_convention_never_reach_the_reward(batch, media, error, message):
    def reward(media, prompts, metadata):
        raise AssertionError("was called")

    with pytest.raises(error, match=message):
        score(reward, media, *batch[1:])


def test_rounding_error_of_a_decoder_and_video_are_accepted():
    media = torch.full((2, 3, 1, 8, 8), 1 + 1e-6)
    assert score(Returns(torch.zeros(2)), media, ["a", "b"])["returns"].shape == (2,)


@pytest.mark.parametrize("prompts", [["a"], "four"])
def test_prompts_of_another_length_are_refused(batch, prompts):
    with pytest.raises(ValueError, match=r"prompts has .* for 4 samples"):
        score(Returns(torch.zeros(4)), batch[0], prompts)


def test_names_come_from_name_class_or_function():
    class JPEGSize:
        pass

    class Named:
        name = "own"

    assert reward_name(JPEGSize()) == "jpeg_size"
    assert reward_name(Named()) == "own"
    assert reward_name(check_reward) == "check_reward"
    for given, name in [
        ("AllNaN", "all_nan"),
        ("SometimesNaN", "sometimes_nan"),
        ("NaNReward", "nan_reward"),
        ("OCRReward", "ocr_reward"),
        ("CLIPScore", "clip_score"),
        ("HPSv2", "hpsv2"),
        ("MyHPSv2Score", "my_hpsv2_score"),
        ("L2Loss", "l2_loss"),
        ("FromOCR", "from_ocr"),
    ]:
        assert reward_name(type(given, (), {})()) == name


def test_checker_is_silent_about_a_good_reward():
    class Good:
        differentiable = True
        range = (0.0, 1.0)

        def __call__(self, media, prompts, metadata):
            return media.mean(dim=(1, 2, 3))

    assert check_reward(Good()) == []


class _Bad:
    differentiable = False
    range = (0.0, 1.0)


class DependsOnBatch(_Bad):
    def __call__(self, media, prompts, metadata):
        values = media.mean(dim=(1, 2, 3))
        return (values - values.mean()).abs()


class Random(_Bad):
    def __call__(self, media, prompts, metadata):
        return torch.rand(len(media))


class OutOfRange(_Bad):
    def __call__(self, media, prompts, metadata):
        return media.sum(dim=(1, 2, 3))


class InPlace(_Bad):
    def __call__(self, media, prompts, metadata):
        return media.mul_(0.5).mean(dim=(1, 2, 3))


class Double(_Bad):
    def __call__(self, media, prompts, metadata):
        return media.double().mean(dim=(1, 2, 3))


class NeverScores(_Bad):
    def __call__(self, media, prompts, metadata):
        return torch.full((len(media),), float("nan"))


class NoGraph(_Bad):
    differentiable = True

    def __call__(self, media, prompts, metadata):
        return media.detach().mean(dim=(1, 2, 3))


class Undeclared:
    def __call__(self, media, prompts, metadata):
        return media.mean(dim=(1, 2, 3))


@pytest.mark.parametrize(
    ("reward", "finding"),
    [
        (DependsOnBatch(), "depend on the rest of the batch"),
        (Random(), "global random state"),
        (OutOfRange(), "leave the declared range"),
        (InPlace(), "in place"),
        (Double(), "float64"),
        (NeverScores(), "all NaN"),
        (NoGraph(), "no graph"),
        (Undeclared(), "declares no `range`"),
    ],
)
def test_checker_finds(reward, finding):
    assert any(finding in line for line in check_reward(reward))
    with pytest.raises(ValueError, match=type(reward).__name__):
        check_reward(reward, strict=True)


def test_importing_rewards_is_light():
    heavy = ["sklearn", "onnxruntime", "scipy", "matplotlib", "rapidocr_onnxruntime"]
    code = f"import sys, genrl.rewards; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]" and not run.stderr
