"""Flow policies: solvers on flows with a known solution, the loss against its closed form, warm starts."""

import math
from itertools import pairwise

import pytest
import torch
from policy_members import SPECS, configure, fixed_noise, generator, make_batch
from torch import nn

from genrl.policies import Chunking, FlowPolicy

M, S0 = 0.3, 0.5  # actions are N(M, S0^2) per coordinate, in normalised units


class GaussianVelocity(nn.Module):
    """The exact marginal velocity of Gaussian data (robot formulas 0.3): v = -m + k_t (x - mu_t)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x, t, cond=None):
        t = t[:, None, None]
        k = (t - (1 - t) * S0**2) / ((1 - t) ** 2 * S0**2 + t**2)
        return -M + k * (x - (1 - t) * M)


def flow(**settings):
    policy = FlowPolicy(**settings).double()
    configure(policy, SPECS)
    policy.net = GaussianVelocity()
    return policy.double().eval()


def sample(policy, eps, start=None):
    cond = torch.zeros(len(eps), policy.encoder_net.out_dim, dtype=torch.float64)
    return policy._sample(cond, lambda step, shape: eps, start)


EPS = torch.randn(6, 8, 3, generator=generator(), dtype=torch.float64)
EXACT = M + S0 * EPS  # the flow map from t = 1 to 0


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
def test_solvers_converge_to_the_flow_map_with_their_order(solver, order):
    errors = [(sample(flow(steps=n, solver=solver), EPS) - EXACT).abs().max().item() for n in (20, 40, 80)]
    rates = [math.log2(a / b) for a, b in pairwise(errors)]
    assert all(abs(rate - order) < 0.25 for rate in rates), (errors, rates)


def test_one_euler_step_is_the_conditional_mean():
    torch.testing.assert_close(sample(flow(steps=1), EPS), torch.full_like(EPS, M))  # v(x, 1) = x - m


def test_a_start_below_one_integrates_only_the_rest():
    start = (0.4 * EPS + 0.6 * M, 0.4)  # x = mu_t + t eps; the map to 0 scales by S_0 / S_t
    scale = S0 / math.sqrt(0.36 * S0**2 + 0.16)
    exact = M + scale * 0.4 * EPS
    error = (sample(flow(steps=200, solver="heun"), EPS, start) - exact).abs().max()
    assert error < 1e-3
    assert (sample(flow(steps=200, solver="heun"), EPS) - exact).abs().max() > 0.05


@pytest.mark.parametrize(("solver", "steps", "calls"), [("euler", 4, 4), ("heun", 4, 7), ("heun", 1, 1)])
def test_network_calls_are_counted(solver, steps, calls):
    assert flow(steps=steps, solver=solver).nfe == calls


def test_the_loss_at_the_exact_velocity_is_the_variance_that_no_network_can_explain():
    # E[(v - v*)^2] = E_t[S0^2 / S_t^2] per coordinate (robot formulas 0.3), with t uniform.
    policy = flow()
    rows = 40_000
    x0 = M + S0 * torch.randn(rows, 8, 3, generator=generator(1), dtype=torch.float64)
    batch = make_batch(policy, 2)
    batch = {
        "obs": {name: value[:1].expand(rows, *value.shape[1:]) for name, value in batch["obs"].items()},
        "actions": policy.normalizer.unnormalize("action", x0),
        "valid": torch.ones(rows, 8, dtype=torch.bool),
    }
    loss, _ = policy.loss(batch, generator(2))
    t = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    expected = (S0**2 / ((1 - t) ** 2 * S0**2 + t**2)).mean()
    assert abs(loss.item() / expected.item() - 1) < 0.02


def test_a_warm_start_has_the_mean_and_spread_of_its_closed_form():
    # One exact step from x = (1 - t) a_warm + t eps (robot formulas 1.6 (5)):
    # N(m + (S0 / S_t) (1 - t) (a_warm - m), S0^2 t^2 / S_t^2)
    t, rows = 0.6, 20_000
    policy = flow(steps=60, solver="heun", chunking=Chunking(8, 2, 3, warm_start=t))
    before = torch.linspace(-1, 1, 8 * 3, dtype=torch.float64).reshape(1, 8, 3)
    obs = {name: value[:1].expand(rows, *value.shape[1:]) for name, value in make_batch(policy)["obs"].items()}
    previous = policy.normalizer.unnormalize("action", before).expand(rows, -1, -1)
    source = generator(3)
    chunk = policy.predict(obs, lambda _, shape: torch.randn(shape, generator=source, dtype=torch.float64), previous)
    x0 = policy.normalizer.normalize("action", chunk)
    warm = torch.cat([before[:, 3:], before[:, -1:].expand(-1, 3, -1)], 1)  # moved on by 3 executed steps
    s_t = math.sqrt((1 - t) ** 2 * S0**2 + t**2)
    mean = M + S0 / s_t * (1 - t) * (warm[0] - M)
    spread = S0 * t / s_t
    assert (x0.mean(0) - mean).abs().max() < 5 * spread / math.sqrt(rows)
    assert (x0.std(0) / spread - 1).abs().max() < 0.03


def test_without_the_setting_the_last_chunk_is_ignored():
    policy = flow(steps=2)
    obs = make_batch(policy)["obs"]
    assert torch.equal(policy.predict(obs, fixed_noise()), policy.predict(obs, fixed_noise(), torch.ones(5, 8, 3)))


@pytest.mark.parametrize("settings", [{"steps": 0}, {"solver": "rk4"}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        FlowPolicy(**settings)
