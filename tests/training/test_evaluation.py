"""Evaluation: the same noise every time, honest intervals, and the same numbers from a finished run."""

import json

import pytest
import torch
import toy
import yaml

from genrl.algorithms import PolicyGradient
from genrl.cli import main
from genrl.config import build, load_config
from genrl.diffusion import FlowSDE, Sampler, Schedule
from genrl.prompts import Prompt
from genrl.report import write_report
from genrl.report.prompts import prompt_histories
from genrl.rewards import Compose, Gate, RewardError
from genrl.training import Loop
from genrl.training.errors import SetupError
from genrl.training.evaluation import (
    ROWS_PER_PROMPT,
    SampleSet,
    deterministic_sampler,
    evaluate_run,
    image_grid,
    load_run,
    measure,
    sample_run,
    sample_set,
    save_evaluation,
    save_image,
)


def draw(generator=None, sampler=None, per_prompt=5, seed=1, batch=100, prompts=None):
    generator = toy.ToyGenerator() if generator is None else generator
    sampler = deterministic_sampler(generator, 3) if sampler is None else sampler
    prompts = toy.ToyPrompts().held_out if prompts is None else prompts
    return sample_set(generator, sampler, prompts, per_prompt, seed=seed, batch=batch, device="cpu")


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 7, 20])
def test_samples_do_not_depend_on_the_batch_size(batch, noisy):
    sampler = Sampler(FlowSDE(), Schedule.uniform(3)) if noisy else None
    # Rounding of one float32 step: torch computes the last few elements of a tensor by other instructions.
    torch.testing.assert_close(
        draw(sampler=sampler, batch=batch).media, draw(sampler=sampler).media, rtol=0, atol=3e-7
    )


def test_a_sample_keeps_its_noise_when_more_are_drawn_and_whatever_the_weights_are():
    few, many = draw(per_prompt=2), draw(per_prompt=5)
    assert torch.equal(few.media.reshape(4, 2, -1), many.media.reshape(4, 5, -1)[:, :2])
    seen = {}
    for name, shift in [("before", 0.0), ("after", 0.3)]:
        generator = toy.ToyGenerator()
        with torch.no_grad():
            generator.module.bias.add_(shift)
        start = generator.initial_latents
        noises = []

        def spy(cond, noise, start=start, noises=noises):
            noises.append(start(cond, noise))
            return noises[-1]

        generator.initial_latents = spy
        draw(generator)
        seen[name] = torch.cat(noises)
    assert torch.equal(seen["before"], seen["after"])


def test_seeds_prompts_and_samples_have_different_noise():
    one, two = draw(seed=1).media, draw(seed=2).media
    assert len(torch.cat([one, two]).flatten(1).unique(dim=0)) == 40


def test_samples_come_with_their_prompts_in_order():
    samples = draw(per_prompt=2)
    assert samples.texts == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]
    assert [m["half"] for m in samples.metadata] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert samples.media.shape == (8, 1, 4, 4)


def test_more_samples_than_there_is_noise_for_are_refused():
    with pytest.raises(ValueError, match=str(ROWS_PER_PROMPT)):
        draw(per_prompt=ROWS_PER_PROMPT + 1)



class Count:
    """A metric of a whole set."""

    def measure(self, media, prompts, metadata):
        return {"count_n": float(len(media)), "other": 1.0}


def test_measured_values_have_the_names_of_rewards_and_gauges():
    samples = draw()
    found = measure(samples, toy.HalfBrightness(), {"judge": toy.Darkness(), "count": Count()})
    for name in ("reward", "bright", "judge"):
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
    assert found["reward"] == found["bright"] and found["judge"] == pytest.approx(1 - float(samples.media.mean()))
    assert found["count_n"] == 20 and found["count_other"] == 1
    assert found["stats/brightness"] == pytest.approx(float(samples.media.mean()), abs=1e-6)


class Brightness:
    range = (0.0, 1.0)

    def __call__(self, media, prompts, metadata):
        return media.flatten(1).mean(1)


class Both:
    """Two numbers at once."""

    range = (0.0, 1.0)

    def __call__(self, media, prompts, metadata):
        mean = media.flatten(1).mean(1)
        return {"light": mean, "dark": 1 - mean}


def test_every_number_of_a_gauge_has_its_own_name():
    """Whether the gauge returns them itself or composes others."""
    samples = draw()
    mean = float(samples.media.mean())
    for gauge in (Both(), Compose({"light": Brightness(), "dark": toy.Darkness()})):
        found = measure(samples, toy.HalfBrightness(), {"views": gauge})
        assert found["views/light"] == pytest.approx(mean) and found["views/dark"] == pytest.approx(1 - mean)
        assert "views" not in found and found["views/dark_low"] < found["views/dark"] < found["views/dark_high"]


@pytest.mark.parametrize(
    ("rewards", "gauges", "message"),
    [
        ({"reward": toy.Darkness(), "b": toy.Darkness()}, {}, "named 'reward'"),
        ({"total": toy.Darkness(), "b": toy.Darkness()}, {}, "named 'total'"),
        ({"stats": Both()}, {}, "named 'stats'"),
        ({"a": toy.Darkness()}, {"a": toy.Darkness()}, "'a' is the name of a reward"),
        ({"a": toy.Darkness()}, {"reward": toy.Darkness()}, "'reward' is taken"),
        ({"a": toy.Darkness()}, {"x/y": toy.Darkness()}, "'x/y' is taken, or has a '/'"),
    ],
)
def test_names_that_would_hide_another_number_are_refused(tmp_path, rewards, gauges, message):
    loop = toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=Compose(rewards), evaluation={"gauges": gauges})
    with pytest.raises(SetupError, match=message):
        loop.run()


def test_samples_that_were_not_scored_are_counted(tmp_path):
    class Half:
        name = "half"

        def __call__(self, media, prompts, metadata):
            values = media.flatten(1).mean(1)
            return torch.where(torch.arange(len(values)) % 2 == 0, values, torch.nan)

    assert measure(draw(), Half(), {})["stats/unscored_share"] == 0.5
    assert "stats/unscored_share" not in measure(draw(), toy.HalfBrightness(), {})
    toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=Half(), trainer={"iterations": 1}).run()
    told = [row["message"] for row in toy.rows(tmp_path, "event")]
    assert sum("50% of the held-out samples were not scored" in message for message in told) == 1


def test_a_reward_that_returns_other_names_for_another_batch_is_named():
    def reward(media, prompts, metadata):
        return {f"question_{i}": media.flatten(1).mean(1) for i in range(len(media))}

    samples = SampleSet(torch.rand(5, 1, 2, 2), [Prompt("p", {})] * 5, 5)
    with pytest.raises(RewardError, match="'reward/question_2' was returned for some batches and not for others"):
        measure(samples, reward, {}, batch=3)


# ---------------------------------------------------------------------------------------------------- pictures


def test_a_grid_shows_every_image_in_its_place():
    images = torch.arange(6.0).reshape(2, 3, 1, 1, 1).expand(2, 3, 1, 8, 8) / 10
    grid = image_grid(images, gap=1, least=8)
    assert grid.shape == (1, 2 * 9 + 1, 3 * 9 + 1)
    for r in range(2):
        for c in range(3):
            assert torch.equal(grid[0, 1 + 9 * r : 9 + 9 * r, 1 + 9 * c : 9 + 9 * c], images[r, c, 0])
    assert (grid[0, 0] == 0.5).all()
    enlarged = image_grid(images, gap=0, least=32)
    assert enlarged.shape == (1, 64, 96) and torch.equal(enlarged[0, :32, 32:64], torch.full((32, 32), 0.1))


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_written_as_they_are(tmp_path, channels):
    from PIL import Image

    picture = torch.arange(channels * 6.0).reshape(channels, 2, 3) / 20
    save_image(picture, tmp_path / "sub" / "a.png")
    with Image.open(tmp_path / "sub" / "a.png") as image:
        assert image.size == (3, 2) and image.mode == ("L" if channels == 1 else "RGB")
        last = image.getpixel((2, 1))
    expected = (picture[:, 1, 2] * 255).round().int().tolist()
    assert (list(last) if channels == 3 else [last]) == expected
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["a.png"]


# ----------------------------------------------------------------------------------------------- finished runs


def configured(folder, parts=None, **changes):
    """A finished run that was started from a configuration file."""
    tree = {
        "run_dir": str(folder / "run"),
        "generator": {"class_path": "toy.ToyGenerator", "init_args": {"hidden": 12}},
        "prompts": {"class_path": "toy.ToyPrompts"},
        "reward": {"class_path": "toy.HalfBrightness"},
        "algorithm": {"class_path": "genrl.algorithms.PolicyGradient", "init_args": {"steps": 4}},
        "trainer": {
            "iterations": 4, "prompts_per_iteration": 4, "group_size": 4, "learning_rate": 0.01, "device": "cpu",
            "checkpoint_every": 2, "tensorboard": False, "cpu_threads": 1, **changes,
        },
        "evaluation": {
            "every": 2, "samples_per_prompt": 8, "steps": 3, "batch": 7, "train_sampler": "always",
            "gauges": {} if parts else {"judge": {"class_path": "toy.Darkness"}},
        },
        **(parts or {}),
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    config = load_config(path)
    Loop(**build(config), config=config.raw).run()
    return folder / "run"


@pytest.mark.parametrize("average", [None, 0.8])
def test_a_finished_run_evaluates_to_its_own_last_numbers_bit_for_bit(tmp_path, average):
    run = configured(tmp_path, ema_decay=average)
    by_iteration = {row["iteration"]: row for row in toy.rows(run, "eval")}
    for checkpoint, iteration in [("last", 4), ("step-000002", 2)]:
        for sampler, prefix in [("ode", "eval/"), ("train", "eval_train_sampler/")]:
            found = evaluate_run(run, checkpoint, sampler=sampler)
            assert found["iteration"] == iteration
            assert found["weights"] == ("raw" if average is None else "ema")
            row = {k.removeprefix(prefix): v for k, v in by_iteration[iteration].items() if k.startswith(prefix)}
            row.pop("weight_change", None), row.pop("uses_ema", None)
            assert len(row) > 8 and {k: found[k] for k in row} == row
    if average is not None:
        assert evaluate_run(run, weights="raw")["reward"] != evaluate_run(run, weights="ema")["reward"]
    else:
        with pytest.raises(ValueError, match=r"no moving average; set trainer.ema_decay"):
            evaluate_run(run, weights="ema")


def test_an_evaluation_is_kept_in_a_file_that_says_with_what_it_was_made(tmp_path, capsys):
    run = configured(tmp_path)
    assert main(["evaluate", str(run)]) == 0
    path = run / "evaluation-step-000004-ode.json"
    assert f"written: {path}" in capsys.readouterr().out
    written, found = json.loads(path.read_text()), evaluate_run(run)
    assert {"genrl", "torch", "python"} <= set(written.pop("versions"))
    assert written == found
    out = tmp_path / "new" / "mine.json"
    for _ in range(2):  # the second replaces the first
        assert main(["evaluate", str(run), "--checkpoint", "step-000002", "--sampler", "train", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["iteration"] == 2
    assert save_evaluation({**found, "judge": float("nan")}, run, "ode") == path
    assert json.loads(path.read_text())["judge"] is None


def test_other_seeds_steps_and_sizes_can_be_asked_for_and_are_stated(tmp_path):
    run = configured(tmp_path)
    base = evaluate_run(run)
    other = evaluate_run(run, samples_per_prompt=3, steps=5, seed=0)
    assert (other["samples"], other["seed"]) == (12, 0)
    assert "5 steps" in other["sampler"] and "Euler" in other["sampler"]
    assert other["reward"] != base["reward"] and base["seed"] == 1234
    with pytest.raises(ValueError, match=r"'sde' is unknown.*'ode'.*'train'"):
        evaluate_run(run, sampler="sde")
    with pytest.raises(FileNotFoundError, match=r"step-000002, step-000004"):
        evaluate_run(run, "step-000003")


def test_sampling_twice_gives_the_same_pictures_and_another_seed_others(tmp_path):
    run = configured(tmp_path)
    grids = [sample_run(run, n=2, out=tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    data = [g.read_bytes() for g in grids]
    assert data[0] == data[1] != data[2]
    names = sorted(p.name for p in (tmp_path / "0").iterdir())
    assert names == ["grid.png", *[f"prompt{p:03d}-{j:03d}.png" for p in range(4) for j in range(2)]]
    assert sample_run(run, prompts=["p7"], n=1) == run / "generated" / "grid.png"
    with pytest.raises(ValueError, match=r"'p77' is unknown"):
        sample_run(run, prompts=["p77"])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        sample_run(run, n=0)


class ToyVideos(toy.ToyGenerator):
    """The toy's picture fades to black over six frames."""

    def decode(self, x0):
        return super().decode(x0)[:, None] * torch.linspace(1, 0, 6)[:, None, None, None]


class FirstFrame(toy.HalfBrightness):
    def __call__(self, media, prompts, metadata):
        return super().__call__(media[:, 0], prompts, metadata)


def test_videos_are_previewed_as_strips_and_films_while_training_and_when_sampled(tmp_path):
    video = {"generator": {"class_path": f"{__name__}.ToyVideos"}, "reward": {"class_path": f"{__name__}.FirstFrame"}}
    run = configured(tmp_path, parts=video, iterations=2)
    names = sorted(p.name for p in (run / "samples").iterdir())
    assert names == [f"iteration-{i:06d}.{end}" for i in (0, 2) for end in ("png", "webp")]
    row = toy.rows(run, "eval")[0]
    assert row["eval/diversity_pairwise_distance"] > 0 and row["eval/stats/dark_share"] >= 1 / 6
    assert "data:image/webp;base64," in write_report(run).read_text()
    folder = sample_run(run, n=2, out=tmp_path / "out").parent
    films = [f"prompt{p:03d}-{j:03d}.webp" for p in range(4) for j in range(2)]
    assert sorted(p.name for p in folder.iterdir()) == ["grid.png", "grid.webp", *films]


def test_a_loaded_run_has_the_weights_of_its_checkpoint_and_the_threads_of_its_training(tmp_path):
    run = configured(tmp_path)
    torch.set_num_threads(2)
    try:
        loaded = load_run(run)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
    exported = toy.ToyGenerator.from_pretrained(loaded["checkpoint"] / "model")
    assert torch.equal(toy.weights_of(loaded["generator"]), toy.weights_of(exported))
    assert not torch.equal(toy.weights_of(loaded["generator"]), toy.weights_of(toy.ToyGenerator(hidden=12)))


def test_a_resumed_run_may_be_longer_and_is_refused_with_another_network(tmp_path):
    run = configured(tmp_path)
    config = load_config(run / "config.yaml", ["trainer.iterations=5"])
    assert Loop(**build(config), config=config.raw).run().iteration == 5
    before = (run / "config.yaml").read_text()
    config = load_config(run / "config.yaml", ["generator.hidden=8"])
    with pytest.raises(RuntimeError, match=r"another experiment \(generator.hidden: \d+ -> 8\)"):
        Loop(**build(config), config=config.raw).run()
    assert (run / "config.yaml").read_text() == before


def test_the_last_evaluation_of_a_run_is_of_the_loop_that_made_it(tmp_path):
    """The loop and `sample_set` draw the same samples."""
    loop = toy.make_loop(tmp_path, PolicyGradient(steps=4), evaluation={"samples_per_prompt": 3})
    summary = loop.run()
    samples = draw(loop.generator, deterministic_sampler(loop.generator, 2), per_prompt=3, seed=1234)
    assert summary.after["eval/reward"] == measure(samples, loop.reward, {})["reward"]


def test_rewards_by_prompt_average_to_the_reward_and_a_resumed_run_has_none_twice(tmp_path):
    reward = Compose({"bright": toy.HalfBrightness(), "dark": toy.Darkness()}, weights={"dark": 0.5})
    settings = {"trainer": {"iterations": 2}, "evaluation": {"every": 1}, "reward": reward}
    toy.make_loop(tmp_path, PolicyGradient(steps=3), **settings).run()
    settings["trainer"]["iterations"] = 4
    toy.make_loop(tmp_path, PolicyGradient(steps=3), **settings).run()
    records = [json.loads(line) for line in (tmp_path / "prompt_rewards.jsonl").read_text().splitlines()]
    held_out, train = ([r for r in records if r["kind"] == kind] for kind in ("eval", "train"))
    assert [r["iteration"] for r in held_out] == [0, 1, 2, 3, 4] and [r["iteration"] for r in train] == [1, 2, 3, 4]
    assert held_out[0]["text"] == {"0": "p0", "1": "p1", "2": "p2", "3": "p3"}
    for kind, name, found in (("eval", "eval/reward", held_out), ("train", "reward/total", train)):
        for row, record in zip(toy.rows(tmp_path, kind), found, strict=True):
            assert sum(record["reward"]) / 4 == pytest.approx(row[name], abs=1e-5)
    assert all(len(set(r["prompt"])) == 4 for r in train)
    assert len(prompt_histories(tmp_path, "eval")) == 4


def test_gates_and_held_out_rewards_in_a_run(tmp_path):
    rewards = {"bright": toy.HalfBrightness(), "dark": toy.Darkness(), "judge": toy.Darkness()}
    reward = Compose(rewards, gates={"bright": Gate("dark", at_least=0.5)}, held_out=["judge"])
    toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=reward, trainer={"iterations": 1}).run()
    (row,) = toy.rows(tmp_path, "train")
    assert 0 < row["gate/bright"] < 1 and "reward/judge" not in row and "gate/dark" not in row
    first = toy.rows(tmp_path, "eval")[0]
    assert first["eval/judge"] == first["eval/dark"]
    assert first["eval/reward"] < first["eval/bright"] + first["eval/dark"]


def test_diversity_is_measured_unless_another_set_metric_is():
    samples = draw()
    assert measure(samples, toy.HalfBrightness(), {})["diversity_pairwise_distance"] > 0
    found = measure(samples, toy.HalfBrightness(), {"count": Count()})
    assert "count_n" in found and "diversity_pairwise_distance" not in found


def test_evaluation_uses_the_shift_of_the_grid_that_was_trained_on(tmp_path, monkeypatch):
    seen = []

    def record(generator, steps, shift):
        seen.append((steps, shift))
        return deterministic_sampler(generator, steps, shift)

    monkeypatch.setattr("genrl.training.loop.deterministic_sampler", record)
    toy.make_loop(tmp_path, PolicyGradient(steps=3, shift=3.0), trainer={"iterations": 1}).run()
    assert seen and {shift for _, shift in seen} == {3.0}


def test_a_reward_is_given_no_more_than_a_batch_at_once():
    sizes = []

    def reward(media, prompts, metadata):
        sizes.append(len(media))
        return media.flatten(1).mean(1)

    media = torch.rand(7, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    samples = SampleSet(media, [Prompt("p", {})] * 7, 7)
    whole, parts = measure(samples, reward, {}), measure(samples, reward, {}, batch=3)
    assert sizes == [7, 3, 3, 1] and parts["reward"] == pytest.approx(whole["reward"], rel=1e-6)
