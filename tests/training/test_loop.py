"""What a run does when nothing goes wrong."""

import json

import pytest
import torch
import toy

from genrl.algorithms import ForwardProcess, PolicyGradient
from genrl.diffusion import FixedWindow, FlowSDE, RandomWindow, Sampler, Schedule
from genrl.prompts import Prompt
from genrl.training.checkpoint import find_checkpoint, load_state
from genrl.training.errors import SetupError
from genrl.training.generator_facts import remaining_noise

METHODS = {
    "all steps": lambda: PolicyGradient(steps=4),
    "KL, window": lambda: PolicyGradient(steps=4, kl_weight=0.1, window=RandomWindow(2)),
    "recomputed anchors": lambda: PolicyGradient(steps=4, anchor="recompute", inner_epochs=2),
    "a fraction of the steps": lambda: PolicyGradient(steps=6, step_fraction=0.6, steps_per_forward=2),
    "a fraction of the steps, KL": lambda: PolicyGradient(steps=6, step_fraction=0.6, kl_weight=0.1),
    "micro-batches": lambda: PolicyGradient(steps=4, micro_batch=3, minibatches=4),
    "shared prefix": lambda: PolicyGradient(steps=6, window=FixedWindow(2, 2), group_noise=True, share_prefix=True),
    "best and worst": lambda: PolicyGradient(steps=4, keep_per_group=1, kl_weight=0.1),
    "forward process": lambda: ForwardProcess(steps=4),
    "forward process, KL, epochs": lambda: ForwardProcess(steps=4, kl_weight=0.1, draws=3, inner_epochs=2),
}


def keep_samples(algorithm):
    """Collect the roll-outs of a run in the order of their sample numbers."""
    kept = []
    rollout = algorithm.rollout

    def wrapped(*arguments):
        made = rollout(*arguments)
        kept.append(made)
        return made

    algorithm.rollout = wrapped
    return kept


@pytest.mark.parametrize("method", ["all steps", "shared prefix", "forward process"])
def test_samples_and_rewards_do_not_depend_on_the_rollout_batch(tmp_path, method):
    found = {}
    for size in (None, 5, 16):
        algorithm = METHODS[method]()
        kept = keep_samples(algorithm)
        toy.make_loop(tmp_path / str(size), algorithm, trainer={"iterations": 1, "rollout_batch": size}).run()
        order = torch.cat([k.rows for k in kept]).argsort()
        row = toy.rows(tmp_path / str(size), "train")[0]
        found[size] = torch.cat([k.x0 for k in kept])[order], row["reward/bright"], row["reward/bright_std"]
        assert len(kept) == (4 if size == 5 else 1)
    for size in (5, 16):
        assert torch.equal(found[None][0], found[size][0])
        assert found[None][1:] == found[size][1:]


def test_rewards_are_computed_while_the_next_batch_is_drawn(tmp_path):
    """Ten batches of a 0.03 s sampler and a 0.03 s reward take less than the sum of both."""
    import time

    class Slow(toy.HalfBrightness):
        def __call__(self, media, prompts, metadata):
            time.sleep(0.03)
            return super().__call__(media, prompts, metadata)

    algorithm = PolicyGradient(steps=2)
    rollout = algorithm.rollout

    def slow(*arguments):
        time.sleep(0.03)
        return rollout(*arguments)

    algorithm.rollout = slow
    toy.make_loop(tmp_path, algorithm, reward=Slow(), trainer={"iterations": 2, "rollout_batch": 1}).run()
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-2]
    assert last["kind"] == "train" and last["time/rollout"] > 16 * 0.03
    assert last["time/reward"] < 0.5 * 16 * 0.03  # what is left to wait for


@pytest.mark.parametrize("method", METHODS)
def test_a_dry_run_trains_nothing_and_foretells_the_cost_and_size_of_a_real_run(tmp_path, method):
    loop = toy.make_loop(tmp_path / "dry", METHODS[method](), trainer={"iterations": 1})
    table = loop.dry_run()
    assert not (tmp_path / "dry").exists()
    assert torch.equal(toy.weights(loop), toy.weights_of(toy.ToyGenerator()))
    assert table["parameters"] == table["trainable_parameters"] == 16 * 28 + 16 * 16 + 16
    real = toy.make_loop(tmp_path / "real", METHODS[method](), trainer={"iterations": 1})
    real.run()
    counted = toy.rows(tmp_path / "real", "train")[0]["cost/forward_equivalents"]
    assert counted == table["forwards_per_iteration"] + 3 * table["forward_backwards_per_iteration"]
    per = real.algorithm.forwards_per_sample(group_size=4)
    assert counted == 16 * (per["sample"] + per["no_grad"] + 3 * per["train"])
    assert table["updates_per_iteration"] == real.updater.updates


def test_a_dry_run_refuses_samples_that_do_not_split_over_the_processes_to_come(tmp_path):
    loop = toy.make_loop(tmp_path, PolicyGradient(steps=3), trainer={"processes": 3})
    with pytest.raises(SetupError, match="does not split over 3 processes"):
        loop.dry_run()


@pytest.mark.parametrize("method", METHODS)
def test_the_counted_cost_is_the_number_of_rows_that_the_network_saw(tmp_path, method):
    generator = toy.ToyGenerator()
    loop = toy.make_loop(tmp_path, METHODS[method](), generator=generator, trainer={"iterations": 2})
    counts = {"forward": 0}
    forward = generator.module.forward

    def counting(x, t, words):
        counts["forward"] += len(x) * (3 if torch.is_grad_enabled() else 1)
        return forward(x, t, words)

    generator.module.forward = counting
    evaluate = loop._evaluate

    def uncounted(*arguments, **options):
        before = counts["forward"]
        evaluate(*arguments, **options)
        counts["forward"] = before

    loop._evaluate = uncounted
    loop.run()
    assert counts["forward"] == loop.cost


def test_evaluation_uses_the_average_says_so_and_leaves_the_live_weights_alone(tmp_path):
    found = {}
    for decay in (None, 0.9):
        loop = toy.make_loop(
            tmp_path / str(decay), PolicyGradient(steps=4), trainer={"ema_decay": decay, "iterations": 3},
            evaluation={"every": 1, "samples_per_prompt": 4},
        )  # fmt: skip
        loop.run()
        found[decay] = toy.rows(tmp_path / str(decay), "eval"), toy.weights(loop)
        if decay:
            with loop.updater.ema.active():
                own = loop._draw(4)
            last = found[decay][0][-1]
            assert last["eval/reward"] == pytest.approx(
                float(toy.HalfBrightness()(own.media, own.texts, own.metadata).double().mean()), abs=1e-9
            )
    assert torch.equal(found[None][1], found[0.9][1])  # the average does not change what is trained
    assert {r["eval/uses_ema"] for r in found[None][0]} == {0} and {r["eval/uses_ema"] for r in found[0.9][0]} == {1}
    assert found[None][0][0]["eval/reward"] == found[0.9][0][0]["eval/reward"]
    assert found[None][0][2]["eval/reward"] != found[0.9][0][2]["eval/reward"]


def test_a_checkpoint_holds_live_and_averaged_weights_and_exports_the_average(tmp_path):
    loop = toy.make_loop(tmp_path, PolicyGradient(steps=4), trainer={"ema_decay": 0.9})
    loop.run()
    folder = find_checkpoint(tmp_path)
    state = load_state(folder)
    live = torch.cat([v.flatten() for v in state["weights"].values()])
    average = torch.cat([v.flatten() for v in state["ema"]["values"]])
    assert torch.equal(live, toy.weights(loop)) and not torch.equal(live, average)
    assert torch.equal(toy.weights_of(toy.ToyGenerator.from_pretrained(folder / "model")), average)


def test_the_set_of_trained_parameters_is_the_same_before_and_after(tmp_path):
    generator = toy.ToyGenerator()
    generator.module.bias.requires_grad_(False)
    generator.weights = toy.TrainableWeights(generator.module)
    before = [p.requires_grad for p in generator.module.parameters()]
    frozen = generator.module.bias.detach().clone()
    loop = toy.make_loop(
        tmp_path, PolicyGradient(steps=4, kl_weight=0.1), generator=generator, trainer={"ema_decay": 0.9}
    )
    loop.run()
    assert [p.requires_grad for p in generator.module.parameters()] == before
    held = {id(p) for group in loop.updater.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in generator.trainable()}
    assert torch.equal(generator.module.bias, frozen)


def test_equal_texts_of_different_rows_are_different_groups(tmp_path):
    class Twins:
        """Ten prompts of one text, half of which want the other side bright."""

        def __init__(self):
            self.train = [Prompt("p0", {"half": k % 2, "level": float(k)}) for k in range(10)]
            self.held_out = self.train[:2]

    class Level(toy.HalfBrightness):
        """A level of its own for every row: within a merged group it would swamp everything else."""

        def __call__(self, media, prompts, metadata):
            return super().__call__(media, prompts, metadata) + torch.tensor([m["level"] for m in metadata])

    seen = []
    algorithm = PolicyGradient(steps=4)
    original = algorithm.advantages
    algorithm.advantages = lambda rewards, *rest: seen.append(rewards["bright"]) or original(rewards, *rest)
    toy.make_loop(tmp_path, algorithm, prompts=Twins(), reward=Level(), trainer={"iterations": 1}).run()
    (table,) = seen
    assert table.shape == (4, 4)
    assert (table.std(1) < 0.2).all() and len(table.mean(1).round().unique()) == 4


def test_the_order_of_samples_and_rewards_is_that_of_their_prompts(tmp_path):
    """Rewards reach the sample that they were given for, through minibatches and groups."""
    kept = []

    class Remember(toy.HalfBrightness):
        def __call__(self, media, prompts, metadata):
            kept.append((media, list(prompts)))
            return super().__call__(media, prompts, metadata)

    tables = []
    algorithm = PolicyGradient(steps=4, minibatches=2)
    original = algorithm.advantages
    algorithm.advantages = lambda rewards, w, ids: tables.append((rewards["bright"], ids)) or original(rewards, w, ids)
    samples = keep_samples(algorithm)
    toy.make_loop(tmp_path, algorithm, reward=Remember(), trainer={"iterations": 1}).run()
    (table, ids), made = tables[0], samples[0]
    for i, row in enumerate(made.rows.tolist()):
        p, g = divmod(row, 4)
        word = int(made.cond["words"][i])
        assert word == int(ids[p])
        image = torch.sigmoid(made.x0[i])[None]
        expected = toy.HalfBrightness()(image, ["?"], [{"half": word % 2}])
        assert float(table[p, g]) == pytest.approx(float(expected), abs=1e-6)


def test_files_of_a_run(tmp_path):
    loop = toy.make_loop(
        tmp_path, PolicyGradient(steps=4), trainer={"iterations": 4, "preview_every": 2, "keep_checkpoints": 2},
        evaluation={"every": 0},
    )  # fmt: skip
    loop.run()
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    pictures = sorted(n for n in names if n.startswith("samples/"))
    assert pictures == [f"samples/iteration-{i:06d}.png" for i in (0, 2, 4)]
    assert {"run.json", "summary.json", "metrics.jsonl"} <= names
    checkpoints = {n.split("/")[1] for n in names if n.startswith("checkpoints/")}
    assert checkpoints - {"best"} == {"step-000003", "step-000004"}
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["times"] == [1, 0.75, 0.5, 0.25, 0] and run["trained_steps"] == [0, 1, 2]
    assert run["method"] == "PolicyGradient / FlowSDE / PPOClip" and run["processes"] == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["forward_equivalents"] == loop.cost


def test_a_run_is_a_function_of_its_seed(tmp_path):
    def rows(name, seed):
        toy.make_loop(tmp_path / name, PolicyGradient(steps=4), seed=seed).run()
        return toy.rows(tmp_path / name, "train")

    assert rows("a", 0) == rows("b", 0)
    assert rows("a", 0)[0]["reward/bright"] != rows("c", 1)[0]["reward/bright"]


def test_a_weight_zero_reward_is_logged_and_not_learnt(tmp_path):
    from genrl.rewards import Compose

    results = []
    for rewards, weights in [
        ({"bright": toy.HalfBrightness()}, None),
        ({"bright": toy.HalfBrightness(), "dark": toy.Darkness()}, {"dark": 0.0}),
    ]:
        loop = toy.make_loop(tmp_path / str(len(rewards)), PolicyGradient(steps=4), reward=Compose(rewards, weights))
        loop.run()
        results.append(toy.weights(loop))
    assert torch.equal(*results)
    assert "reward/dark" in toy.rows(tmp_path / "2", "train")[0]


def test_samples_above_a_cap_are_equal_to_the_advantage(tmp_path):
    from genrl.rewards import Compose

    loop = toy.make_loop(
        tmp_path, PolicyGradient(steps=4), reward=Compose({"bright": toy.HalfBrightness()}, caps={"bright": 0.1})
    )
    assert loop.run().weight_change == 0
    assert toy.rows(tmp_path, "train")[0]["reward/bright"] > 0.3  # what is logged is not capped


def test_bfloat16_keeps_float32_weights_and_ratios(tmp_path):
    toy.make_loop(tmp_path / "before", PolicyGradient(steps=4), trainer={"iterations": 1}).run()  # in another precision
    loop = toy.make_loop(tmp_path, PolicyGradient(steps=4), trainer={"mixed_precision": "bf16", "iterations": 2})
    loop.run()
    assert toy.weights(loop).dtype == torch.float32
    assert toy.rows(tmp_path, "train")[0]["ratio/first_step_gap"] == 0


def test_noise_that_a_step_leaves_in_the_samples_is_noted():
    grid = torch.tensor([1.0, 0.6, 0.3, 0.003, 0.0])  # as pipelines have it
    noisy = Sampler(FlowSDE(), Schedule(grid))
    (note,) = remaining_noise(noisy, seed=0)
    s = 0.7 * (0.3 * 0.297 / 0.7) ** 0.5
    assert f"step 2 adds noise of {s:.2g} and ends at t = 0.003, where the path has 0.003" in note
    assert remaining_noise(Sampler(FlowSDE(), Schedule(grid), FixedWindow(0, 2)), seed=0) == []
    assert remaining_noise(Sampler(FlowSDE(), Schedule.uniform(10)), seed=0) == []
