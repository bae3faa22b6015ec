from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from genrl.rewards import DigitSpread, PairwiseDiversity, image_statistics
from genrl.rewards.diversity import digit_spread


def brute_force(images, labels, real, real_labels):
    """The three numbers by plain loops over images, in the scale [-1, 1]."""
    numbers = {"spread_std": [], "spread_nn": [], "spread_rec": []}
    for label in sorted(set(labels.tolist())):
        ours = [2 * x.ravel() - 1 for x, y in zip(images, labels, strict=True) if y == label]
        theirs = [2 * x.ravel() - 1 for x, y in zip(real, real_labels, strict=True) if y == label]
        numbers["spread_std"].append(np.mean(np.std(ours, axis=0)))
        numbers["spread_nn"].append(np.mean([min(np.sqrt(np.mean((a - b) ** 2)) for b in theirs) for a in ours]))
        numbers["spread_rec"].append(np.mean([min(np.sqrt(np.mean((a - b) ** 2)) for a in ours) for b in theirs]))
    return {name: float(np.mean(values)) for name, values in numbers.items()}


@pytest.fixture(scope="module")
def generated(split):
    rows = np.arange(150)
    return torch.from_numpy(split.generator.images[rows]), [{"label": int(x)} for x in split.generator.labels[rows]]


def measure(media, metadata):
    return DigitSpread().measure(media, [""] * len(media), metadata)


def test_spread_equals_brute_force(split, generated):
    media, metadata = generated
    real = np.concatenate([split.proxy.images, split.gold.images])
    real_labels = np.concatenate([split.proxy.labels, split.gold.labels])
    expected = brute_force(media.numpy(), np.array([m["label"] for m in metadata]), real, real_labels)
    assert measure(media, metadata) == pytest.approx(expected, abs=1e-6)


def test_real_data_reads_its_reference():
    """What real images of one half read against the other; the scale that published numbers of this task use."""
    reference = DigitSpread().reference()
    assert reference == pytest.approx({"spread_std": 0.327, "spread_nn": 0.279, "spread_rec": 0.280}, abs=0.006)


def test_a_collapsed_set_has_no_spread_and_covers_less(generated):
    media, metadata = generated
    first = {}
    for image, entry in zip(media, metadata, strict=True):
        first.setdefault(entry["label"], image)
    collapsed = torch.stack([first[entry["label"]] for entry in metadata])
    healthy, dead = measure(media, metadata), measure(collapsed, metadata)
    assert dead["spread_std"] == 0.0
    assert dead["spread_rec"] > healthy["spread_rec"]


def test_noise_raises_std_and_nn(generated):
    media, metadata = generated
    noise = torch.randn(media.shape, generator=torch.Generator().manual_seed(0))
    clean, noisy = measure(media, metadata), measure((media + 0.2 * noise).clamp(0, 1), metadata)
    assert noisy["spread_std"] > clean["spread_std"] and noisy["spread_nn"] > clean["spread_nn"] + 0.03


def test_copies_of_real_images_have_distance_zero(split):
    part = split.gold
    images, labels = torch.from_numpy(part.images), torch.from_numpy(part.labels)
    numbers = digit_spread(images, labels, images, labels)
    assert numbers["spread_nn"] == 0.0 and numbers["spread_rec"] == 0.0


def test_pairwise_distance_equals_brute_force_and_skips_single_prompts():
    media = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    prompts = ["a", "b", "a", "b", "a", "alone"]

    def mean_pair(rows):
        pairs = [(i, j) for i in rows for j in rows if i < j]
        return np.mean([(media[i] - media[j]).square().mean().sqrt().item() for i, j in pairs])

    result = PairwiseDiversity().measure(media, prompts, [{}] * 6)
    assert result["pairwise_distance"] == pytest.approx((mean_pair([0, 2, 4]) + mean_pair([1, 3])) / 2, rel=1e-5)
    assert np.isnan(PairwiseDiversity().measure(media, list("abcdef"), [{}] * 6)["pairwise_distance"])


def test_the_same_text_over_different_images_is_not_one_prompt():
    media = torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None, None, None].expand(4, 1, 2, 2)
    metadata = [{"image": "a.png"}, {"image": "a.png"}, {"image": "b.png"}, {"image": "b.png"}]
    assert PairwiseDiversity().measure(media, ["edit"] * 4, metadata)["pairwise_distance"] == 0.0
    assert PairwiseDiversity().measure(media, ["edit"] * 4, [{}] * 4)["pairwise_distance"] == pytest.approx(2 / 3)


def test_large_pictures_and_long_videos_are_reduced_first():
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(4, 3, 8, 8, generator=generator)
    large = small.repeat_interleave(16, -1).repeat_interleave(16, -2)
    grain = (large + 0.2 * (torch.rand(large.shape, generator=generator) - 0.5)).clamp(0, 1)

    def measured(media, **arguments):
        return PairwiseDiversity(**arguments).measure(media, ["a"] * 4, [{}] * 4)["pairwise_distance"]

    assert measured(large, size=8) == pytest.approx(measured(small)) == pytest.approx(measured(large, size=None))
    assert measured(grain, size=8) == pytest.approx(measured(small), rel=0.02)
    video = small[:, None].expand(4, 30, 3, 8, 8)
    assert measured(video) == pytest.approx(measured(small))
    with pytest.raises(ValueError, match="frames = 0 must be at least 1"):
        PairwiseDiversity(frames=0)


def by_hand(image):
    """Statistics of one image [3, H, W] by plain loops over pixels."""
    _, height, width = image.shape
    pixels = [[image[:, y, x].tolist() for x in range(width)] for y in range(height)]
    grey = [[sum(p) / 3 for p in row] for row in pixels]
    flat = [p for row in pixels for p in row]
    colors, levels = Counter(tuple(int(c * 8) for c in p) for p in flat), Counter(int(sum(p) / 3 * 32) for p in flat)
    steps = [(grey[y][x + 1] - grey[y][x]) ** 2 for y in range(height) for x in range(width - 1)]
    steps += [(grey[y + 1][x] - grey[y][x]) ** 2 for y in range(height - 1) for x in range(width)]

    def bits(counts):
        return -sum(n / len(flat) * math.log2(n / len(flat)) for n in counts.values())

    return {
        "brightness": np.mean(grey), "dark_share": np.mean([v < 0.1 for row in grey for v in row]),
        "saturated_share": np.mean([v > 0.9 for row in grey for v in row]), "edge_energy": np.mean(steps),
        "entropy": bits(levels), "color_saturation": np.mean([max(p) - min(p) for p in flat]),
        "color_entropy": bits(colors),
    }  # fmt: skip


def test_statistics_equal_loops_over_pixels(monkeypatch):
    media = torch.rand(3, 3, 5, 6, generator=torch.Generator().manual_seed(0)) ** 3
    one_by_one = [by_hand(image) for image in media]
    expected = {name: np.mean([found[name] for found in one_by_one]) for name in one_by_one[0]}
    assert image_statistics(media) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr("genrl.rewards.statistics.PIXELS_AT_ONCE", 60)  # two images at once
    assert image_statistics(media) == pytest.approx(expected, rel=1e-5)


def test_statistics_of_known_images():
    black, white = torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8)
    assert image_statistics(black) == {
        "brightness": 0.0, "dark_share": 1.0, "saturated_share": 0.0, "edge_energy": 0.0, "entropy": 0.0,
        "color_saturation": 0.0, "color_entropy": 0.0,
    }  # fmt: skip
    red = torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(2, 3, 8, 8)
    assert image_statistics(red)["color_saturation"] == 1.0
    assert "color_entropy" not in image_statistics(red[:, :1])  # grey pictures have no colours
    assert image_statistics(white)["saturated_share"] == 1.0
    board = (torch.arange(8)[:, None] + torch.arange(8)).remainder(2).float().expand(2, 1, 8, 8)
    checker = image_statistics(board)
    assert checker["edge_energy"] == 1.0 and checker["entropy"] == pytest.approx(1.0)


def test_a_video_reads_like_its_frames():
    video = torch.rand(2, 3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert image_statistics(video) == pytest.approx(image_statistics(video.flatten(0, 1)))
