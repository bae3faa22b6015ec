"""Methods of final samples on a pipeline of diffusers and on the digits: one update each."""

from dataclasses import replace

import pytest
import torch
from pipelines import change, encode, make

from genrl.algorithms import AdvantageWeightedMatching, Homing, OnlineDPO, PositivesOnly
from genrl.algorithms.base import Batch
from genrl.diffusion import RowNoise
from genrl.generators import DigitsGenerator

METHODS = [Homing, PositivesOnly, AdvantageWeightedMatching, OnlineDPO]


@pytest.fixture(scope="module")
def twin():
    generator = make("flux")
    change(generator)  # away from its reference
    return generator, encode(generator, "flux")[torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])]


@pytest.fixture(scope="module")
def digits():
    generator = DigitsGenerator(dim=16, depth=1, heads=2, base_steps=3)
    generator.prepare("cpu", progress=False)
    return generator, generator.encode(["the number 3"] * 4 + ["the number 8"] * 4)


@pytest.mark.parametrize("which", ["twin", "digits"])
@pytest.mark.parametrize("method", METHODS)
def test_one_update_moves_the_trained_weights(method, which, request):
    generator, cond = request.getfixturevalue(which)
    algorithm = method(steps=2)
    algorithm.configure(generator)
    rows, groups = torch.arange(8), torch.arange(8) // 4
    noise = RowNoise.of(("test",), rows), RowNoise.of(("test", "group"), groups)
    batch = Batch(cond, rows, groups, *noise, seed=0, iteration=0)
    rollout = algorithm.rollout(generator.velocity, generator, batch)
    brightness = generator.decode(rollout.x0).flatten(1).mean(1).detach().reshape(2, 4)
    advantages = algorithm.advantages({"bright": brightness}, None, torch.arange(2)).values
    keep = algorithm.keep(advantages)
    rollout = replace(rollout, advantage=advantages.flatten())
    if keep is not None:
        rollout = rollout.select(keep.flatten().nonzero()[:, 0])
    rollout = algorithm.before_update(generator.velocity, generator, rollout, batch)
    generator.module.zero_grad()
    for unit in (units := algorithm.units(rollout, batch)):
        loss, metrics = algorithm.loss(generator.velocity, rollout, unit, units)
        assert loss.shape == (len(rollout),) and all(torch.isfinite(v).all() for v in metrics.values())
        loss.mean().backward()
    gradients = [p.grad for p in generator.trainable() if p.grad is not None]
    assert gradients and all(torch.isfinite(g).all() for g in gradients)
    assert sum(float(g.abs().sum()) for g in gradients) > 0
