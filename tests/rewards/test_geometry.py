"""Rewards of shapes against closed forms and brute force."""

from __future__ import annotations

import time
from itertools import combinations

import numpy as np
import pytest
import torch

from genrl.generators.meshes import surface_nets, surface_points
from genrl.generators.shapes_data import KINDS, TRUNCATION, box, cell_centres, clean_shape, make_shapes, sphere
from genrl.generators.shapes_view import to_media
from genrl.rewards import (
    Chamfer,
    Components,
    Compose,
    DepthAgreement,
    FScore,
    NormalSmoothness,
    ShapeDiversity,
    SilhouetteAgreement,
    ViewConsistency,
    VolumeIoU,
    Watertight,
    geometry,
    score,
)
from genrl.rewards.geometry import ROUGHNESS_OF_OBJECTS, component_count, roughness, soft_iou

OBJECTS = [(kind, seed) for kind in KINDS for seed in range(4)]
PROMPTS = [f"{kind} {seed}" for kind, seed in OBJECTS]
METADATA = [{"kind": kind, "seed": seed} for kind, seed in OBJECTS]
REWARDS = [
    Components(), Watertight(), SilhouetteAgreement(), DepthAgreement(), NormalSmoothness(), ViewConsistency(),
    FScore(), Chamfer(), VolumeIoU(),
]  # fmt: skip

EXACT = "donot_use_mm_for_euclid_dist"


def points(resolution=16):
    line = cell_centres(resolution)
    return np.meshgrid(line, line, line, indexing="ij")


def grid(distance):
    """Media [1, n, n, n] of distances."""
    return to_media(torch.from_numpy(np.clip(distance / TRUNCATION, -1, 1)).float())[None]


def alone(reward, media):
    return reward(media, ["?"] * len(media), [{} for _ in media])


@pytest.fixture(scope="module")
def whole():
    return to_media(make_shapes(OBJECTS)[1])


@pytest.fixture(scope="module")
def dirty():
    return to_media(make_shapes(OBJECTS, broken_share=1.0)[0])


@pytest.fixture
def instead(monkeypatch):
    """Put a distance [n, n, n] in the place of the whole object of every prompt."""

    def put(distance):
        shape = torch.from_numpy(np.clip(distance / TRUNCATION, -1, 1)).float()
        monkeypatch.setattr(geometry, "clean_shape", lambda kind, seed, resolution: shape)
        geometry._clean_surface.cache_clear()

    yield put
    geometry._clean_surface.cache_clear()


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: type(reward).__name__)
def test_values_are_finite_in_range_and_those_of_each_sample_alone(reward, dirty):
    (values,) = score(reward, dirty, PROMPTS, METADATA).values()
    low, high = reward.range
    assert values.isfinite().all() and values.min() >= low and values.max() <= high
    part = reward(dirty[5:7], PROMPTS[5:7], METADATA[5:7])
    torch.testing.assert_close(part.float(), values[5:7], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"\(2, 3, 16, 16\)"):
        reward(torch.zeros(2, 3, 16, 16), ["chair 1"] * 2, [{}, {}])


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: type(reward).__name__)
def test_empty_shapes_have_a_score_or_none_but_no_error(reward):
    (values,) = score(reward, torch.zeros(2, 16, 16, 16), ["chair 1", "mug 1"]).values()
    assert not values.isinf().any()


@pytest.mark.parametrize("reward", [r for r in REWARDS if r.differentiable], ids=lambda reward: type(reward).__name__)
def test_gradients_of_differentiable_rewards_agree_with_finite_differences(reward):
    draw = torch.Generator().manual_seed(0)
    media = (to_media(make_shapes([("chair", 3)], broken_share=1.0)[0]) * 0.8 + 0.1).double().requires_grad_()
    (gradient,) = torch.autograd.grad(reward(media, ["chair 3"], [{}]).sum(), media)
    assert gradient.isfinite().all()
    step = 1e-5 * torch.randn(media.shape, generator=draw).double()
    with torch.no_grad():
        ends = [reward(media + sign * step, ["chair 3"], [{}]) for sign in (1, -1)]
    slope = ((ends[0] - ends[1]) / 2).item()
    assert (gradient * step).sum().item() == pytest.approx(slope, rel=0.02, abs=1e-8)


def test_whole_objects_have_the_best_scores_and_broken_ones_less(whole, dirty):
    for reward, best in (
        (Components(), 1), (SilhouetteAgreement(), 1), (DepthAgreement(), 1), (FScore(), 1), (VolumeIoU(), 1),
        (Chamfer(), 0),
    ):  # fmt: skip
        values = reward(whole, PROMPTS, METADATA)
        torch.testing.assert_close(values, torch.full_like(values, best), atol=1e-5, rtol=0)
        broken = reward(dirty, PROMPTS, METADATA)
        assert (broken - best).abs().mean() > 0.01


def test_what_knows_the_object_cannot_be_trained_on_by_accident():
    for gold in (FScore(), Chamfer(), VolumeIoU()):
        compose = Compose({"components": Components(), "gold": gold})
        assert compose.weight("gold") == 0 and compose.weight("components") == 1
        with pytest.raises(ValueError, match="gold"):
            Compose({"components": Components(), "gold": gold}, weights={"gold": 1.0})


# ------------------------------------------------------------------------------------------------ the shape by itself


def test_components_of_balls_touching_and_apart():
    p = points()
    two = np.minimum(sphere(p, (-0.5, 0, 0), 0.3), sphere(p, (0.5, 0, 0), 0.3))
    three = np.minimum(two, sphere(p, (0, 0, 0.7), 0.2))
    joined = np.minimum(two, box(p, (0, 0, 0), (0.5, 0.1, 0.1)))
    media = torch.cat(
        [grid(sphere(p, (0, 0, 0), 0.5)), grid(two), grid(three), grid(joined), torch.zeros(1, 16, 16, 16)]
    )
    torch.testing.assert_close(alone(Components(), media), torch.tensor([1, 1 / 2, 1 / 3, 1, 0]))


def test_cells_that_share_an_edge_alone_are_apart_and_specks_may_be_ignored():
    media = torch.zeros(1, 16, 16, 16)
    media[0, 4:8, 4:8, 4:8] = 1
    media[0, 8, 8, 4:8] = 1
    assert alone(Components(), media).item() == 0.5
    assert alone(Components(least=5), media).item() == 1
    assert component_count((media[0] > 0.5).numpy(), least=4) == 2
    with pytest.raises(ValueError, match="least = 0"):
        Components(least=0)


def test_a_box_that_stands_on_the_border_is_open_by_the_share_of_its_faces_there():
    media = torch.zeros(3, 16, 16, 16)
    media[0, 2:6, 3:8, 1:4] = 1  # 4 x 5 x 3, inside
    media[1, 0:4, 3:8, 1:4] = 1  # one 5 x 3 end on the border
    media[2] = 1
    surface = 2 * (4 * 5 + 5 * 3 + 3 * 4)
    expected = torch.tensor([1, 1 - 15 / surface, 0.0])
    torch.testing.assert_close(alone(Watertight(), media), expected)


def test_roughness_is_none_for_a_plane_and_the_angle_between_neighbours_for_a_ball():
    p = points(24)
    # Normals of the cells of a plane agree, but for those at the border of the grid.
    assert roughness(grid(0.3 * p[0] + 0.4 * p[2]))[0] < 0.05
    ball = sphere(p, (0, 0, 0), 0.6)
    place = np.stack(p, -1)
    normal = place / np.linalg.norm(place, axis=-1, keepdims=True)
    near = np.abs(ball) < 0.6 * TRUNCATION
    angles = []
    for axis in range(3):
        first, second = np.take(normal, range(23), axis), np.take(normal, range(1, 24), axis)
        both = np.take(near, range(23), axis) & np.take(near, range(1, 24), axis)
        angles.append((1 - (first * second).sum(-1))[both])
    assert roughness(grid(ball))[0].item() == pytest.approx(np.concatenate(angles).mean(), rel=0.05)


def test_smoothness_pays_nothing_beyond_that_of_objects(whole):
    assert roughness(whole).mean().item() == pytest.approx(ROUGHNESS_OF_OBJECTS, abs=0.03)
    ball = grid(sphere(points(), (0, 0, 0), 0.6))
    assert roughness(ball)[0] < ROUGHNESS_OF_OBJECTS and alone(NormalSmoothness(), ball).item() == 0
    noisy = (whole + 0.3 * torch.randn(whole.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    torch.testing.assert_close(alone(NormalSmoothness(), noisy), ROUGHNESS_OF_OBJECTS - roughness(noisy))
    assert alone(NormalSmoothness(), noisy).max() < -0.1


def test_views_are_consistent_where_there_is_a_plane_of_symmetry():
    p = points()
    table = to_media(clean_shape("table", 0))[None]
    one_sided = grid(np.minimum(box(p, (0, 0, 0), (0.6, 0.6, 0.1)), box(p, (0.45, 0.35, 0.4), (0.12, 0.12, 0.4))))
    on_plane = grid(np.minimum(box(p, (0, 0, 0), (0.6, 0.6, 0.1)), box(p, (0.45, 0.0, 0.4), (0.12, 0.12, 0.4))))
    same, less, again = alone(ViewConsistency(), torch.cat([table, one_sided, on_plane])).tolist()
    assert same == pytest.approx(1, abs=1e-4) and again == pytest.approx(1, abs=1e-4) and less < 0.9
    with pytest.raises(ValueError, match="azimuths is empty"):
        ViewConsistency(azimuths=[])


# ------------------------------------------------------------------------------------------ against picture and object


def test_soft_iou_is_that_of_sets_and_counts_two_empty_ones_as_equal():
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.rand(2, 5, 8, 8, generator=draw) > 0.5).float()
    expected = [(x.bool() & y.bool()).sum() / (x.bool() | y.bool()).sum() for x, y in zip(a, b, strict=True)]
    torch.testing.assert_close(soft_iou(a, b), torch.stack(expected))
    assert soft_iou(torch.zeros(1, 4), torch.zeros(1, 4)).item() == 1


def test_the_silhouette_may_be_a_picture_that_is_given(whole, tmp_path):
    from PIL import Image

    Image.new("L", (24, 24), 255).save(tmp_path / "white.png")
    entries = [{"image": str(tmp_path / "white.png")}] * 2
    values = SilhouetteAgreement()(whole[:2], ["?"] * 2, entries)
    own = SilhouetteAgreement()(whole[:2], PROMPTS[:2], METADATA[:2])
    assert (values < 0.5).all() and (own > 0.999).all()
    for gold in (FScore(), Chamfer(), VolumeIoU()):  # there is no object to compare with
        mixed = gold(whole[:3], PROMPTS[:3], [*entries, METADATA[2]])
        assert mixed.isnan().tolist() == [True, True, False]


def test_depth_tells_what_the_silhouette_cannot():
    p = points()
    into = np.array([-np.cos(np.radians(35)) * np.cos(np.radians(25)), -np.sin(np.radians(35)) * np.cos(np.radians(25)),
                     -np.sin(np.radians(25))])  # fmt: skip
    near, far = (grid(sphere(p, tuple(shift * into), 0.3)) for shift in (-0.3, 0.3))
    a, b = (geometry._rendered(media, "depth") for media in (near, far))
    shift = (a - b)[0, 10:14, 10:14].mean().item()
    assert shift == pytest.approx(0.6 / 3.1, abs=0.02)  # the scene is 3.1 deep
    silhouettes = [geometry._rendered(media, "silhouette") for media in (near, far)]
    assert soft_iou(*silhouettes).item() > 0.9


def test_distances_of_concentric_balls_are_the_difference_of_their_radii(instead):
    p = points(24)
    instead(sphere(p, (0, 0, 0), 0.5))
    for radius, f in ((0.5, 1), (0.53, 1), (0.62, 0)):
        media = grid(sphere(p, (0, 0, 0), radius))
        assert alone_with_object(FScore(), media) == pytest.approx(f, abs=0.02)
        # Points are .03 apart, which adds to small distances.
        assert alone_with_object(Chamfer(), media) == pytest.approx(-abs(radius - 0.5), abs=0.012)


def alone_with_object(reward, media):
    return reward(media, ["chair 1"], [{}]).item()


def test_chamfer_of_shifted_plates_is_the_shift(instead):
    p = points(16)
    instead(box(p, (0, 0, -0.2), (0.8, 0.8, 0.2)))
    shifted = grid(box(p, (0, 0, -0.1), (0.8, 0.8, 0.2)))
    # All of top and bottom is .1 away from the nearest plane, the sides almost nothing.
    sides = 4 * 1.6 * 0.4 / (4 * 1.6 * 0.4 + 2 * 1.6**2)
    assert alone_with_object(Chamfer(), shifted) == pytest.approx(-0.1 * (1 - sides), abs=0.02)


def test_f_score_and_chamfer_agree_with_brute_force(dirty):
    for row in (13, 17):
        (mine, area), (clean, clean_area) = (
            surface_points(surface_nets(media.numpy())) for media in (dirty[row], to_media(clean_shape(*OBJECTS[row])))
        )
        table = torch.cdist(*(torch.from_numpy(x).double() for x in (mine, clean)), compute_mode=EXACT).numpy()
        there, back = table.min(1), table.min(0)
        precision, recall = (
            area[there <= 0.0625].sum() / area.sum(),
            clean_area[back <= 0.0625].sum() / clean_area.sum(),
        )
        one = slice(row, row + 1)
        f = FScore()(dirty[one], PROMPTS[one], METADATA[one]).item()
        assert f == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-5)
        chamfer = -(np.average(there, weights=area) + np.average(back, weights=clean_area)) / 2
        assert Chamfer()(dirty[one], PROMPTS[one], METADATA[one]).item() == pytest.approx(chamfer, abs=1e-5)


def test_volume_of_a_ball_in_a_ball(instead):
    p = points(24)
    instead(sphere(p, (0, 0, 0), 0.7))
    media = grid(sphere(p, (0, 0, 0), 0.5))
    assert alone_with_object(VolumeIoU(), media) == pytest.approx((0.5 / 0.7) ** 3, rel=0.05)


def test_the_distance_between_samples_of_a_prompt_is_that_of_all_pairs():
    draw = torch.Generator().manual_seed(0)
    media = torch.rand(7, 16, 16, 16, generator=draw)
    prompts, metadata = ["chair 1"] * 3 + ["mug 1"] * 3 + ["mug 1"], [{}] * 6 + [{"seed": 2}]
    solid = (media > 0.5).numpy()
    groups = []
    for rows in ((0, 1, 2), (3, 4, 5)):  # the last sample has no other of its prompt
        each = [1 - (solid[i] & solid[j]).sum() / (solid[i] | solid[j]).sum() for i, j in combinations(rows, 2)]
        groups.append(np.mean(each))
    found = ShapeDiversity().measure(media, prompts, metadata)["shape_distance"]
    assert found == pytest.approx(np.mean(groups), abs=1e-6)
    assert ShapeDiversity().measure(media[:1].repeat(3, 1, 1, 1), prompts[:3], metadata[:3])["shape_distance"] == 0
    assert np.isnan(ShapeDiversity().measure(media[6:], prompts[6:], metadata[6:])["shape_distance"])


def test_what_is_optimised_takes_a_few_milliseconds_a_sample(whole):
    for reward in (Components(), SilhouetteAgreement(), NormalSmoothness(), Watertight()):
        reward(whole, PROMPTS, METADATA)
        began = time.process_time()
        reward(whole, PROMPTS, METADATA)
        assert (time.process_time() - began) / len(whole) < 0.01
