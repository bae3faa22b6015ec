"""What goes wrong in a run is said clearly, and nothing that was computed is lost."""

import io
import os
import resource
import signal
import sys
import time

import pytest
import torch
import toy

from genrl.algorithms import ForwardProcess, PolicyGradient
from genrl.diffusion import NonFiniteError
from genrl.rewards import RewardError
from genrl.training import TrainingError
from genrl.training.checkpoint import CheckpointError, find_checkpoint, list_checkpoints, load_state
from genrl.training.logging import RunWriter

METHODS = {"policy gradient": lambda: PolicyGradient(steps=3), "forward process": lambda: ForwardProcess(steps=3)}


class At(toy.HalfBrightness):
    """Behaves until its call number `call` (1 is the first evaluation, 2 the first iteration), then does `what`."""

    def __init__(self, call, what):
        self.calls, self.call, self.what = 0, call, what

    def __call__(self, media, prompts, metadata):
        self.calls += 1
        values = super().__call__(media, prompts, metadata)
        return self.what(values) if self.calls == self.call else values


def raises(values):
    raise OSError("the reward server is gone")


def infinite(values):
    values[2] = float("inf")
    return values


def slow(values):
    time.sleep(3)
    return values


FAILURES = {
    "raises": (raises, r"'bright'.*raised OSError: the reward server is gone.*prompts: 'p\d'"),
    "shape": (lambda v: v[:-1], r"'bright'.*shape \(15,\) for 16 samples.*'p\d'"),
    "inf": (infinite, r"'bright'.*inf for 1 of 16.*'p\d'"),
    "type": (str, r"'bright'.*returned str.*'p\d'"),
    "slow": (slow, r"did not answer within trainer.reward_timeout = 0.3 s.*'p\d'"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_reward_is_named_and_the_run_goes_on_from_the_iteration_before(tmp_path, failure):
    what, message = FAILURES[failure]
    settings = {"trainer": {"iterations": 4, "checkpoint_every": 0, "reward_timeout": 0.3}}
    toy.make_loop(tmp_path / "good", PolicyGradient(steps=3), **settings).run()
    loop = toy.make_loop(tmp_path / "bad", PolicyGradient(steps=3), reward=At(4, what), **settings)
    with pytest.raises(RewardError, match=message):
        loop.run()
    assert [i for i, _ in list_checkpoints(tmp_path / "bad")] == [2]  # iteration 3 failed
    toy.make_loop(tmp_path / "bad", PolicyGradient(steps=3), **settings).run()
    assert toy.rows(tmp_path / "bad") == toy.rows(tmp_path / "good")


@pytest.mark.parametrize("part", ["reward", "gauge"])
def test_a_failure_in_evaluation_loses_nothing_either(tmp_path, part):
    settings = {"trainer": {"iterations": 4, "checkpoint_every": 0}}
    evaluation = {"every": 2}
    broken = {"reward": At(4, raises)} if part == "reward" else {}  # evaluation, 2 iterations, evaluation

    def gauges(call):
        return {"judge": At(call if part == "gauge" else -1, raises)}

    for name, call, changes in [("good", -1, {}), ("bad", 2, broken)]:
        loop = toy.make_loop(
            tmp_path / name, PolicyGradient(steps=3), evaluation={**evaluation, "gauges": gauges(call)}, **settings,
            **changes,
        )  # fmt: skip
        if name == "bad":
            with pytest.raises(RewardError, match="the reward server is gone"):
                loop.run()
        else:
            loop.run()
    assert [i for i, _ in list_checkpoints(tmp_path / "bad")] == [2]
    toy.make_loop(
        tmp_path / "bad", PolicyGradient(steps=3), evaluation={**evaluation, "gauges": gauges(-1)}, **settings
    ).run()
    # The evaluation that failed is made up for.
    assert toy.rows(tmp_path / "bad") == toy.rows(tmp_path / "good")


def test_a_save_that_fails_does_not_hide_why_it_was_made(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise CheckpointError("could not save step-000002: the disk is full")

    loop = toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=At(4, raises), trainer={"checkpoint_every": 0})
    monkeypatch.setattr("genrl.training.run.save_checkpoint", refuse)
    with pytest.raises(TrainingError, match=r"(?s)the reward server is gone.*the disk is full"):
        loop.run()


def test_a_failure_before_the_first_iteration_leaves_no_checkpoint(tmp_path):
    with pytest.raises(RewardError):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=At(1, raises)).run()
    assert list_checkpoints(tmp_path) == []


# --------------------------------------------------------------------------------------- rewards without a say


class Nan(toy.HalfBrightness):
    """NaN where `mask` [P, G] says, in training."""

    def __init__(self, mask):
        self.mask = mask

    def __call__(self, media, prompts, metadata):
        values = super().__call__(media, prompts, metadata)
        if len(values) == self.mask.numel():
            # Samples come in the order minibatch, prompt, place.
            mask = self.mask.reshape(4, 2, 2).transpose(0, 1).reshape(-1)
            values[mask] = float("nan")
        return values


@pytest.mark.parametrize("method", METHODS)
def test_without_any_scored_sample_the_weights_stay_exactly_as_they_are(tmp_path, method):
    loop = toy.make_loop(
        tmp_path, METHODS[method](), reward=Nan(torch.ones(4, 4, dtype=torch.bool)), trainer={"ema_decay": 0.9}
    )
    summary = loop.run()
    assert summary.status == "finished" and summary.weight_change == 0
    for row in toy.rows(tmp_path, "train"):
        assert row["advantage/nan_share"] == 1 and row["reward/bright"] is None and row["grad/norm"] == 0
    assert any("not scored" in r["message"] for r in toy.rows(tmp_path, "event"))


class Constant(toy.HalfBrightness):
    """0.1, the same for all samples, once `from_call` is reached."""

    def __init__(self, from_call=0):
        self.calls, self.from_call = 0, from_call

    def __call__(self, media, prompts, metadata):
        self.calls += 1
        values = super().__call__(media, prompts, metadata)
        return torch.full_like(values, 0.1) if self.calls > self.from_call else values


@pytest.mark.parametrize("method", METHODS)
def test_groups_without_spread_move_nothing_also_not_by_momentum_or_weight_decay(tmp_path, method):
    # Two iterations of learning fill the momentum, then all rewards are equal.
    loop = toy.make_loop(tmp_path, METHODS[method](), reward=Constant(3), trainer={"weight_decay": 0.1})
    moved = []
    original = loop._iterate
    loop._iterate = lambda: (original(), moved.append(toy.weights(loop).clone()))
    loop.run()
    assert not torch.equal(moved[0], moved[1])
    assert torch.equal(moved[1], moved[2])
    assert [r["advantage/zero_std_groups"] for r in toy.rows(tmp_path, "train")] == [0, 0, 1]


@pytest.mark.parametrize("method", [*METHODS, "policy gradient with KL"])
@pytest.mark.parametrize("pattern", ["some samples", "a whole group"])
def test_an_unscored_sample_contributes_exactly_nothing(tmp_path, method, pattern):
    """The latents of unscored samples have no influence on the update: other latents there, same weights after."""
    mask = torch.zeros(4, 4, dtype=torch.bool)
    if pattern == "some samples":
        mask[0, 1] = mask[2, 3] = mask[3, 0] = True
    else:
        mask[1] = True
    results = []
    for disturb in (False, True):
        algorithm = PolicyGradient(steps=3, kl_weight=0.5) if "KL" in method else METHODS[method]()
        algorithm.inner_epochs = 2
        loop = toy.make_loop(tmp_path / str(disturb), algorithm, reward=Nan(mask), trainer={"iterations": 2})
        if disturb:
            rollout = algorithm.rollout

            def disturbed(velocity, generator, batch, rollout=rollout):
                made = rollout(velocity, generator, batch)
                where = mask.flatten()[batch.rows]
                made.x0[where] += 0.7
                if made.trajectory is not None:
                    for states in made.trajectory.states.values():
                        states[where] += 0.7
                return made

            algorithm.rollout = disturbed
        loop.run()
        results.append(toy.weights(loop))
        share = [r["advantage/nan_share"] for r in toy.rows(tmp_path / str(disturb), "train")]
        assert share == [float(mask.float().mean())] * 2
    assert torch.equal(*results)


# ----------------------------------------------------------------------------------------- numbers and networks


def poisoned_loop(run_dir, accumulation):
    """A run whose gradient becomes NaN in the given accumulation, counted from 1; there are two an iteration."""
    loop = toy.make_loop(run_dir, PolicyGradient(steps=3), trainer={"checkpoint_every": 0})
    original, calls = loop.updater.accumulate, []

    def poisoned(*arguments):
        done = original(*arguments)
        calls.append(1)
        if len(calls) == accumulation:
            loop.updater.parameters[0].grad[0, 0] = float("nan")
        return done

    loop.updater.accumulate = poisoned
    return loop


def test_a_gradient_that_is_not_finite_stops_the_run_with_the_weights_intact(tmp_path):
    loop = poisoned_loop(tmp_path, 3)  # the first update of iteration 2
    with pytest.raises(NonFiniteError, match=r"iteration 2: the gradient norm is nan in update 3.*learning_rate"):
        loop.run()
    assert torch.isfinite(toy.weights(loop)).all()
    assert [i for i, _ in list_checkpoints(tmp_path)] == [1]


def test_in_the_middle_of_an_iteration_nothing_is_saved_under_the_name_of_the_last_one(tmp_path):
    with pytest.raises(NonFiniteError):
        poisoned_loop(tmp_path, 4).run()  # the second update of iteration 2
    assert list_checkpoints(tmp_path) == []


def test_dropout_in_training_mode_is_refused(tmp_path):
    generator = toy.ToyGenerator()
    generator.module.extra = torch.nn.Dropout(0.1)
    with pytest.raises(TrainingError, match=r"extra is a dropout layer in training mode"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), generator=generator).run()
    generator.module.eval()
    toy.make_loop(tmp_path, PolicyGradient(steps=3), generator=generator, trainer={"iterations": 1}).run()


def test_half_precision_weights_are_refused(tmp_path):
    generator = toy.ToyGenerator()
    generator.module.bias.data = generator.module.bias.data.half()
    with pytest.raises(TrainingError, match=r"must be float32 .*found torch.float16"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), generator=generator).run()


def test_fewer_processes_than_asked_for_is_an_error_that_says_how_to_launch(tmp_path):
    with pytest.raises(TrainingError, match=r"processes = 2, but 1 process.*torchrun --nproc_per_node 2 -m genrl"):
        toy.make_loop(tmp_path / "run", PolicyGradient(steps=3), trainer={"processes": 2}).run()
    assert not (tmp_path / "run").exists()


def test_sizes_that_do_not_fit_are_refused_before_anything_is_computed(tmp_path):
    generator = toy.ToyGenerator()
    for changes, message in [
        ({"group_size": 5}, "group_size = 5 is not a multiple"),
        ({"prompts_per_iteration": 11}, "only 10 training prompts"),
    ]:
        with pytest.raises(ValueError, match=message):
            toy.make_loop(tmp_path, PolicyGradient(steps=3), generator=generator, trainer=changes).run()
    assert generator.rows == 0


# ------------------------------------------------------------------------------------------------------ disks


def test_a_run_directory_that_cannot_be_written_is_reported_before_anything_is_computed(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    generator = toy.ToyGenerator()
    with pytest.raises(TrainingError, match=r"run directory .*file/run cannot be written.*choose another run_dir"):
        toy.make_loop(tmp_path / "file" / "run", PolicyGradient(steps=3), generator=generator).run()
    assert generator.rows == 0


def test_a_place_where_not_even_root_may_write_is_reported_before_anything_is_computed():
    generator = toy.ToyGenerator()
    with pytest.raises(TrainingError, match=r"run directory /proc/run cannot be written.*choose another run_dir"):
        toy.make_loop("/proc/run", PolicyGradient(steps=3), generator=generator).run()
    assert generator.rows == 0


def test_a_read_only_file_system_is_reported_before_anything_is_computed(tmp_path, monkeypatch):
    from pathlib import Path

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    generator = toy.ToyGenerator()
    with pytest.raises(TrainingError, match=r"cannot be written.*Read-only file system"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), generator=generator).run()
    assert generator.rows == 0


@pytest.mark.parametrize("victim", ["checkpoint", "metrics", "picture"])
def test_a_disk_that_fills_up_in_mid_run_is_reported_and_the_run_resumes_from_the_last_checkpoint(tmp_path, victim):
    algorithm, run = PolicyGradient(steps=3), tmp_path / "run"
    settings = {"iterations": 6, "checkpoint_every": 2}
    toy.make_loop(tmp_path / "good", algorithm, trainer=settings, evaluation={"every": 1}).run()
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            sys.stdout = sys.stderr = io.StringIO()  # the limit holds for captured output, too
            loop = toy.make_loop(run, algorithm, trainer=settings, evaluation={"every": 1})
            original = loop._iterate

            def fill():
                if loop.iteration == 3:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    size = {"checkpoint": 8000, "metrics": (run / "metrics.jsonl").stat().st_size + 20, "picture": 50}
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size[victim], size[victim]))
                original()

            loop._iterate = fill
            if victim == "picture":  # the metrics may still be written
                RunWriter.write = lambda *_: None
            try:
                loop.run()
            except CheckpointError as error:
                code = 7 if "step-000002" in str(error) and "ree the disk" in str(error) else 8
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert load_state(find_checkpoint(run))["iteration"] == 2
    toy.make_loop(run, algorithm, trainer=settings, evaluation={"every": 1}).run()
    if victim != "picture":
        assert toy.rows(run) == toy.rows(tmp_path / "good")
