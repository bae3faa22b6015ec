"""One-step flow policies: the parts of the loss, the teacher, warm starts, and modes that one step keeps."""

from __future__ import annotations

import policy_members as members
import pytest
import torch
import two_modes
from policy_members import awaken, generator, make_batch
from test_meanflow import MEAN, STD, Always, GaussianNet, exact_policy, gaussian_batch, variance
from torch import nn

from genrl.objectives import UniformTimes
from genrl.policies import Chunking, FlowIntervals, OneStepFlowPolicy, Teacher

ONE_INTERVAL = FlowIntervals(Always(0.8), Always(0.625), full_share=0.0)  # t = 0.8, r = 0.3


class BiasedNet(GaussianNet):
    """The true average velocity plus a constant wherever the interval has a length."""

    def __init__(self, bias: float):
        super().__init__()
        self.bias = bias

    def forward(self, x, t, cond, r=None):
        u = super().forward(x, t, cond, r)
        return u if r is None else u + self.bias * (t > r)[:, None, None]


def policy_with(net: nn.Module, teacher: nn.Module | None = None, **settings) -> OneStepFlowPolicy:
    policy = exact_policy(net, OneStepFlowPolicy, **{"weighting": "none", "times": Always(0.6), **settings})
    policy.teacher = Teacher(teacher or net)
    return policy


# ---- the loss ---------------------------------------------------------------------------------------------


def test_the_anchor_at_the_true_network_is_the_variance_of_the_velocity():
    policy = policy_with(GaussianNet(), flow_share=1.0)
    loss, metrics = policy.loss(gaussian_batch(), generator(1))
    assert loss.item() == pytest.approx(STD**2 / variance(0.6), rel=0.02)
    assert set(metrics) == {"loss", "flow_error"}


def _consistency(policy: OneStepFlowPolicy, progress: float) -> float:
    return float(policy.loss(gaussian_batch(), generator(1), progress)[1]["consistency_error"])


@pytest.mark.parametrize(("progress", "rho"), [(0.0, 1.0), (0.5, 0.25), (1.0, 0.0)])
def test_self_consistency_at_the_true_network_is_the_spread_of_the_interpolated_point(progress, rho):
    """E (u_tgt - u*)^2 for an exact teacher, by a second computation: a Gaussian integral over m."""
    t, r, minimum = 0.8, 0.3, 0.05
    policy = policy_with(GaussianNet(), intervals=ONE_INTERVAL, flow_share=0.01, minimum=minimum)
    expected = []
    for p in torch.linspace(0, 1, 2001).tolist():
        m = max(t - max((t - r) * rho * p, minimum), r)
        # u_tgt - u* is linear in the independent unit normals (z, eps) of x0 = MEAN + STD z, with no constant.
        s_t, s_m, s_r = (variance(a) ** 0.5 for a in (t, m, r))
        along = [(s_r / s_t) * (1 - t) * STD - (s_r / s_m) * (1 - m) * STD, (s_r / s_t) * t - (s_r / s_m) * m]
        expected.append(sum(c**2 for c in along) / (t - r) ** 2)
    assert _consistency(policy, progress) == pytest.approx(sum(expected) / len(expected), rel=0.03)


def test_the_target_comes_from_the_teacher_and_the_prediction_from_the_network():
    """An error b of the teacher over (m - r) of the interval shifts the target by b (m - r) / (t - r)."""
    near = {"intervals": ONE_INTERVAL, "flow_share": 0.01, "minimum": 0.1, "contraction": "quadratic"}
    none, teacher, both = (
        _consistency(policy_with(BiasedNet(own), BiasedNet(other), **near), 1.0)
        for own, other in ((0.0, 0.0), (0.0, 2.0), (2.0, 2.0))
    )
    assert teacher - none == pytest.approx((2.0 * 0.4 / 0.5) ** 2, rel=0.03)
    assert both - none == pytest.approx((2.0 * 0.1 / 0.5) ** 2, rel=0.1)


def test_step_weights_multiply_rows_by_their_interval_over_the_step():
    settings = {"intervals": ONE_INTERVAL, "flow_share": 0.5, "minimum": 0.05, "consistency_weight": 3.0}
    values = {}
    for weighting in ("none", "step"):
        loss, metrics = policy_with(BiasedNet(1.0), weighting=weighting, **settings).loss(
            gaussian_batch(1000), generator(1), 1.0
        )
        values[weighting] = float(loss.detach() - metrics["flow_error"]), float(metrics["consistency_error"])
    assert values["none"][1] == values["step"][1]
    assert values["none"][0] == pytest.approx(3 * values["none"][1], rel=1e-9)
    assert values["step"][0] == pytest.approx(3 * values["none"][1] * 0.5 / 0.05, rel=1e-9)


def test_without_the_step_weights_the_gradient_vanishes_with_the_step():
    """Which is why they are the default: the published target tends to the teacher's own prediction."""
    gradients = {}
    for weighting in ("none", "step"):
        for minimum in (0.1, 0.01):
            net = BiasedNet(0.0)
            net.bias = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
            policy = policy_with(net, weighting=weighting, minimum=minimum, intervals=ONE_INTERVAL, flow_share=0.01)
            policy.loss(gaussian_batch(20_000), generator(1), 1.0)[0].backward()
            gradients[weighting, minimum] = float(net.bias.grad)
    # d/db of ((b (t-m) / (t-r))^2 + ...) with the teacher held fixed.
    assert gradients["none", 0.1] / gradients["none", 0.01] == pytest.approx(10, rel=0.1)
    assert gradients["step", 0.1] / gradients["step", 0.01] == pytest.approx(1, rel=0.1)


def test_full_intervals_end_where_acting_ends_and_the_teacher_is_called_without_a_graph():
    class Recorder(GaussianNet):
        ends: list

        def forward(self, x, t, cond, r=None):
            self.ends.append((r.clone(), t.clone()))
            return super().forward(x, t, cond, r)

    net, teacher = Recorder(), Recorder()
    net.ends, teacher.ends = [], []
    policy = policy_with(net, teacher, flow_share=0.5, intervals=FlowIntervals(full_share=0.5))
    policy.teacher.module.ends = []
    policy.loss(gaussian_batch(40), generator(1), 0.3)
    ((r, t),) = net.ends
    assert int((r == t).sum()) == 20 and int((r == 0).sum()) >= 10 and bool((r <= t).all())
    assert net.calls == [(40, True)] and policy.teacher.module.calls == [(20, False)]


# ---- self-guidance ----------------------------------------------------------------------------------------


def test_self_guidance_moves_samples_by_the_teachers_contrast_and_is_zero_without_one():
    guided = {"guidance_weight": 1.0, "dropout": 1e-9, "flow_share": 0.5, "guidance_times": Always(0.6)}
    guided["intervals"] = FlowIntervals(full_share=1.0)
    net = GaussianNet(mean=1.0, null_mean=-0.2)
    _, metrics = policy_with(net, **guided).loss(gaussian_batch(1000, mean=1.0), generator(1))
    assert float(metrics["guidance_size"]) == pytest.approx((1.2 * 0.6 / variance(0.6)) ** 2, rel=1e-9)
    _, metrics = policy_with(GaussianNet(), **guided).loss(gaussian_batch(1000), generator(1))
    assert float(metrics["guidance_size"]) == pytest.approx(0, abs=1e-20)


def test_the_gradient_of_self_guidance_raises_the_likelihood_of_the_condition():
    """Delta < 0 here: u falls, so that the sample x_t - t u moves from the null mean -0.2 to 1 and beyond."""
    net = GaussianNet(mean=1.0, null_mean=-0.2)
    slopes = []
    for weight in (0.0, 1.0):
        settings = {"guidance_weight": weight} if weight else {}
        policy = policy_with(
            net, **settings, dropout=1e-9, flow_share=0.5, intervals=FlowIntervals(full_share=1.0), minimum=0.05
        )
        net.anything.grad = None
        shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        policy.net = _Shifted(net, shift)
        policy.loss(gaussian_batch(20_000, mean=1.0), generator(1), 0.5)[0].backward()
        slopes.append(float(shift.grad))
    assert slopes[1] - slopes[0] > 0.1  # descending lowers u


class _Shifted(nn.Module):
    def __init__(self, net: nn.Module, shift: nn.Parameter):
        super().__init__()
        self.inner, self.shift = net, shift

    def forward(self, x, t, cond, r=None):
        return self.inner(x, t, cond, r) + self.shift


# ---- the teacher ------------------------------------------------------------------------------------------


def test_the_teacher_follows_the_network_with_a_warm_up_and_is_not_trained():
    policy = awaken(members.Member("", OneStepFlowPolicy, {"teacher_decay": 0.5}).build())
    live, average = (next(module.parameters()) for module in (policy.net, policy.teacher.module))
    expected = average.clone()
    for update in range(1, 30):
        live.data.add_(1.0)
        policy.after_update(update)
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * live.detach()
        torch.testing.assert_close(average, expected)
    assert not any(p is average for p in policy.trained_parameters())


def test_teachers_are_part_of_the_state_and_not_of_what_is_saved(tmp_path):
    from safetensors import safe_open

    policy = members.Member("", OneStepFlowPolicy).build()
    assert any(name.startswith("teacher.") for name in policy.state_dict())
    policy.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not any("teacher" in name for name in file.keys())  # noqa: SIM118


# ---- acting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
def test_a_warm_start_from_the_last_chunk_has_the_predicted_distribution(steps):
    """N( m + (s0/S)(1-t_w)(a - m), (s0 t_w / S)^2 ) around the old action a, for any number of steps."""
    start, old, rows = 0.85, 1.5, 100_000
    policy = policy_with(GaussianNet(), steps=steps)
    policy.chunking = Chunking(2, 1, 1, warm_start=start)
    eps = torch.randn(rows, 2, 1, generator=generator(), dtype=torch.float64)
    previous = torch.tensor([9.0, old], dtype=torch.float64)[None, :, None].expand(rows, -1, -1)
    chunk = policy.predict({"state": torch.zeros(rows, 1, 1)}, lambda step, shape: eps, previous)
    width = variance(start) ** 0.5
    # The action after the executed one moves to the front, and its repetition fills the end.
    for index in range(2):
        assert float(chunk[:, index].mean()) == pytest.approx(MEAN + STD / width * 0.15 * (old - MEAN), abs=5e-3)
        assert float(chunk[:, index].std()) == pytest.approx(STD * start / width, rel=0.01)


def test_any_number_of_steps_gives_the_same_action_with_the_true_network():
    obs = {"state": torch.zeros(50, 1, 1)}
    eps = torch.randn(50, 1, 1, generator=generator(), dtype=torch.float64)
    for steps in (1, 2, 5):
        policy = policy_with(GaussianNet(), steps=steps)
        assert policy.nfe == steps
        torch.testing.assert_close(policy.predict(obs, lambda step, shape: eps), MEAN + STD * eps, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_one_step_keeps_both_modes(seed):
    """One Euler step of plain flow matching averages them, see test_meanflow."""
    lower, upper = two_modes.shares(two_modes.sample(two_modes.train(OneStepFlowPolicy, 300, seed)))
    assert lower > 0.25 and upper > 0.25 and lower + upper > 0.7


def test_strong_self_guidance_is_off_by_default_and_single_rows_train():
    policy = awaken(members.Member("", OneStepFlowPolicy).build())
    assert policy.guidance_weight == 0 and policy.null is None
    loss, _ = policy.loss(make_batch(policy, rows=1), generator())
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneStepFlowPolicy(flow_share=0.0), r"flow_share = 0.0 .*without an anchor constant maps"),
        (lambda: OneStepFlowPolicy(minimum=0.0), r"minimum = 0.0 .*the target repeats the teacher"),
        (lambda: OneStepFlowPolicy(consistency_weight=-1.0), r"consistency_weight = -1.0 must not be negative"),
        (lambda: OneStepFlowPolicy(guidance_weight=0.1, dropout=0.0), r"guidance_weight = 0.1 needs rows"),
        (
            lambda: OneStepFlowPolicy(guidance_weight=0.1, intervals=FlowIntervals(full_share=0.0)),
            r"intervals.full_share > 0 \(now 0.0\)",
        ),
        (lambda: OneStepFlowPolicy(teacher_decay=1.0), r"teacher_decay = 1.0 must lie in \[0, 1\)"),
        (lambda: OneStepFlowPolicy(weighting="snr"), r"weighting = 'snr'; allowed are \['step', 'none'\]"),
        (lambda: OneStepFlowPolicy(contraction="cosine"), r"schedule = 'cosine' is unknown"),
        (lambda: OneStepFlowPolicy(dropout=1.0), r"dropout = 1.0 must lie in \[0, 1\)"),
        (lambda: OneStepFlowPolicy(steps=0), r"steps = 0"),
        (lambda: FlowIntervals(minimum=0.0), r"intervals.minimum = 0.0"),
        (lambda: FlowIntervals(UniformTimes(), full_share=1.5), r"intervals.full_share = 1.5"),
    ],
)
def test_unusable_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
