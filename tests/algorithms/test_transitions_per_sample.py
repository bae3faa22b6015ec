"""Steps of each sample's own, against the full sum over steps."""

from dataclasses import replace

import pytest
import torch
import toy

from genrl.algorithms import PolicyGradient
from genrl.algorithms.base import Batch
from genrl.diffusion import Consistency, FlowSDE, RowNoise, index_batch
from genrl.objectives import ConsistencyRegression, Guard, PPOClip

STEPS = 5
SURROGATES = [PPOClip(), Guard(), Guard(delta_form="inv_kappa"), ConsistencyRegression()]
surrogates = pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda s: type(s).__name__)


def started():
    generator = toy.ToyGenerator()
    with torch.no_grad():
        generator.module.second.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    generator.weights = toy.TrainableWeights(generator.module)
    return generator


def batch_of(generator, rows, iteration=0):
    rows = torch.as_tensor(rows)
    cond = generator.encode([f"p{int(row) % 10}" for row in rows])
    key = (0, "rollout", iteration)
    noise, group = RowNoise.of(key, rows), RowNoise.of((*key, "group"), rows // 4)
    return Batch(cond, rows, rows // 4, noise, group, seed=0, iteration=iteration)


def made(generator, **changes):
    settings = {"kernel": FlowSDE(), "steps": STEPS, "minibatches": 1, **changes}
    algorithm = PolicyGradient(**settings)
    algorithm.configure(generator)
    return algorithm


def sampled(algorithm, generator, rows=range(8)):
    batch = batch_of(generator, list(rows))
    rollout = algorithm.rollout(generator.velocity, generator, batch)
    advantage = torch.linspace(-1.5, 2.0, len(rollout))
    rollout = replace(rollout, advantage=advantage)
    return algorithm.before_update(generator.velocity, generator, rollout, batch), batch


def losses(algorithm, generator, rollout, batch):
    """Loss [B] over all units, and the gradient of its sum."""
    units = algorithm.units(rollout, batch)
    total = sum(algorithm.loss(generator.velocity, rollout, unit, units)[0] for unit in units)
    gradient = torch.autograd.grad(total.sum(), generator.trainable())
    return total.detach(), torch.cat([g.flatten() for g in gradient])


def moved(generator):
    with torch.no_grad():
        generator.module.second.add_(1e-4 * torch.randn(toy.PIXELS, 16, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("anchor", ["rollout", "recompute"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
@surrogates
def test_the_mean_over_all_choices_of_a_step_is_the_full_loss(surrogate, kl_weight, anchor):
    settings = {"surrogate": surrogate, "kl_weight": kl_weight, "anchor": anchor}
    settings |= {"kernel": Consistency()} if isinstance(surrogate, ConsistencyRegression) else {}
    generator = started()
    full = made(generator, **settings)
    rollout, batch = sampled(full, generator)
    one = made(generator, transitions_per_sample=1, **settings)
    own, _ = sampled(one, generator)
    reference = [torch.stack([rollout.extra["reference_means"][k] for k in range(STEPS - 1)])] if kl_weight else []
    moved(generator)
    expected, gradient = losses(full, generator, rollout, batch)
    found, of_choices = torch.zeros(8), torch.zeros_like(gradient)
    for k in range(STEPS - 1):
        extra = {"own_steps": torch.full((8, 1), k)}
        extra |= {"reference_means": {0: reference[0][k]}} if kl_weight else {}
        choice = replace(rollout, extra=extra)
        loss, grad = losses(one, generator, choice, batch)
        found, of_choices = found + loss / (STEPS - 1), of_choices + grad / (STEPS - 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(of_choices, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    assert own.extra["own_steps"].shape == (8, 1)


def test_all_steps_of_each_sample_give_the_full_loss():
    generator = started()
    full, own = (
        made(generator, surrogate=PPOClip(0.2)),
        made(generator, surrogate=PPOClip(0.2), transitions_per_sample=STEPS - 1, steps_per_forward=3),
    )
    pair = [sampled(algorithm, generator) for algorithm in (full, own)]
    moved(generator)
    (a, ga), (b, gb) = (losses(algorithm, generator, *two) for algorithm, two in zip((full, own), pair, strict=True))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(ga, gb, rtol=1e-4, atol=1e-6 * float(ga.abs().max()))


def test_steps_are_drawn_evenly_and_belong_to_the_sample():
    generator = started()
    algorithm = made(generator, transitions_per_sample=2)

    def drawn(rows, iteration=0):
        return algorithm.rollout(generator.velocity, generator, batch_of(generator, rows, iteration)).extra["own_steps"]

    whole = drawn(range(400))
    assert torch.equal(whole[100:120], drawn(range(100, 120)))
    assert not torch.equal(whole, drawn(range(400), iteration=1))
    assert bool((whole[:, 0] != whole[:, 1]).all())  # without replacement
    share = torch.bincount(whole.flatten(), minlength=STEPS - 1) / 800
    assert float((share - 1 / (STEPS - 1)).abs().max()) < 4 * (0.25 * 0.75 / 800) ** 0.5


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_run_with_one_step_a_sample_trains_and_its_first_ratios_are_one(tmp_path, micro_batch):
    algorithm = PolicyGradient(steps=STEPS, transitions_per_sample=1, micro_batch=micro_batch, kl_weight=0.01)
    loop = toy.make_loop(tmp_path, algorithm)
    before = toy.weights(loop)
    loop.run(resume="never")
    (row, *_) = toy.rows(tmp_path, "train")
    assert row["ratio/first_step_gap"] == 0 and row["ratio/mean"] == pytest.approx(1, abs=0.1)
    assert not torch.equal(before, toy.weights(loop))
    # 16 samples: 5 evaluations, 1 of the reference, and 1 with a backward, which counts 3
    assert row["cost/forward_equivalents"] == 16 * (STEPS + 1 + 3)
    assert algorithm.forwards_per_sample()["train"] == 1


def test_impossible_numbers_of_steps_are_refused():
    with pytest.raises(ValueError, match="transitions_per_sample = 0 must be at least 1"):
        PolicyGradient(transitions_per_sample=0)
    with pytest.raises(ValueError, match="transitions_per_sample = 5 is more than the 4 steps"):
        made(started(), transitions_per_sample=5)


def test_rows_of_a_rollout_take_their_steps_with_them():
    generator = started()
    rollout, _ = sampled(made(generator, transitions_per_sample=1), generator)
    index = torch.tensor([5, 2])
    assert torch.equal(rollout.select(index).extra["own_steps"], index_batch(rollout.extra["own_steps"], index))
