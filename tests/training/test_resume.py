"""A run that was stopped, killed or broken off and then resumed is the run that was never disturbed."""

import os
import random
import signal
import sys
import time

import pytest
import torch
import toy

from genrl.algorithms import (
    AdvantageWeightedMatching,
    ForwardProcess,
    Homing,
    OnlineDPO,
    PolicyGradient,
    PositivesOnly,
)
from genrl.diffusion import CPS, RandomWindow
from genrl.training.checkpoint import list_checkpoints

EVALUATION = {"every": 3, "train_sampler": "always"}


def advantage_with_state():
    from genrl.objectives import RunningAdvantage

    return RunningAdvantage()


CASES = {
    "policy gradient": lambda: (PolicyGradient(steps=3), {}),
    "moving average and warm-up": lambda: (PolicyGradient(steps=3), {"ema_decay": 0.9, "warmup_updates": 9}),
    "running statistics": lambda: (PolicyGradient(steps=3, advantage=advantage_with_state()), {}),
    "random window, KL, inner epochs": lambda: (
        PolicyGradient(CPS(), steps=4, window=RandomWindow(2), kl_weight=0.1, inner_epochs=2, step_fraction=0.5),
        {},
    ),
    "forward process": lambda: (ForwardProcess(steps=3), {}),
    "forward process, old policy, moving average": lambda: (
        ForwardProcess(steps=3, old_decay=0.7, kl_weight=0.1),
        {"ema_decay": 0.5},
    ),
    "homing, old policy": lambda: (Homing(steps=3, beta=0.5, old_decay=0.5, micro_batch=3), {"ema_decay": 0.5}),
    "positives only": lambda: (PositivesOnly(steps=3, times="logit_normal"), {}),
    "advantage-weighted matching": lambda: (AdvantageWeightedMatching(steps=3, inner_epochs=2), {}),
    "online DPO": lambda: (OnlineDPO(steps=3, pairs="all"), {}),
}


def same_files(one, other):
    """The final checkpoints hold the same state, optimizer and all."""
    states = [torch.load(list_checkpoints(d)[-1][1] / "training_state.pt", weights_only=True) for d in (one, other)]
    return same(*states)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("case", CASES)
def test_three_and_three_iterations_equal_six_bit_for_bit(tmp_path, case):
    for name, stops in [("straight", [6]), ("resumed", [3, 6])]:
        for iterations in stops:
            algorithm, settings = CASES[case]()
            loop = toy.make_loop(
                tmp_path / name, algorithm, trainer={"iterations": iterations, **settings}, evaluation=EVALUATION
            )
            loop.run()
    assert toy.rows(tmp_path / "resumed") == toy.rows(tmp_path / "straight")
    assert [r["iteration"] for r in toy.rows(tmp_path / "resumed", "train")] == list(range(1, 7))
    assert same_files(tmp_path / "straight", tmp_path / "resumed")
    moved = [r["eval/weight_change"] for r in toy.rows(tmp_path / "resumed", "eval")]
    assert moved[0] == 0 < moved[1] < moved[2]  # measured from the base, not from the checkpoint


def test_the_comparison_notices_a_lost_optimizer_state(tmp_path, monkeypatch):
    """The test above can fail: forgetting one piece of state changes the metrics."""
    algorithm = PolicyGradient(steps=3)
    toy.make_loop(tmp_path / "straight", algorithm, trainer={"iterations": 4}).run()
    toy.make_loop(tmp_path / "resumed", algorithm, trainer={"iterations": 2}).run()
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    toy.make_loop(tmp_path / "resumed", algorithm, trainer={"iterations": 4}).run()
    straight, resumed = (toy.rows(tmp_path / name, "train") for name in ("straight", "resumed"))
    assert straight[2]["reward/bright"] == resumed[2]["reward/bright"]  # the weights were there
    assert straight[3] != resumed[3]


class Jittery(toy.HalfBrightness):
    """Draws from the global generators, as a user's reward may."""

    def __call__(self, media, prompts, metadata):
        return super().__call__(media, prompts, metadata) + 0.01 * torch.rand(len(media)) + 0.01 * random.random()


def test_global_random_numbers_of_a_users_reward_go_on_where_they_were(tmp_path):
    for name, stops in [("straight", [4]), ("resumed", [2, 4])]:
        for iterations in stops:
            torch.manual_seed(time.time_ns() % 1000)  # what happened before does not matter
            loop = toy.make_loop(
                tmp_path / name, PolicyGradient(steps=3), trainer={"iterations": iterations}, reward=Jittery(),
                evaluation={"every": 2},
            )  # fmt: skip
            loop.run()
    assert toy.rows(tmp_path / "resumed") == toy.rows(tmp_path / "straight")


def test_learning_rate_warms_up_by_updates_also_across_a_resume(tmp_path):
    def run(iterations):
        algorithm = PolicyGradient(steps=3, minibatches=2, micro_batch=3, inner_epochs=1)
        toy.make_loop(tmp_path, algorithm, trainer={"iterations": iterations, "warmup_updates": 10}).run()

    run(2)
    run(7)
    # The rate of the last of two updates, whatever the number of micro-batches.
    expected = [0.01 * min(1, 2 * i / 10) for i in range(1, 8)]
    assert [r["lr"] for r in toy.rows(tmp_path, "train")] == pytest.approx(expected)


def test_never_starts_anew_and_require_needs_a_checkpoint(tmp_path):
    algorithm = PolicyGradient(steps=3)
    with pytest.raises(RuntimeError, match=r"require.*has no checkpoint"):
        toy.make_loop(tmp_path, algorithm).run(resume="require")
    toy.make_loop(tmp_path, algorithm).run()
    first = toy.rows(tmp_path)
    toy.make_loop(tmp_path, algorithm, trainer={"iterations": 2}).run(resume="never")
    assert toy.rows(tmp_path, "train") == [r for r in first if r["kind"] == "train"][:2]
    assert [i for i, _ in list_checkpoints(tmp_path)] == [1, 2]
    with pytest.raises(RuntimeError, match=r"'sometimes' is unknown.*auto, never, require"):
        toy.make_loop(tmp_path, algorithm).run(resume="sometimes")


def test_a_finished_run_is_left_as_it_is(tmp_path):
    algorithm = PolicyGradient(steps=3)
    toy.make_loop(tmp_path, algorithm).run()
    before = toy.rows(tmp_path)
    summary = toy.make_loop(tmp_path, algorithm).run()
    assert toy.rows(tmp_path) == before and summary.status == "finished" and summary.weight_change > 0


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    toy.make_loop(tmp_path, PolicyGradient(steps=3)).run()
    with pytest.raises(RuntimeError, match=r"does not fit this configuration.*moving average.*--resume never"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), trainer={"ema_decay": 0.9}).run()
    with pytest.raises(RuntimeError, match=r"does not fit this configuration.*shape"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), generator=toy.ToyGenerator(hidden=8)).run()


# ------------------------------------------------------------------------------------------- kills and signals


def fork_run(run_dir, before=None, **changes):
    """Start a run in a child that has all imports already; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if before is not None:
            before()
        toy.make_loop(run_dir, **changes).run()
        code = 0
    finally:
        os._exit(code)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def undisturbed(run_dir, **changes):
    toy.make_loop(run_dir, **changes).run(resume="never")  # imports what later runs find
    began = time.perf_counter()
    toy.make_loop(run_dir, **changes).run(resume="never")
    return time.perf_counter() - began


@pytest.mark.parametrize("every", [1, 2])
def test_killed_at_random_moments_and_resumed_it_is_the_undisturbed_run(tmp_path, every):
    settings = {
        "trainer": {"iterations": 12, "checkpoint_every": every, "ema_decay": 0.9, "keep_checkpoints": 1},
        "evaluation": EVALUATION,
    }
    algorithm = PolicyGradient(steps=3)
    seconds = undisturbed(tmp_path / "straight", algorithm=algorithm, **settings)
    moments = random.Random(every)
    codes = []
    while 0 not in codes:
        pid = fork_run(tmp_path / "killed", algorithm=algorithm, **settings)
        if len(codes) < 8:
            time.sleep(moments.uniform(0.02, 0.2) * seconds)
            os.kill(pid, signal.SIGKILL)
        codes.append(ended(pid))
    assert set(codes[:-1]) == {-signal.SIGKILL} and len(codes) > 5
    assert toy.rows(tmp_path / "killed") == toy.rows(tmp_path / "straight")
    assert same_files(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_iteration_with_a_checkpoint_and_exit_code_0(tmp_path, number):
    settings = {"algorithm": PolicyGradient(steps=3), "trainer": {"iterations": 8, "checkpoint_every": 0}}
    toy.make_loop(tmp_path / "straight", **settings).run()
    stopped = tmp_path / "stopped"
    printed = tmp_path / "printed"

    class Signalling(toy.HalfBrightness):
        calls = 0

        def __call__(self, media, prompts, metadata):
            self.calls += 1
            if self.calls == 4:  # the first evaluation, then iterations 1 to 3
                os.kill(os.getpid(), number)
            return super().__call__(media, prompts, metadata)

    def keep_output():
        sys.stdout = printed.open("w", buffering=1)

    assert ended(fork_run(stopped, keep_output, reward=Signalling(), **settings)) == 0
    assert [i for i, _ in list_checkpoints(stopped)] == [3]
    text = printed.read_text()
    assert number.name in text and "Run the same command again to go on from iteration 3" in text
    toy.make_loop(stopped, **settings).run()
    assert toy.rows(stopped) == toy.rows(tmp_path / "straight")
    assert same_files(tmp_path / "straight", stopped)


def test_a_signal_in_the_first_evaluation_ends_a_run_that_has_nothing_to_save(tmp_path):
    class Signalling(toy.HalfBrightness):
        def __call__(self, media, prompts, metadata):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(media, prompts, metadata)

    assert ended(fork_run(tmp_path, algorithm=PolicyGradient(steps=3), reward=Signalling())) == 0
    assert list_checkpoints(tmp_path) == [] and [r["kind"] for r in toy.rows(tmp_path)] == ["eval"]
    assert toy.make_loop(tmp_path, PolicyGradient(steps=3)).run().status == "finished"
    assert [r["iteration"] for r in toy.rows(tmp_path, "eval")] == [0, 3]


def test_a_second_signal_ends_the_run_at_once_and_the_last_checkpoint_stands(tmp_path):
    class Hanging(toy.HalfBrightness):
        calls = 0

        def __call__(self, media, prompts, metadata):
            self.calls += 1
            if self.calls == 4:  # iteration 3
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.1)
                time.sleep(30)
            return super().__call__(media, prompts, metadata)

    began = time.perf_counter()
    settings = {"algorithm": PolicyGradient(steps=3), "trainer": {"iterations": 4, "checkpoint_every": 1}}
    assert ended(fork_run(tmp_path / "stopped", reward=Hanging(), **settings)) == 99
    assert time.perf_counter() - began < 20
    for name in ("straight", "stopped"):
        toy.make_loop(tmp_path / name, **settings).run()
    assert toy.rows(tmp_path / "stopped") == toy.rows(tmp_path / "straight")


def test_a_signal_handler_of_the_caller_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    toy.make_loop(tmp_path, PolicyGradient(steps=3), trainer={"iterations": 1}).run()
    assert signal.getsignal(signal.SIGTERM) is before
