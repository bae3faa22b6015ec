"""LeRobot data sets, built to the published layouts."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import FPS, raw_episodes, write_lerobot, write_video

from genrl.envs.data import DataError, open_demonstrations
from genrl.networks.encoders import ObsSpec

DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
@pytest.mark.parametrize("pictures", ["image", "video"])
def test_all_known_versions_give_the_same_episodes(version, pictures, tmp_path):
    raw = raw_episodes((5, 3, 7), images=True)
    data = open_demonstrations(write_lerobot(tmp_path, raw, version, pictures))
    assert data.meta["version"] == version and data.meta["tasks"] == ["push"] and data.meta["fps"] == FPS
    assert data.specs == {"state": ObsSpec((3,), "state"), "top": ObsSpec((3, 32, 48), "image")}
    for episode, expected in zip(data.episodes, raw, strict=True):
        assert np.array_equal(episode.obs["state"], expected["state"])
        assert np.array_equal(episode.actions, expected["action"]) and episode.success is True
        frames = np.moveaxis(expected["image"], -1, 1).astype(int)
        off = np.abs(episode.obs["top"].astype(int) - frames).max()
        # Frames differ by at least 28 grey levels from step to step; compression moves them by a few.
        assert off == 0 if pictures == "image" else off < 12


def test_videos_may_be_read_in_any_order_of_episodes(tmp_path):
    raw = raw_episodes((5, 3, 7), images=True)
    path = write_lerobot(tmp_path, raw, per_file=3)
    data = open_demonstrations(path, episodes=["2", "0", "1"], obs=["top"])
    for episode, number in zip(data.episodes, (2, 0, 1), strict=True):
        frames = np.moveaxis(raw[number]["image"], -1, 1).astype(int)
        assert np.abs(episode.obs["top"].astype(int) - frames).max() < 12


def test_av1_videos_are_decoded(tmp_path):
    """LeRobot's own default codec."""
    raw = raw_episodes((4, 3), images=True)
    data = open_demonstrations(write_lerobot(tmp_path, raw, codec="libsvtav1"), obs=["observation.images.top"])
    frames = np.moveaxis(raw[1]["image"], -1, 1).astype(int)
    assert np.abs(data.episodes[1].obs["top"].astype(int) - frames).max() < 12


@pytest.mark.parametrize("version", ["v1.6", "v3.1", "v4.0", "none"])
def test_other_versions_are_refused_with_those_that_are_read(version, tmp_path):
    path = write_lerobot(tmp_path, raw_episodes(), info={"codebase_version": version})
    with pytest.raises(DataError, match=rf"version {version}.*v2\.0, v2\.1, v3\.0"):
        open_demonstrations(path)


def test_splits_are_filter_keys(tmp_path):
    path = write_lerobot(tmp_path, raw_episodes(), info={"splits": {"train": "0:2", "test": "2:3"}})
    assert [len(e) for e in open_demonstrations(path, filter_key="test").episodes] == [7]
    with pytest.raises(DataError, match="existing ones: test, train"):
        open_demonstrations(path, filter_key="valid")


def edit(file, change):
    table = pq.read_table(file).to_pydict()
    change(table)
    pq.write_table(pa.table(table), file)


def set_stamp(table):
    table["timestamp"][7] += 0.01  # step 2 of episode 1


def repeat_frame(table):
    table["frame_index"][6] = 0


def lose_a_step(table):
    for column in table.values():
        del column[7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_stamp, r"'timestamp'.*10 frames a second.*step 2.*0\.11"),
        (repeat_frame, r"'frame_index'.*numbered"),
        (lose_a_step, r"'length'.*declares 3 steps, the data have 2"),
        (lambda t: t["episode_index"].__setitem__(7, 0), r"declares"),
        (lambda t: t["action"].__setitem__(6, [1.0]), r"'action'.*29 numbers|'action'.*15 numbers|'action'.*5 numbers"),
    ],
)
def test_episodes_are_checked_at_load_and_can_be_skipped(change, message, tmp_path):
    path = write_lerobot(tmp_path, raw_episodes())
    edit(path / DATA, change)
    with pytest.raises(DataError, match=message):
        open_demonstrations(path, episodes=["1"])
    with pytest.raises(DataError, match="episode"):
        open_demonstrations(path)
    kept = [e.name for e in open_demonstrations(path, bad_episodes="skip").episodes]
    assert "1" not in kept and "2" in kept


def test_time_stamps_late_in_a_long_episode_may_be_rounded(tmp_path):
    steps = 20_000  # float32 time stamps around 2000 s are off by 1e-4
    raw = [{"state": np.zeros((steps, 3), np.float32), "action": np.zeros((steps, 2), np.float32)}]
    raw[0]["reward"] = np.zeros(steps, np.float32)
    assert open_demonstrations(write_lerobot(tmp_path, raw)).transitions == steps


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"fps": 20}, "20 frames a second"),
        ({"fps": None}, "'fps'.*is missing"),
        ({"total_frames": 99}, r"total_frames = 99.*15"),
        ({"total_episodes": 4}, r"total_episodes = 4.*3"),
        ({"features": {}}, "'features'"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(info, message, tmp_path):
    with pytest.raises(DataError, match=message):
        open_demonstrations(write_lerobot(tmp_path, raw_episodes(), info=info))


def test_videos_that_do_not_fit_are_refused(tmp_path):
    raw = raw_episodes((5, 3, 7), images=True)
    path = write_lerobot(tmp_path, raw)
    frames = np.concatenate([raw[0]["image"], raw[1]["image"]])
    write_video(path / VIDEO, frames[:6])
    with pytest.raises(DataError, match=r"file-000\.mp4.*has 6 frames.*5 to 7"):
        open_demonstrations(path)
    assert len(open_demonstrations(path, bad_episodes="skip")) == 2
    write_video(path / VIDEO, frames, fps=25)
    with pytest.raises(DataError, match=r"25 frames a second.*declares 10"):
        open_demonstrations(path)
    write_video(path / VIDEO, frames[:, :16, :16])
    with pytest.raises(DataError, match=r"'observation\.images\.top'.*\(16, 16, 3\).*\[32, 48, 3\]"):
        open_demonstrations(path)
    (path / VIDEO).write_bytes(b"no video")
    with pytest.raises(DataError, match=r"file-000\.mp4.*cannot be decoded"):
        open_demonstrations(path)
    (path / VIDEO).unlink()
    with pytest.raises(DataError, match=r"file-000\.mp4.*missing"):
        open_demonstrations(path)
    # States alone need no video.
    assert len(open_demonstrations(path, obs=["state"])) == 3


@pytest.mark.parametrize("missing", ["meta/episodes", DATA])
def test_missing_files_are_named(missing, tmp_path):
    path = write_lerobot(tmp_path, raw_episodes())
    if (path / missing).is_dir():
        (path / EPISODES).unlink()
    else:
        (path / missing).unlink()
    with pytest.raises(DataError, match=missing):
        open_demonstrations(path)


def test_broken_pictures_name_their_step(tmp_path):
    path = write_lerobot(tmp_path, raw_episodes((5, 3), images=True), pictures="image")
    edit(path / DATA, lambda t: t["observation.images.top"][6].__setitem__("bytes", b"no picture"))
    with pytest.raises(DataError, match=r"episode 1.*'observation\.images\.top'.*step 1"):
        open_demonstrations(path)


def test_broken_metadata_is_named(tmp_path):
    path = write_lerobot(tmp_path, raw_episodes(), version="v2.1")
    content = (path / "meta/episodes.jsonl").read_text()
    (path / "meta/episodes.jsonl").write_text(content[:-5])
    with pytest.raises(DataError, match=r"episodes\.jsonl.*no JSON"):
        open_demonstrations(path)
    (path / "meta/info.json").write_text("{")
    with pytest.raises(DataError, match=r"info\.json.*JSON"):
        open_demonstrations(path)


@pytest.mark.parametrize("names", [["channel", "height", "width"], ["height", "width", "channel"]])
def test_the_layout_of_arrays_is_that_of_their_axis_names(names, tmp_path):
    """3 x 3 x 3 is ambiguous by its shape, but not by its declaration."""
    path = write_lerobot(tmp_path, raw_episodes((2,)))
    array = np.arange(54, dtype=np.uint8).reshape(2, 3, 3, 3)
    edit(path / DATA, lambda t: t.__setitem__("observation.small", array.tolist()))
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["observation.small"] = {"dtype": "uint8", "shape": [3, 3, 3], "names": names}
    (path / "meta/info.json").write_text(json.dumps(info))
    read = open_demonstrations(path, obs=["small"]).episodes[0].obs["small"]
    assert np.array_equal(read, array if names[0] == "channel" else np.moveaxis(array, -1, 1))
    info["features"]["observation.small"]["names"] = None
    (path / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match="image_layout"):
        open_demonstrations(path, obs=["small"])
