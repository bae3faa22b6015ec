"""Point clouds: on the surfaces, in the crop, evenly spread, and the same for the same seed."""

import numpy as np
import pytest

from genrl.envs import EnvError, make_env
from genrl.envs.pointcloud import crop_mask, farthest_points, sample_points


def greedy(points, count, start):
    """Farthest-point sampling by its definition, over all pairs of distances."""
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    taken = [start]
    while len(taken) < count:
        nearest = distances[:, taken].min(1)
        nearest[taken] = -1
        taken.append(int(nearest.argmax()))
    return taken


@pytest.mark.parametrize("seed", range(5))
def test_farthest_points_are_the_greedy_choice(seed):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(60, 3)).astype(np.float32)
    start = int(rng.integers(60))
    assert farthest_points(points, 25, start).tolist() == greedy(points, 25, start)


def test_no_point_is_taken_twice_even_where_points_coincide():
    points = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    assert sorted(farthest_points(points, 12)) == list(range(12))


def test_farthest_points_spread_more_than_random_ones():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(size=(2000, 3)) * 0.01, rng.uniform(-1, 1, (200, 3))])

    def gap(cloud):
        pairs = np.linalg.norm(cloud[:, None] - cloud[None], axis=-1)
        return pairs[~np.eye(len(cloud), dtype=bool)].min()

    spread = sample_points(points, 50, np.random.default_rng(1))
    drawn = sample_points(points, 50, np.random.default_rng(1), "random")
    assert gap(spread) > 5 * gap(drawn)


@pytest.mark.parametrize("method", ["fps", "random"])
@pytest.mark.parametrize("total", [1, 7, 20, 21, 500])
def test_a_cloud_has_exactly_the_points_wanted_and_only_given_ones(method, total):
    points = np.random.default_rng(0).normal(size=(total, 6))
    cloud = sample_points(points, 20, np.random.default_rng(3), method)
    assert cloud.shape == (20, 6)
    rows = {row.tobytes() for row in points}
    assert all(row.tobytes() in rows for row in cloud)
    if total <= 20:  # all are there, some again
        assert {row.tobytes() for row in cloud} == rows
    else:
        assert len({row.tobytes() for row in cloud}) == 20
    assert np.array_equal(cloud, sample_points(points, 20, np.random.default_rng(3), method))


def test_crop_keeps_what_lies_between_its_corners():
    points = np.array([[0, 0, 0], [1, 1, 1], [0.5, 0.5, 1.1], [np.inf, 0, 0], [0.5, np.nan, 0.5]])
    assert crop_mask(points, ((0, 0, 0), (1, 1, 1))).tolist() == [True, True, False, False, False]
    assert crop_mask(points, None).tolist() == [True, True, True, False, False]


@pytest.fixture(scope="module")
def env():
    made = make_env("metaworld/drawer-open-v3", observations=("points", "state"), points=300, point_colors=True)
    yield made
    made.close()


class TestMetaWorld:
    def test_clouds_follow_the_seed_and_the_step(self, env):
        first = env.reset(seed=4)[0]["points"]
        moved = env.step(np.ones(4))[0]["points"]
        assert not np.array_equal(first, moved)
        assert np.array_equal(env.reset(seed=4)[0]["points"], first)
        assert np.array_equal(env.step(np.ones(4))[0]["points"], moved)
        assert not np.array_equal(env.reset(seed=5)[0]["points"], first)

    def test_points_are_in_the_crop_and_colours_in_their_range(self, env):
        points = env.reset(seed=4)[0]["points"]
        assert points.shape == (300, 6) and points.dtype == np.float32
        low, high = env.simulator.scene().crop
        assert (points[:, :3] >= low).all() and (points[:, :3] <= high).all()
        assert points[:, 3:].min() >= 0 and points[:, 3:].max() <= 1 and points[:, 3:].std() > 0.05

    def test_the_cloud_shows_what_the_state_says(self, env):
        """In world coordinates, though the camera is mounted upside down."""
        obs, _ = env.reset(seed=4)
        hand, handle = obs["state"][:3], obs["state"][4:7]
        for thing in (hand, handle):
            assert np.linalg.norm(obs["points"][:, :3] - thing, axis=1).min() < 0.06

    def test_points_move_with_the_hand(self, env):
        obs, _ = env.reset(seed=4)
        near_start = np.linalg.norm(obs["points"][:, :3] - obs["state"][:3], axis=1).min()
        for _ in range(30):
            obs = env.step(np.array([1.0, 0.3, -0.2, 0]))[0]
        near_end = np.linalg.norm(obs["points"][:, :3] - obs["state"][:3], axis=1).min()
        assert near_start < 0.06 and near_end < 0.06

    def test_both_renderers_give_the_same_surface(self):
        clouds = []
        for renderer in ("egl", "rays"):
            env = make_env("metaworld/drawer-open-v3", observations=("points",), renderer=renderer, points=800)
            clouds.append(env.reset(seed=4)[0]["points"])
            env.close()
        gaps = np.linalg.norm(clouds[0][:, None] - clouds[1][None], axis=-1)
        assert np.median(gaps.min(0)) < 0.02 and np.median(gaps.min(1)) < 0.02

    def test_another_crop_is_obeyed(self):
        crop = ((-0.2, 0.4, 0.0), (0.2, 0.8, 0.3))
        env = make_env("metaworld/reach-v3", observations=("points",), crop=crop, points=64, renderer="rays")
        points = env.reset(seed=0)[0]["points"]
        assert (points >= np.array(crop[0]) - 1e-6).all() and (points <= np.array(crop[1]) + 1e-6).all()

    def test_an_empty_crop_says_what_to_change(self):
        crop = ((5, 5, 5), (6, 6, 6))
        env = make_env("metaworld/reach-v3", observations=("points",), crop=crop, renderer="rays")
        with pytest.raises(EnvError, match=r"corner2.*sees nothing in crop"):
            env.reset(seed=0)


def test_the_last_cloud_stands_in_when_nothing_is_seen():
    env = make_env("metaworld/reach-v3", observations=("points",), points=32, renderer="rays")
    first = env.reset(seed=0)[0]["points"]
    env.simulator.scene().crop = ((5, 5, 5), (6, 6, 6))
    assert np.array_equal(env.step(np.zeros(4))[0]["points"], first)


@pytest.mark.parametrize("env_id", ["robosuite/Lift", "ogbench/cube-single-v0", "robotics/FetchPickAndPlace-v4"])
def test_clouds_of_other_families_show_the_object(env_id):
    """At the simulator's own position of it."""
    env = make_env(env_id, observations=("points",), points=400)
    points = env.reset(seed=3)[0]["points"]
    data = env.simulator.scene().data
    body = {"robosuite": "cube_main", "ogbench": "object_0", "robotics": "object0"}[env.family]
    assert np.linalg.norm(points - data.body(body).xpos, axis=1).min() < 0.04
    # The table is not in the crop: most points are not in one plane.
    heights = np.round(points[:, 2], 2)
    assert np.unique(heights, return_counts=True)[1].max() < 0.5 * len(points)
    env.close()
