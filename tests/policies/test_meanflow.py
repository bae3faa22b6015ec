"""MeanFlow policies: the loss is MeanFlow's, one step keeps modes, guidance guides, wrapping changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import policy_members as members
import pytest
import torch
import two_modes
from policy_members import awaken, generator, make_batch
from torch import nn

from genrl.networks import ObsSpec
from genrl.objectives import dispersive_loss
from genrl.policies import Chunking, FlowPolicy, MeanFlowGuidance, MeanFlowPolicy, Normalizer, OneStepFlowPolicy

MEAN, STD = 0.7, 0.5  # of the actions in the closed forms below


@dataclass(frozen=True)
class Always:
    """A distribution of times that has one value."""

    value: float

    def quantile(self, p):
        return torch.full_like(p, self.value)


class GaussianNet(nn.Module):
    """The true average velocity for actions N(m, STD^2), float64.

    m is `mean` where the condition is set and `null_mean` in the rows of the null condition, which is marked by a large
    number. `calls` counts rows.
    """

    def __init__(self, mean: float = MEAN, null_mean: float = MEAN):
        super().__init__()
        self.means = torch.tensor([mean, null_mean], dtype=torch.float64)
        self.anything = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.calls: list[tuple[int, bool]] = []

    def forward(self, x, t, cond, r=None):
        self.calls.append((len(x), torch.is_grad_enabled()))
        r = t if r is None else r
        m = self.means[(cond[:, 0] > 50).long()][:, None, None]
        t, r = t[:, None, None], r[:, None, None]
        s_t, s_r = (((1 - a) ** 2 * STD**2 + a**2).sqrt() for a in (t, r))
        growth = ((t + r) - (2 - t - r) * STD**2) / (s_t + s_r)
        return -m + growth / s_t * (x - (1 - t) * m) + 0 * self.anything


def exact_policy(net: GaussianNet | None = None, cls=MeanFlowPolicy, **settings):
    """A policy whose network is the solution, without adaptive weights."""
    policy = cls(chunking=Chunking(1, 1, 1), adaptive_power=0.0, **settings)
    features = {"state": ("identity", (1,)), "action": ("identity", (1,))}
    policy.configure({"state": ObsSpec((1,), "state")}, 1, Normalizer(features))
    policy.net = GaussianNet() if net is None else net
    policy = policy.double()
    if policy.null is not None:
        policy.null.data.fill_(100.0)
    return policy


def gaussian_batch(rows: int = 100_000, seed: int = 0, mean: float = MEAN):
    actions = mean + STD * torch.randn(rows, 1, 1, generator=generator(seed), dtype=torch.float64)
    return {"obs": {"state": torch.zeros(rows, 1, 1)}, "actions": actions, "valid": torch.ones(rows, 1).bool()}


def variance(t: float) -> float:
    return (1 - t) ** 2 * STD**2 + t**2


# ---- the loss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("derivative", ["jvp", "difference"])
@pytest.mark.parametrize(
    ("flow_share", "tangent", "expected"),
    [
        (0.0, "sampled", variance(0.3) * STD**2 / variance(0.8) ** 2),
        (0.0, "model", STD**2 / variance(0.8)),
        (1.0, "sampled", STD**2 / variance(0.8)),
        (0.25, "sampled", STD**2 * (0.25 / variance(0.8) + 0.75 * variance(0.3) / variance(0.8) ** 2)),
    ],
)
def test_the_loss_at_the_true_network_is_the_known_floor(flow_share, tangent, expected, derivative):
    policy = exact_policy(
        flow_share=flow_share, tangent=tangent, derivative=derivative, times=Always(0.8), end_times=Always(0.3)
    )
    loss, metrics = policy.loss(gaussian_batch(), generator(1))
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert float(metrics["squared_error"]) == pytest.approx(loss.item())


def test_the_derivative_is_taken_on_the_rows_with_an_interval_only_and_without_a_graph():
    policy = exact_policy(flow_share=0.75)
    policy.loss(gaussian_batch(100), generator())
    assert policy.net.calls == [(25, False), (100, True)]
    policy = exact_policy(flow_share=1.0)
    policy.loss(gaussian_batch(100), generator())
    assert policy.net.calls == [(100, True)]


def test_one_step_and_several_give_the_same_action_with_the_true_network():
    obs = {"state": torch.zeros(50, 1, 1)}
    eps = torch.randn(50, 1, 1, generator=generator(), dtype=torch.float64)
    one, four = (exact_policy(steps=steps).predict(obs, lambda step, shape: eps) for steps in (1, 4))
    torch.testing.assert_close(one, MEAN + STD * eps, rtol=0, atol=1e-12)
    torch.testing.assert_close(four, one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("network", members.NETWORKS)
def test_the_dispersive_loss_adds_its_weight_times_the_spread_of_the_networks_features(network):
    spread, plain = (
        awaken(members.Member("", MeanFlowPolicy).build(network, dispersive_weight=weight)) for weight in (0.5, 0.0)
    )
    seen = []
    inner = spread.net.features

    def features(*args):
        out, maps = inner(*args)
        if torch.is_grad_enabled():  # the call for the derivative is without
            seen.append(dispersive_loss(maps).detach())
        return out, maps

    spread.net.features = features
    batch = make_batch(spread)
    (with_it, metrics), (without, _) = (policy.loss(batch, generator()) for policy in (spread, plain))
    assert len(seen) == 1 and float(seen[0]) < 0
    torch.testing.assert_close(metrics["dispersive_loss"], seen[0])
    torch.testing.assert_close(with_it - without, 0.5 * seen[0], rtol=1e-4, atol=1e-5)
    with_it.backward()
    assert all(p.grad is not None for p in spread.trained_parameters())


# ---- guidance ---------------------------------------------------------------------------------------------


def test_guided_targets_have_the_guided_network_as_solution_and_dropped_rows_the_plain_one():
    """Conditional N(1, s^2), null N(-0.2, s^2): guided with strength 2 is N(2.2, s^2), see the closed forms."""
    guidance = MeanFlowGuidance(1.0, mix=0.5, dropout=0.25)
    net = GaussianNet(mean=-0.2 + 2 * 1.2, null_mean=-0.2)
    policy = exact_policy(net, guidance=guidance, flow_share=1.0, times=Always(0.6))
    x = torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None, None]
    t, cond = torch.full((7,), 0.6, dtype=torch.float64), torch.zeros(7, policy.encoder_net.out_dim).double()
    v = GaussianNet(mean=1.0)(x, t, cond)
    drop = torch.arange(7) < 3
    target = policy._target_velocity(x, t, v, policy.null_cond(cond, drop), drop)
    torch.testing.assert_close(target[3:], net(x, t, cond)[3:], rtol=0, atol=1e-10)
    assert torch.equal(target[:3], v[:3])


def test_mp1s_rule_uses_the_conditional_branch():
    net = GaussianNet()
    policy = exact_policy(net, guidance=MeanFlowGuidance(2.0, branch="mp1"))
    x, t = torch.randn(5, 1, 1).double(), torch.full((5,), 0.6).double()
    cond, v = torch.zeros(5, policy.encoder_net.out_dim).double(), torch.randn(5, 1, 1).double()
    target = policy._target_velocity(x, t, v, cond, None)
    torch.testing.assert_close(target, 2 * v - net(x, t, cond))
    assert policy.null is None and not policy.uses_null


def _means(updates: int = 250, **settings) -> tuple[float, float]:
    """Mean action in the states -1 and 1, learned from actions N(0.3 state, 0.3^2)."""
    batch = 256
    policy = MeanFlowPolicy(network=members.MLPBackbone(64, 2), chunking=Chunking(1, 1, 1), **settings)
    features = {"state": ("identity", (1,)), "action": ("identity", (1,))}
    policy.configure({"state": ObsSpec((1,), "state")}, 1, Normalizer(features))
    optimizer, source = torch.optim.Adam(policy.trained_parameters(), 3e-3), generator()
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - update / updates)
        state = 2.0 * torch.randint(0, 2, (batch, 1, 1), generator=source) - 1
        actions = 0.3 * state + 0.3 * torch.randn(batch, 1, 1, generator=source)
        data = {"obs": {"state": state}, "actions": actions, "valid": torch.ones(batch, 1).bool()}
        optimizer.zero_grad()
        policy.loss(data, source)[0].backward()
        optimizer.step()
    obs = {"state": torch.tensor([-1.0, 1.0]).repeat_interleave(1000)[:, None, None]}
    eps = torch.randn(2000, 1, 1, generator=source)
    low, high = policy.predict(obs, lambda step, shape: eps).reshape(2, 1000).mean(1)
    return float(low), float(high)


@pytest.mark.parametrize(
    ("guidance", "expected"),
    [
        (MeanFlowGuidance(), 0.3),
        (MeanFlowGuidance(2.0, dropout=0.2), 0.6),
        (MeanFlowGuidance(1.0, mix=0.5, dropout=0.2), 0.6),
        (MeanFlowGuidance(2.0, branch="mp1"), 0.3),
    ],
    ids=["none", "scale", "mix", "mp1"],
)
def test_trained_guidance_moves_actions_away_from_the_unconditional_mean_and_mp1s_rule_does_not(guidance, expected):
    low, high = _means(guidance=guidance)
    assert high == pytest.approx(expected, abs=0.1) and low == pytest.approx(-expected, abs=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeanFlowGuidance(branch="cfg"), r"guidance.branch = 'cfg'; allowed are \['null', 'mp1'\]"),
        (lambda: MeanFlowGuidance(0.0), r"guidance.scale = 0.0 must be positive"),
        (lambda: MeanFlowGuidance(mix=1.0), r"guidance.mix = 1.0 must lie in \[0, 1\)"),
        (lambda: MeanFlowGuidance(mix=0.5, branch="mp1"), r"the mp1 branch has no mix"),
        (lambda: MeanFlowGuidance(2.0, dropout=0.0), r"guidance.dropout = 0.0 .*never trained"),
        (lambda: MeanFlowPolicy(flow_share=1.5), r"flow_share = 1.5 must lie in \[0, 1\]"),
        (lambda: MeanFlowPolicy(dispersive_weight=-1.0), r"dispersive_weight = -1.0"),
        (lambda: MeanFlowPolicy(tangent="teacher"), r"tangent = 'teacher'; allowed are"),
        (lambda: MeanFlowPolicy(derivative="vjp"), r"derivative = 'vjp' is unknown"),
        (lambda: MeanFlowPolicy(adaptive_power=-0.5), r"power = -0.5 must not be negative"),
        (lambda: MeanFlowPolicy(steps=0), r"steps = 0; sampling needs at least 1"),
    ],
)
def test_unusable_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_one_step_keeps_both_modes_on_every_seed(seed):
    """With the default embedding no seed may fail; with frequencies in the hundreds three of these four do."""
    lower, upper = two_modes.shares(two_modes.sample(two_modes.train(MeanFlowPolicy, 300, seed)))
    assert lower > 0.25 and upper > 0.25 and lower + upper > 0.75


def test_one_euler_step_of_plain_flow_matching_averages_the_modes():
    """What the test above excludes: 95 % of these actions lie between the modes."""
    actions = two_modes.sample(two_modes.train(FlowPolicy, 300, 0, steps=1))
    assert sum(two_modes.shares(actions)) < 0.05
    assert abs(float(actions.mean())) < 0.1 and float(actions.std()) < 0.3


def test_networks_that_are_differentiated_in_time_read_it_at_low_frequencies():
    """The trap: the derivative of the embedding enters the target, and grows with its frequencies."""
    t, eps = torch.linspace(0.3, 1, 64), torch.randn(64, 8, 3, generator=generator())

    def rate(frequency: float) -> float:
        cls = type("Policy", (MeanFlowPolicy,), {"max_frequency": frequency})
        policy = awaken(members.Member("", cls).build())
        cond = torch.zeros(64, policy.encoder_net.out_dim)
        _, slope = torch.func.jvp(lambda t: policy.velocity(eps, t, cond, 0.1 * t), (t,), (torch.ones(64),))
        return float(slope.detach().square().mean().sqrt())

    assert rate(400.0) > 10 * rate(MeanFlowPolicy.max_frequency)
    for cls in (MeanFlowPolicy, OneStepFlowPolicy):
        net = members.Member("", cls).build().net
        assert float(net.time.frequencies.max()) == float(net.interval.frequencies.max()) == 5.0


# ---- wrapped networks -------------------------------------------------------------------------------------


def _gradients(policy) -> tuple[torch.Tensor, torch.Tensor]:
    loss, _ = policy.loss(make_batch(policy, rows=6), generator(), 0.5)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in policy.trained_parameters()])


@pytest.mark.parametrize("derivative", ["jvp", "difference"])
def test_a_network_wrapped_for_several_processes_has_the_same_loss_and_gradient(derivative):
    guided = {"guidance": MeanFlowGuidance(1.5, mix=0.2, dropout=0.5), "tangent": "model", "derivative": derivative}
    plain, wrapped = (awaken(members.Member("", MeanFlowPolicy, guided).build()) for _ in range(2))
    expected = _gradients(plain)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped.net = nn.parallel.DistributedDataParallel(wrapped.net)
        torch.testing.assert_close(_gradients(wrapped), expected, rtol=1e-6, atol=1e-8)
    finally:
        torch.distributed.destroy_process_group()


def test_a_compiled_network_has_the_same_loss_and_gradient():
    """Compiled graphs drop forward-mode derivatives without a word."""
    plain, wrapped = (awaken(members.Member("", MeanFlowPolicy).build()) for _ in range(2))
    wrapped.net = torch.compile(wrapped.net, backend="aot_eager")
    torch.testing.assert_close(_gradients(wrapped), _gradients(plain), rtol=1e-4, atol=1e-6)


def test_under_autocast_the_target_is_computed_in_full_precision():
    policy = awaken(members.Member("", MeanFlowPolicy, {"flow_share": 0.0}).build())
    batch = make_batch(policy, rows=16)
    types = []
    policy.net.register_forward_hook(
        lambda module, inputs, output: types.append((output.dtype, torch.is_grad_enabled()))
    )
    with torch.autocast("cpu", torch.bfloat16):
        policy.loss(batch, generator())
    assert types == [(torch.float32, False), (torch.bfloat16, True)]
