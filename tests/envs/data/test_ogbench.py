"""OGBench's .npz files, checked against OGBench's own loader."""

from __future__ import annotations

import numpy as np
import pytest
from data_files import raw_episodes, write_ogbench
from ogbench.utils import load_dataset

from genrl.envs.data import DataError, open_demonstrations


def test_transitions_equal_those_of_ogbench(tmp_path):
    path = write_ogbench(tmp_path, raw_episodes())
    theirs = load_dataset(str(path))
    ours = {"observations": [], "actions": [], "next_observations": []}
    for episode in open_demonstrations(path).episodes:
        following, valid = episode.next_obs()
        ours["observations"].append(episode.obs["state"][valid])
        ours["actions"].append(episode.actions[valid])
        ours["next_observations"].append(following["state"][valid])
    for key, parts in ours.items():
        assert np.array_equal(np.concatenate(parts), theirs[key])


@pytest.mark.parametrize("compact", [False, True])
def test_files_that_went_through_ogbenchs_loader_give_the_same_trajectories(compact, tmp_path):
    raw = raw_episodes()
    prepared = load_dataset(str(write_ogbench(tmp_path, raw)), compact_dataset=compact)
    np.savez(tmp_path / "prepared.npz", **prepared)
    data = open_demonstrations(tmp_path / "prepared.npz")
    assert [len(e) for e in data.episodes] == ([5, 3, 7] if compact else [4, 2, 6])
    for episode, expected in zip(data.episodes, raw, strict=True):
        following, valid = episode.next_obs()
        assert np.array_equal(episode.obs["state"], expected["state"][: len(episode)])
        assert np.array_equal(following["state"][valid], expected["state"][1 : 1 + valid.sum()])
        assert valid.all() != compact


def test_terminals_are_cuts_and_masks_are_successes(tmp_path):
    masks = np.ones(15)
    masks[6] = 0  # the second step of the second trajectory, which goes on
    rewards = masks - 1.0 - 1.0 + masks
    data = open_demonstrations(write_ogbench(tmp_path, raw_episodes(), masks=masks, rewards=-masks))
    assert rewards is not None and [episode.success for episode in data.episodes] == [False, True, False]
    assert data.episodes[1].terminated.tolist() == [False, True, False]
    summary = data.summary()
    assert (summary.successes, summary.judged, summary.rewards) == (1, 3, (-1.0, 0.0))
    assert summary.terminated == 1


def test_data_without_any_success_are_noted_not_silent(tmp_path):
    ones = np.ones(15)
    notes = open_demonstrations(write_ogbench(tmp_path, raw_episodes(), masks=ones, rewards=-ones)).summary().notes
    assert any("no episode succeeded" in note for note in notes) and any("same reward, -1" in note for note in notes)
    notes = open_demonstrations(write_ogbench(tmp_path, raw_episodes())).summary().notes
    assert any("does not say which episodes succeeded" in note for note in notes)


@pytest.mark.parametrize(
    ("file", "env"),
    [
        ("cube-single-play-v0", "ogbench/cube-single-v0"),
        ("cube-single-play-v0-val", "ogbench/cube-single-v0"),
        ("puzzle-3x3-noisy-v0", "ogbench/puzzle-3x3-v0"),
        ("antmaze-large-navigate-singletask-task2-v0", "ogbench/antmaze-large-singletask-task2-v0"),
        ("my-own-data", None),
    ],
)
def test_the_name_of_the_file_gives_the_environment(file, env, tmp_path):
    write_ogbench(tmp_path, raw_episodes()).rename(tmp_path / f"{file}.npz")
    meta = open_demonstrations(tmp_path / f"{file}.npz").meta
    assert meta.get("env", {}).get("id") == env


def test_pictures_are_images(tmp_path):
    pictures = np.random.default_rng(0).integers(0, 256, (15, 64, 64, 3), dtype=np.uint8)
    data = open_demonstrations(write_ogbench(tmp_path, raw_episodes(), observations=pictures))
    assert np.array_equal(data.episodes[2].obs["image"], np.moveaxis(pictures[8:], -1, 1))


def test_simulator_states_are_read_on_request_and_never_observed(tmp_path):
    qpos, qvel = np.random.default_rng(0).normal(size=(2, 15, 4))
    path = write_ogbench(tmp_path, raw_episodes(), qpos=qpos, qvel=qvel)
    data = open_demonstrations(path, simulator_states=True)
    assert list(data.specs) == ["state"]
    assert np.array_equal(data.episodes[1].states, np.concatenate([qpos, qvel], 1)[5:8])


def test_an_unmarked_last_trajectory_is_kept(tmp_path):
    terminals = np.zeros(15)
    terminals[[4, 7]] = 1
    data = open_demonstrations(write_ogbench(tmp_path, raw_episodes(), terminals=terminals))
    assert [len(episode) for episode in data.episodes] == [5, 3, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": np.zeros((14, 2), np.float32)}, r"'actions'.*14 steps.*15"),
        ({"actions": np.array(["a"] * 15)}, r"'actions'.*dtype"),
        ({"masks": np.zeros(3)}, r"'masks'.*3 steps"),
        ({"terminals": np.zeros((15, 2))}, r"'terminals'.*\(15, 2\)"),
        ({"observations": np.array([None] * 15, dtype=object)}, r"'observations'.*cannot be read"),
        ({"terminals": np.zeros(0), "observations": np.zeros((0, 3)), "actions": np.zeros((0, 2))}, "no episodes"),
    ],
)
def test_broken_files_name_file_and_key(changes, message, tmp_path):
    path = write_ogbench(tmp_path, raw_episodes(), **changes)
    with pytest.raises(DataError, match=message) as caught:
        open_demonstrations(path)
    assert str(path) in str(caught.value)


def test_missing_arrays_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", observations=np.zeros((3, 2)), actions=np.zeros((3, 2)))
    with pytest.raises(DataError, match=r"'terminals'.*is missing.*observations, actions"):
        open_demonstrations(tmp_path / "a.npz")
