from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from data_members import toy_episode
from scipy.spatial.transform import Rotation

from genrl.envs.data import DataError
from genrl.envs.data.actions import (
    SIZES,
    ActionRepresentation,
    apply_bounds,
    convert_actions,
    convert_rotation,
    representation_of_robomimic,
)

FORMS = list(SIZES)


@pytest.fixture
def rotations():
    """Random rotations, the identity, tiny ones, and half turns, where formulas by cases fail."""
    half = np.pi * np.eye(3)
    vectors = np.concatenate([np.zeros((1, 3)), 1e-8 * np.eye(3), half, half * (1 - 1e-9)])
    return Rotation.concatenate([Rotation.random(50, random_state=0), Rotation.from_rotvec(vectors)])


def written(rotations, form):
    if form == "axis_angle":
        return rotations.as_rotvec()
    if form == "quaternion":
        return rotations.as_quat()
    return rotations.as_matrix()[:, :2].reshape(-1, 6)


def read(values, form):
    if form == "axis_angle":
        return Rotation.from_rotvec(values)
    if form == "quaternion":
        return Rotation.from_quat(values)
    rows = values.reshape(-1, 2, 3)
    return Rotation.from_matrix(np.concatenate([rows, np.cross(rows[:, 0], rows[:, 1])[:, None]], axis=1))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FORMS, FORMS)))
def test_rotations_equal_those_of_scipy_and_return(source, target, rotations):
    values = written(rotations, source)
    converted = convert_rotation(values, source, target)
    assert converted.shape == (len(values), SIZES[target])
    assert (read(converted, target) * rotations.inv()).magnitude().max() < 1e-6
    back = convert_rotation(converted, target, source)
    assert (read(back, source) * rotations.inv()).magnitude().max() < 1e-6


def test_actions_of_two_arms_convert_from_seven_to_ten_numbers_and_back():
    actions = np.random.default_rng(0).uniform(-1, 1, size=(5, 14)).astype(np.float32)
    wide = convert_actions(actions, "axis_angle", "rotation_6d", arms=2)
    assert (
        wide.shape == (5, 20)
        and np.array_equal(wide[:, :3], actions[:, :3])
        and np.array_equal(wide[:, 9], actions[:, 6])
    )
    np.testing.assert_allclose(convert_actions(wide, "rotation_6d", "axis_angle", arms=2), actions, atol=1e-6)
    with pytest.raises(ValueError, match=r"5 numbers.*rotation_6d"):
        convert_actions(np.zeros((2, 5)), "rotation_6d", "axis_angle")


def test_only_contradictions_are_refused():
    delta, absolute = ActionRepresentation("delta", "axis_angle"), ActionRepresentation("absolute", "rotation_6d")
    delta.require(ActionRepresentation())
    ActionRepresentation("delta").require(delta)
    with pytest.raises(ValueError, match=r"'delta'.*the arm expects 'absolute'"):
        delta.require(absolute, "the arm")
    with pytest.raises(ValueError, match=r"'axis_angle'.*'rotation_6d'"):
        delta.require(ActionRepresentation("delta", "rotation_6d"))
    assert ActionRepresentation.from_dict(json.loads(json.dumps(delta.to_dict()))) == delta
    assert ActionRepresentation.from_dict(None) == ActionRepresentation()
    with pytest.raises(ValueError, match=r"'relative'.*delta, absolute"):
        ActionRepresentation("relative")


@pytest.mark.parametrize(
    ("configs", "key", "frame", "rotation"),
    [
        ({"type": "OSC_POSE", "control_delta": True}, "actions", "delta", "axis_angle"),
        ({"type": "OSC_POSE", "control_delta": False}, "actions", "absolute", "axis_angle"),
        ({"type": "OSC_POSE", "control_delta": True}, "actions_abs", "absolute", "axis_angle"),
        ({"type": "JOINT_VELOCITY"}, "actions", "unspecified", "none"),
        (
            {"type": "BASIC", "body_parts": {"right": {"type": "OSC_POSE", "input_type": "delta"}}},
            "actions",
            "delta",
            "axis_angle",
        ),
        (
            {"body_parts": {"arms": {"right": {"type": "OSC_POSITION", "input_type": "absolute"}}}},
            "actions",
            "absolute",
            "none",
        ),
        (None, "actions", "unspecified", "unspecified"),
    ],
)
def test_controllers_of_robosuite_say_what_actions_mean(configs, key, frame, rotation):
    found = representation_of_robomimic({"env_kwargs": {"controller_configs": configs}}, key)
    assert found == ActionRepresentation(frame, rotation)


@pytest.fixture
def wild():
    """Two dimensions; the second reaches from -25 to 10 in a quarter of the steps."""
    episodes = [toy_episode(8, i, np.random.default_rng(0)) for i in range(2)]
    for episode in episodes:
        episode.actions[:] = 0.5
        episode.actions[:2, 1] = [-25.0, 10.0]
    return episodes


ONES = np.ones(2)


def test_actions_outside_are_reported_with_dimension_range_and_share(wild):
    with pytest.raises(DataError, match=r"dimension 1: -25 to 10, accepted -1 to 1, 25 % of the steps") as caught:
        apply_bounds(wild, -ONES, ONES, "stop")
    assert "clip" in str(caught.value) and "rescale" in str(caught.value) and "dimension 0" not in str(caught.value)


def test_clipping_cuts_off_and_rescaling_divides_by_the_largest(wild):
    clipped, report = apply_bounds(wild, -ONES, ONES, "clip")
    assert clipped[0].actions[:, 1].tolist() == [-1.0, 1.0] + [0.5] * 6 and len(report["violations"]) == 1
    scaled, report = apply_bounds(wild, -ONES, ONES, "rescale")
    np.testing.assert_allclose(scaled[0].actions[:, 1], wild[0].actions[:, 1] / 25, rtol=1e-6)
    assert np.array_equal(scaled[0].actions[:, 0], wild[0].actions[:, 0])
    assert report["action_factor"] == [1.0, pytest.approx(1 / 25)]
    with pytest.raises(DataError, match="keeps 0"):
        apply_bounds(wild, np.array([-1.0, 0.1]), ONES, "rescale")


def test_actions_inside_are_left_alone_and_rounding_is_no_violation(wild):
    inside = [toy_episode(4, 0, np.random.default_rng(0), name="a")]
    inside[0].actions[:] = 1.0 + 1e-7
    kept, report = apply_bounds(inside, -ONES, ONES, "stop")
    assert report == {} and kept[0] is inside[0]
    unbounded, report = apply_bounds(wild, np.full(2, -np.inf), np.full(2, np.inf), "stop")
    assert report == {} and unbounded == wild
