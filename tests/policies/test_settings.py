"""Chunk geometry, normalisation by kind, and randomness."""

import pytest
import torch
from policy_members import PICTURES, generator

from genrl.policies import Chunking, Draw, Normalization


def test_the_executed_slice_starts_at_the_newest_observation():
    for horizon, history, executed in [(16, 2, 8), (8, 1, 8), (4, 1, 1), (5, 2, 4)]:
        chunking = Chunking(horizon, history, executed)
        assert (chunking.first, chunking.last) == (history - 1, history - 1 + executed)
        assert chunking.last <= horizon


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # MP1's and FlowPolicy's configuration, which executes 3 actions where it says 4
        (
            {"horizon": 4, "n_obs_steps": 2, "n_action_steps": 4},
            r"2 - 1 \+ 4 = 5 .*set horizon >= 5, or n_action_steps <= 3",
        ),
        ({"horizon": 2, "n_obs_steps": 5, "n_action_steps": 1}, "set horizon >= 5, or n_obs_steps <= 2"),
        ({"horizon": 0}, "horizon = 0"),
        ({"n_obs_steps": 0}, "n_obs_steps = 0"),
        ({"n_action_steps": 0}, "n_action_steps = 0"),
        ({"ensembling": 0.01}, "set n_action_steps = 1"),
        ({"ensembling": -1.0, "n_action_steps": 1}, "must not be negative"),
        ({"warm_start": 1.0}, r"warm_start = 1.0 must lie in \(0, 1\)"),
        ({"warm_start": 0.0}, "warm_start"),
    ],
)
def test_chunks_that_cannot_be_executed_are_refused_with_the_numbers_that_can(settings, message):
    with pytest.raises(ValueError, match=message):
        Chunking(**settings)


def test_modes_follow_the_kind_unless_a_key_has_its_own():
    modes = Normalization(action="quantile", state="meanstd", keys={"robot0.eef_pos": "identity"}).modes(PICTURES)
    assert modes == {
        "cam": "image",
        "points": "minmax",
        "state": "meanstd",
        "robot0.eef_pos": "identity",
        "action": "quantile",
    }


def test_unknown_modes_and_keys_are_refused():
    with pytest.raises(ValueError, match=r"normalization\.state = 'zscore'.*'meanstd'"):
        Normalization(state="zscore")
    with pytest.raises(ValueError, match=r"normalization\.keys\.cam"):
        Normalization(keys={"cam": "image"})
    with pytest.raises(ValueError, match=r"names \['gripper'\]; the observations are"):
        Normalization(keys={"gripper": "identity"}).modes(PICTURES)


def test_draws_come_from_the_generator_alone():
    state = torch.get_rng_state()
    one, two = (Draw(generator(1)) for _ in range(2))
    assert torch.equal(one.normal((3, 2)), two.noise(-1, (3, 2)))
    assert torch.equal(one.uniform((5,)), two.uniform((5,)))
    assert not torch.equal(one.normal((3, 2)), one.normal((3, 2)))
    assert torch.equal(torch.get_rng_state(), state)
    assert Draw(generator(), dtype=torch.float64).normal((2,)).dtype == torch.float64
