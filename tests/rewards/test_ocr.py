from __future__ import annotations

import functools
import itertools
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from genrl.rewards import OCRReward, RewardError, check_reward, score
from genrl.rewards.ocr import edit_distance, text_similarity


def recursive_distance(a: str, b: str) -> int:
    """The definition, without a table."""

    @functools.cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        same = a[i - 1] == b[j - 1]
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (not same))

    return distance(len(a), len(b))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("", "", 0), ("flaw", "lawn", 2), ("same", "same", 0)],
)
def test_edit_distance_of_known_pairs(a, b, expected):
    assert edit_distance(a, b) == expected


def test_edit_distance_equals_the_recursive_definition():
    words = ["".join(word) for n in range(4) for word in itertools.product("ab", repeat=n)]
    assert all(edit_distance(a, b) == recursive_distance(a, b) for a in words for b in words)


@pytest.mark.parametrize(
    ("read", "target", "expected"),
    [
        ("42", "42", 1.0),
        ("", "42", 0.0),
        ("4 2", "42", 1.0),
        ("40", "42", 0.5),
        ("4242", "42", 0.5),
        ("ABC", "abc", 1.0),
    ],
)
def test_similarity_of_known_pairs(read, target, expected):
    assert text_similarity(read, target) == expected


def test_similarity_with_case_and_with_an_empty_target():
    assert text_similarity("ABC", "abc", ignore_case=False) == 0.0
    with pytest.raises(ValueError, match="empty"):
        text_similarity("x", " ")


def render(text: str, width: int, height: int, size: int) -> torch.Tensor:
    """White text in the middle of black; [1, H, W] in [0, 1]."""
    image = Image.new("L", (width, height))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=size)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    draw.text(((width - right - left) / 2, (height - bottom - top) / 2), text, font=font, fill=255)
    return torch.from_numpy(np.array(image)).float()[None] / 255


def scores(reward, media, texts):
    return score(reward, media, texts, [{"text": text} for text in texts])["ocr"]


@pytest.fixture(scope="module")
def reader() -> OCRReward:
    pytest.importorskip("rapidocr_onnxruntime", reason="needs the extra ocr")
    reward = OCRReward()
    reward.prepare("cpu")
    return reward


def test_small_two_digit_renders_are_read(reader):
    texts = [f"{i:02d}" for i in range(0, 100, 7)]
    media = torch.stack([render(text, 24, 16, 14) for text in texts])
    assert scores(reader, media, texts).mean() >= 0.9
    assert scores(reader, media.expand(-1, 3, -1, -1), texts).mean() >= 0.9


def test_words_are_read_and_wrong_targets_score_less(reader):
    words = ["hello", "open door", "robot"]
    media = torch.stack([render(word, 96, 24, 18) for word in words])
    assert scores(reader, media, words).tolist() == [1.0, 1.0, 1.0]
    assert scores(reader, media, ["jelly", "9", "robots"]).max() < 1.0


def test_an_empty_image_scores_zero_and_says_nothing(reader, capfd):
    assert scores(reader, torch.zeros(2, 1, 16, 24), ["42", "7"]).tolist() == [0.0, 0.0]
    assert "".join(capfd.readouterr()) == ""


def test_text_in_a_large_picture_is_found(reader, capfd):
    media = torch.cat([render("hello", 256, 256, 28)[None], torch.zeros(1, 1, 256, 256)])
    assert scores(OCRReward(detect=True), media, ["hello", "hello"]).tolist() == [1.0, 0.0]
    assert "".join(capfd.readouterr()) == ""


def test_checker_finds_nothing(reader):
    texts = ["42", "hello"]
    media = torch.stack([render(text, 96, 24, 18) for text in texts])
    assert check_reward(reader, media, texts, [{"text": text} for text in texts]) == []


@pytest.mark.parametrize("metadata", [{}, {"text": ""}, {"text": 42}])
def test_a_missing_target_is_named(metadata):
    with pytest.raises(RewardError, match="metadata text"):
        score(OCRReward(), torch.zeros(1, 1, 16, 24), ["forty-two"], [metadata])


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    with pytest.raises(ImportError, match=r'pip install "genrl\[ocr\]"'):
        OCRReward().prepare("cpu")
