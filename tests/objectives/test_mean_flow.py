"""MeanFlow's target, guidance, weighting and dispersion against closed forms on flows between Gaussians."""

from __future__ import annotations

import math

import pytest
import torch
from gaussian_bed import GaussianBed, MixtureBed

from genrl.objectives import (
    BetaTimes,
    LogitNormalTimes,
    UniformTimes,
    adaptive_loss,
    dispersive_loss,
    flow_map_sample,
    guided_velocity,
    interval_below,
    mean_flow_target,
    random_rows,
    time_pair,
    total_derivative,
)

BED = GaussianBed(m=0.7, s0=0.5)
derivatives = pytest.mark.parametrize(("derivative", "tolerance"), [("jvp", 1e-9), ("difference", 1e-4)])


def exact(x, t, r, bed=BED):
    """u* with times [B] for x [B, D]."""
    return bed.average_velocity(x, t[:, None], r[:, None])


def points(rows: int, dim: int = 2, seed: int = 0):
    """Uniform t and r <= t, and (x0, eps, x_t) of the bed."""
    g = torch.Generator().manual_seed(seed)
    t = 0.05 + 0.95 * torch.rand(rows, generator=g, dtype=torch.float64)
    r = t * torch.rand(rows, generator=g, dtype=torch.float64)
    x0, eps = BED.pair((rows, dim), g)
    return t, r, x0, eps, torch.lerp(x0, eps, t[:, None])


# ---- the identity -----------------------------------------------------------------------------------------


@derivatives
def test_the_target_is_u_itself_at_the_true_u_with_the_marginal_velocity(derivative, tolerance):
    t, r, _, _, x = points(500)
    target = mean_flow_target(exact, x, t, r, BED.velocity(x, t[:, None]), derivative=derivative)
    torch.testing.assert_close(target, exact(x, t, r), rtol=0, atol=tolerance)
    assert (exact(x, t, r) - BED.velocity(x, t[:, None])).abs().max() > 0.1  # the derivative's term is at work


def test_a_wrong_u_is_corrected():
    t, r, _, _, x = points(500)
    target = mean_flow_target(lambda *a: exact(*a) + 0.1 * a[0], x, t, r, BED.velocity(x, t[:, None]))
    assert (target - exact(x, t, r)).abs().max() > 0.01


@pytest.mark.parametrize(("t", "r"), [(1.0, 0.0), (0.8, 0.3), (0.4, 0.35)])
def test_with_sampled_velocities_the_loss_at_the_true_u_is_the_known_floor(t, r):
    rows = 200_000
    x0, eps = BED.pair((rows, 1), torch.Generator().manual_seed(3))
    times, ends = torch.full((rows,), t, dtype=torch.float64), torch.full((rows,), r, dtype=torch.float64)
    x, v = torch.lerp(x0, eps, times[:, None]), eps - x0
    residual = exact(x, times, ends) - mean_flow_target(exact, x, times, ends, v)
    floor = BED.std(r) ** 2 * BED.s0**2 / BED.std(t) ** 4
    assert float(residual.square().mean()) == pytest.approx(float(floor), rel=0.02)
    # Its mean given x_t is 0, so the gradient in every parameter of u vanishes in expectation.
    for feature in (torch.ones_like(x), x, x**2):
        gradient = residual * feature
        assert abs(float(gradient.mean())) < 4 * float(gradient.std()) / math.sqrt(rows)


def test_differentiating_along_the_models_velocity_leaves_the_noise_of_v_alone():
    """The floor falls from S_r^2 s0^2 / S_t^4 to Var(v | x_t) where the tangent is the marginal velocity."""
    rows, t, r = 200_000, 0.3, 0.0
    x0, eps = BED.pair((rows, 1), torch.Generator().manual_seed(4))
    times, ends = torch.full((rows,), t, dtype=torch.float64), torch.full((rows,), r, dtype=torch.float64)
    x = torch.lerp(x0, eps, times[:, None])
    target = mean_flow_target(exact, x, times, ends, eps - x0, tangent=exact(x, times, times))
    residual = exact(x, times, ends) - target
    assert float(residual.square().mean()) == pytest.approx(float(BED.velocity_variance(t)), rel=0.02)
    assert abs(float(residual.mean())) < 4 * float(residual.std()) / math.sqrt(rows)


@derivatives
def test_intervals_of_length_zero_have_the_velocity_as_target(derivative, tolerance):
    t, _, x0, eps, x = points(50)
    target = mean_flow_target(exact, x, t, t, eps - x0, derivative=derivative)
    assert torch.equal(target, eps - x0)


def test_targets_are_detached_and_keep_the_shape_of_chunks():
    scale = torch.tensor(0.3, requires_grad=True)
    x, v = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    t, r = torch.full((4,), 0.8), torch.full((4,), 0.2)
    for derivative in ("jvp", "difference"):
        target = mean_flow_target(lambda x, t, r: scale * x, x, t, r, v, derivative=derivative)
        assert target.shape == x.shape and not target.requires_grad
        torch.testing.assert_close(target, v - 0.6 * 0.3 * v)


def test_the_difference_approaches_the_derivative_quadratically():
    t, r, x0, eps, x = points(100)
    _, true = total_derivative(exact, x, t, r, eps - x0)
    errors = [
        (total_derivative(exact, x, t, r, eps - x0, "difference", step)[1] - true).abs().mean() for step in (0.02, 0.01)
    ]
    assert float(errors[0] / errors[1]) == pytest.approx(4, rel=0.1)


def test_unknown_ways_to_differentiate_are_refused():
    x, t = torch.zeros(2, 1), torch.ones(2)
    with pytest.raises(ValueError, match=r"derivative = 'fd' is unknown; allowed are 'jvp' and 'difference'"):
        mean_flow_target(exact, x, t, t, x, derivative="fd")
    with pytest.raises(ValueError, match=r"step = 0.0 .*0.005"):
        mean_flow_target(exact, x, t, t, x, derivative="difference", step=0.0)


@pytest.mark.parametrize("times", [[1, 0], [1, 0.5, 0], [1, 0.9, 0.85, 0.2, 0]])
def test_with_the_true_u_any_number_of_steps_gives_the_same_sample(times):
    eps = torch.randn(100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sample = flow_map_sample(exact, eps, times)
    torch.testing.assert_close(sample, BED.flow_map(eps, 1.0, 0.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("times", [[1.0], [0.0, 1.0], [1.0, 0.5, 0.5, 0.0]])
def test_times_of_sampling_must_fall(times):
    with pytest.raises(ValueError, match=r"at least two and fall"):
        flow_map_sample(exact, torch.zeros(1, 1), times)


# ---- guidance ---------------------------------------------------------------------------------------------


def _fixed_point(update, start: float = 0.0) -> float:
    """Gradient descent of (beta - update(beta))^2 with the target held fixed."""
    beta = start
    for _ in range(400):
        beta -= 0.1 * (beta - update(beta))
    return beta


@pytest.mark.parametrize("scale", [1.0, 2.0, 3.0])
def test_the_published_branch_guides_nothing(scale):
    """MP1's quirk: with u = beta v* and its own conditional branch the solution is beta = 1 for every scale."""
    v = torch.tensor([[0.8]])
    beta = _fixed_point(lambda b: float(guided_velocity(v, None, b * v, scale) / v))
    assert beta == pytest.approx(1, abs=1e-6)


def test_the_published_branch_multiplies_the_noise_of_the_target_by_the_scale():
    t, _, x0, eps, x = points(100_000, 1)
    own = BED.velocity(x, t[:, None])
    noise = [(guided_velocity(eps - x0, None, own, w) - own).square().mean() for w in (1.0, 3.0)]
    assert float(noise[1] / noise[0]) == pytest.approx(9, rel=1e-9)


@pytest.mark.parametrize(("scale", "mix"), [(1.0, 0.0), (2.0, 0.0), (1.0, 0.5), (3.0, 0.2)])
def test_with_a_null_branch_the_solution_is_guided_by_scale_over_one_minus_mix(scale, mix):
    """For Gaussians of equal variance guidance moves the mean: m_0 + g (m_s - m_0), exactly."""
    given, null = GaussianBed(1.0, 0.5), GaussianBed(-0.2, 0.5)
    g = scale / (1 - mix)
    guided = GaussianBed(-0.2 + g * 1.2, 0.5)
    x, t = torch.linspace(-2, 2, 9, dtype=torch.float64), 0.6
    # v_0 + g (v_s - v_0) is the velocity of the Gaussian with the moved mean ...
    v_s, v_0 = given.velocity(x, t), null.velocity(x, t)
    torch.testing.assert_close(v_0 + g * (v_s - v_0), guided.velocity(x, t), rtol=0, atol=1e-10)
    # ... and it is where the target repeats the network.
    u = guided.velocity(x, t)
    torch.testing.assert_close(guided_velocity(v_s, u, v_0, scale, mix), u, rtol=0, atol=1e-10)
    found = _fixed_point(lambda b: float(guided_velocity(v_s[:1], torch.tensor([b]), v_0[:1], scale, mix)))
    assert found == pytest.approx(float(u[0]), abs=1e-6)


def test_no_guidance_needs_no_branch_and_a_missing_one_is_named():
    v = torch.randn(3, 2)
    assert torch.equal(guided_velocity(v, None, None, 1.0), v)
    with pytest.raises(ValueError, match=r"weigh the unconditional branch by -1.0"):
        guided_velocity(v, None, None, 2.0)
    with pytest.raises(ValueError, match=r"weigh the conditional branch by 0.5"):
        guided_velocity(v, None, v, 1.0, 0.5)
    with pytest.raises(ValueError, match=r"mix = 1.0 must lie in \[0, 1\)"):
        guided_velocity(v, v, v, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"scale = 0.0 must be positive"):
        guided_velocity(v, v, v, 0.0)


# ---- weighting --------------------------------------------------------------------------------------------


def test_the_weighted_gradient_in_the_rms_error_is_at_most_two():
    rms = torch.logspace(-6, 6, 200, dtype=torch.float64, requires_grad=True)
    adaptive_loss(rms.square(), power=0.5).sum().backward()
    assert float(rms.grad.max()) <= 2 and float(rms.grad.max()) == pytest.approx(2, rel=1e-6)
    torch.testing.assert_close(rms.grad, 2 * rms.detach() / (rms.detach() ** 2 + 1e-3).sqrt())


def test_powers_of_the_weighting():
    delta = torch.tensor([0.0, 0.01, 4.0])
    assert torch.equal(adaptive_loss(delta, power=0.0), delta)
    torch.testing.assert_close(adaptive_loss(delta, power=1.0, eps=0.01), torch.tensor([0.0, 0.5, 4 / 4.01]))
    with pytest.raises(ValueError, match=r"power = -1"):
        adaptive_loss(delta, power=-1)
    with pytest.raises(ValueError, match=r"eps = 0"):
        adaptive_loss(delta, eps=0)


# ---- dispersion -------------------------------------------------------------------------------------------


def _dispersion_by_hand(z, temperature):
    """The definition, pair by pair."""
    d = [[float((a - b).square().sum()) for a in z] for b in z]
    top = max(max(row) for row in d)
    return math.log(sum(math.exp(-value / top / temperature) for row in d for value in row) / len(z) ** 2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_dispersion_is_its_definition_within_its_bounds_and_blind_to_scale(temperature):
    z = torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    loss = dispersive_loss(z, temperature)
    assert float(loss) == pytest.approx(_dispersion_by_hand(z.double(), temperature), rel=1e-5)
    assert -1 / temperature <= float(loss) < 0
    for other in (1e-4 * z, 1e4 * z, z + 100):
        assert float(dispersive_loss(other, temperature)) == pytest.approx(float(loss), rel=1e-3)
    assert float(dispersive_loss([z, 2 * z], temperature)) == pytest.approx(2 * float(loss), rel=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_equal_representations_have_dispersion_zero_and_finite_gradients(value):
    z = torch.full((7, 5), value, requires_grad=True)
    loss = dispersive_loss(z)
    loss.backward()
    assert loss.item() == 0 and float(z.grad.abs().max()) == 0


def test_descending_the_dispersion_moves_the_nearest_pair_apart():
    z = torch.tensor([[0.0, 0.0], [0.1, 0.0], [1.0, 2.0], [-2.0, 1.0]], requires_grad=True)
    dispersive_loss(z).backward()
    moved = (z - 0.01 * z.grad).detach()
    assert float((moved[0] - moved[1]).norm()) > 0.1
    # Scale-free: the gradient neither grows nor shrinks the whole.
    assert abs(float((z.grad * z.detach()).sum())) < 1e-6


def test_dispersion_refuses_what_it_cannot_measure():
    with pytest.raises(ValueError, match=r"temperature = 0 must be positive"):
        dispersive_loss(torch.zeros(2, 2), 0)
    with pytest.raises(ValueError, match=r"at least one feature map"):
        dispersive_loss([])


# ---- times ------------------------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "uniform": (UniformTimes(0.2, 0.9), torch.distributions.Uniform(0.2, 0.9)),
    "beta(0.8,1)": (BetaTimes(0.8, 1.0), torch.distributions.Beta(0.8, 1.0)),
    "beta(1,1.5)": (BetaTimes(1.0, 1.5), torch.distributions.Beta(1.0, 1.5)),
    "logit_normal": (LogitNormalTimes(-0.6, 1.6), torch.distributions.LogNormal(-0.6, 1.6)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_quantiles_belong_to_the_distribution(name):
    times, reference = DISTRIBUTIONS[name]
    p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    t = times.quantile(p)
    if name.startswith("beta"):  # torch has no CDF of Beta: with one parameter 1 it is a power
        cdf = t**0.8 if "0.8" in name else 1 - (1 - t) ** 1.5
        sampled = reference.sample((100_000,))
        assert float(times.quantile(torch.rand(100_000)).mean()) == pytest.approx(float(sampled.mean()), abs=0.01)
    else:
        cdf = reference.cdf(t / (1 - t) if name == "logit_normal" else t)
    torch.testing.assert_close(cdf.double(), p, rtol=1e-5, atol=1e-6)
    edges = times.quantile(torch.tensor([0.0, 1.0]))
    assert bool(torch.isfinite(edges).all()) and 0 <= float(edges[0]) < float(edges[1]) <= 1


def test_pairs_are_sorted_and_have_the_distribution_of_order_statistics():
    p = torch.rand(200_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t, r = time_pair(p, UniformTimes())
    assert bool((r <= t).all())
    assert (float(t.mean()), float(r.mean())) == pytest.approx((2 / 3, 1 / 3), abs=5e-3)
    t, r = time_pair(p, LogitNormalTimes(-0.6, 1.6), LogitNormalTimes(-4.0, 1.6))  # py-meanflow's two distributions
    swapped = float((LogitNormalTimes(-4.0, 1.6).quantile(p[:, 1]) == t).double().mean())
    # P(second > first) of normals with means -4, -0.6 and variances 1.6^2.
    assert swapped == pytest.approx(float(torch.special.ndtr(torch.tensor(-3.4 / (1.6 * 2**0.5)))), abs=5e-3)


def test_intervals_below_a_time_have_their_minimum_and_end_at_zero():
    t, fraction = torch.tensor([1.0, 1.0, 0.5, 0.03]), torch.tensor([1.0, 0.0, 0.5, 0.2])
    torch.testing.assert_close(interval_below(t, fraction, 0.05), torch.tensor([0.0, 0.95, 0.25, 0.0]))


def test_random_rows_are_as_many_as_asked_each_equally_often():
    g = torch.Generator().manual_seed(0)
    counts = torch.zeros(8)
    for _ in range(2000):
        rows = random_rows(torch.rand(8, generator=g), 0.25)
        assert len(rows) == 2 == len(set(rows.tolist()))
        counts[rows] += 1
    assert float((counts / 2000 - 0.25).abs().max()) < 0.05
    assert len(random_rows(torch.rand(8), 0.0)) == 0 and len(random_rows(torch.rand(8), 1.0)) == 8
    with pytest.raises(ValueError, match=r"share of the rows lies in \[0, 1\], got 1.5"):
        random_rows(torch.rand(8), 1.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UniformTimes(0.5, 0.5), r"0 <= low < high <= 1"),
        (lambda: LogitNormalTimes(std=0.0), r"std = 0.0 must be positive"),
        (lambda: BetaTimes(2.0, 3.0), r"a or b must be 1"),
        (lambda: BetaTimes(-1.0, 1.0), r"must be positive"),
    ],
)
def test_distributions_refuse_what_they_are_not(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mixture_satisfies_the_identity_as_well():
    """On the path's ODE, which has no closed form here: u* by Runge-Kutta, its derivative by differences."""
    bed = MixtureBed(((-1.0,), (1.0,)), (0.3, 0.2), (0.4, 0.6))
    x = torch.tensor([[-1.0], [0.2], [0.9]], dtype=torch.float64)
    t, r = torch.full((3,), 0.7, dtype=torch.float64), torch.full((3,), 0.2, dtype=torch.float64)

    def u(x, t, r):
        return (x - bed.flow_map(x, float(t[0]), float(r[0]))) / (t - r)[:, None]

    target = mean_flow_target(u, x, t, r, bed.velocity(x, 0.7), derivative="difference", step=1e-3)
    torch.testing.assert_close(target, u(x, t, r), rtol=0, atol=1e-4)
    wrong = mean_flow_target(u, x, t, r, bed.velocity(x, 0.7) + 0.05, derivative="difference", step=1e-3)
    assert (wrong - u(x, t, r)).abs().max() > 0.01
