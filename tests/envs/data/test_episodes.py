from __future__ import annotations

import numpy as np
import pytest
from data_members import toy_demonstrations, toy_episode

from genrl.envs.data import DataError, Demonstrations, Episode


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def state(steps: int, size: int = 2) -> dict[str, np.ndarray]:
    return {"state": np.zeros((steps, size), np.float32)}


def actions(steps: int, size: int = 2) -> np.ndarray:
    return np.zeros((steps, size), np.float32)


def test_next_observations_are_shifted_inside_an_episode_and_the_last_is_marked():
    demonstrations = toy_demonstrations((3, 2))
    for episode in demonstrations.episodes:
        following, valid = episode.next_obs()
        assert np.array_equal(following["state"][:-1], episode.obs["state"][1:])
        assert np.array_equal(following["state"][-1], episode.obs["state"][-1])
        assert valid.tolist() == [True] * (len(episode) - 1) + [False]


def test_a_stored_final_observation_completes_the_shift(rng):
    episode = toy_episode(3, 0, rng, final_obs={"state": np.array([9.0, 9.0], np.float32)})
    following, valid = episode.next_obs()
    assert following["state"][-1].tolist() == [9.0, 9.0] and valid.all()


def broken(value, step=1):
    array = actions(3)
    array[step, 0] = value
    return array


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Episode(state(3), broken(np.nan), name="demo_4"), r"demo_4.*'actions'.*NaN.*step 1"),
        (lambda: Episode({"state": broken(np.inf, 2)}, actions(3)), r"'state'.*infinite.*step 2"),
        (lambda: Episode(state(3), actions(0)), "no steps"),
        (lambda: Episode(state(2), actions(3), name="demo_1"), r"demo_1.*'state'.*2 steps.*3 actions"),
        (lambda: Episode(state(3), actions(3), rewards=np.zeros(4, np.float32)), r"'rewards'.*4 steps"),
        (lambda: Episode(state(3), actions(3).astype(int)), r"'actions'.*int64.*float32"),
        (lambda: Episode(state(3), actions(3)[:, 0]), r"'actions'.*\(3,\).*\[T, A\]"),
        (lambda: Episode({}, actions(3)), r"no observations.*obs="),
    ],
)
def test_broken_episodes_are_refused_with_name_key_and_step(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Episode(state(3, 4), actions(3), name="b"), r"f\.hdf5.*episode b.*'state'.*\(4,\).*\(2,\)"),
        (Episode(state(3), actions(3, 7), name="b"), r"episode b.*'actions'.*7 action dimensions.*has 2"),
        (Episode({**state(3), "extra": actions(3)}, actions(3), name="b"), r"episode b.*'extra'"),
    ],
)
def test_episodes_that_differ_are_refused(second, message):
    with pytest.raises(DataError, match=message):
        Demonstrations.of([Episode(state(3), actions(3), name="a"), second], {"path": "f.hdf5"})


def test_a_data_set_without_episodes_is_refused():
    with pytest.raises(DataError, match="no episodes"):
        Demonstrations.of([], {"path": "f.hdf5"})


def test_split_is_seeded_disjoint_and_complete():
    demonstrations = toy_demonstrations((2,) * 20)
    train, held_out = demonstrations.split(0.25, seed=3)
    names = [episode.name for episode in demonstrations.episodes]
    kept, left = [e.name for e in train.episodes], [e.name for e in held_out.episodes]
    assert len(left) == 5 and sorted(kept + left) == sorted(names)
    assert [name for name in names if name in kept] == kept  # order of the file
    again = demonstrations.split(0.25, seed=3)[1]
    assert [e.name for e in again.episodes] == left
    assert any([e.name for e in demonstrations.split(0.25, seed=s)[1].episodes] != left for s in range(4))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 0.99])
def test_splits_without_training_episodes_are_refused(fraction):
    with pytest.raises(ValueError, match="validation_fraction"):
        toy_demonstrations((2, 2, 2)).split(fraction)


def test_summary_reports_rewards_lengths_and_success(rng):
    episodes = [toy_episode(4, 0, rng), toy_episode(8, 1, rng, success=False), toy_episode(3, 2, rng, success=None)]
    summary = Demonstrations.of(episodes).summary()
    assert (summary.episodes, summary.transitions, summary.lengths) == (3, 15, (3, 5.0, 8))
    assert summary.rewards == (0.0, 1.0) and (summary.successes, summary.judged) == (1, 2)
    assert ("successful episodes", "1 of 2") in summary.rows()


def test_data_without_any_success_gets_a_note(rng):
    failed = [toy_episode(4, i, rng, success=False, rewards=np.full(4, -1, np.float32)) for i in range(2)]
    notes = Demonstrations.of(failed).summary().notes
    assert any("no episode succeeded" in note for note in notes)
    assert any("same reward, -1" in note for note in notes)
    unknown = Demonstrations.of([toy_episode(4, 0, rng, success=None)]).summary()
    assert any("does not say" in note for note in unknown.notes)


def test_arrays_for_statistics_join_everything_but_images():
    demonstrations = toy_demonstrations((5, 3), images=True)
    arrays = demonstrations.arrays()
    assert (
        arrays["state"].shape == (8, 2) and arrays["action"].shape == (8, 2) and arrays["image"].shape == (1, 3, 8, 8)
    )
