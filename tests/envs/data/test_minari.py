"""Minari data sets, written by Minari."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from data_files import raw_episodes, write_minari

from genrl.envs.data import DataError, open_demonstrations
from genrl.networks.encoders import ObsSpec

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari")


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
@pytest.mark.parametrize("images", [False, True])
def test_all_storages_give_what_was_written(data_format, images, tmp_path):
    raw = raw_episodes(images=images)
    data = open_demonstrations(write_minari(tmp_path, raw, data_format))
    assert data.specs["state"] == ObsSpec((3,), "state")
    for i, (episode, expected) in enumerate(zip(data.episodes, raw, strict=True)):
        assert np.array_equal(episode.obs["state"], expected["state"])
        assert np.array_equal(episode.actions, expected["action"])
        assert np.array_equal(episode.rewards, expected["reward"])
        # A termination is an end, a truncation is none.
        assert episode.terminated.tolist() == [False] * (len(episode) - 1) + [i % 2 == 0]
        assert episode.success is (i % 2 == 0)
        assert np.array_equal(episode.final_obs["state"], expected["state"][-1] + 1)
        if images:
            frames = np.moveaxis(expected["image"], -1, 1).astype(int)
            assert np.abs(episode.obs["image"].astype(int) - frames).max() < 12  # Minari keeps JPEGs
    assert [episode.seed for episode in data.episodes] == [10, 11, 12]


def test_the_action_space_gives_the_bounds(tmp_path):
    raw = raw_episodes()
    raw[0]["action"][0, 1] = 3.0
    path = write_minari(tmp_path, raw)
    with pytest.raises(DataError, match=r"dimension 1: .* to 3, accepted -1 to 1"):
        open_demonstrations(path)
    assert open_demonstrations(path, out_of_bounds="clip").episodes[0].actions[0, 1] == 1.0


@pytest.mark.parametrize("part", ["", "data", "data/main_data.hdf5"])
def test_the_folder_its_data_and_the_file_are_all_accepted(part, tmp_path):
    path = write_minari(tmp_path, raw_episodes())
    assert open_demonstrations(path / part).meta["dataset_id"] == "toy/mix-v0"


def test_equal_numbers_of_observations_and_actions_have_no_final_one(tmp_path):
    data = open_demonstrations(write_minari(tmp_path, raw_episodes(), final=False))
    assert all(episode.final_obs is None for episode in data.episodes)


def test_pictures_are_decoded_only_when_they_are_selected(tmp_path):
    path = write_minari(tmp_path, raw_episodes(images=True))
    with h5py.File(path / "data/main_data.hdf5", "a") as file:
        del file["episode_1/observations/image"]
        file["episode_1/observations/image"] = np.zeros((4, 20), np.uint8)
    assert list(open_demonstrations(path, obs=["state"]).specs) == ["state"]
    with pytest.raises(DataError, match=r"episode_1.*'observations/image'.*decoded"):
        open_demonstrations(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("actions", None, r"episode_1.*'actions'.*is missing"),
        ("observations", None, r"episode_1.*'observations'.*is missing"),
        ("observations", np.zeros((9, 3)), r"episode_1.*'observations'.*9 observations for 3 actions"),
        ("rewards", np.zeros(5), r"episode_1.*'rewards'.*total_steps is 3.*5"),
        ("terminations", np.zeros(5), r"episode_1.*'terminated'.*5"),
        ("actions", np.zeros((3, 2, 2)), r"episode_1.*'actions'.*\(3, 2, 2\)"),
        ("actions", np.zeros(3, np.int64), r"episode_1.*discrete"),
    ],
)
def test_broken_files_name_file_episode_and_key(key, value, message, tmp_path):
    path = write_minari(tmp_path, raw_episodes())
    with h5py.File(path / "data/main_data.hdf5", "a") as file:
        del file[f"episode_1/{key}"]
        if value is not None:
            file[f"episode_1/{key}"] = value
    with pytest.raises(DataError, match=message) as caught:
        open_demonstrations(path)
    assert str(path) in str(caught.value)
    assert len(open_demonstrations(path, bad_episodes="skip")) == 2


def test_broken_tables_name_their_folder(tmp_path):
    path = write_minari(tmp_path, raw_episodes(), "parquet")
    file = next((path / "data/1").glob("*.parquet"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=r"data/1.*cannot be read"):
        open_demonstrations(path)
    assert len(open_demonstrations(path, bad_episodes="skip")) == 2


def test_actions_in_a_dictionary_need_a_choice(tmp_path):
    path = write_minari(tmp_path, raw_episodes((3,)))
    with h5py.File(path / "data/main_data.hdf5", "a") as file:
        episode = file["episode_0"]
        moves = episode["actions"][()]
        del episode["actions"]
        episode["actions/arm"], episode["actions/hand"] = moves, moves[:, :1]
    with pytest.raises(DataError, match=r"'actions'.*arm.*hand.*actions/arm"):
        open_demonstrations(path)
    assert open_demonstrations(path, action_key="actions/hand", action_bounds=(-1, 1)).action_dim == 1


def test_other_storages_are_refused(tmp_path):
    path = write_minari(tmp_path, raw_episodes())
    file = path / "data/metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_format": "bag"}))
    with pytest.raises(DataError, match=r"metadata\.json.*'bag'.*hdf5, arrow, parquet"):
        open_demonstrations(path)
