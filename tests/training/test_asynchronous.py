"""Roll-outs in other processes: they train, stay fresh enough, and end with their parent, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import toy
from asynchronous_run import make, write_config

from genrl.training.asynchronous import FOLDER
from genrl.training.errors import SetupError, TrainingError
from genrl.training.settings import AsynchronousSettings

METHODS = ["ForwardProcess", "OnlineDPO"]  # one with an old policy, one with a reference


def alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid):
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_run_learns_from_samples_of_lagged_weights_and_leaves_nothing_behind(tmp_path):
    path = write_config(tmp_path, trainer={"iterations": 25, "prompts_per_iteration": 8, "group_size": 8}, max_lag=3)
    loop = make(path, "evaluation.samples_per_prompt=64", "evaluation.steps=6", "trainer.learning_rate=0.02")
    summary = loop.run()
    assert summary.after["eval/reward"] > summary.before["eval/reward"] + 0.08  # .65 measured
    rows = toy.rows(tmp_path / "run", "train")
    lags = [row["async/lag_mean"] for row in rows]
    assert len(rows) == 25 and 0 < max(lags) <= 3
    assert all(row["async/queue"] <= 2 for row in rows)
    assert not (tmp_path / "run" / FOLDER).exists()
    assert not any(worker.is_alive() for worker in loop.rollouts._workers)


def test_what_is_too_old_is_dropped_and_counted(tmp_path):
    """With a long queue and no lag allowed, whatever waited is dropped, and its sampling is paid for."""
    loop = make(write_config(tmp_path, queue=8, max_lag=0, trainer={"iterations": 4}))
    train = loop._train

    def slowly(collected):
        train(collected)
        time.sleep(0.5)

    loop._train = slowly
    loop.run()
    rows = toy.rows(tmp_path / "run", "train")
    assert all(row["async/lag_mean"] == 0 for row in rows)
    assert sum(row["async/dropped"] for row in rows) > 0
    sampled = 16 * 3 * (4 + sum(row["async/dropped"] for row in rows))
    assert loop.cost > sampled and loop.rollouts.drawn > 4


@pytest.mark.parametrize("method", METHODS)
def test_methods_with_other_weights_beside_the_live_ones_run(tmp_path, method):
    changes = ["algorithm.old_decay=0.5"] if method == "ForwardProcess" else []
    make(write_config(tmp_path, f"genrl.algorithms.{method}", trainer={"iterations": 2}, workers=2), *changes).run()
    assert [row["iteration"] for row in toy.rows(tmp_path / "run", "train")] == [1, 2]


def test_a_resumed_run_goes_on_with_fresh_draws_of_its_own_weights(tmp_path):
    path = write_config(tmp_path, trainer={"iterations": 3})
    first = make(path)
    first.run()
    second = make(path, "trainer.iterations=6")
    numbers, starts, train = [], [], second._train

    def watched(collected):
        numbers.append(collected.batch.iteration)
        starts.append(toy.weights(second).clone())
        train(collected)

    second._train = watched
    second.run(resume="require")
    assert [row["iteration"] for row in toy.rows(tmp_path / "run", "train")] == list(range(1, 7))
    assert min(numbers) >= 3  # no draw of the first half again
    assert torch.equal(starts[0], toy.weights(first))


def test_samples_come_from_the_weights_that_were_published(tmp_path):
    """A worker's samples are those that the collector draws with the same weights, prompts and noise."""
    loop = make(write_config(tmp_path, trainer={"iterations": 1}))
    seen = []
    train = loop._train

    def watched(collected):
        seen.extend([collected, loop.collector.sample(loop.worker, 0)])
        train(collected)

    loop._train = watched
    loop.run()
    theirs, ours = seen
    assert torch.equal(theirs.rollout.rows, ours.rollout.rows)
    torch.testing.assert_close(theirs.rollout.x0, ours.rollout.x0, rtol=0, atol=1e-6)
    torch.testing.assert_close(theirs.values["bright"], ours.values["bright"], rtol=0, atol=1e-6)
    assert torch.equal(theirs.rollout.cond["words"], ours.rollout.cond["words"])
    assert theirs.rollout.evaluations == ours.rollout.evaluations


def test_a_reward_that_fails_in_a_worker_ends_the_run_with_its_message(tmp_path):
    loop = make(write_config(tmp_path, reward={"what": "raise"}, trainer={"checkpoint_every": 0}))
    with pytest.raises(TrainingError, match=r"roll-out worker 0 failed: .*the reward server is gone"):
        loop.run()
    assert (tmp_path / "run" / "checkpoints").exists()  # what was trained until then
    assert not any(worker.is_alive() for worker in loop.rollouts._workers)


def test_a_worker_that_is_killed_ends_the_run_and_is_named(tmp_path):
    loop = make(write_config(tmp_path, reward={"what": "die", "after": 1}))
    with pytest.raises(TrainingError, match="roll-out worker 0 died with exit code -9"):
        loop.run()


def test_a_killed_run_leaves_no_worker_and_can_be_resumed(tmp_path):
    path = write_config(tmp_path, reward={"seconds": 0.05}, trainer={"iterations": 100_000}, workers=2)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = Path(__file__).with_name("asynchronous_run.py")
    run = subprocess.Popen(
        [sys.executable, str(program), str(path)], env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        limit = time.time() + 240
        while time.time() < limit and len(list((tmp_path / "run" / "checkpoints").glob("step*"))) < 1:
            assert run.poll() is None
            time.sleep(0.1)
        workers = children(run.pid)
        assert len(workers) >= 2
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    limit = time.time() + 20
    while any(alive(pid) for pid in workers) and time.time() < limit:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in workers)
    before = len(toy.rows(tmp_path / "run", "train"))
    summary = make(path, f"trainer.iterations={before + 2}").run(resume="require")
    assert summary.iteration == before + 2


def test_methods_that_need_the_weights_that_sampled_are_refused(tmp_path):
    with pytest.raises(SetupError, match="PolicyGradient needs the densities of the weights that sampled"):
        make(write_config(tmp_path, "genrl.algorithms.PolicyGradient")).run()


def test_a_run_without_a_configuration_is_refused(tmp_path):
    from genrl.algorithms import Homing

    with pytest.raises(SetupError, match="needs its configuration"):
        toy.make_loop(tmp_path, Homing(steps=3), trainer={"asynchronous": AsynchronousSettings()}).run()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"workers": 0}, "workers = 0"),
        ({"queue": 0}, "queue = 0"),
        ({"max_lag": -1}, "max_lag = -1"),
        ({"publish_every": 6}, "publish_every = 6 lets all samples"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AsynchronousSettings(**arguments)
