"""Distillation in the loop: what is trained and counted, resuming, and what is refused."""

from typing import get_args

import pytest
import torch
import toy
from toy_video import FirstFrame, ToyVideos, real_videos

from genrl.algorithms import Batch, Distillation
from genrl.diffusion import Consistency, RowNoise
from genrl.generators.distill import History
from genrl.training.checkpoint import list_checkpoints

HISTORIES = get_args(History)
EVALUATION = {"every": 3, "train_sampler": "always"}


def method(history="raven", **settings):
    return Distillation(
        ToyVideos("teacher"), history, steps=2, data=real_videos, **{"critic_learning_rate": 0.02, **settings}
    )


def run(folder, algorithm, iterations=3, resume="auto", **settings):
    parts = {"generator": ToyVideos(), "reward": FirstFrame(), "evaluation": EVALUATION}
    trainer = {"iterations": iterations, "ema_decay": 0.9, **settings.pop("trainer", {})}
    loop = toy.make_loop(folder, algorithm, **{**parts, **settings, "trainer": trainer})
    loop.run(resume=resume)
    return loop


def a_batch(generator, rows=6):
    index = torch.arange(rows)
    noise = RowNoise.of((0, "rollout", 0), index)
    prompts = [toy.ToyPrompts().train[0]] * rows
    return Batch(generator.encode([p.text for p in prompts]), index, index, noise, noise, 0, 0, prompts)


@pytest.mark.parametrize("history", HISTORIES)
def test_six_iterations_equal_three_and_three_bit_for_bit(tmp_path, history):
    """The critic, its optimizer and its counter are part of a checkpoint."""
    for name, stops in [("straight", [6]), ("resumed", [3, 6])]:
        for iterations in stops:
            run(tmp_path / name, method(history), iterations)
    assert toy.rows(tmp_path / "resumed") == toy.rows(tmp_path / "straight")
    states = [
        torch.load(list_checkpoints(tmp_path / name)[-1][1] / "training_state.pt", weights_only=True)
        for name in ("straight", "resumed")
    ]
    critics = [state["algorithm"]["distiller"] for state in states]
    assert critics[0]["updates"] == critics[1]["updates"] == 12
    for name, value in critics[0]["critic"].items():
        assert torch.equal(value, critics[1]["critic"][name])


def test_a_run_moves_the_students_samples_toward_the_teachers(tmp_path):
    def mean(generator):
        sampler = generator.make_sampler(Consistency(), toy_schedule())
        noise = RowNoise.of(("test",), range(2000))
        cond = {"tokens": torch.zeros(2000, 1, dtype=torch.long)}
        return sampler.rollout(None, noise.initial((2000, 2, 1, 1, 1)), cond, noise).x0.flatten(1).mean(0)

    goal = torch.tensor([0.5, -0.4])
    before = (mean(ToyVideos()) - goal).norm()
    loop = run(tmp_path, method(), 60, trainer={"learning_rate": 0.03, "checkpoint_every": 0}, evaluation={"every": 0})
    assert float((mean(loop.generator) - goal).norm()) < 0.4 * float(before)


def toy_schedule():
    from genrl.diffusion import Schedule

    return Schedule.uniform(2)


class Nothing(FirstFrame):
    """Scores nothing."""

    def __call__(self, media, prompts, metadata):
        return torch.full((len(media),), torch.nan)


def test_rewards_train_nothing(tmp_path):
    class Other(FirstFrame):
        def __call__(self, media, prompts, metadata):
            return -3 * super().__call__(media, prompts, metadata) + 1

    weights = []
    for k, reward in enumerate([FirstFrame(), Other(), Nothing()]):
        loop = run(tmp_path / str(k), method(), reward=reward, evaluation={"every": 0})
        weights.append(toy.weights(loop))
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("history", HISTORIES)
def test_costs_are_counted_as_promised(tmp_path, history):
    """A sample: 2 steps and the past, 2 x 3 of the critic, teacher and critic once, forward and backward of 1 1/2."""
    loop = run(tmp_path, method(history), 1, evaluation={"every": 0})
    expected = 2.5 + 6 + 2 + 4.5 + (0 if history not in ("teacher_forcing", "diffusion_forcing") else 1.5)
    assert loop.last["cost/forward_equivalents"] == 16 * expected
    promised = loop.algorithm.forwards_per_sample()
    assert promised["sample"] + promised["no_grad"] + 3 * promised["train"] == expected


def test_metrics_of_the_critic_are_logged(tmp_path):
    loop = run(tmp_path, method(), 2, evaluation={"every": 0})
    assert {"distil/critic_loss", "distil/direction", "distil/teacher_distance"} <= loop.last.keys()
    assert loop.last["distil/critic_loss"] > 0


def test_evaluation_uses_the_consistency_sampler(tmp_path):
    algorithm, generator = method(), ToyVideos()
    algorithm.configure(generator)
    assert isinstance(generator.sampling_kernel, Consistency)
    assert isinstance(algorithm.train_sampler().kernel, Consistency)


def test_micro_batches_change_the_loss_by_rounding_only():
    losses = []
    for size in (None, 2):
        algorithm, generator = method(micro_batch=size), ToyVideos()
        algorithm.configure(generator)
        batch = a_batch(generator)
        rollout = algorithm.rollout(generator.velocity, generator, batch)
        rollout = algorithm.before_update(generator.velocity, generator, rollout, batch)
        parts = [rollout] if size is None else [rollout.select(slice(k, k + size)) for k in range(0, 6, size)]
        losses.append(torch.cat([algorithm.loss(generator.velocity, part, (0,), [(0,)])[0] for part in parts]))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_distilled_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"'teacher_forcing' shows the student real videos.*RealMovingDigits"):
        Distillation(ToyVideos("teacher"), "teacher_forcing")
    with pytest.raises(ValueError, match="minibatches = 0"):
        method(minibatches=0)
    with pytest.raises(ValueError, match="'alone' is unknown"):
        method("alone")
    with pytest.raises(ValueError, match="ToyGenerator does not make videos chunk by chunk"):
        method().configure(toy.ToyGenerator())
    other = ToyVideos()
    other.latent_shape = (3, 1, 1, 1)
    with pytest.raises(ValueError, match=r"teacher's latents have shape \(2, 1, 1, 1\)"):
        method().configure(other)
    guided = ToyVideos()
    guided.guidance_scale = 2.0
    with pytest.raises(ValueError, match=r"guidance_scale = 2.0, but it learns its teacher's"):
        method().configure(guided)
    with pytest.raises(RuntimeError, match="configure"):
        method().train_sampler()


TINY = {"dim": 8, "depth": 1, "heads": 2, "base_steps": 2, "videos": 80}


@pytest.mark.parametrize("config", HISTORIES)
def test_recipes_train_and_export_a_student(tmp_path, monkeypatch, config):
    """The recipes as they are, with tiny networks; the model of a run's end is a student's weights."""
    from genrl.config import build, load_config
    from genrl.generators import VideoGenerator
    from genrl.training import Loop
    from genrl.training.evaluation import deterministic_sampler, sample_set

    monkeypatch.setenv("GENRL_CACHE", str(tmp_path / "cache"))
    changes = {
        **{f"generator.init_args.{k}": v for k, v in TINY.items()},
        **{f"algorithm.init_args.teacher.init_args.{k}": v for k, v in TINY.items()},
        "reward": "{class_path: genrl.rewards.MotionSmoothness}",
        "evaluation": "{every: 0, samples_per_prompt: 1, steps: 4, train_sampler: never}",
        "trainer.iterations": 2,
        "trainer.prompts_per_iteration": 4,
        "trainer.checkpoint_every": 1,
        "run_dir": tmp_path / "run",
    }
    loaded = load_config(f"configs/moving_digits/{config}.yaml", [f"{k}={v}" for k, v in changes.items()])
    loop = Loop(**build(loaded), config=loaded.raw)
    loop.run()
    assert loop.iteration == 2 and loop.last["distil/critic_loss"] > 0
    folder = list_checkpoints(tmp_path / "run")[-1][1] / "model"
    student = VideoGenerator("student", **TINY, weights=str(folder))
    student.prepare("cpu", progress=False)
    raw = dict(loop.generator.module.named_parameters())
    with loop.updater.evaluated_weights():
        average = {name: p.detach().clone() for name, p in raw.items()}
    saved = dict(student.module.named_parameters())
    assert any(all(torch.equal(saved[name], values[name]) for name in raw) for values in (raw, average))
    drawn = sample_set(
        student, deterministic_sampler(student, 4), loop.prompts.held_out[:2], 1, seed=0, batch=2, device="cpu"
    )
    assert drawn.media.shape == (2, 10, 1, 16, 16)
