"""What holds for every format."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from data_files import ACTION, STATE, WRITERS, raw_episodes

from genrl.envs.data import ChunkDataset, DataError, open_demonstrations
from genrl.envs.data.formats import FORMATS, open_reader
from genrl.networks.encoders import ObsSpec

FORMAT_NAMES = list(WRITERS)
each_format = pytest.mark.parametrize("form", FORMAT_NAMES)


@pytest.fixture
def written(tmp_path):
    def write(form: str, episodes=None, **options) -> Path:
        return WRITERS[form](tmp_path, raw_episodes() if episodes is None else episodes, **options)

    return write


def test_every_registered_format_is_tested():
    assert set(FORMATS) == set(FORMAT_NAMES)


@each_format
def test_contents_are_read_exactly_and_the_format_is_recognised(form, written):
    raw = raw_episodes()
    data = open_demonstrations(written(form, raw))
    assert data.meta["format"] == form and len(data) == 3 and data.action_dim == 2
    for episode, expected in zip(data.episodes, raw, strict=True):
        assert np.array_equal(episode.obs["state"], expected["state"]) and episode.obs["state"].dtype == np.float32
        assert np.array_equal(episode.actions, expected["action"]) and episode.actions.dtype == np.float32
        if form != "ogbench":  # whose files hold rewards only after relabelling
            assert np.array_equal(episode.rewards, expected["reward"])
    assert data.specs["state"] == ObsSpec((3,), "state")
    assert json.loads(json.dumps(data.meta)) == dict(data.meta)


@each_format
def test_the_format_can_be_said(form, written):
    path = written(form)
    assert len(open_demonstrations(path, format=form)) == 3
    other = "zarr" if form == "robomimic" else "robomimic"
    with pytest.raises(DataError, match=str(path)):
        open_demonstrations(path, format=other)


@each_format
def test_exactly_as_many_episodes_as_asked_for(form, written):
    path = written(form, raw_episodes((2,) * 12))
    data = open_demonstrations(path, max_episodes=10)
    # In the order of the file: demo_2 comes before demo_10.
    assert [int(e.obs["state"][0, 0]) for e in data.episodes] == list(range(10))
    assert len(open_demonstrations(path, max_episodes=12)) == 12
    with pytest.raises(DataError, match=r"max_episodes = 13.*there are 12"):
        open_demonstrations(path, max_episodes=13)


@each_format
def test_nan_actions_are_an_error_with_file_episode_and_key_or_skipped(form, written):
    raw = raw_episodes()
    raw[1]["action"][2, 0] = np.nan
    path = written(form, raw)
    with pytest.raises(DataError, match="NaN") as caught:
        open_demonstrations(path)
    message = str(caught.value)
    assert str(path) in message and "'actions'" in message and "step 2" in message
    assert caught.value.episode is not None and caught.value.episode.endswith("1")
    data = open_demonstrations(path, bad_episodes="skip")
    assert [int(e.obs["state"][0, 0]) for e in data.episodes] == [0, 2]
    assert any("left out (1)" in note and "NaN" in note for note in data.summary().notes)


@each_format
def test_nan_observations_are_an_error_with_their_key(form, written):
    raw = raw_episodes()
    raw[2]["state"][1] = np.inf
    with pytest.raises(DataError, match=r"'state'.*step 1"):
        open_demonstrations(written(form, raw))


@each_format
def test_unknown_observations_are_refused_with_those_there_are(form, written):
    with pytest.raises(DataError, match=r"no observation 'velocity'.*state"):
        open_demonstrations(written(form), obs=["velocity"])


@each_format
def test_observations_can_be_renamed_and_asked_for_by_either_name(form, written):
    path, stored = written(form), STATE.get(form, "state")
    for wanted in ("pose", stored):
        data = open_demonstrations(path, obs=[wanted], rename={stored: "pose"})
        assert list(data.specs) == ["pose"] and data.meta["observations"] == {"pose": stored}
    with pytest.raises(DataError, match="nothing_like_it"):
        open_demonstrations(path, rename={"nothing_like_it": "pose"})


@each_format
def test_a_missing_action_array_is_refused_with_what_there_is(form, written):
    path = written(form)
    with pytest.raises(DataError, match=rf"'(data/)?commands'.*is missing.*{ACTION.get(form, 'action')}"):
        open_demonstrations(path, action_key="commands")


@each_format
def test_truncated_files_are_errors_that_name_the_file(form, written):
    path = written(form)
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file() and "meta" not in str(f)]
    cut = max(files, key=lambda f: f.stat().st_size)
    content = cut.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError) as caught:
        open_demonstrations(path)
    assert str(path) in str(caught.value) and ("copy" in str(caught.value) or "cannot be read" in str(caught.value))


@each_format
def test_empty_files_are_errors(form, tmp_path):
    path = WRITERS[form](tmp_path, raw_episodes())
    for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
        file.write_bytes(b"")
    with pytest.raises(DataError, match=str(path)):
        open_demonstrations(path, format=form)


@each_format
def test_actions_outside_the_given_bounds_stop_or_are_treated(form, written):
    raw = raw_episodes()
    raw[0]["action"][0] = [0.5, -25.0]
    path = written(form, raw)
    with pytest.raises(DataError, match=r"dimension 1: -25 to .*accepted -1 to 1.*6.67 %"):
        open_demonstrations(path, action_bounds=(-1.0, 1.0))
    clipped = open_demonstrations(path, action_bounds=(-1.0, 1.0), out_of_bounds="clip")
    assert clipped.episodes[0].actions[0].tolist() == [0.5, -1.0]
    assert clipped.meta["out_of_bounds"]["how"] == "clip" and clipped.meta["action_low"] == [-1.0, -1.0]
    assert any("clip" in note for note in clipped.summary().notes)
    scaled = open_demonstrations(path, action_bounds=(-1.0, 1.0), out_of_bounds="rescale")
    np.testing.assert_allclose(scaled.episodes[1].actions[:, 1], raw[1]["action"][:, 1] / 25, rtol=1e-5)
    json.dumps(scaled.meta)


@each_format
def test_files_are_closed_after_reading_and_after_errors(form, written):
    def open_files() -> int:
        return sum(str(path) in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if exists(fd))

    def exists(fd: str) -> bool:
        try:
            os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return False
        return True

    path = written(form)
    with open_reader(path):
        assert open_files() == (form in ("robomimic", "minari", "ogbench"))  # the others open nothing for long
    open_demonstrations(path)
    assert open_files() == 0
    with pytest.raises(DataError):
        open_demonstrations(path, obs=["velocity"])
    assert open_files() == 0


@each_format
def test_data_become_training_batches(form, written):
    from data_members import Chunks

    data = ChunkDataset(open_demonstrations(written(form), obs=["state"]), Chunks(4, 2, 3))
    assert len(data) == 15 and data.window(0).name in ("0", "demo_0", "episode_0")


def test_an_absent_path_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.hdf5"):
        open_demonstrations(tmp_path / "nowhere.hdf5")


@pytest.mark.parametrize("kind", ["text", "folder", "hdf5"])
def test_unknown_formats_are_refused_with_the_list_of_known_ones(kind, tmp_path):
    path = tmp_path / "thing"
    if kind == "text":
        path.write_text("a,b,c")
    elif kind == "folder":
        (path / "inner").mkdir(parents=True)
    else:
        import h5py

        with h5py.File(path, "w") as file:
            file["pictures"] = [1]
    with pytest.raises(DataError) as caught:
        open_demonstrations(path)
    assert all(f"{name}:" in str(caught.value) for name in FORMATS)
    assert {"text": "thing", "folder": "inner", "hdf5": "pictures"}[kind] in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "rlds"}, r"rlds.*robomimic"),
        ({"max_episodes": 0}, "max_episodes = 0"),
        ({"out_of_bounds": "ignore"}, r"ignore.*stop, clip, rescale"),
        ({"bad_episodes": "ignore"}, r"ignore.*stop, skip"),
        ({"image_layout": "NCHW"}, r"NCHW.*auto, HWC, CHW"),
        ({"obs": "state"}, r"\['state'\]|\[\"state\"\]"),
        ({"obs": []}, "no observations are chosen"),
        ({"action_bounds": (1.0, -1.0)}, "must lie below"),
        ({"action_representation": {"frame": "relative"}}, "relative"),
    ],
)
def test_wrong_settings_are_refused(arguments, message, written):
    with pytest.raises(ValueError, match=message):
        open_demonstrations(written("ogbench"), **arguments)
