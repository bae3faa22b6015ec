"""Replay: unchanged weights have ratio 1 and the policy gradient, for any micro-batch and several steps at once."""

from __future__ import annotations

import pytest
import torch
from diffusion_members import NOISY, PATHS, elementwise, old_transition, sampler_of, start
from torch import Tensor, nn

from genrl.diffusion import FlowSDE, GaussianTransition, Sampler, Schedule, index_batch

noisy_kernels = pytest.mark.parametrize("name", NOISY)
all_paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


class Network(nn.Module):
    """A small convolutional velocity network with time and condition."""

    def __init__(self, channels: int = 3):
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, 16, 3, padding=1), nn.Conv2d(16, channels, 3, padding=1)
        self.time = nn.Linear(2, 16)

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        h = self.first(x) + self.time(torch.stack([t.to(x), cond.to(x)], 1))[:, :, None, None]
        return self.last(torch.nn.functional.silu(h))


# ---- unchanged weights: the ratio is 1 and the gradient is the policy gradient --------------------------


@all_paths
@noisy_kernels
def test_ratio_of_unchanged_weights_is_exactly_one_for_any_micro_batch(name, path) -> None:
    sampler = sampler_of(name, path)
    x1, cond = start()
    trajectory = sampler.rollout(elementwise, x1, cond, torch.Generator().manual_seed(1))
    assert trajectory.steps == (0, 1, 2, 3)
    for size in (1, 3, 8):
        for index in torch.arange(8).split(size):
            part = trajectory.select(index)
            for k in trajectory.steps:
                new = sampler.replay(elementwise, part, k, index_batch(cond, index))
                for reduction in ("mean", "sum"):
                    log_ratio = new.log_ratio(old_transition(sampler, part, k), part.states[k + 1], reduction)
                    assert (log_ratio == 0).all()


@noisy_kernels
def test_ratio_of_an_unchanged_network_is_one_up_to_the_blocking_of_its_matrix_products(name) -> None:
    """With a network the replay may differ from the roll-out in the last bit, and only there: BLAS and convolutions
    choose their blocking, and so the order of their sums, by the batch size. The sampler adds nothing to it, which the
    test above shows; here the same batch gives exactly 0, and others stay far below any clip range (1e-4)."""
    torch.manual_seed(2)
    network = Network()
    sampler = sampler_of(name)
    x1, cond = start()
    trajectory = sampler.rollout(network, x1, cond, torch.Generator().manual_seed(1))
    for size in (1, 3, 8):
        for index in torch.arange(8).split(size):
            part = trajectory.select(index)
            for k in trajectory.steps:
                new = sampler.replay(network, part, k, index_batch(cond, index))
                log_ratio = new.log_ratio(old_transition(sampler, part, k), part.states[k + 1])
                assert log_ratio.abs().max() <= (1e-6 if size < 8 else 0)


@noisy_kernels
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_of_unchanged_weights_is_the_policy_gradient(name, reduction) -> None:
    """d/dw of -sum A r at r = 1 equals that of -sum A log N(x'; mu, s), from torch's own density, in float64."""
    torch.manual_seed(3)
    network = Network().double()
    sampler = sampler_of(name)
    x1, cond = start(dtype=torch.float64)
    advantages = torch.randn(8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    trajectory = sampler.rollout(network, x1, cond, torch.Generator().manual_seed(1))

    expected = []
    loss = torch.zeros((), dtype=torch.float64)
    for k in trajectory.steps:
        t, t_next = trajectory.t[k].double(), trajectory.t[k + 1].double()
        x = trajectory.states[k]
        v = network(x, t.expand(8), cond)
        a, b, s = sampler.kernel.coefficients(t, t_next)
        mean = a * (x - t * v) + b * (x + (1 - t) * v)
        log_prob = torch.distributions.Normal(mean, s).log_prob(trajectory.states[k + 1]).flatten(1)
        loss = loss - (advantages * (log_prob.mean(1) if reduction == "mean" else log_prob.sum(1))).sum()
    expected = torch.autograd.grad(loss, list(network.parameters()))

    for size in (1, 3, 8):
        network.zero_grad()
        for index in torch.arange(8).split(size):
            part = trajectory.select(index)
            for k in trajectory.steps:
                new = sampler.replay(network, part, k, index_batch(cond, index))
                log_ratio = new.log_ratio(old_transition(sampler, part, k), part.states[k + 1], reduction)
                (-advantages[index] * log_ratio.exp()).sum().backward()
        for parameter, gradient in zip(network.parameters(), expected, strict=True):
            scale = float(gradient.abs().max())
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10 * scale)


@noisy_kernels
def test_changed_weights_have_the_ratio_of_their_densities(name) -> None:
    sampler = sampler_of(name)
    x1, cond = start(dtype=torch.float64)
    trajectory = sampler.rollout(elementwise, x1, cond, torch.Generator().manual_seed(1))

    def changed(x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        return elementwise(x, t, cond) + 0.01 * torch.sin(x)

    for k in trajectory.steps:
        old, drawn = old_transition(sampler, trajectory, k), trajectory.states[k + 1]
        new = sampler.replay(changed, trajectory, k, cond)
        kappa = sampler.step(k, True).kappa
        torch.testing.assert_close(new.mean, old.mean - kappa * 0.01 * torch.sin(trajectory.states[k]))
        difference = new.log_prob(drawn, "sum") - old.log_prob(drawn, "sum")
        torch.testing.assert_close(new.log_ratio(old, drawn, "sum"), difference, rtol=1e-6, atol=1e-9)


@noisy_kernels
def test_drawn_points_have_unit_normalised_residuals(name) -> None:
    sampler = sampler_of(name)
    trajectory = sampler.rollout(elementwise, *_wide(), torch.Generator().manual_seed(5))
    for k in trajectory.steps:
        residual = (trajectory.states[k + 1] - trajectory.means[k]) / sampler.step(k, True).s
        assert float(residual.square().mean()) == pytest.approx(1, abs=0.03)


def _wide() -> tuple[Tensor, Tensor]:
    return torch.randn(200, 100, generator=torch.Generator().manual_seed(6)), torch.zeros(200)


# ---- several steps at once ------------------------------------------------------------------------------


@all_paths
@noisy_kernels
def test_several_steps_in_one_forward_equal_step_by_step(name, path) -> None:
    sampler = sampler_of(name, path)
    x1, cond = start()
    trajectory = sampler.rollout(elementwise, x1, cond, torch.Generator().manual_seed(1))
    chosen = (3, 0, 2)
    together = sampler.replay(elementwise, trajectory, chosen, cond)
    drawn = torch.cat([trajectory.states[k + 1] for k in chosen])
    old = GaussianTransition(torch.cat([trajectory.means[k] for k in chosen]), together.std)
    assert (together.log_ratio(old, drawn) == 0).all()  # exactly: the means agree bit for bit
    parts = [sampler.replay(elementwise, trajectory, k, cond) for k in chosen]
    torch.testing.assert_close(together.mean, torch.cat([part.mean for part in parts]), rtol=0, atol=0)
    densities = [part.log_prob(trajectory.states[k + 1]) for k, part in zip(chosen, parts, strict=True)]
    torch.testing.assert_close(together.log_prob(drawn), torch.cat(densities), rtol=1e-5, atol=1e-6)


def test_times_of_the_network_are_the_stored_float32_times() -> None:
    schedule, seen = Schedule.uniform(7, shift=3.0), []

    def velocity(x: Tensor, t: Tensor, cond: None) -> Tensor:
        assert t.dtype == torch.float32 and t.shape == (len(x),)
        seen.append(t.clone())
        return x

    sampler = Sampler(FlowSDE(), schedule)
    trajectory = sampler.rollout(velocity, torch.ones(2, 3))
    torch.testing.assert_close(torch.stack(seen)[:, 0], schedule.t[:-1], rtol=0, atol=0)
    seen.clear()
    sampler.replay(velocity, trajectory, (4, 1))
    torch.testing.assert_close(seen[0], schedule.t[[4, 4, 1, 1]], rtol=0, atol=0)
