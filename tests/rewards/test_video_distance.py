"""The distance of generated to real videos."""

import numpy as np
import pytest
import torch

from genrl.generators.moving_digits import moving_digits
from genrl.rewards import VideoDistance
from genrl.rewards.video_distance import video_features


def one_pixel(rows, columns):
    media = torch.zeros(1, len(rows), 1, 16, 16)
    for f, (row, column) in enumerate(zip(rows, columns, strict=True)):
        media[0, f, 0, row, column] = 1.0
    return media


def test_features_are_ink_centre_and_spread_of_every_frame():
    found = video_features(one_pixel([3, 4], [5, 5]))[0]
    np.testing.assert_allclose(found[:10], [0.1, 0.1, 3, 4, 0, 0, 5, 5, 0, 0], atol=1e-6)
    assert len(found) == 10 + 32


def test_spread_is_the_standard_deviation_of_the_ink():
    media = one_pixel([2, 2], [2, 2]) + one_pixel([6, 6], [2, 2])
    np.testing.assert_allclose(video_features(media)[0][4:6], [2, 2], atol=1e-6)  # along rows, of both frames


def test_real_videos_are_nearer_than_reversed_frozen_or_noisy_ones():
    gauge = VideoDistance(1000)
    real = moving_digits(300, "generator", seed=1)[0]
    frozen = real[:, :1].expand_as(real)
    dirty = (real + 0.3 * torch.randn(real.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    values = [gauge.measure(media, [], [])["frechet"] for media in (real, frozen, dirty)]
    assert 2 * values[0] < values[1] and 2 * values[0] < values[2]
    assert gauge.reference()["frechet"] == pytest.approx(values[0], rel=0.5)


def test_the_distance_counts_features_in_their_own_units():
    gauge = VideoDistance(1000)
    gauge.prepare()
    np.testing.assert_allclose(gauge._real.std(0), 1, rtol=1e-4)


def test_wrong_media_and_settings_are_refused():
    with pytest.raises(ValueError, match=r"\[B, F, 1, 16, 16\]"):
        VideoDistance(10).measure(torch.zeros(2, 3, 8, 8), [], [])
    with pytest.raises(ValueError, match="n is 1"):
        VideoDistance(1)
