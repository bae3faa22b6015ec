"""Training from demonstrations: what a batch is, what resumes, what several processes share, what is refused."""

import math

import pytest
import torch
import toy_demos

from genrl.envs.data import Demonstrations
from genrl.training import PolicyEvaluationSettings, PolicyTrainerSettings, SetupError
from genrl.training.checkpoint import CheckpointError, list_checkpoints
from genrl.training.policy_runs import load_policy_of


def run(folder, **changes):
    made = toy_demos.make_imitation(folder, **changes)
    made.run()
    return made


# ------------------------------------------------------------------------------------------------ batches


def test_every_epoch_visits_every_chunk_once_also_where_batches_run_over_its_end(tmp_path):
    made = run(tmp_path, trainer={"iterations": 5})
    n = len(made.dataset)
    updates = 3 * n // 16 + 1
    seen = torch.cat([made._rows(u) for u in range(updates)])
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    assert not torch.equal(seen[:n], seen[n : 2 * n])


def test_the_rows_of_processes_together_are_those_of_one_process(tmp_path):
    made = run(tmp_path, trainer={"iterations": 5})

    class Two:
        num_processes = 2

        def __init__(self, rank):
            self.process_index = rank

    alone = made._rows(7)
    parts = []
    for rank in range(2):
        made.accelerator = Two(rank)
        parts.append(made._rows(7))
    assert torch.equal(torch.cat(parts), alone)


def test_the_learning_rate_warms_up_and_falls_to_zero_along_a_cosine():
    settings = PolicyTrainerSettings(iterations=100, warmup_updates=10, checkpoint_every=0)
    factors = [settings.learning_rate_factor(u) for u in range(100)]
    assert factors[:10] == pytest.approx([(u + 1) / 10 for u in range(10)])
    for u in (10, 37, 99):
        assert factors[u] == pytest.approx(0.5 * (1 + math.cos(math.pi * (u - 10) / 90)))
    constant = PolicyTrainerSettings(iterations=100, warmup_updates=10, checkpoint_every=0, schedule="constant")
    assert constant.learning_rate_factor(80) == 1.0


def test_training_learns_the_demonstrated_function(tmp_path):
    data = toy_demos.ToyDemonstrations(12, validation_fraction=0.2)
    settings = {"iterations": 600, "log_every": 100, "checkpoint_every": 0, "learning_rate": 5e-3}
    run(tmp_path, data=data, trainer=settings)
    before, after = toy_demos.rows(tmp_path, "eval")
    assert after["eval/held_out_loss"] < 0.75 * before["eval/held_out_loss"]
    assert after["eval/held_out_action_mse"] < 0.6 * before["eval/held_out_action_mse"]


# ------------------------------------------------------------------------------------------------ resuming


def test_a_run_that_stopped_at_any_checkpoint_goes_on_bit_for_bit(tmp_path):
    straight = run(tmp_path / "straight", evaluation={"every": 10}, data=toy_demos.ToyDemonstrations(6, 0.2))
    for stop in (5, 10, 15):
        folder = tmp_path / f"stopped-{stop}"
        made = toy_demos.make_imitation(folder, evaluation={"every": 10}, data=toy_demos.ToyDemonstrations(6, 0.2))
        original = made._iterate

        def iterate(made=made, original=original, stop=stop):
            if made.iteration == stop:
                raise KeyboardInterrupt
            original()

        made._iterate = iterate
        with pytest.raises(KeyboardInterrupt):
            made.run()
        again = run(folder, evaluation={"every": 10}, data=toy_demos.ToyDemonstrations(6, 0.2))
        assert torch.equal(toy_demos.weights(again), toy_demos.weights(straight))
        for kind in ("train", "eval"):
            found = toy_demos.without_times(toy_demos.rows(folder, kind))
            assert found == toy_demos.without_times(toy_demos.rows(tmp_path / "straight", kind))
        assert again.best == straight.best


def test_the_moving_average_keeps_its_counter_and_is_what_is_exported(tmp_path):
    made = run(tmp_path)
    assert made.optimization.ema.updates == 20
    folder = list_checkpoints(tmp_path)[-1][1]
    averaged, label, _ = load_policy_of(tmp_path)
    raw, raw_label, _ = load_policy_of(tmp_path, weights="raw")
    assert (label, raw_label) == ("ema", "raw")
    live = dict(made.policy.named_parameters())
    some = next(name for name in live if name.startswith("net."))
    assert torch.equal(dict(raw.named_parameters())[some], live[some])
    with made.optimization.evaluated_weights():
        assert torch.equal(dict(averaged.named_parameters())[some], live[some])
    assert not torch.equal(dict(averaged.named_parameters())[some], dict(raw.named_parameters())[some])
    assert folder.name == "step-000020"


def test_a_policy_without_an_average_says_raw_and_refuses_ema(tmp_path):
    run(tmp_path, trainer={"ema_decay": None})
    assert load_policy_of(tmp_path)[1] == "raw"
    with pytest.raises(ValueError, match="no moving average"):
        load_policy_of(tmp_path, weights="ema")


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    run(tmp_path)
    other = toy_demos.make_policy(mask_padding=True)
    other.network = type(other.network)(width=24, depth=1)
    with pytest.raises((CheckpointError, RuntimeError), match=r"size mismatch|does not fit"):
        run(tmp_path, policy=other, trainer={"iterations": 30})


def test_best_and_last_are_kept_apart(tmp_path, monkeypatch):
    losses = {0: 3.0, 5: 2.0, 10: 1.0, 15: 1.5, 20: 1.2}
    monkeypatch.setattr(
        "genrl.training.imitation.Imitation._validation",
        lambda self, held_out: {"eval/held_out_action_mse": losses[self.iteration]},
    )
    made = run(tmp_path, data=toy_demos.ToyDemonstrations(8, 0.25), evaluation={"every": 5})
    assert made.best_iteration() == 10
    best, label, folder = load_policy_of(tmp_path, "best")
    assert label == "ema" and folder.name == "best"
    tenth = run(tmp_path / "ten", data=toy_demos.ToyDemonstrations(8, 0.25), trainer={"checkpoint_every": 10})
    del tenth
    expected, _, _ = load_policy_of(tmp_path / "ten", "step-10")
    last, _, _ = load_policy_of(tmp_path, "last")
    weight = [next(policy.net.parameters()) for policy in (best, expected, last)]
    assert torch.equal(weight[0], weight[1]) and not torch.equal(weight[0], weight[2])
    with pytest.raises(ValueError, match="evaluated weights only"):
        load_policy_of(tmp_path, "best", "raw")


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "trainer, evaluation, message",
    [
        ({}, {"every": 7}, "evaluation.every = 7 is no multiple of trainer.log_every = 5"),
        ({"batch_size": 0}, {}, "trainer.batch_size = 0 is too small"),
        ({"checkpoint_every": 7}, {}, "trainer.checkpoint_every = 7 is no multiple"),
        ({}, {"episodes": -1}, "evaluation.episodes = -1 is too small"),
        ({}, {"n_envs": 0}, "evaluation.n_envs = 0 is too small"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_before_anything_is_written(tmp_path, trainer, evaluation, message):
    with pytest.raises((SetupError, ValueError), match=message):
        run(tmp_path / "run", trainer=trainer, evaluation=evaluation)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_names_the_iteration_and_leaves_the_last_checkpoint(tmp_path):
    policy = toy_demos.make_policy()
    original, calls = policy.loss, []

    def broken(*arguments):
        loss, metrics = original(*arguments)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 8 else loss), metrics

    policy.loss = broken
    with pytest.raises(FloatingPointError, match="iteration 8: the gradient norm is nan"):
        run(tmp_path, policy=policy)
    assert [i for i, _ in list_checkpoints(tmp_path)] == [5]


def test_evaluation_settings_have_defaults_that_work():
    assert PolicyEvaluationSettings().seed == 50_000


def test_the_demonstrations_of_a_run_are_described(tmp_path):
    made = run(tmp_path)
    facts = made.describe()["sizes"]
    assert facts["demonstrations"] == 6
    assert facts["transitions"] == sum(range(12, 18)) == facts["chunks"]
    assert isinstance(made.demonstrations, Demonstrations)
