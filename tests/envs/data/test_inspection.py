from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from data_files import ACTION, STATE, WRITERS, raw_episodes, write_robomimic_like, write_zarr
from data_members import toy_demonstrations

from genrl.envs.data import DataError, inspect_demonstrations, write_robomimic


@pytest.mark.parametrize("form", list(WRITERS))
def test_every_format_is_described_key_by_key(form, tmp_path):
    raw = raw_episodes((30, 40))
    report = inspect_demonstrations(WRITERS[form](tmp_path, raw))
    assert report.format == form and report.problems == ()
    keys = {key.name: key for key in report.keys}
    state, action = keys[STATE.get(form, "state")], keys[ACTION.get(form, "action")]
    assert state.shape == (3,) and state.dtype == "float32" and state.used == "yes, as 'state'"
    assert "observation" in state.meaning and "predicts" in action.meaning and action.used == "yes, as the target"
    values = np.concatenate([episode["action"] for episode in raw])
    assert (action.low, action.high) == (pytest.approx(values.min()), pytest.approx(values.max()))
    assert report.summary.episodes == 2 and report.quality.horizon == 35
    json.dumps(report.to_dict())
    assert all(len(row) in (2, 6) and all(isinstance(cell, str) for cell in row) for row in report.rows())
    text = str(report)
    assert all(key in text for key in keys) and "action variance" in text


def test_simulator_states_are_told_apart_from_observations(tmp_path):
    report = inspect_demonstrations(write_robomimic_like(tmp_path, raw_episodes(), next_obs=True))
    keys = {key.name: key for key in report.keys}
    assert "never an input" in keys["states"].meaning and keys["states"].used == "no"
    assert keys["next_obs/state"].used == "no" and "not by imitation" in keys["rewards"].used
    assert (keys["rewards"].low, keys["rewards"].high) == (0.0, 1.0)


def test_only_selected_observations_count_as_used(tmp_path):
    path = write_robomimic_like(tmp_path, raw_episodes(images=True))
    report = inspect_demonstrations(path, obs=["state"])
    keys = {key.name: key for key in report.keys}
    assert keys["obs/image"].used == "no (not selected)" and keys["obs/image"].shape == (32, 48, 3)
    assert keys["obs/image"].dtype == "uint8" and 0 <= keys["obs/image"].low < keys["obs/image"].high <= 255


def test_filter_keys_are_listed_with_their_sizes(tmp_path):
    path = write_robomimic(
        tmp_path / "a.hdf5", toy_demonstrations(), {"train": ["demo_0", "demo_1"], "valid": ["demo_2"]}
    )
    report = inspect_demonstrations(path)
    assert report.masks == {"train": 2, "valid": 1} and ("filter keys", "train (2), valid (1)") in report.rows()


def test_broken_data_can_still_be_looked_at(tmp_path):
    raw = raw_episodes((30, 30, 30))
    raw[1]["action"][3] = np.nan
    raw[2]["action"][3] = 7.0
    path = write_robomimic_like(tmp_path, raw)
    with h5py.File(path, "a") as file:
        del file["data/demo_1/obs/state"]
    report = inspect_demonstrations(path)
    assert any("demo_1" in problem and "'obs/state'" in problem for problem in report.problems)
    assert report.summary.episodes == 2
    assert {key.name: key.high for key in report.keys}["actions"] == 7.0


def test_an_unknown_observation_is_a_problem_in_the_report(tmp_path):
    report = inspect_demonstrations(write_robomimic_like(tmp_path, raw_episodes()), obs=["velocity"])
    assert any("'velocity'" in problem for problem in report.problems)


def test_data_of_pictures_alone_have_no_metrics_but_a_report(tmp_path):
    raw = raw_episodes(images=True)
    path = write_zarr(tmp_path, raw)
    report = inspect_demonstrations(path, obs=["image"])
    assert report.quality is None and report.summary is None and any("pictures" in p for p in report.problems)


def test_what_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        inspect_demonstrations(tmp_path / "nothing")
    with pytest.raises(DataError, match="no episodes"):
        inspect_demonstrations(write_robomimic_like(tmp_path, []))
