"""Diffusion-DPO against its closed form."""

import math

import pytest
import torch

from genrl.diffusion import RectifiedFlow, VariancePreserving
from genrl.objectives import flow_matching_loss
from genrl.objectives.preference import dpo_loss, dpo_margin, matching_error, pairs_of


def test_a_model_that_is_its_reference_has_the_loss_log_two():
    better, worse = torch.tensor([0.3, 1.0]), torch.tensor([0.7, 0.1])
    torch.testing.assert_close(dpo_loss(better, better, worse, worse, 2000.0), torch.full((2,), math.log(2)))


def test_the_loss_is_the_closed_form():
    better, better_ref, worse, worse_ref = (torch.rand(8, generator=torch.Generator().manual_seed(s)) for s in range(4))
    beta = 3.0
    inner = -(beta / 2) * ((better - better_ref) - (worse - worse_ref))
    torch.testing.assert_close(dpo_margin(better, better_ref, worse, worse_ref, beta), inner)
    expected = -(1 / (1 + (-inner).exp())).log()
    torch.testing.assert_close(dpo_loss(better, better_ref, worse, worse_ref, beta), expected)


def test_the_loss_lowers_the_error_of_the_better_and_raises_that_of_the_worse():
    better, worse = torch.tensor([0.5], requires_grad=True), torch.tensor([0.5], requires_grad=True)
    dpo_loss(better, better.detach(), worse, worse.detach(), 10.0).sum().backward()
    assert better.grad.item() == pytest.approx(10 / 4) and worse.grad.item() == pytest.approx(-10 / 4)


def test_scaling_errors_is_scaling_beta():
    arms = [torch.tensor([v]) for v in (0.4, 0.3, 0.2, 0.6)]
    torch.testing.assert_close(dpo_loss(*[3 * a for a in arms], 2.0), dpo_loss(*arms, 6.0))


def test_the_matching_error_is_that_of_the_path():
    x0, eps, v = (torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    t = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(matching_error(v, x0, eps, t), flow_matching_loss(v, x0, eps))
    vp = VariancePreserving(torch.linspace(0.999, 0.01, 100, dtype=torch.float64))
    exact = vp.velocity(x0, eps, t)
    torch.testing.assert_close(matching_error(exact, x0, eps, t, vp), torch.zeros(3))
    torch.testing.assert_close(matching_error(eps - x0, x0, eps, t, RectifiedFlow()), torch.zeros(3))


def test_pairs_stay_within_a_group_and_differ():
    rows, groups = torch.arange(7), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    advantage = torch.tensor([1.0, -2.0, 0.5, 0.0, 0.0, -1.0, 3.0])
    better, worse = pairs_of(rows, groups, advantage, best_worst=True)
    assert set(zip(better.tolist(), worse.tolist(), strict=True)) == {(0, 1), (6, 5)}
    better, worse = pairs_of(rows, groups, advantage, best_worst=False)
    assert set(zip(better.tolist(), worse.tolist(), strict=True)) == {(0, 1), (0, 2), (2, 1), (6, 5)}


def test_a_copy_of_a_sample_is_in_no_pair():
    rows, groups = torch.tensor([0, 1, 0]), torch.zeros(3, dtype=torch.long)
    better, worse = pairs_of(rows, groups, torch.tensor([1.0, -1.0, 1.0]), best_worst=False)
    assert (better.tolist(), worse.tolist()) == ([0], [1])
    assert all(len(side) == 0 for side in pairs_of(rows[:0], groups[:0], torch.zeros(0), best_worst=True))
