"""The probe passes an environment that keeps its promises, and finds each fault of one that does not."""

import json

import faulty_envs
import numpy as np
import pytest

from genrl.envs import EnvSettings, TaskEnv, make_env, probe
from genrl.envs.gym_simulator import GymSimulator
from genrl.envs.own import wrap


def verdicts(report):
    return {name: word for name, word, _ in report.rows()}


def test_a_faultless_environment_passes():
    report = probe("faulty_envs:Reach")
    assert report.ok and set(verdicts(report).values()) == {"ok", "note"}
    assert report.facts["observations"] == {"state": (4,)}


@pytest.mark.parametrize(
    "fault, failing",
    [
        ("GlobalSeed", {"same seed, same start", "same seed, same 20 steps"}),
        ("HiddenController", {"same seed, same 20 steps"}),
        ("OneStart", {"seeds differ"}),
        ("NotFinite", {"observations as declared"}),
        ("RaisesAtLimit", {"goes on after the time limit"}),
    ],
)
def test_each_fault_is_found(fault, failing):
    report = probe(f"faulty_envs:{fault}", steps=20)
    assert not report.ok
    assert {name for name, word in verdicts(report).items() if word == "FAILED"} == failing


def test_a_forgotten_controller_shows_only_in_the_steps():
    found = verdicts(probe("faulty_envs:HiddenController"))
    assert found["same seed, same start"] == "ok"
    assert found["same seed, same 20 steps"] == "FAILED"


def test_success_at_the_start_is_reported_and_is_no_failure():
    report = probe("faulty_envs:StartsInGoal")
    assert report.ok
    assert "2 of 2 episodes start in the goal" in str(report)
    assert "none of 2" in str(probe("faulty_envs:Reach"))


def test_a_task_that_never_reports_success_is_noted():
    report = probe("gymnasium.envs.classic_control.pendulum:PendulumEnv")
    assert report.ok and "no notion of success" in str(report)
    env = make_env("faulty_envs:Reach")
    env.reset(seed=0)
    env.step(np.zeros(2))
    assert env.has_success


def test_shared_buffers_reach_no_user_of_a_task_environment():
    assert probe("faulty_envs:SharedBuffer").ok


def test_a_task_environment_that_does_not_copy_is_found():
    class Uncopied(TaskEnv):
        def _observe(self, vectors):
            return {"state": self.simulator.env.buffer}

    env = faulty_envs.SharedBuffer()
    env.buffer = np.zeros(4, np.float32)
    settings = EnvSettings("faulty_envs:SharedBuffer")
    report = probe(Uncopied(settings, wrap(env, settings), "own"))
    assert verdicts(report)["observations are copies"] == "FAILED"


def test_an_undeclared_type_is_found():
    class Double(TaskEnv):
        def _observe(self, vectors):
            return {"state": np.array(vectors["state"], np.float64)}

    report = probe(Double(EnvSettings("x.y:z"), GymSimulator(faulty_envs.Reach(), 10), "own"))
    assert verdicts(report)["observations as declared"] == "FAILED"


def test_the_report_is_plain_data():
    report = probe("faulty_envs:GlobalSeed", steps=3)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["ok"] is False
    assert any("np_random" in check["detail"] for check in values["checks"])


def test_the_time_limit_is_put_back():
    env = make_env("faulty_envs:make_limited")
    probe(env, steps=3)
    assert env.max_steps == 7
