from __future__ import annotations

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


def test_statistics_of_known_images():
    black, white = torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8)
    assert image_statistics(black) == {
        "brightness": 0.0, "dark_share": 1.0, "saturated_share": 0.0, "edge_energy": 0.0, "entropy": 0.0,
    }  # fmt: skip
    assert image_statistics(white)["saturated_share"] == 1.0
    board = (torch.arange(8)[:, None] + torch.arange(8)).remainder(2).float().expand(2, 1, 8, 8)
    checker = image_statistics(board)
    assert checker["edge_energy"] == 1.0 and checker["entropy"] == pytest.approx(1.0)


def test_a_video_reads_like_its_frames():
    video = torch.rand(2, 3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert image_statistics(video) == pytest.approx(image_statistics(video.flatten(0, 1)))
