"""Drifting policies: who attracts and who repels whom, guidance, padding, and several ways of acting in one step."""

from __future__ import annotations

import policy_members as members
import pytest
import torch
import two_modes
from policy_members import awaken, generator, make_batch
from torch import nn

from genrl.networks import MLPBackbone, ObsSpec
from genrl.objectives import drifting_loss
from genrl.policies import Chunking, DriftGuidance, DriftingPolicy, Normalizer


class Shifted(nn.Module):
    def __init__(self, inner: nn.Module, shift: float):
        super().__init__()
        self.inner, self.shift = inner, nn.Parameter(torch.tensor(shift))

    def forward(self, x, t, cond):
        return self.inner(x, t, cond) + self.shift


def build(**settings):
    return awaken(members.Member("", DriftingPolicy, settings).build())


def test_each_state_calls_the_network_once_per_particle_at_pure_noise():
    policy = build(particles=5)
    calls = []
    policy.net.register_forward_hook(lambda module, inputs, output: calls.append(inputs))
    policy.loss(make_batch(policy, rows=3), generator())
    ((x, t, cond),) = calls
    assert x.shape == (15, 8, 3) and torch.equal(t, torch.ones(15))
    assert torch.equal(cond, cond[::5].repeat_interleave(5, 0))  # the particles of a state are neighbours
    assert abs(float(x.std()) - 1) < 0.2


def test_the_loss_is_that_of_the_particles_of_each_state_against_its_own_action():
    policy = build(particles=4, temperatures=(0.1, 0.3))
    batch = make_batch(policy)
    loss, metrics = policy.loss(batch, generator(1))
    eps = torch.randn(5, 4, 8, 3, generator=generator(1))
    cond = policy.encode(batch["obs"]).repeat_interleave(4, 0)
    x = eps.flatten(0, 1)
    x = (x - policy.velocity(x, torch.ones(20), cond)).reshape(5, 4, 24)
    actions = policy.normalizer.normalize("action", batch["actions"]).flatten(1)[:, None]
    expected, gauges = drifting_loss(x, actions, None, (0.1, 0.3), affinity=policy.affinity, min_scale=policy.min_scale)
    torch.testing.assert_close(loss, expected.mean())
    torch.testing.assert_close(metrics["force"], gauges["force"].mean())
    torch.testing.assert_close(metrics["scale"], gauges["scale"].mean())


def test_particles_far_outside_the_range_of_actions_keep_their_gradient():
    """The trap: clipped to [-1, 1] before the loss they would have none."""
    policy = build()
    policy.net = Shifted(policy.net, -50.0)  # every particle near +50
    policy.loss(make_batch(policy), generator())[0].backward()
    assert float(policy.net.shift.grad) < -1e-3  # descent raises v, which lowers the actions


def test_padded_actions_attract_nobody():
    policy = build(mask_padding=True, neighbours=2, bandwidth=1.0)
    batch = make_batch(policy)
    changed = {**batch, "actions": torch.where(batch["valid"][..., None], batch["actions"], 40.0)}
    losses = []
    for data in (batch, changed):
        policy.zero_grad()
        loss, _ = policy.loss(data, generator(2))
        loss.backward()
        losses.append(torch.cat([p.grad.flatten() for p in policy.trained_parameters()]))
    torch.testing.assert_close(*losses)
    policy.mask_padding = False
    assert policy.loss(changed, generator(2))[1]["scale"] > 1.1 * policy.loss(batch, generator(2))[1]["scale"]


# ---- positives and negatives ------------------------------------------------------------------------------


def test_neighbours_are_the_nearest_other_states_with_weights_that_fall_with_distance():
    policy = build(neighbours=2, bandwidth=0.3)
    cond = torch.tensor([[0.0], [0.1], [0.3], [4.0]])
    actions = torch.arange(4.0)[:, None]
    positives, weights = policy._positives(actions, cond, None)
    assert positives[:, 0, 0].tolist() == [0, 1, 2, 3]  # a state's own action comes first, with weight 1
    assert positives[0, 1:, 0].tolist() == [1, 2] and positives[1, 1:, 0].tolist() == [0, 2]
    assert torch.equal(weights[:, 0], torch.ones(4))
    assert (weights[0, 1:].diff() < 0).all() and (weights[:3, 1] > 0.9).all()
    assert (weights[3, 1:] < 1e-3).all()  # far from all


def test_a_neighbour_needs_actions_wherever_the_state_has_them():
    policy = build(neighbours=1, bandwidth=10.0)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    cond = torch.tensor([[0.0], [0.1], [5.0]])
    positives, weights = policy._positives(torch.arange(3.0)[:, None].expand(3, 2), cond, mask)
    assert positives[0, 1, 0] == 2 and weights[0, 1] > 0.5  # not row 1, which is nearer but short
    assert positives[1, 1, 0] == 0


def test_a_batch_of_one_state_has_no_neighbours():
    policy = build(neighbours=3)
    positives, weights = policy._positives(torch.ones(1, 4), torch.zeros(1, 2), None)
    assert positives.shape == (1, 1, 4) and weights.tolist() == [[1.0]]
    guided = build(guidance=DriftGuidance(1.5), neighbours=3)
    assert torch.isfinite(guided.loss(make_batch(guided, rows=1), generator())[0])


def _means(**settings) -> tuple[float, float]:
    """Mean action in the states -1 and 1, learned from actions N(0.3 state, 0.3^2)."""
    batch, updates = 128, 200
    policy = DriftingPolicy(network=MLPBackbone(64, 2), chunking=Chunking(1, 1, 1), **settings)
    features = {"state": ("identity", (1,)), "action": ("identity", (1,))}
    policy.configure({"state": ObsSpec((1,), "state")}, 1, Normalizer(features))
    optimizer, source = torch.optim.Adam(policy.trained_parameters(), 3e-3), generator()
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / updates)
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


def test_guidance_moves_actions_away_from_those_of_other_states():
    settings = {"particles": 16, "neighbours": 15}
    plain = _means(**settings)
    assert 0.2 < plain[1] < 0.36 and -0.36 < plain[0] < -0.2
    for source in ("data", "network"):
        low, high = _means(guidance=DriftGuidance(2.0, negatives=16, source=source, dropout=0.2), **settings)
        assert high > 0.4 and low < -0.4


def test_the_null_condition_exists_and_is_trained_for_guidance_by_the_network_only():
    assert build(guidance=DriftGuidance(2.0), neighbours=1).null is None
    policy = build(guidance=DriftGuidance(2.0, source="network", dropout=0.5), neighbours=1)
    policy.loss(make_batch(policy, rows=12), generator())[0].backward()
    assert policy.null.grad.abs().max() > 0


# ---- several ways of acting -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"affinity": "both", "temperatures": (0.1,)}], ids=["default", "published"])
def test_one_step_keeps_both_modes_though_each_state_has_one_action(settings):
    lower, upper = two_modes.shares(two_modes.sample(two_modes.train(DriftingPolicy, 200, 0, **settings)))
    assert lower > 0.3 and upper > 0.3 and lower + upper > 0.75


def test_without_competition_one_mode_takes_all():
    """The trap: with one positive a kernel mean shift is a regression, whatever the kernel."""
    policy = two_modes.train(DriftingPolicy, 200, 0, affinity="separate", temperatures=(0.1,))
    assert min(two_modes.shares(two_modes.sample(policy))) < 0.05


def test_force_falls_while_the_loss_stays_at_one():
    policy = two_modes.train(DriftingPolicy, 1, 0, affinity="both", temperatures=(0.1,))
    trained = two_modes.train(DriftingPolicy, 200, 0, affinity="both", temperatures=(0.1,))
    sign = torch.where(torch.arange(512) % 2 == 0, -1.0, 1.0)
    data = {
        "obs": {"state": torch.zeros(512, 1, 1)},
        "actions": sign[:, None, None],
        "valid": torch.ones(512, 1, dtype=torch.bool),
    }
    (first, before), (last, after) = (p.loss(data, generator(1)) for p in (policy, trained))
    first, last = first.detach(), last.detach()
    assert float(first) == pytest.approx(1.0, abs=0.01) and float(last) == pytest.approx(1.0, abs=0.01)
    assert after["force"] < 0.7 * before["force"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DriftingPolicy(particles=1), r"particles = 1; a particle needs another"),
        (lambda: DriftingPolicy(neighbours=-1), r"neighbours = -1 must not be negative"),
        (lambda: DriftingPolicy(bandwidth=0.0), r"bandwidth = 0.0 must be positive"),
        (lambda: DriftingPolicy(temperatures=()), r"temperatures is empty"),
        (lambda: DriftingPolicy(temperatures=(-0.1,)), r"temperature = -0.1 must be positive"),
        (lambda: DriftingPolicy(affinity="all"), r"affinity = 'all' is unknown"),
        (lambda: DriftingPolicy(kernel="box"), r"kernel = 'box' is unknown"),
        (lambda: DriftingPolicy(shared="group"), r"shared = 'group' is unknown"),
        (lambda: DriftingPolicy(min_scale=0.0), r"min_scale = 0.0 must be positive"),
        (lambda: DriftingPolicy(guidance=DriftGuidance(2.0)), r"no effect with a single positive"),
        (lambda: DriftGuidance(0.5), r"guidance = 0.5"),
        (lambda: DriftGuidance(2.0, negatives=0), r"guidance needs"),
        (lambda: DriftGuidance(source="null"), r"guidance.source = 'null'"),
        (lambda: DriftGuidance(dropout=0.0), r"guidance.dropout = 0.0"),
        (lambda: DriftingPolicy(chunking=Chunking(4, 1, 2, warm_start=0.8)), r"always starts from pure noise"),
    ],
)
def test_unusable_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
