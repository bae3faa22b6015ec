"""Steered sampling and its training: equal to DDPO when switched off, exact on a Gaussian, complete lineages."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import toy

from genrl.algorithms import FeynmanKac, LateSteps, NestedSteps, ParticleSteering, PolicyGradient
from genrl.algorithms.base import Batch
from genrl.diffusion import CPS, DDIM, Euler, FlowSDE, RowNoise, Sampler, Schedule
from genrl.objectives import GRPO, RunningAdvantage
from genrl.prompts import Prompt

STEPS = 8
KERNELS = {"vp": DDIM(1.0), "rectified_flow": FlowSDE(0.7)}


def started(path="rectified_flow", seed=1):
    generator = toy.ToyGenerator(path=path)
    with torch.no_grad():
        generator.module.second.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    generator.weights = toy.TrainableWeights(generator.module)
    return generator


def brightness(media, prompts):
    return 10 * media.mean((1, 2, 3))


def batch_of(generator, rows, group_size=8, score=brightness, iteration=0):
    rows = torch.as_tensor(rows)
    groups = rows // group_size
    prompts = [Prompt(f"p{int(g) % 10}", {"half": int(g) % 2}) for g in groups]
    key = (0, "rollout", iteration)
    return Batch(
        cond=generator.encode([p.text for p in prompts]),
        rows=rows,
        groups=groups,
        noise=RowNoise.of(key, rows),
        group_noise=RowNoise.of((*key, "group"), groups),
        seed=0,
        iteration=iteration,
        prompts=prompts,
        score=score,
    )


def made(steering, path="rectified_flow", kernel=None, **settings):
    generator = started(path)
    algorithm = FeynmanKac(
        steering, settings.pop("trained", None), kernel=kernel or KERNELS[path], steps=STEPS, **settings
    )
    algorithm.configure(generator)
    return algorithm, generator


def equal(a, b):
    assert torch.equal(a.x0, b.x0) and a.trajectory.steps == b.trajectory.steps
    for k in a.trajectory.states:
        assert torch.equal(a.trajectory.states[k], b.trajectory.states[k])
    for k in a.trajectory.means:
        assert torch.equal(a.trajectory.means[k], b.trajectory.means[k])


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("steering", [None, ParticleSteering(strength=0.0), ParticleSteering(particles=1)])
def test_without_strength_samples_are_those_of_the_policy_gradient(steering, path):
    algorithm, generator = made(steering, path)
    plain = PolicyGradient(KERNELS[path], steps=STEPS)
    plain.configure(generator)
    batch = batch_of(generator, range(16))
    equal(algorithm.rollout(generator.velocity, generator, batch), plain.rollout(generator.velocity, generator, batch))


@pytest.mark.parametrize("steering", [None, ParticleSteering(particles=1)])
def test_switched_off_it_is_ddpo_to_the_last_bit(tmp_path, steering):
    off = {"steering": steering, "trained": None, "keep_best": None, "keep_worst": None}
    common = {"kernel": DDIM(1.0), "steps": STEPS, "minibatches": 2, "inner_epochs": 2}
    runs = []
    for name, algorithm in [
        ("ddpo", PolicyGradient(advantage=RunningAdvantage(), **common)),
        ("off", FeynmanKac(advantage=RunningAdvantage(), **off, **common)),
    ]:
        loop = toy.make_loop(tmp_path / name, algorithm, generator=started("vp"))
        loop.run(resume="never")
        runs.append((toy.weights(loop), toy.rows(tmp_path / name)))
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert not torch.equal(runs[0][0], toy.weights_of(started("vp")))


@pytest.mark.parametrize("branch_at", [0, 2])
@pytest.mark.parametrize("kernel", [DDIM(1.0), CPS(0.8), FlowSDE(0.7)], ids=lambda k: type(k).__name__)
def test_surviving_lineages_are_complete(kernel, branch_at):
    """Replaying a stored transition gives its stored mean, and its noise is some particle's noise of that step."""
    algorithm, generator = made(ParticleSteering(4, 20.0, "diff", branch_at=branch_at), kernel=kernel)
    batch = batch_of(generator, range(16))
    rollout = algorithm.rollout(generator.velocity, generator, batch)
    sampler, trajectory = algorithm.train_sampler(), rollout.trajectory
    assert algorithm._seen[0]["resampled"] > 0.3 and algorithm._seen[0]["ancestors"] < 0.8
    for k in trajectory.steps:
        replayed = sampler.replay(generator.velocity, trajectory, k, batch.cond)
        assert torch.equal(replayed.mean, trajectory.means[k])
        noise = (trajectory.states[k + 1] - trajectory.means[k]) / sampler.step(k, True).s
        drawn = batch.noise(k, tuple(noise.shape))
        gap = (noise[:, None] - drawn[None]).flatten(2).abs().amax(2).amin(1)  # nearest row
        assert float(gap.max()) < 1e-4
    last = trajectory.steps[-1]  # the end follows from the last stored state by the ODE step into the data
    end = sampler.transition(generator.velocity, trajectory.states[last + 1], sampler.step(last + 1, False), batch.cond)
    assert torch.equal(end.mean, rollout.x0)
    assert rollout.evaluations == 16 * (STEPS - branch_at) + 4 * branch_at
    if branch_at:
        shared = trajectory.states[branch_at].reshape(4, 4, -1)
        assert bool((shared == shared[:, :1]).all())


@pytest.mark.parametrize("potential", ["diff", "max", "add", "rt"])
def test_a_linear_reward_shifts_a_gaussian_by_its_strength(potential):
    """The toy's sampler gives N(0, q I) with q from its steps; with r = <c, x> the tilted law is N(lam q c, q I)."""
    generator, systems, size, lam = toy.ToyGenerator(), 50, 128, 1.0
    sampler, q = Sampler(DDIM(1.0), Schedule.uniform(12)), 1.0
    for k in range(12):
        step = sampler.step(k, k in sampler.eligible)
        slope = (2 * step.t - 1) / ((1 - step.t) ** 2 + step.t**2)
        q = (step.c_x + step.c_v * slope) ** 2 * q + step.s**2
    c = torch.zeros(toy.SHAPE)
    c[0, 1, 2], c[0, 3, 3] = 0.8, -0.6
    rows = range(systems * size)
    noise = RowNoise.of((3, "tilt"), rows)
    steered = ParticleSteering(size, lam, potential, resample_at=[6, 10]).rollout(
        sampler,
        generator.velocity,
        noise.initial((len(rows), *toy.SHAPE)),
        generator.encode(["p0"] * len(rows)),
        noise,
        lambda x, places: (x * c).flatten(1).sum(1),
    )
    x0 = steered.trajectory.x0
    torch.testing.assert_close(x0.mean(0), lam * q * c, atol=0.1, rtol=0)
    assert float(x0.var(0).mean()) == pytest.approx(q, abs=0.1)
    torch.testing.assert_close(steered.rewards, (x0 * c).flatten(1).sum(1).reshape(systems, size))


def test_constant_rewards_move_nothing(tmp_path):
    class Constant:
        range = (0.0, 1.0)

        def __call__(self, media, prompts, metadata):
            return torch.full((len(media),), 0.5)

    algorithm = FeynmanKac(ParticleSteering(2), steps=STEPS, minibatches=2)
    loop = toy.make_loop(tmp_path, algorithm, generator=started(), reward=Constant())
    loop.run(resume="never")
    assert torch.equal(toy.weights(loop), toy.weights_of(started()))
    assert all(row["grad/norm"] == 0 for row in toy.rows(tmp_path, "train"))


def test_nested_steps_contain_the_earlier_ones_and_grow_as_counted():
    window, eligible = NestedSteps((4, 8, 12, 16), 10), list(range(19))
    sets = [set(window(eligible, iteration)) for iteration in (0, 9, 10, 20, 30, 500)]
    assert sets[0] == sets[1] == {0, 6, 12, 18}
    assert [len(s) for s in sets] == [4, 4, 8, 12, 16, 16]
    assert all(a <= b for a, b in pairwise(sets))
    assert sets[2] - sets[0] == {1, 7, 11, 17}  # places 0, 14/3, 28/3, 14 of the fifteen that are left
    assert list(NestedSteps((4, 50), 1)([3, 5, 8], 1)) == [3, 5, 8]
    assert list(LateSteps(4)(eligible)) == [15, 16, 17, 18]
    with pytest.raises(ValueError, match="counts must grow"):
        NestedSteps((4, 2))


def test_trained_steps_are_those_of_the_schedule(tmp_path):
    algorithm = FeynmanKac(ParticleSteering(2), NestedSteps((2, 4), 1), steps=STEPS, minibatches=1)
    toy.make_loop(tmp_path, algorithm, generator=started()).run(resume="never")
    steps = [{int(k[5]) for k in row if k.startswith("step_")} for row in toy.rows(tmp_path, "train")]
    assert steps[0] == {0, 6} and len(steps[1]) == len(steps[2]) == 4 and steps[0] < steps[1]


def test_samples_do_not_depend_on_the_batch_they_are_drawn_in():
    algorithm, generator = made(ParticleSteering(4, 5.0))
    whole = algorithm.rollout(generator.velocity, generator, batch_of(generator, range(16)))
    for part in (range(4, 8), [12, 13, 14, 15, 0, 1, 2, 3]):
        alone = algorithm.rollout(generator.velocity, generator, batch_of(generator, part))
        equal(alone, whole.select(torch.tensor(list(part))))
    # Rows of several minibatches need not lie beside each other.
    mixed = algorithm.rollout(generator.velocity, generator, batch_of(generator, [4, 5, 0, 1, 6, 7, 2, 3]))
    equal(mixed, whole.select(torch.tensor([4, 5, 0, 1, 6, 7, 2, 3])))


@pytest.mark.parametrize("rows", [range(6), [0, 1, 2, 4], range(2, 6)])
def test_a_system_must_be_drawn_together(rows):
    algorithm, generator = made(ParticleSteering(4))
    with pytest.raises(ValueError, match="rollout_batch"):
        algorithm.rollout(generator.velocity, generator, batch_of(generator, rows))


def test_a_system_must_lie_in_one_group():
    algorithm, generator = made(ParticleSteering(4))
    with pytest.raises(ValueError, match="group_size a multiple of 4"):
        algorithm.rollout(generator.velocity, generator, batch_of(generator, range(12), group_size=6))


def test_worst_systems_go_the_other_way():
    algorithm, generator = made(ParticleSteering(4, 5.0), worst_systems=True)
    rollout = algorithm.rollout(generator.velocity, generator, batch_of(generator, range(64)))
    reward = brightness(generator.decode(rollout.x0), None).reshape(8, 2, 4).mean((0, 2))
    plain, _ = made(None)
    middle = brightness(
        generator.decode(plain.rollout(generator.velocity, generator, batch_of(generator, range(64))).x0), None
    ).mean()
    assert float(reward[1]) < float(middle) - 0.2 < float(middle) + 0.2 < float(reward[0])


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    def loop(name, iterations):
        algorithm = FeynmanKac(ParticleSteering(2, 5.0), NestedSteps((2, 4), 2), steps=STEPS, minibatches=2)
        return toy.make_loop(tmp_path / name, algorithm, generator=started(), trainer={"iterations": iterations})

    whole = loop("whole", 4)
    whole.run(resume="never")
    loop("cut", 2).run(resume="never")
    again = loop("cut", 4)
    again.run(resume="require")
    assert torch.equal(toy.weights(whole), toy.weights(again))
    assert not torch.equal(toy.weights(whole), toy.weights_of(started()))
    rows = [r for r in toy.rows(tmp_path / "cut", "train") if r["iteration"] > 2]
    assert rows == [r for r in toy.rows(tmp_path / "whole", "train") if r["iteration"] > 2]
    assert rows[0]["steering/ess"] < 1


def test_rollout_batches_that_hold_whole_systems_change_nothing(tmp_path):
    found = []
    for size in (None, 8, 4):
        algorithm = FeynmanKac(ParticleSteering(2, 5.0), steps=STEPS, minibatches=1)
        trainer = {"iterations": 2, "rollout_batch": size}
        loop = toy.make_loop(tmp_path / str(size), algorithm, generator=started(), trainer=trainer)
        loop.run(resume="never")
        found.append(toy.weights(loop))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_unscored_predictions_are_counted_and_survive_nowhere():
    def half(media, prompts):
        reward = brightness(media, prompts)
        return torch.where(torch.arange(len(media)) % 2 == 0, torch.full_like(reward, math.nan), reward)

    algorithm, generator = made(ParticleSteering(4, 1.0, resample_at=[]))
    batch = replace(batch_of(generator, range(16)), score=half)
    rollout = algorithm.rollout(generator.velocity, generator, batch)
    assert algorithm._seen[0]["unscored"] == 8
    plain, _ = made(None)
    dead = plain.rollout(generator.velocity, generator, batch).x0[::2]
    assert not any(torch.equal(x, y) for x in rollout.x0 for y in dead)


def test_impossible_settings_are_refused_by_name():
    for steering, message in [
        (ParticleSteering(branch_at=8), "branch_at = 8"),
        (ParticleSteering(resample_at=[8]), "step 8"),
        (ParticleSteering(branch_at=3, resample_at=[3]), "step 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            made(steering)
    with pytest.raises(ValueError, match="scheme"):
        ParticleSteering(scheme="x")
    with pytest.raises(ValueError, match="potential mode"):
        ParticleSteering(potential="x")
    with pytest.raises(ValueError, match="particles = 0"):
        ParticleSteering(0)
    with pytest.raises(ValueError, match="no step with a density"):
        made(ParticleSteering(), kernel=Euler())
    with pytest.raises(ValueError, match="steering is null"):
        FeynmanKac(None, worst_systems=True)
    with pytest.raises(ValueError, match="not among the stochastic"):
        made(ParticleSteering(), trained=lambda eligible, iteration=0, seed=0: [7])


def test_costs_are_told_before(tmp_path):
    algorithm, _ = made(ParticleSteering(4, branch_at=2), trained=NestedSteps((3,), 1), advantage=GRPO())
    assert algorithm.forwards_per_sample(8) == {"sample": 6.5, "no_grad": 0.0, "train": 1.5}
