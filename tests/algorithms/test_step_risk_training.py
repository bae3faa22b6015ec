"""Advantages of their own for every step, from the estimator through the loop to the loss."""

import torch
import toy

from genrl.algorithms import PolicyGradient
from genrl.objectives import DrGRPO, StepRisk
from genrl.objectives.advantages import Advantages

STEPS = 6


def started():
    generator = toy.ToyGenerator()
    with torch.no_grad():
        generator.module.second.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    generator.weights = toy.TrainableWeights(generator.module)
    return generator


def trained(folder, advantage, iterations=2, resume="never"):
    algorithm = PolicyGradient(steps=STEPS, advantage=advantage, minibatches=2)
    loop = toy.make_loop(folder, algorithm, generator=started(), trainer={"iterations": iterations})
    loop.run(resume=resume)
    return toy.weights(loop)


class OneForAll(StepRisk):
    """Hands out what the first step has, as a number for the whole sample."""

    def __call__(self, rewards, weights=None, prompt_ids=None):
        found = super().__call__(rewards, weights, prompt_ids)
        return Advantages(found.by_step[:, :, 0], found.metrics)


def test_a_constant_schedule_trains_as_one_advantage_for_all_steps(tmp_path):
    by_step = trained(tmp_path / "a", StepRisk(beta_early=2.0, beta_late=2.0))
    assert torch.equal(by_step, trained(tmp_path / "b", OneForAll(beta_early=2.0, beta_late=2.0)))


def test_no_risk_trains_as_grpo_without_division(tmp_path):
    none = trained(tmp_path / "a", StepRisk(beta_early=0.0, beta_late=0.0, unit="none"))
    torch.testing.assert_close(none, trained(tmp_path / "b", DrGRPO()), atol=1e-6, rtol=0)


def test_the_order_of_the_states_matters(tmp_path):
    falling = trained(tmp_path / "a", StepRisk(beta_early=6.0, beta_late=0.0))
    rising = trained(tmp_path / "b", StepRisk(beta_early=0.0, beta_late=6.0))
    assert float((falling - rising).abs().max()) > 1e-4


def test_each_step_is_trained_with_its_own_column(tmp_path):
    seen = []

    class Kept(PolicyGradient):
        def loss(self, velocity_fn, rollout, unit, units):
            seen.append((unit, rollout.extra["advantage_by_step"], self._taken(rollout, unit[0]).advantage))
            return super().loss(velocity_fn, rollout, unit, units)

    algorithm = Kept(steps=STEPS, advantage=StepRisk(), minibatches=1)
    toy.make_loop(tmp_path, algorithm, generator=started(), trainer={"iterations": 1}).run(resume="never")
    assert len(seen) == STEPS - 1
    for (k,), table, used in seen:
        assert table.shape[1] == STEPS and torch.equal(used, table[:, k])
    assert not torch.equal(seen[0][2], seen[-1][2])


def test_a_killed_run_goes_on_with_the_range_it_has_seen(tmp_path):
    whole = trained(tmp_path / "whole", StepRisk(window=3), 4)
    trained(tmp_path / "cut", StepRisk(window=3), 2)
    assert torch.equal(whole, trained(tmp_path / "cut", StepRisk(window=3), 4, resume="require"))
