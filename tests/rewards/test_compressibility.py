from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from genrl.rewards import Incompressibility, JPEGCompressibility, check_reward, score


def pil_size(image: torch.Tensor, quality: int) -> int:
    array = np.round(image.numpy() * 255).astype(np.uint8)
    picture = Image.fromarray(array[0], "L") if len(array) == 1 else Image.fromarray(array.transpose(1, 2, 0), "RGB")
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=quality)
    return len(buffer.getvalue())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("quality", [50, 95])
def test_size_is_that_of_pillows_file(channels, quality):
    media = torch.rand(3, channels, 24, 16, generator=torch.Generator().manual_seed(0))
    values = score(JPEGCompressibility(quality), media, ["a", "b", "c"])["jpeg_compressibility"]
    expected = [-pil_size(image, quality) / 1000 for image in media]
    torch.testing.assert_close(values, torch.tensor(expected))


def test_incompressibility_is_the_opposite_and_noise_is_larger_than_grey():
    media = torch.cat([torch.full((1, 3, 64, 64), 0.5), torch.rand(1, 3, 64, 64)])
    small = JPEGCompressibility()(media, ["a", "b"], [{}] * 2)
    large = Incompressibility()(media, ["a", "b"], [{}] * 2)
    assert torch.equal(small, -large) and large[1] > large[0]


def test_video_scores_the_mean_of_its_frames():
    video = torch.rand(2, 3, 3, 16, 16)
    frames = JPEGCompressibility()(video.flatten(0, 1), [""] * 6, [{}] * 6)
    torch.testing.assert_close(JPEGCompressibility()(video, [""] * 2, [{}] * 2), frames.view(2, 3).mean(dim=1))


@pytest.mark.parametrize("reward", [JPEGCompressibility(), Incompressibility()])
def test_checker_finds_nothing(reward):
    assert check_reward(reward) == []


def test_bad_arguments_name_value_and_remedy():
    with pytest.raises(ValueError, match="quality is 100"):
        JPEGCompressibility(quality=100)
    with pytest.raises(ValueError, match="sign is 2"):
        JPEGCompressibility(sign=2)
    with pytest.raises(ValueError, match="4 channels"):
        JPEGCompressibility()(torch.zeros(1, 4, 8, 8), ["a"], [{}])
