from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from data_members import Chunks, toy_demonstrations

from genrl.envs.data import ChunkDataset, Demonstrations, Episode, print_windows

SETTINGS = [Chunks(1, 1, 1), Chunks(4, 1, 4), Chunks(4, 2, 3), Chunks(8, 3, 2), Chunks(16, 2, 8)]


def brute_force(demonstrations, chunking):
    """Every window written down step by step, as the convention says it in words."""
    windows = []
    for episode in demonstrations.episodes:
        last = len(episode) - 1
        for current in range(len(episode)):
            start = current - chunking.n_obs_steps + 1
            history = [episode.obs["state"][max(0, start + k)] for k in range(chunking.n_obs_steps)]
            actions, valid = [], []
            for k in range(chunking.horizon):
                step = start + k
                actions.append(episode.actions[min(max(step, 0), last)])
                valid.append(0 <= step <= last)
            windows.append((np.stack(history), np.stack(actions), valid))
    return windows


@pytest.mark.parametrize("chunking", SETTINGS, ids=str)
def test_batches_equal_windows_written_down_step_by_step(chunking):
    demonstrations = toy_demonstrations((1, 2, 5, 40))
    data = ChunkDataset(demonstrations, chunking)
    expected = brute_force(demonstrations, chunking)
    assert len(data) == len(expected) == 48
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    batch = data.batch(order)
    for row, index in enumerate(order.tolist()):
        history, actions, valid = expected[index]
        assert batch["obs"]["state"][row].numpy().tolist() == history.tolist()
        assert batch["actions"][row].numpy().tolist() == actions.tolist()
        assert batch["valid"][row].tolist() == valid


@pytest.mark.parametrize("chunking", SETTINGS, ids=str)
def test_number_of_windows_follows_the_documented_formula(chunking):
    lengths = (1, 2, 5, 40)
    demonstrations = toy_demonstrations(lengths)
    assert len(ChunkDataset(demonstrations, chunking)) == sum(lengths)
    for padding in (0, 1, chunking.n_action_steps - 1, 100):
        data = ChunkDataset(demonstrations, chunking, max_padding=padding)
        rule = [max(1, min(T, T + padding + chunking.n_obs_steps - chunking.horizon)) for T in lengths]
        assert len(data) == sum(rule)
        seen = [data.window(i) for i in range(len(data))]
        assert {window.episode for window in seen} == {0, 1, 2, 3}  # no episode is lost
        for window in seen:
            ends = len(window.valid) - len(list(itertools.dropwhile(lambda v: not v, reversed(window.valid))))
            assert ends <= padding or window.step == 0


def test_diffusion_policys_rule_is_max_padding_of_the_executed_slice():
    # pad_before = n_obs - 1, pad_after = n_act - 1: windows start at -pad_before, ..., T - H + pad_after.
    chunking, T = Chunks(16, 2, 8), 50
    data = ChunkDataset(toy_demonstrations((T,)), chunking, max_padding=7)
    starts = range(-1, T - 16 + 7 + 1)
    assert [data.window(i).step for i in range(len(data))] == [start + 1 for start in starts]


def test_the_executed_slice_starts_at_the_current_step():
    data = ChunkDataset(toy_demonstrations((10,)), Chunks(8, 3, 4))
    for index in range(7):
        window = data.window(index)
        assert [window.action_steps[k] for k in window.executed] == list(range(index, index + 4))
        assert window.obs_steps[-1] == index
        assert all(window.valid[k] for k in window.executed)


@pytest.mark.parametrize(
    ("chunking", "message"),
    [
        (Chunks(4, 2, 4), r"horizon = 4 .*\[1, 5\).*horizon >= 5.*n_action_steps <= 3"),
        (Chunks(1, 1, 2), "horizon >= 2"),
        (Chunks(0, 1, 1), "horizon = 0"),
        (Chunks(4, 0, 1), "n_obs_steps = 0"),
        (Chunks(4, 1, 0), "n_action_steps = 0"),
    ],
)
def test_a_slice_that_does_not_fit_is_refused(chunking, message):
    with pytest.raises(ValueError, match=message):
        ChunkDataset(toy_demonstrations(), chunking)


def test_one_observation_step_and_horizon_one_keep_the_time_axis():
    batch = ChunkDataset(toy_demonstrations((3,), images=True), Chunks(1, 1, 1)).batch(torch.arange(3))
    assert batch["obs"]["state"].shape == (3, 1, 2) and batch["obs"]["image"].shape == (3, 1, 3, 8, 8)
    assert batch["actions"].shape == (3, 1, 2) and batch["valid"].all()


def test_images_stay_bytes_and_are_those_of_their_step():
    demonstrations = toy_demonstrations((4, 6), images=True)
    batch = ChunkDataset(demonstrations, Chunks(4, 2, 3)).batch(torch.tensor([0, 3, 9]))
    assert batch["obs"]["image"].dtype == torch.uint8
    for row, (episode, step) in enumerate([(0, 0), (0, 3), (1, 5)]):
        image = demonstrations.episodes[episode].obs["image"][step]
        assert torch.equal(batch["obs"]["image"][row, -1], torch.from_numpy(image))


def test_windows_never_cross_episodes():
    data = ChunkDataset(toy_demonstrations((3, 4, 2)), Chunks(8, 4, 5))
    batch = data.batch(torch.arange(len(data)))
    episodes = batch["obs"]["state"][..., 0]
    assert torch.equal(episodes, episodes[:, :1].expand_as(episodes))
    assert torch.equal((batch["actions"][..., 0] // 100), episodes[:, :1].expand(-1, 8))


def test_batches_do_not_depend_on_their_composition():
    data = ChunkDataset(toy_demonstrations(), Chunks())
    whole, part = data.batch(torch.arange(len(data))), data.batch(torch.tensor([4, 4, 11]))
    for key in ("actions", "valid"):
        assert torch.equal(whole[key][[4, 4, 11]], part[key])
    assert torch.equal(whole["obs"]["state"][[4, 4, 11]], part["obs"]["state"])


@pytest.mark.parametrize("index", [-1, 15])
def test_positions_outside_the_data_set_are_refused(index):
    data = ChunkDataset(toy_demonstrations(), Chunks())
    with pytest.raises(IndexError, match="15"):
        data.batch(torch.tensor([0, index]))
    with pytest.raises(IndexError, match="15"):
        data.window(index)


def test_print_out_shows_indices_and_padding_of_a_toy_episode(capsys):
    data = ChunkDataset(toy_demonstrations((2, 5)), Chunks(4, 2, 3))
    text = print_windows(data, episode=1)
    assert capsys.readouterr().out.strip() == text.strip()
    lines = [line.split() for line in text.splitlines()[1:]]
    assert lines == [
        ["0", "0", "0", "(0)", "*0", "*1", "*2"],
        ["1", "0", "1", "0", "*1", "*2", "*3"],
        ["2", "1", "2", "1", "*2", "*3", "*4"],
        ["3", "2", "3", "2", "*3", "*4", "*(4)"],
        ["4", "3", "4", "3", "*4", "*(4)", "*(4)"],
    ]
    with pytest.raises(ValueError, match="no episode 2"):
        print_windows(data, episode=2)


def test_batches_of_a_large_data_set_need_no_loop_over_samples():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(200_000, 8)).astype(np.float32)
    episodes = [Episode({"state": part}, part[:, :2]) for part in np.split(states, 1000)]
    data = ChunkDataset(Demonstrations.of(episodes), Chunks(16, 2, 8))
    indices = torch.randint(len(data), (4096,), generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    for _ in range(5):
        data.batch(indices)
    # A Python loop over 20,000 windows takes more than half a second; the gather a few milliseconds a batch.
    assert time.process_time() - start < 0.5
