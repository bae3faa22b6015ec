"""Point clouds: sampling against brute force, crops, and the set encoder's invariances."""

import itertools

import pytest
import torch

from genrl.networks import PointEncoder, crop_points, farthest_point_sampling


def farthest_one_by_one(points, k, start):
    chosen = [start]
    while len(chosen) < k:
        distances = [min(((p - points[c]) ** 2).sum().item() for c in chosen) for p in points[:, :3]]
        chosen.append(max(range(len(points)), key=lambda i: distances[i]))
    return chosen


@pytest.mark.parametrize(("n", "k", "channels", "start"), [(20, 7, 3, 0), (9, 9, 3, 4), (12, 1, 3, 2), (15, 5, 6, 0)])
def test_farthest_points_are_those_of_a_search_over_all(n, k, channels, start):
    points = torch.randn(3, n, channels, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    found = farthest_point_sampling(points, k, start)
    assert found.dtype == torch.long
    assert found.tolist() == [farthest_one_by_one(cloud[:, :3], k, start) for cloud in points]


def test_farthest_points_are_within_twice_the_best_covering():
    # Gonzalez 1985: the greedy choice covers all points within twice the radius of the best k centres.
    points = torch.rand(1, 9, 3, generator=torch.Generator().manual_seed(1))
    distances = torch.cdist(points[0], points[0])

    def radius(centres):
        return distances[list(centres)].amin(0).max()

    best = min(radius(centres) for centres in itertools.combinations(range(9), 3))
    assert radius(farthest_point_sampling(points, 3)[0].tolist()) <= 2 * best


def test_colours_do_not_count_as_distance():
    points = torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(0))
    other = points.clone()
    other[..., 3:] *= 100
    assert torch.equal(farthest_point_sampling(points, 5), farthest_point_sampling(other, 5))


def test_repeated_points_are_taken_only_when_nothing_else_is_left():
    points = torch.tensor([[[0.0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]])
    assert points[0, farthest_point_sampling(points, 2)[0]].unique(dim=0).shape[0] == 2
    assert farthest_point_sampling(points, 4).shape == (1, 4)


@pytest.mark.parametrize(("k", "start"), [(0, 0), (6, 0), (2, 5), (2, -1)])
def test_impossible_numbers_of_points_are_refused(k, start):
    with pytest.raises(ValueError, match=r"k = |start = "):
        farthest_point_sampling(torch.zeros(1, 5, 3), k, start)


def test_crops_keep_points_inside_the_box_and_all_of_them_if_they_fit():
    points = torch.rand(4, 50, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    low, high = (-0.6, -0.6, -0.6), (0.6, 0.6, 0.6)
    inside = ((points >= -0.6) & (points <= 0.6)).all(2)
    assert inside.any(1).all() and len(set(inside.sum(1).tolist())) > 1
    cropped = crop_points(points, low, high, 40)
    assert cropped.shape == (4, 40, 3)
    for cloud, all_points, kept in zip(cropped, points, inside, strict=True):
        assert {tuple(p) for p in cloud.tolist()} == {tuple(p) for p in all_points[kept].tolist()}
    few = crop_points(points, low, high, 3)
    assert ((few >= -0.6) & (few <= 0.6)).all() and all(len(cloud.unique(dim=0)) == 3 for cloud in few)


def test_a_crop_without_points_repeats_the_nearest_one():
    points = torch.tensor([[[3.0, 0, 0, 1, 2, 3], [9, 0, 0, 4, 5, 6]]])
    assert crop_points(points, (-1, -1, -1), (1, 1, 1), 4).tolist() == [[[3, 0, 0, 1, 2, 3]] * 4]


def test_in_a_long_box_a_near_point_outside_does_not_count():
    points = torch.tensor([[[0.0, 0.5, 0], [9, 0, 0]]])
    assert crop_points(points, (-10, -0.1, -0.1), (10, 0.1, 0.1), 3).tolist() == [[[9, 0, 0]] * 3]


def test_crops_do_not_depend_on_the_rest_of_the_batch():
    points = torch.randn(5, 30, 3, generator=torch.Generator().manual_seed(0))
    together = crop_points(points, (-1, -1, -1), (1, 1, 1), 8)
    alone = torch.cat([crop_points(cloud[None], (-1, -1, -1), (1, 1, 1), 8) for cloud in points])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("low", "high", "k"), [((0, 0, 0), (1, 0, 1), 4), ((0, 0), (1, 1), 4), ((0, 0, 0), (1, 1, 1), 0)]
)
def test_impossible_crops_are_refused(low, high, k):
    with pytest.raises(ValueError, match=r"low|k = 0"):
        crop_points(torch.zeros(1, 5, 3), low, high, k)


def test_a_set_of_points_is_encoded_whatever_their_order_and_number():
    torch.manual_seed(0)
    encoder = PointEncoder(channels=6, features=5)
    points = torch.randn(3, 20, 6)
    encoded = encoder(points)
    assert encoded.shape == (3, 5) and encoder.out_dim == 5
    torch.testing.assert_close(encoder(points[:, torch.randperm(20)]), encoded)
    torch.testing.assert_close(encoder(torch.cat([points, points[:, :7]], 1)), encoded)
    assert (encoder(points + 0.1) - encoded).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"\[B, N, 6\]"):
        encoder(points[..., :3])


def test_the_encoder_is_the_published_one():
    encoder = PointEncoder()
    assert [layer.out_features for layer in encoder.shared if hasattr(layer, "out_features")] == [64, 128, 256]
    assert sum(type(layer).__name__ == "LayerNorm" for layer in encoder.shared) == 3
    out = encoder(torch.randn(64, 30, 3))  # ends in LayerNorm
    torch.testing.assert_close(out.mean(1), torch.zeros(64), atol=1e-5, rtol=0)
