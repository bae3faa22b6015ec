"""The generator of moving digits: its three kinds, their samplers, what is saved, and whole runs."""

import json
from pathlib import Path

import pytest
import torch
from generator_members import change

from genrl.algorithms import Batch, PolicyGradient
from genrl.cli import main
from genrl.diffusion import CPS, ChunkSampler, Consistency, Euler, FlowSDE, RowNoise, Sampler, Schedule
from genrl.generators import MovingDigitPrompts, VideoGenerator
from genrl.generators.base import sampler_for, schedule_for
from genrl.training.checkpoint import list_checkpoints
from genrl.training.evaluation import deterministic_sampler, sample_set

TINY = {"dim": 16, "depth": 2, "heads": 2, "base_steps": 2, "distil_steps": 2, "videos": 20}
KINDS = ("teacher", "causal", "student")
PROMPTS = MovingDigitPrompts().held_out[:3]


def build(kind, cache, **more):
    """A prepared generator; its weights are moved away from a start whose output is almost 0."""
    generator = VideoGenerator(kind, **{**TINY, "cache_dir": cache, **more})
    generator.prepare("cpu", progress=False)
    change(generator)
    return generator


def start(generator, rows):
    cond = generator.encode([PROMPTS[i].text for i in rows])
    noise = RowNoise.of((0, "test"), list(rows), "cpu")
    return generator.initial_latents(cond, noise.initial), cond, noise


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_makes_videos_that_do_not_depend_on_the_batch(kind, cache):
    generator = build(kind, cache)
    sampler = deterministic_sampler(generator, 4)
    whole = sample_set(generator, sampler, PROMPTS, 2, seed=1, batch=6, device="cpu").media
    assert whole.shape == (6, 10, 1, 16, 16) and whole.min() >= 0 and whole.max() <= 1
    parts = sample_set(generator, sampler, PROMPTS, 2, seed=1, batch=4, device="cpu").media
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
    assert generator.preview(whole).shape == (6, 3, 16, 48)
    assert torch.equal(generator.preview(whole)[0, 0, :, 32:], whole[0, 9, 0])


def test_each_kind_has_its_own_way_of_sampling(cache):
    teacher, causal, student = (VideoGenerator(kind, **TINY, cache_dir=cache) for kind in KINDS)
    assert type(sampler_for(teacher, Euler(), Schedule.uniform(4))) is Sampler
    assert isinstance(sampler_for(causal, Euler(), Schedule.uniform(4)), ChunkSampler)
    assert isinstance(deterministic_sampler(student, 4).kernel, Consistency)
    assert isinstance(deterministic_sampler(causal, 4).kernel, Euler)
    assert torch.equal(schedule_for(teacher, 4).t, torch.tensor([1, 0.75, 0.5, 0.25, 0]))
    t = torch.tensor([1, 0.75, 0.5, 0.25, 0])
    torch.testing.assert_close(schedule_for(student, 4).t, 2 * t / (1 + t))  # trailing, shifted by 2


@pytest.mark.parametrize("guidance_scale", [None, 2.0])
@pytest.mark.parametrize("kernel", [Consistency(), FlowSDE(0.7), CPS(0.8)])
def test_one_forward_of_all_chunks_gives_the_means_of_the_roll_out(kernel, guidance_scale, cache):
    generator = build("causal", cache, guidance_scale=guidance_scale)
    sampler = sampler_for(generator, kernel, schedule_for(generator, 4))
    x1, cond, noise = start(generator, range(3))
    trajectory = sampler.rollout(generator.velocity, x1, cond, noise)
    assert trajectory.steps == (0, 1, 2)
    with torch.no_grad():
        for k in trajectory.steps:
            mean = sampler.replay(generator.velocity, trajectory, k, cond).mean
            torch.testing.assert_close(mean, trajectory.means[k], atol=1e-4, rtol=1e-4)
        both = sampler.replay(generator.velocity, trajectory, (0, 2), cond).mean
        torch.testing.assert_close(both, torch.cat([trajectory.means[0], trajectory.means[2]]), atol=1e-4, rtol=1e-4)


def test_guidance_moves_from_the_null_condition_through_the_conditional_velocity(cache):
    generator = build("teacher", cache)
    x1, cond, _ = start(generator, range(3))
    t = torch.tensor([0.9, 0.5, 0.2])
    with torch.no_grad():
        conditional = generator.velocity(x1, t, cond)
        null = generator.module(x1, t, cond["tokens"], null=True)
        for scale in (0.0, 1.0, 2.5):
            generator.guidance_scale = scale
            expected = null + scale * (conditional - null)
            torch.testing.assert_close(generator.velocity(x1, t, cond), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(conditional, null)


@pytest.mark.parametrize("anchor", ["rollout", "recompute"])
def test_log_ratios_of_unchanged_weights_are_0_when_means_are_recomputed(anchor, cache):
    generator = build("student", cache)
    method = PolicyGradient(Consistency(), 4, anchor=anchor, micro_batch=2, minibatches=1)
    method.configure(generator)
    _, cond, noise = start(generator, range(3))
    rows = torch.arange(3)
    batch = Batch(cond, rows, rows, noise, noise, 0, 0, list(PROMPTS))
    rollout = method.before_update(
        generator.velocity, generator, method.rollout(generator.velocity, generator, batch), batch
    )
    for part in (slice(0, 2), slice(2, 3)):
        some = rollout.select(part)
        some = type(some)(**{**vars(some), "advantage": torch.ones(len(some))})
        for unit in method.units(rollout, batch):
            gap = method.loss(generator.velocity, some, unit, [unit])[1][f"step_{unit[0]}/gap_max"]
            assert gap == 0 if anchor == "recompute" else gap < 1e-4


def test_a_bases_training_takes_the_condition_away_from_some(cache):
    """So that guidance has a null condition that was trained."""
    fresh = VideoGenerator("teacher", **TINY, cache_dir=cache)
    fresh.build("cpu")
    trained = VideoGenerator("teacher", **{**TINY, "base_steps": 8}, cache_dir=cache)
    trained.prepare("cpu", progress=False)
    null = fresh.module.condition.null_id
    assert not torch.allclose(*(g.module.condition.embedding.weight[null] for g in (fresh, trained)), atol=1e-4)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(kind, lora, cache, tmp_path):
    generator = build(kind, cache, lora=lora)
    generator.save_pretrained(tmp_path)
    loaded = VideoGenerator.from_pretrained(tmp_path)
    x1, cond, noise = start(generator, range(2))
    first, second = (
        sampler_for(g, Consistency(), schedule_for(g, 2)).rollout(g.velocity, x1, cond, noise).x0
        for g in (generator, loaded)
    )
    assert torch.equal(first, second)
    assert loaded.kind == kind and loaded.latent_axes == "FCHW"


def test_a_student_takes_saved_weights_of_a_causal_model(cache, tmp_path):
    causal = build("causal", cache)
    causal.save_pretrained(tmp_path / "causal")
    student = VideoGenerator("student", **TINY, weights=str(tmp_path / "causal"))
    student.prepare("cpu", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(causal.trainable(), student.trainable(), strict=True))
    with pytest.raises(FileNotFoundError, match=r"nothing.*model\.safetensors"):
        VideoGenerator("student", **TINY, weights=str(tmp_path / "nothing")).prepare("cpu", progress=False)


def test_the_reference_is_the_base_and_a_students_base_is_cached(cache):
    base = VideoGenerator("student", **TINY, cache_dir=cache)
    base.prepare("cpu", progress=False)
    trained = build("student", cache)
    x1, cond, _ = start(base, range(2))
    cond, t = {**cond, "history": x1}, torch.tensor([0.3, 0.8])
    with torch.no_grad():
        expected = base.velocity(x1, t, cond)
        assert not torch.allclose(trained.velocity(x1, t, cond), expected)
        with trained.reference():
            assert torch.equal(trained.velocity(x1, t, cond), expected)
    names = {folder.name.rsplit("-", 1)[0] for folder in Path(cache).glob("moving-digits-*") if folder.is_dir()}
    assert names == {f"moving-digits-{kind}" for kind in KINDS}


def test_impossible_settings_are_named():
    with pytest.raises(ValueError, match=r"pupil.*teacher, causal, student"):
        VideoGenerator("pupil")
    with pytest.raises(ValueError, match="frames_per_chunk = 3 does not divide the 10 frames"):
        VideoGenerator("causal", frames_per_chunk=3)


# ------------------------------------------------------------------------------------------------------- whole runs


RECIPE = """
generator:
  class_path: genrl.generators.VideoGenerator
  init_args: {sizes}
prompts: {{class_path: genrl.generators.MovingDigitPrompts}}
reward:
  class_path: genrl.rewards.Compose
  init_args:
    rewards:
      motion: {{class_path: genrl.rewards.MotionMatch}}
      smooth: {{class_path: genrl.rewards.MotionSmoothness}}
algorithm:
  class_path: genrl.algorithms.{algorithm}
  init_args: {arguments}
trainer: {{iterations: 2, prompts_per_iteration: 2, group_size: 4, checkpoint_every: 1, cpu_threads: 1}}
evaluation: {{every: 2, samples_per_prompt: 1, steps: 3, train_sampler: always}}
"""
FLOW = {"kernel": {"class_path": "genrl.diffusion.FlowSDE"}, "steps": 3}
REGRESSION = {
    "kernel": {"class_path": "genrl.diffusion.Consistency"},
    "steps": 4,
    "minibatches": 1,
    "transitions_per_sample": 1,
    "surrogate": {"class_path": "genrl.objectives.ConsistencyRegression"},
}
RUNS = {
    "teacher-flow": ("teacher", "PolicyGradient", FLOW),
    "causal-flow": ("causal", "PolicyGradient", {**FLOW, "anchor": "recompute", "kl_weight": 0.01, "minibatches": 1}),
    "student-regression": ("student", "PolicyGradient", REGRESSION),
    "causal-distillation": ("causal", "Distillation", {"steps": 2}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_evaluates_saves_and_resumes_bit_for_bit(name, cache, tmp_path):
    kind, algorithm, arguments = RUNS[name]
    sizes = {**TINY, "cache_dir": str(cache)}
    if algorithm == "Distillation":
        teacher = {"class_path": "genrl.generators.VideoGenerator", "init_args": {**sizes, "kind": "teacher"}}
        arguments = {**arguments, "teacher": teacher}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(sizes={**sizes, "kind": kind}, algorithm=algorithm, arguments=arguments))
    runs = {"straight": [2], "resumed": [1, 2]}
    rows = {}
    for run, stops in runs.items():
        folder = tmp_path / run
        for iterations in stops:
            assert main(["train", str(recipe), f"run_dir={folder}", f"trainer.iterations={iterations}"]) == 0
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows[run] = [
            {k: v for k, v in row.items() if not k.startswith("time/")} for row in found if row["kind"] == "train"
        ]
    assert rows["straight"] == rows["resumed"] and len(rows["straight"]) == 2
    assert all(row["grad/norm"] > 0 for row in rows["straight"])
    gaps = [row["ratio/first_step_gap"] for row in rows["straight"] if "ratio/first_step_gap" in row]
    assert len(gaps) == (0 if algorithm == "Distillation" else 2)
    assert max(gaps, default=0) <= (0 if arguments.get("anchor") == "recompute" else 1e-4)
    model = list_checkpoints(tmp_path / "straight")[-1][1] / "model"
    assert VideoGenerator.from_pretrained(model).kind == kind
    pictures = list((tmp_path / "straight" / "samples").glob("iteration-000002*"))
    assert pictures and (tmp_path / "straight" / "report.html").is_file()
