"""Receding-horizon execution against plain loops over single episodes."""

import math

import numpy as np
import pytest
import torch
from policy_members import MEMBERS, SPECS, awaken

from genrl.networks import ObservationError, ObsSpec
from genrl.policies import ChunkExecutor, Chunking, ChunkPolicy, EpisodeNoise, Normalizer


class Recorder(ChunkPolicy):
    """Its chunk is `1000 * history[0] + index in the chunk`, and it keeps what it was asked."""

    supports_warm_start = True

    def _configured(self):
        self.asked = []

    def predict(self, obs, noise=None, previous=None):
        history = obs["state"][..., 0]  # [B, T]
        shape = (len(history), self.chunking.horizon, 1)
        self.asked.append((history.clone(), noise(-1, shape), None if previous is None else previous.clone()))
        return 1000 * history[:, :1, None] + torch.arange(self.chunking.horizon, dtype=torch.float32)[None, :, None]


def recorder(chunking):
    policy = Recorder(chunking=chunking)
    data = {"state": np.array([[-1.0], [1.0]]), "action": np.array([[-1.0], [1.0]])}
    policy.configure({"state": ObsSpec((1,), "state")}, 1, Normalizer.fit(data))
    return policy.eval()


def run(executor, steps, row=0, episode=0, first=1.0):
    """Actions for observations first, first + 1, ..."""
    executor.start(row, episode, {"state": np.array([first])})
    actions = []
    for step in range(steps):
        obs = np.full((executor.rows, 1), np.nan, np.float32)
        obs[row] = first + step
        active = np.arange(executor.rows) == row
        actions.append(float(executor.act({"state": obs}, active)[row, 0]))
    return actions


def test_history_begins_with_the_first_observation_repeated_and_then_moves_on():
    policy = recorder(Chunking(8, 3, 2))
    run(ChunkExecutor(policy, rows=1, batch=1), steps=6)
    histories = [history[0].tolist() for history, _, _ in policy.asked]
    assert histories == [[1, 1, 1], [1, 2, 3], [3, 4, 5]]


def test_executed_are_the_actions_from_the_newest_observation_on():
    # With 3 observations, index 2 of a chunk belongs to the newest one.
    policy = recorder(Chunking(8, 3, 2))
    assert run(ChunkExecutor(policy, rows=1), steps=6) == [1002, 1003, 1002, 1003, 3002, 3003]
    # Published configurations with horizon 4, history 2 and 4 actions execute three; ours is refused at construction.
    with pytest.raises(ValueError, match="too short"):
        Chunking(horizon=4, n_obs_steps=2, n_action_steps=4)


def test_rows_are_in_their_own_phase_and_idle_ones_keep_theirs():
    policy = recorder(Chunking(4, 1, 3))
    executor = ChunkExecutor(policy, rows=3)
    executor.start(0, 0, {"state": np.array([1.0])})
    executor.start(2, 1, {"state": np.array([5.0])})
    plan = [[True, False, False], [True, False, True], [False, False, True], [True, False, True]]
    found = []
    for step, active in enumerate(plan):
        obs = np.array([[1.0 + step], [np.nan], [5.0 + step]], np.float32)
        found.append(executor.act({"state": obs}, np.array(active))[:, 0].tolist())
        assert executor.predicted.nonzero()[0].tolist() == [[0], [2], [], []][step]
    assert found == [[1000, 0, 0], [1001, 0, 6000], [0, 0, 6001], [1002, 0, 6002]]
    executor.start(0, 2, {"state": np.array([9.0])})  # a new episode drops what is left of the old chunk
    assert executor.act({"state": np.full((3, 1), 9.0)}, np.array([True, False, False])).tolist() == [[9000], [0], [0]]
    assert executor.last_chunks[0, :, 0].tolist() == [9000, 9001, 9002, 9003]
    assert executor.last_chunks[2, :, 0].tolist() == [6000, 6001, 6002, 6003]


def test_predictions_come_in_padded_batches_of_one_size():
    policy = recorder(Chunking(4, 1, 3))
    executor = ChunkExecutor(policy, rows=7, batch=3)
    for row in range(7):
        executor.start(row, row, {"state": np.array([float(row)])})
    actions = executor.act({"state": np.arange(7.0)[:, None]})
    assert [len(history) for history, _, _ in policy.asked] == [3, 3, 3]
    assert actions[:, 0].tolist() == [1000.0 * row for row in range(7)]
    policy.asked.clear()
    ChunkExecutor(policy, rows=7, batch=None)
    executor = ChunkExecutor(policy, rows=7, batch=None)
    for row in range(7):
        executor.start(row, row, {"state": np.array([float(row)])})
    executor.act({"state": np.arange(7.0)[:, None]})
    assert [len(history) for history, _, _ in policy.asked] == [7]


def test_an_episode_has_its_place_in_the_batch_whichever_row_it_runs_in():
    policy = recorder(Chunking(4, 1, 4))
    executor = ChunkExecutor(policy, rows=2, batch=4)
    executor.start(0, 6, {"state": np.array([6.0])})
    executor.start(1, 3, {"state": np.array([3.0])})
    executor.act({"state": np.array([[6.0], [3.0]])})
    assert policy.asked[0][0][[2, 3], 0].tolist() == [6, 3]  # 6 mod 4 and 3 mod 4


def test_noise_belongs_to_seed_episode_prediction_and_step():
    shape = (3, 4, 2)
    noise = EpisodeNoise(0, [5, 6, 5], [0, 0, 1])
    draws = {step: noise(step, shape) for step in (-1, 0, 1, 15, 16, 99)}
    for step, drawn in draws.items():
        alone = EpisodeNoise(0, [6], [0])(step, (1, 4, 2))
        assert torch.equal(drawn[1:2], alone)
        assert torch.equal(EpisodeNoise(0, [1, 2, 3, 6], [4, 4, 4, 0])(step, (4, 4, 2))[3:], alone)
    everything = torch.stack([*draws.values(), EpisodeNoise(1, [5, 6, 5], [0, 0, 1])(-1, shape)]).flatten(0, 1)
    assert len(everything.flatten(1).unique(dim=0)) == 7 * 3
    many = torch.cat([EpisodeNoise(0, range(64), [0] * 64)(step, (64, 32)) for step in (-1, 3)])
    assert abs(many.mean()) < 0.05 and abs(many.std() - 1) < 0.05


def test_every_prediction_of_an_episode_draws_fresh_noise_and_a_rerun_the_same():
    noises = []
    for _ in range(2):
        policy = recorder(Chunking(4, 1, 2))
        run(ChunkExecutor(policy, rows=1, seed=3, batch=1), steps=6, episode=4)
        noises.append(torch.stack([noise[0] for _, noise, _ in policy.asked]))
    assert torch.equal(*noises) and len(noises[0].unique(dim=0)) == 3
    policy = recorder(Chunking(4, 1, 2))
    run(ChunkExecutor(policy, rows=1, seed=4, batch=1), steps=6, episode=4)
    assert not torch.equal(policy.asked[0][1][0], noises[0][0])


@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("m", [0.0, 0.01, 0.5])
def test_ensembling_averages_all_predictions_for_a_step_with_acts_weights(m, history):
    horizon, steps = 5, 9
    policy = recorder(Chunking(horizon, history, 1, ensembling=m))
    found = run(ChunkExecutor(policy, rows=2), steps, row=1)
    observations = [1.0] * (history - 1) + [1.0 + k for k in range(steps)]
    for now in range(steps):
        # Prediction made at step p: index i is for step p + i - (history - 1).
        indices = {p: now - p + history - 1 for p in range(now + 1)}
        made = [1000 * observations[p] + i for p, i in indices.items() if i < horizon]
        weights = [math.exp(-m * i) for i in range(len(made))]  # oldest first
        expected = sum(w * a for w, a in zip(weights, made, strict=True)) / sum(weights)
        assert found[now] == pytest.approx(expected, rel=1e-6)


def test_ensembling_forgets_the_last_episode():
    policy = recorder(Chunking(5, 1, 1, ensembling=0.1))
    executor = ChunkExecutor(policy, rows=1)
    first = run(executor, 6)
    assert run(executor, 6, episode=1) == first


def test_warm_starts_get_the_last_chunk_from_the_second_prediction_on():
    policy = recorder(Chunking(6, 1, 2, warm_start=0.5))
    executor = ChunkExecutor(policy, rows=2, batch=2)
    executor.start(0, 0, {"state": np.array([1.0])})
    executor.start(1, 1, {"state": np.array([2.0])})
    obs = {"state": np.array([[1.0], [2.0]])}
    for _ in range(3):
        executor.act(obs)
    assert [previous is None for _, _, previous in policy.asked] == [True, False]
    assert policy.asked[1][2][:, :, 0].tolist() == [[1000 + i for i in range(6)], [2000 + i for i in range(6)]]
    policy.asked.clear()
    executor.start(0, 2, {"state": np.array([7.0])})  # its first prediction beside a continued one
    for _ in range(2):
        executor.act({"state": np.array([[7.0], [2.0]])})
    assert [(previous is None, len(history)) for history, _, previous in policy.asked] == [(True, 2), (False, 2)]


def test_a_warm_start_re_noises_the_unexecuted_tail():
    policy = awaken(MEMBERS[0].build(chunking=Chunking(6, 1, 2, warm_start=0.75)))
    previous = torch.randn(2, 6, 3)
    eps = torch.randn(2, 6, 3)
    x, t = policy._warm_start(previous, lambda step, shape: eps)
    moved = previous[:, [2, 3, 4, 5, 5, 5]]
    assert t == 0.75
    torch.testing.assert_close(x, 0.25 * policy.normalizer.normalize("action", moved) + 0.75 * eps)


def test_observations_are_copied():
    policy = recorder(Chunking(4, 2, 1))
    executor = ChunkExecutor(policy, rows=1, batch=1)
    buffer = np.array([[1.0]], np.float32)
    executor.start(0, 0, {"state": buffer[0]})
    for value in (1.0, 2.0, 3.0):
        buffer[:] = value
        executor.act({"state": buffer})
        buffer[:] = -99
    assert [history[0].tolist() for history, _, _ in policy.asked] == [[1, 1], [1, 2], [2, 3]]
    assert executor.history([0])["state"].tolist() == [[[2], [3]]]


def test_tensors_in_give_tensors_out_and_arrays_arrays():
    policy = awaken(MEMBERS[0].build()).eval()
    results = []
    for wrap in (np.asarray, torch.as_tensor):
        executor = ChunkExecutor(policy, rows=2)
        obs = {name: wrap(np.ones((2, *spec.shape), np.float32)) for name, spec in SPECS.items()}
        for row in range(2):
            executor.start(row, row, {name: value[row] for name, value in obs.items()})
        results.append(executor.act(obs))
    assert isinstance(results[0], np.ndarray) and isinstance(results[1], torch.Tensor)
    assert results[0].dtype == np.float32 and np.array_equal(results[0], results[1].numpy())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_observation_that_is_not_a_number_is_refused_and_idle_rows_may_hold_anything(bad):
    executor = ChunkExecutor(recorder(Chunking(8, 3, 2)), rows=2)
    executor.start(1, 0, {"state": np.array([1.0])})
    obs = np.array([[bad], [1.0]], np.float32)
    executor.act({"state": obs}, np.array([False, True]))
    with pytest.raises(ObservationError, match="'state' of row 1 holds NaN or inf"):
        executor.act({"state": obs[::-1].copy()}, np.array([False, True]))


def test_misuse_is_answered():
    policy = recorder(Chunking(4, 1, 2))
    executor = ChunkExecutor(policy, rows=2)
    with pytest.raises(ValueError, match="row 0 is active but has no episode"):
        executor.act({"state": np.zeros((2, 1))})
    executor.start(0, 0, {"state": np.zeros(1)})
    with pytest.raises(ValueError, match=r"'state' has shape \[2, 2\]; expected \[2, 1\]"):
        executor.act({"state": np.zeros((2, 2))}, np.array([True, False]))
    with pytest.raises(ValueError, match="'state' is missing"):
        executor.start(0, 0, {"other": np.zeros(1)})
    for arguments, message in [({"rows": 0}, "rows = 0"), ({"rows": 1, "batch": 0}, "batch = 0")]:
        with pytest.raises(ValueError, match=message):
            ChunkExecutor(policy, **arguments)
    with pytest.raises(ValueError, match="no networks"):
        ChunkExecutor(Recorder(), rows=1)
