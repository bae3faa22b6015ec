"""robomimic's HDF5 files, checked against robomimic's own reader."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from data_files import raw_episodes, write_robomimic_like
from data_members import toy_demonstrations, toy_episode

from genrl.envs.data import DataError, Demonstrations, open_demonstrations, write_robomimic


@pytest.fixture(scope="module")
def sequence_dataset():
    """robomimic's reader, told that `image` is a picture."""
    import robomimic.utils.obs_utils as obs_utils
    from robomimic.utils.dataset import SequenceDataset

    modalities = {"obs": {"low_dim": ["state"], "rgb": [], "depth": [], "scan": []}}
    obs_utils.initialize_obs_utils_with_obs_specs(modalities)

    def make(path, **options):
        settings = {"obs_keys": ("state",), "dataset_keys": ("actions", "rewards", "dones"), "hdf5_cache_mode": None}
        return SequenceDataset(str(path), hdf5_use_swmr=False, **(settings | options))

    return make


def test_robomimics_own_reader_finds_equal_contents(sequence_dataset, tmp_path):
    demonstrations = toy_demonstrations((5, 3, 7))
    path = write_robomimic(tmp_path / "toy.hdf5", demonstrations)
    theirs = sequence_dataset(path)
    assert len(theirs) == demonstrations.transitions == 15
    steps = [(episode, t) for episode in demonstrations.episodes for t in range(len(episode))]
    for item, (episode, t) in zip((theirs[i] for i in range(15)), steps, strict=True):
        following, _ = episode.next_obs()
        assert np.array_equal(item["obs"]["state"][0], episode.obs["state"][t])
        assert np.array_equal(item["next_obs"]["state"][0], following["state"][t])
        assert np.array_equal(item["actions"][0], episode.actions[t])
        assert item["rewards"][0] == episode.rewards[t] and item["dones"][0] == episode.terminated[t]
    theirs.close_and_delete_hdf5_handle()


def test_robomimic_sees_the_filter_keys(sequence_dataset, tmp_path):
    demonstrations = toy_demonstrations((5, 3, 7))
    masks = {"train": ["demo_0", "demo_2"], "valid": ["demo_1"]}
    path = write_robomimic(tmp_path / "toy.hdf5", demonstrations, masks)
    assert len(sequence_dataset(path, filter_by_attribute="train")) == 12
    assert len(sequence_dataset(path, filter_by_attribute="valid")) == 3
    assert [len(e) for e in open_demonstrations(path, filter_key="train").episodes] == [5, 7]


def test_windows_equal_those_of_robomimic(sequence_dataset, tmp_path):
    """robomimic pads the same way, and its actions also begin with the first observation of the history."""
    import torch
    from data_members import Chunks

    from genrl.envs.data import ChunkDataset

    demonstrations = toy_demonstrations((5, 3, 7))
    path = write_robomimic(tmp_path / "toy.hdf5", demonstrations)
    theirs = sequence_dataset(path, frame_stack=2, seq_length=3, get_pad_mask=True)
    ours = ChunkDataset(open_demonstrations(path), Chunks(4, 2, 3))
    assert len(theirs) == len(ours)
    batch = ours.batch(torch.arange(len(ours)))
    for i in range(len(ours)):
        item = theirs[i]
        assert np.array_equal(item["actions"], batch["actions"][i].numpy())
        assert np.array_equal(item["obs"]["state"][:2], batch["obs"]["state"][i].numpy())
        assert np.array_equal(item["pad_mask"][:, 0], batch["valid"][i].numpy())


def full_demonstrations() -> Demonstrations:
    rng = np.random.default_rng(0)
    final = {"state": np.array([7.0, 8.0], np.float32), "image": rng.integers(0, 256, (3, 8, 8), dtype=np.uint8)}
    episodes = [
        toy_episode(
            5, 0, rng, images=True, final_obs=final, states=rng.normal(size=(5, 9)), attrs={"model_file": "<x/>"}
        ),
        toy_episode(3, 1, rng, images=True, success=False, seed=None, rewards=None, terminated=None),
        toy_episode(4, 2, rng, images=True, success=None),
    ]
    meta = {
        "env": {"id": "metaworld/reach-v3", "max_steps": 100},
        "action_representation": {"frame": "delta", "rotation": "none"},
        "expert": "scripted",
    }
    return Demonstrations.of(episodes, meta)


def test_everything_that_is_written_is_read_back(tmp_path):
    written = full_demonstrations()
    path = write_robomimic(tmp_path / "new" / "toy.hdf5", written)
    read = open_demonstrations(path, simulator_states=True)
    assert read.specs == written.specs and read.meta["env"] == written.meta["env"]
    assert read.meta["action_representation"] == written.meta["action_representation"]
    assert read.meta["expert"] == "scripted"
    for new, old in zip(read.episodes, written.episodes, strict=True):
        for key in old.obs:
            assert np.array_equal(new.obs[key], old.obs[key]) and new.obs[key].dtype == old.obs[key].dtype
            assert (new.final_obs is None) == (old.final_obs is None)
            if old.final_obs is not None:
                assert np.array_equal(new.final_obs[key], old.final_obs[key])
        for name in ("actions", "rewards", "terminated", "states"):
            expected = getattr(old, name)
            assert (getattr(new, name) is None) == (expected is None)
            assert expected is None or np.array_equal(getattr(new, name), expected)
        assert (new.success, new.seed, new.name) == (old.success, old.seed, old.name)
        assert dict(new.attrs) == dict(old.attrs)
    assert all(episode.states is None for episode in open_demonstrations(path).episodes)
    # And once more: a file made of what was read is the same data.
    again = open_demonstrations(write_robomimic(tmp_path / "again.hdf5", read), simulator_states=True)
    assert all(
        np.array_equal(a.obs["image"], b.obs["image"]) for a, b in zip(again.episodes, read.episodes, strict=True)
    )


def test_images_lie_height_width_channels_in_the_file_however_small(tmp_path):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, size=(4, 3, 3, 3), dtype=np.uint8)
    toy = Demonstrations.of([toy_episode(4, 0, rng)])
    episode = toy.episodes[0]
    tiny = Demonstrations.of([type(episode)({**episode.obs, "image": image}, episode.actions)])
    path = write_robomimic(tmp_path / "tiny.hdf5", tiny)
    with h5py.File(path) as file:
        assert np.array_equal(file["data/demo_0/obs/image"], np.moveaxis(image, 1, -1))
    # 3 x 3 x 3 is ambiguous in files of others; this one says what it is.
    assert np.array_equal(open_demonstrations(path).episodes[0].obs["image"], image)


def test_next_observations_are_used_where_stored_and_shifted_where_not(tmp_path):
    raw = raw_episodes((4, 2))
    for stored in (True, False):
        data = open_demonstrations(write_robomimic_like(tmp_path, raw, next_obs=stored))
        for episode, expected in zip(data.episodes, raw, strict=True):
            following, valid = episode.next_obs()
            assert np.array_equal(following["state"][:-1], expected["state"][1:])
            assert valid[-1] == stored
            assert np.array_equal(following["state"][-1], expected["state"][-1] + stored)


def test_env_args_are_kept_and_say_what_actions_mean(tmp_path):
    controller = {"type": "OSC_POSE", "control_delta": True}
    env_args = {
        "env_name": "Lift",
        "type": 1,
        "env_kwargs": {"controller_configs": controller, "reward_shaping": False},
    }
    path = write_robomimic_like(tmp_path, raw_episodes((4, 4)), env_args=env_args)
    data = open_demonstrations(path)
    assert data.meta["env_args"] == env_args
    assert data.meta["action_representation"] == {"frame": "delta", "rotation": "axis_angle"}
    assert data.meta["action_low"] == [-1.0, -1.0]
    assert [episode.success for episode in data.episodes] == [True, True]  # a sparse reward is a success
    copy = write_robomimic(tmp_path / "copy.hdf5", data)
    with h5py.File(copy) as file:
        assert json.loads(file["data"].attrs["env_args"]) == env_args
    said = open_demonstrations(path, action_representation={"frame": "absolute"})
    assert said.meta["action_representation"] == {"frame": "absolute", "rotation": "unspecified"}


def test_absolute_actions_beside_the_controllers_are_read_when_asked_for(tmp_path):
    controller = {"type": "OSC_POSE", "control_delta": True}
    path = write_robomimic_like(
        tmp_path,
        raw_episodes((4,)),
        env_args={"env_name": "Lift", "type": 1, "env_kwargs": {"controller_configs": controller}},
    )
    with h5py.File(path, "a") as file:
        file["data/demo_0/actions_abs"] = np.full((4, 10), 5.0)
    data = open_demonstrations(path, action_key="actions_abs")  # not bounded by what a delta controller accepts
    assert data.action_dim == 10 and data.meta["action_representation"]["frame"] == "absolute"


def test_an_absent_filter_key_lists_the_existing_ones_and_the_remedy(tmp_path):
    path = write_robomimic(tmp_path / "toy.hdf5", toy_demonstrations(), {"train": ["demo_0"], "20_percent": ["demo_1"]})
    with pytest.raises(DataError, match=r"'valid'; existing ones: 20_percent, train.*validation_fraction.*split_train"):
        open_demonstrations(path, filter_key="valid")
    with h5py.File(path, "a") as file:
        file["mask/broken"] = np.array([b"demo_0", b"demo_77"])
        file["mask/empty"] = np.array([], dtype="S8")
    with pytest.raises(DataError, match=r"mask/broken.*demo_77"):
        open_demonstrations(path, filter_key="broken")
    with pytest.raises(DataError, match=r"mask/empty.*no episode"):
        open_demonstrations(path, filter_key="empty")


def test_masks_of_unknown_episodes_leave_no_file(tmp_path):
    with pytest.raises(DataError, match=r"mask 'train'.*demo_9"):
        write_robomimic(tmp_path / "toy.hdf5", toy_demonstrations(), {"train": ["demo_9"]})
    assert list(tmp_path.iterdir()) == []


def damaged(path, change):
    with h5py.File(path, "a") as file:
        change(file)


def replace_with(key, value):
    def change(file):
        del file[key]
        if value is not None:
            file[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_with("data/demo_1/actions", None), r"episode demo_1.*'actions'.*is missing"),
        (replace_with("data/demo_1/obs/state", None), r"episode demo_1.*'obs/state'.*is missing"),
        (replace_with("data/demo_1/obs", None), r"episode demo_1.*'obs'.*dataset_states_to_obs"),
        (replace_with("data/demo_1/actions", np.array([b"x", b"y", b"z"])), r"demo_1.*'actions'.*dtype"),
        (replace_with("data/demo_1/actions", np.zeros((2, 2))), r"demo_1.*num_samples is 3.*2 steps"),
        (replace_with("data/demo_1/rewards", np.zeros(9)), r"demo_1.*'rewards'.*9 steps"),
        (replace_with("data/demo_1/obs/state", np.zeros((3, 5))), r"demo_1.*'state'.*\(5,\).*\(3,\)"),
        (replace_with("data/demo_1/obs/state", np.zeros((2, 3))), r"demo_1.*'state'.*2 steps.*3 actions"),
        (replace_with("data", None), r"no group 'data'|no known format"),
        (lambda file: file["data"].attrs.__setitem__("env_args", "{oops"), r"'data'.*env_args.*JSON"),
    ],
)
def test_broken_files_name_file_episode_and_key(change, message, tmp_path):
    path = write_robomimic_like(tmp_path, raw_episodes())
    damaged(path, change)
    with pytest.raises(DataError, match=message) as caught:
        open_demonstrations(path)
    assert str(path) in str(caught.value)


def test_files_without_episodes_and_episodes_without_steps(tmp_path):
    path = write_robomimic_like(tmp_path, [])
    with pytest.raises(DataError, match=r"demo\.hdf5.*no episodes"):
        open_demonstrations(path)
    path = write_robomimic_like(tmp_path, raw_episodes((3, 0, 2)))
    with pytest.raises(DataError, match=r"episode demo_1.*no steps"):
        open_demonstrations(path)
    assert len(open_demonstrations(path, bad_episodes="skip")) == 2


def test_an_observation_may_be_called_like_an_array_beside_it(tmp_path):
    path = write_robomimic_like(tmp_path, raw_episodes((3,)))
    with h5py.File(path, "a") as file:
        file["data/demo_0/obs/actions"], file["data/demo_0/obs/states"] = np.full((3, 4), 7.0), np.full((3, 5), 8.0)
    episode = open_demonstrations(path, obs=["actions", "states"]).episodes[0]
    assert (episode.obs["actions"] == 7).all() and (episode.obs["states"] == 8).all()
    assert np.array_equal(episode.actions, raw_episodes((3,))[0]["action"])


def test_simulator_states_are_no_observations(tmp_path):
    path = write_robomimic_like(tmp_path, raw_episodes())
    with pytest.raises(DataError, match="states of the simulator are no observations; choose from state"):
        open_demonstrations(path, obs=["states"])


def test_pictures_are_read_only_when_they_are_selected(tmp_path):
    path = write_robomimic_like(tmp_path, raw_episodes(images=True))
    damaged(path, replace_with("data/demo_1/obs/image", np.array([b"no", b"pictures", b"here"])))
    assert list(open_demonstrations(path, obs=["state"]).specs) == ["state"]
    with pytest.raises(DataError, match=r"demo_1.*'obs/image'"):
        open_demonstrations(path, obs=["state", "image"])


def test_observations_come_in_the_order_that_is_asked_for(tmp_path):
    path = write_robomimic_like(tmp_path, raw_episodes(images=True))
    assert list(open_demonstrations(path, obs=["state", "image"]).specs) == ["state", "image"]
    assert list(open_demonstrations(path, obs=["image", "state"]).specs) == ["image", "state"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_robomimic(tmp_path / "toy.hdf5", toy_demonstrations((4,)))
    monkeypatch.setattr("genrl.envs.data.robomimic._write_episode", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_robomimic(path, toy_demonstrations((2, 2)))
    assert [len(e) for e in open_demonstrations(path).episodes] == [4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy.hdf5"]


def test_meta_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(DataError, match="JSON"):
        write_robomimic(tmp_path / "toy.hdf5", toy_demonstrations(generator=object()))
