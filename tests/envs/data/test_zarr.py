"""Replay buffers in zarr."""

from __future__ import annotations

import numcodecs
import numpy as np
import pytest
import zarr
from data_files import raw_episodes, write_zarr

from genrl.envs.data import DataError, open_demonstrations
from genrl.networks.encoders import ObsSpec


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("zipped", [False, True])
def test_both_formats_as_folder_and_zip(zarr_format, zipped, tmp_path):
    raw = raw_episodes(images=True)
    data = open_demonstrations(write_zarr(tmp_path, raw, zarr_format, zipped))
    assert data.meta["format"] == "zarr" and data.meta["version"] == str(zarr_format)
    assert data.specs == {"image": ObsSpec((3, 32, 48), "image"), "state": ObsSpec((3,), "state")}
    for episode, expected in zip(data.episodes, raw, strict=True):
        assert np.array_equal(episode.obs["image"], np.moveaxis(expected["image"], -1, 1))
        assert np.array_equal(episode.obs["state"], expected["state"])
        assert np.array_equal(episode.actions, expected["action"])


def test_the_compressors_of_diffusion_policy_are_read(tmp_path):
    """Its buffers are in format 2 with blosc; written here as zarr 2 lays them on disk."""
    path = tmp_path / "pusht.zarr"
    root = zarr.open_group(str(path), mode="w", zarr_format=2)
    rng = np.random.default_rng(0)
    # Push-T keeps its pictures as floats from 0 to 255.
    arrays = {"img": rng.integers(0, 256, (12, 24, 24, 3)).astype(np.float32), "state": rng.normal(size=(12, 5))}
    arrays["action"] = rng.uniform(0, 512, size=(12, 2)).astype(np.float32)
    for key, array in arrays.items():
        codec = numcodecs.Blosc(cname="zstd", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
        stored = root.create_array(
            f"data/{key}", shape=array.shape, dtype=array.dtype, chunks=array.shape, compressors=codec
        )
        stored[:] = array
    ends = root.create_array("meta/episode_ends", shape=(2,), dtype=np.int64, chunks=(2,), compressors=None)
    ends[:] = [5, 12]
    data = open_demonstrations(path)
    assert [len(episode) for episode in data.episodes] == [5, 7]
    assert np.array_equal(data.episodes[1].obs["image"], np.moveaxis(arrays["img"][5:], -1, 1).astype(np.uint8))
    np.testing.assert_array_equal(data.episodes[1].actions, arrays["action"][5:])


def test_point_clouds_of_dp3_are_points_with_colours(tmp_path):
    clouds = np.random.default_rng(0).normal(size=(15, 64, 6)).astype(np.float32)
    path = write_zarr(tmp_path, raw_episodes(), point_cloud=clouds)
    data = open_demonstrations(path, obs=["points", "state"])
    assert data.specs["points"] == ObsSpec((64, 6), "points")
    assert np.array_equal(data.episodes[1].obs["points"], clouds[5:8])


def test_depth_maps_are_refused_until_left_out(tmp_path):
    path = write_zarr(tmp_path, raw_episodes(), depth=np.full((15, 40, 40), 1.5, np.float32))
    with pytest.raises(DataError, match=r"'depth'.*obs="):
        open_demonstrations(path)
    assert list(open_demonstrations(path, obs=["state"]).specs) == ["state"]


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([5, 8, 99], r"data/.*has 15 steps.*ends at 99"),
        ([5, 3, 15], r"meta/episode_ends.*must not decrease"),
        ([5, 5, 15], r"episode 1.*no steps"),
        ([], "no episodes"),
        ([5.0, 8.0, 15.0], r"meta/episode_ends.*float64"),
    ],
)
def test_episode_ends_that_do_not_fit_are_refused(ends, message, tmp_path):
    path = write_zarr(tmp_path, raw_episodes())
    zarr.open_group(str(path), mode="a").create_array("meta/episode_ends", data=np.array(ends), overwrite=True)
    if not ends:
        zarr.open_group(str(path), mode="a").create_array("meta/episode_ends", data=np.zeros(0, int), overwrite=True)
    with pytest.raises(DataError, match=message):
        open_demonstrations(path)


def test_arrays_of_unequal_length_are_refused_and_a_common_tail_is_noted(tmp_path):
    path = write_zarr(tmp_path, raw_episodes())
    group = zarr.open_group(str(path), mode="a")
    group.create_array("meta/episode_ends", data=np.array([5, 8]), overwrite=True)
    data = open_demonstrations(path)
    assert len(data) == 2 and any("7 steps after the last episode" in note for note in data.summary().notes)
    group.create_array("data/action", data=np.zeros((6, 2), np.float32), overwrite=True)
    with pytest.raises(DataError, match=r"data/action.*has 6 steps.*ends at 8"):
        open_demonstrations(path)


def test_format_three_with_zarr_two_says_what_to_install(tmp_path, monkeypatch):
    path = write_zarr(tmp_path, raw_episodes(), zarr_format=3)

    def refuse(*_, **__):
        raise ValueError("group not found at path ''")

    monkeypatch.setattr(zarr, "open_group", refuse)
    monkeypatch.setattr(zarr, "__version__", "2.18.3")
    with pytest.raises(DataError, match="format 3 needs zarr >= 3"):
        open_demonstrations(path)


def test_a_folder_without_episode_ends_is_no_replay_buffer(tmp_path):
    path = write_zarr(tmp_path, raw_episodes())
    del zarr.open_group(str(path), mode="a")["meta/episode_ends"]
    with pytest.raises(DataError, match=r"'meta/episode_ends'.*is missing"):
        open_demonstrations(path, format="zarr")
