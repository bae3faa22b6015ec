from __future__ import annotations

import numpy as np
import pytest

from genrl.envs.data import DataError
from genrl.envs.data.convert import to_actions, to_images, to_observation


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, size=(2, 3, 8, 9), dtype=np.uint8)


@pytest.mark.parametrize("layout", ["auto", "HWC", "CHW"])
def test_both_layouts_give_the_same_image(pixels, layout):
    if layout != "HWC":
        assert np.array_equal(to_images(pixels, "image", layout), pixels)
    if layout != "CHW":
        assert np.array_equal(to_images(np.moveaxis(pixels, 1, -1), "image", layout), pixels)


def test_bytes_floats_and_whole_numbers_give_the_same_image(pixels):
    unit = (pixels / 255).astype(np.float32)
    for array in (unit, unit.astype(np.float64), pixels.astype(np.float32), pixels.astype(np.int64)):
        converted = to_observation(array, "image")
        assert converted.dtype == np.uint8 and np.array_equal(converted, pixels)


@pytest.mark.parametrize("shape", [(3, 3, 3), (3, 64, 4), (1, 64, 3)])
def test_an_ambiguous_layout_is_an_error_until_it_is_declared(shape):
    images = np.zeros((2, *shape), np.uint8)
    with pytest.raises(DataError, match=r"'image'.*image_layout: HWC or CHW"):
        to_observation(images, "image")
    assert to_observation(images, "image", "CHW").shape == (2, *shape)
    assert to_observation(images, "image", "HWC").shape == (2, shape[2], shape[0], shape[1])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 8, 9, 7), np.uint8), "no axis of 1, 3 or 4 channels"),
        (np.full((2, 8, 8, 3), 1.7, np.float32), r"1.7.*\[0, 1\]"),
        (np.full((2, 8, 8, 3), -1.0, np.float32), "-1"),
        (np.full((2, 8, 8, 3), 300, np.int32), "300"),
        (np.zeros((2, 2, 2, 2, 2), np.float32), "1 to 4 dimensions"),
        (np.array(["a", "b"]), "dtype"),
        (np.array([{}, {}], dtype=object), "object"),
        (np.full((2, 3), 1e300), "float32"),
    ],
)
def test_what_is_no_observation_is_refused_with_its_key(array, message):
    with pytest.raises(DataError, match=message) as caught:
        to_observation(array, "thing")
    assert caught.value.key == "thing"


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (np.zeros(4), (4, 1)),
        (np.zeros((4, 2), np.int64), (4, 2)),
        (np.zeros((4, 2), bool), (4, 2)),
        (np.zeros((4, 2), np.uint8), (4, 2)),
        (np.zeros((4, 100, 3)), (4, 100, 3)),
        (np.zeros((4, 100, 6), np.float16), (4, 100, 6)),
        (np.zeros((4, 5, 4)), (4, 20)),
    ],
)
def test_states_and_point_clouds_become_float32(array, shape):
    converted = to_observation(array, "x")
    assert converted.dtype == np.float32 and converted.shape == shape


def test_a_grey_image_gets_a_channel():
    assert to_observation(np.zeros((4, 20, 30), np.uint8), "x").shape == (4, 1, 20, 30)


def test_actions_are_float32_and_discrete_ones_are_refused():
    assert to_actions(np.zeros((3, 2))).dtype == np.float32 and to_actions(np.zeros(3)).shape == (3, 1)
    with pytest.raises(DataError, match="discrete"):
        to_actions(np.zeros(3, np.int64))
    with pytest.raises(DataError, match=r"\(3, 2, 2\)"):
        to_actions(np.zeros((3, 2, 2)))
    with pytest.raises(DataError, match="dtype"):
        to_actions(np.array([b"x", b"y"]))
