"""Evaluation in an environment while a policy is trained: in the background or not, killed or not, the same values."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import toy_demos
import toy_env

from genrl.envs import EnvSettings
from genrl.training import SetupError
from genrl.training.checkpoint import list_checkpoints

ENV = EnvSettings(toy_env.ID, max_steps=20)
TOY = Path(toy_env.__file__).parent


@pytest.fixture(autouse=True)
def other_processes_find_the_toy(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TOY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr("genrl.report.write_report", lambda run_dir: None)


def make(folder, background=False, env=ENV, **changes):
    evaluation = {"every": 10, "episodes": 4, "videos": 0, "background": background, **changes.pop("evaluation", {})}
    return toy_demos.make_imitation(folder, env=env, evaluation=evaluation, **changes)


def metrics(folder):
    """By iteration: an evaluation in the background is written when it has ended."""
    found = [row for kind in ("train", "eval") for row in toy_demos.rows(folder, kind)]
    return sorted(toy_demos.without_times(found), key=lambda row: (row["kind"], row["iteration"]))


def test_an_evaluation_in_the_background_gives_the_values_of_one_in_the_foreground(tmp_path):
    for name, background in (("front", False), ("back", True)):
        make(tmp_path / name, background).run()
    assert metrics(tmp_path / "front") == metrics(tmp_path / "back")
    evaluated = [row for row in metrics(tmp_path / "back") if "eval/success" in row]
    assert [row["iteration"] for row in evaluated] == [10, 20]  # an untrained policy is not sent to act
    assert all(row["eval/distinct_starts"] == 4 for row in evaluated)
    for iteration in (10, 20):
        files = [tmp_path / name / "evaluations" / f"iteration-{iteration:06d}.json" for name in ("front", "back")]
        assert files[0].read_bytes() == files[1].read_bytes()


def killed_at(folder, method, when, iteration):
    """A run in a child that ends with SIGKILL before or after a call of a method at an iteration."""
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        return
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        made = make(folder, background=True)
        original = getattr(made, method)

        def call(*arguments, **named):
            due = made.iteration == iteration
            if due and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            original(*arguments, **named)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(made, method, call)
        made.run()
    finally:
        os._exit(1)


def test_a_run_killed_around_an_evaluation_in_the_background_goes_on_to_the_same_values(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    make(straight).run()
    # The evaluation of iteration 10 has begun and is not in the checkpoint; is in it, unfinished; was just written.
    for method, when, iteration in [("save", "before", 10), ("save", "after", 10), ("_evaluate", "after", 20)]:
        killed_at(killed, method, when, iteration)
    make(killed).run()
    assert metrics(straight) == metrics(killed)
    states = [
        torch.load(list_checkpoints(f)[-1][1] / "training_state.pt", weights_only=True) for f in (straight, killed)
    ]
    for name, value in states[0]["weights"].items():
        assert torch.equal(value, states[1]["weights"][name])
    assert states[0]["best"] == states[1]["best"]


def test_the_best_checkpoint_is_the_policy_of_the_best_evaluation(tmp_path):
    made = make(tmp_path, trainer={"iterations": 30})
    made.run()
    rates = {row["iteration"]: row["eval/success"] for row in metrics(tmp_path) if "eval/success" in row}
    first_best = min(i for i, rate in rates.items() if rate == max(rates.values()))
    assert made.best_iteration() == first_best
    assert (tmp_path / "checkpoints" / "best" / "model" / "model.safetensors").is_file()
    assert f'"iteration": {first_best}' in (tmp_path / "checkpoints" / "best" / "evaluation.json").read_text()


@pytest.mark.parametrize("background", [False, True])
def test_an_environment_that_fails_is_named_and_training_is_kept(tmp_path, background):
    env = EnvSettings(toy_env.ID, max_steps=20, kwargs={"fail_at": 3})
    with pytest.raises(Exception, match="the motor is on fire"):
        make(tmp_path, background, env, trainer={"checkpoint_every": 0}).run()
    # In the background the fault is seen when the next evaluation is due.
    assert [i for i, _ in list_checkpoints(tmp_path)] == ([] if background else [10])


def test_an_environment_that_does_not_fit_the_demonstrations_is_refused_before_training(tmp_path):
    class Wide(toy_demos.ToyDemonstrations):
        def load(self):
            from genrl.envs.data import Demonstrations, Episode

            made = super().load()
            episodes = [Episode({"camera": e.obs["state"]}, e.actions, name=e.name) for e in made.episodes]
            return Demonstrations.of(episodes)

    with pytest.raises(SetupError, match=r"observation 'camera', which toy_env:PointEnv does not show"):
        make(tmp_path / "a", data=Wide()).run()
    with pytest.raises(Exception, match="nowhere_at_all"):
        make(tmp_path / "b", env=EnvSettings("nowhere_at_all:Env")).run()


def test_ctrl_c_during_an_evaluation_in_the_background_saves_and_ends_well(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import pathlib, toy_env, toy_demos\n"
        "from genrl.envs import EnvSettings\n"
        "env = EnvSettings(toy_env.ID, max_steps=20)\n"
        "trainer = {'iterations': 100_000, 'checkpoint_every': 50_000}\n"
        "evaluation = {'every': 10, 'episodes': 4, 'videos': 0, 'background': True}\n"
        "run = toy_demos.make_imitation(pathlib.Path(sys.argv[1]), env=env, evaluation=evaluation, trainer=trainer)\n"
        "print(run.run().status)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run"), str(TOY)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    deadline = time.time() + 120
    while not (metrics_file.is_file() and '"iteration": 15' in metrics_file.read_text()) and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group gets it
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()[-2000:]
    assert out.decode().strip().endswith("interrupted")
    ((iteration, _),) = list_checkpoints(tmp_path / "run")
    assert iteration >= 15
    assert any("eval/success" in row for row in toy_demos.rows(tmp_path / "run", "eval"))


def test_an_evaluation_leaves_its_numbers_and_no_copy_of_the_weights(tmp_path):
    make(tmp_path, background=True).run()
    names = sorted(path.name for path in (tmp_path / "evaluations").iterdir())
    assert [name for name in names if name.startswith(".")] == []
    assert [name for name in names if name.endswith("0.json")] == ["iteration-000010.json", "iteration-000020.json"]


def test_a_new_run_in_the_same_folder_shows_nothing_of_the_old_one(tmp_path):
    make(tmp_path).run()
    make(tmp_path, trainer={"iterations": 10}).run(resume="never")
    assert not (tmp_path / "evaluations" / "iteration-000020.json").exists()


def test_a_longer_run_says_that_its_schedules_have_moved(tmp_path, capsys):
    make(tmp_path).run()
    made = make(tmp_path, trainer={"iterations": 40})
    made.run()
    assert "every schedule of the policy now end there" in capsys.readouterr().out
    assert len([row for row in metrics(tmp_path) if row["kind"] == "eval" and row["iteration"] == 20]) == 1
