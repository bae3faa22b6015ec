"""OFP's targets and guidance, and self-distillation, against closed forms on flows between Gaussians."""

from __future__ import annotations

import math

import pytest
import torch
from gaussian_bed import GaussianBed

from genrl.objectives import (
    contracted_time,
    contraction,
    mean_flow_target,
    self_consistency_target,
    self_distillation_target,
    self_guidance,
    trigonometric_step,
)

BED = GaussianBed(m=0.7, s0=0.5)


def exact(x, t, r, bed=BED):
    """u* with times [B] for x [B, D]."""
    return bed.average_velocity(x, t[:, None], r[:, None])


def triples(rows: int, seed: int = 0):
    """t > m > r in [0, 1], and (x0, eps, x_t)."""
    g = torch.Generator().manual_seed(seed)
    r, m, t = torch.rand(3, rows, generator=g, dtype=torch.float64).sort(0).values
    x0, eps = BED.pair((rows, 2), g)
    return t, m, r, x0, eps, torch.lerp(x0, eps, t[:, None])


def collapsed(x, t, r):
    """The map that sends everything to 0.3, whatever r."""
    return (x - 0.3) / t[:, None]


# ---- OFP: self-consistency --------------------------------------------------------------------------------


def test_an_exact_teacher_is_reproduced_for_every_intermediate_point_on_the_path():
    t, m, r, _, _, x_t = triples(500)
    keep = t - r > 1e-3
    t, m, r, x_t = t[keep], m[keep], r[keep], x_t[keep]
    x_m = BED.flow_map(x_t, t[:, None], m[:, None])
    target = self_consistency_target(exact, x_t, x_m, t, m, r)
    torch.testing.assert_close(target, exact(x_t, t, r), rtol=0, atol=1e-12)


def _slope(t: float, m: float, r: float, rows: int = 1000) -> float:
    """Regression of the target on x_t over samples, with x_m of the same data and noise.

    Sample moments of (x0, eps) are made exact; everything is linear in them, so the regression has no sampling error.
    """
    z = torch.randn(rows, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    z = torch.linalg.qr(z - z.mean(0)).Q * rows**0.5  # mean 0, covariance 1
    x0, eps = BED.m + BED.s0 * z[:, :1], z[:, 1:]
    times = [torch.full((rows,), value, dtype=torch.float64) for value in (t, m, r)]
    x_t, x_m = (torch.lerp(x0, eps, value[:, None]) for value in times[:2])
    target = self_consistency_target(exact, x_t, x_m, *times)
    centred = x_t - x_t.mean()
    return float((centred * target).mean() / centred.square().mean())


def _exact_slope(t: float, r: float) -> float:
    return float((1 - BED.std(r) / BED.std(t)) / (t - r))


@pytest.mark.parametrize("m", [0.2, 0.5, 0.7, 0.79])
def test_the_interpolated_point_biases_the_target_as_predicted(m):
    t, r = 0.8, 0.15
    ratio = BED.std(r) / BED.std(m) * BED.covariance(m, t) / BED.std(t) ** 2
    predicted = float((1 - ratio) / (t - r))
    assert _slope(t, m, r) == pytest.approx(predicted, abs=1e-9)
    assert predicted - _exact_slope(t, r) > 1e-5


def test_the_bias_is_quadratic_in_the_distance_to_t():
    t, r = 0.8, 0.15
    bias = [_slope(t, t - d, r) - _exact_slope(t, r) for d in (0.02, 0.01, 0.005)]
    assert bias[0] / bias[1] == pytest.approx(4, rel=0.05)
    assert bias[1] / bias[2] == pytest.approx(4, rel=0.025)


def test_at_m_equal_t_the_target_repeats_the_teacher_and_at_r_it_is_the_sampled_velocity():
    t, _, r, x0, eps, x_t = triples(100)
    x_r = torch.lerp(x0, eps, r[:, None])
    torch.testing.assert_close(self_consistency_target(collapsed, x_t, x_t, t, t, r), collapsed(x_t, t, r))
    torch.testing.assert_close(self_consistency_target(collapsed, x_t, x_r, t, r, r), eps - x0)


def test_short_intervals_keep_their_digits_in_float32():
    t, r = torch.tensor([0.9]), torch.tensor([0.9 - 1e-3])
    x0, eps = torch.tensor([[3.0]]), torch.tensor([[-2.0]])
    m = (t + r) / 2
    target = self_consistency_target(
        lambda x, t, r: torch.full_like(x, -5.0),
        torch.lerp(x0, eps, t[:, None]),
        torch.lerp(x0, eps, m[:, None]),
        t,
        m,
        r,
    )
    assert float(target) == pytest.approx(-5, rel=2e-3)


@pytest.mark.parametrize("rho", [0.0, 1e-3, 0.4, 1.0])
def test_intermediate_times_lie_in_their_contracted_share_below_t(rho):
    p = torch.linspace(0, 1, 101, dtype=torch.float64)
    t, r = torch.full_like(p, 0.8), torch.full_like(p, 0.3)
    m = contracted_time(t, r, rho, p, minimum=0.01)
    torch.testing.assert_close(m, 0.8 - (0.5 * rho * p).clamp(min=0.01))
    assert bool((m >= r).all()) and bool((m <= t - 0.01 + 1e-12).all())


def test_intervals_below_the_minimum_use_their_end():
    t, r = torch.tensor([0.5]), torch.tensor([0.496])
    assert torch.equal(contracted_time(t, r, 0.0, torch.tensor([0.3]), minimum=0.01), r)


def test_contraction_falls_to_zero():
    assert [contraction(p) for p in (0.0, 0.5, 1.0)] == [1.0, 0.25, 0.0]
    assert [contraction(p, "linear") for p in (0.0, 0.5, 1.0)] == [1.0, 0.5, 0.0]
    assert [contraction(p, "constant") for p in (0.0, 1.0)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: contraction(1.2), r"progress = 1.2 must lie in \[0, 1\]"),
        (lambda: contraction(0.5, "cosine"), r"schedule = 'cosine' is unknown; allowed are"),
        (lambda: contracted_time(*[torch.ones(1)] * 2, 0.5, torch.ones(1), minimum=0.0), r"minimum = 0.0 .*try 0.01"),
        (lambda: contracted_time(*[torch.ones(1)] * 2, 1.5, torch.ones(1)), r"rho = 1.5"),
        (lambda: self_distillation_target(exact, *[torch.ones(1)] * 3, "cubic"), r"interpolant = 'cubic' is unknown"),
    ],
)
def test_unusable_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_targets_carry_no_gradient():
    scale = torch.tensor(0.5, requires_grad=True)
    x, t = torch.randn(4, 3, 2), torch.full((4,), 0.8)

    def u(x, t, r):
        return scale * x

    for target in (
        self_consistency_target(u, x, 0.5 * x, t, t - 0.2, t - 0.5),
        self_distillation_target(u, x, t, t - 0.3),
        self_distillation_target(u, x, t, t - 0.3, "trigonometric", "difference"),
        self_guidance(u, u, u(x, t, t), t, torch.randn_like(x)),
    ):
        assert target.shape == x.shape and not target.requires_grad


# ---- OFP: self-guidance -----------------------------------------------------------------------------------


def test_equal_branches_guide_nothing():
    t, _, _, _, eps, x = triples(50)
    u = x.clone().requires_grad_()
    delta = self_guidance(exact, exact, x, t, eps)
    assert torch.equal(delta, torch.zeros_like(delta))
    (u - (u + delta).detach()).square().sum().backward()
    assert torch.equal(u.grad, torch.zeros_like(u))


def test_guidance_between_gaussians_is_known_and_moves_samples_away_from_the_unconditional_mean():
    given, null = GaussianBed(1.0, 0.5), GaussianBed(-0.2, 0.5)
    t, _, _, _, eps, x0_hat = triples(200)
    delta = self_guidance(lambda *a: exact(*a, given), lambda *a: exact(*a, null), x0_hat, t, eps)
    expected = -(1.0 + 0.2) * t / BED.std(t) ** 2
    torch.testing.assert_close(delta, expected[:, None].expand_as(delta), rtol=1e-10, atol=1e-12)
    # x0_hat = x_t - t u: adding Delta to u moves the sample by -t Delta, from m_0 = -0.2 towards m_s = 1 and beyond.
    assert bool((-t[:, None] * delta > 0).all())


def test_guidance_is_the_gradient_of_the_implicit_classifier():
    """-t Delta is t^2 / (1-t) grad log p(s | x) at the re-noised sample, with p(s | x) from the two densities."""
    given, null = GaussianBed(1.0, 0.5), GaussianBed(-0.2, 0.7)
    x0_hat, eps = torch.full((1, 1), 0.3, dtype=torch.float64), torch.full((1, 1), -0.8, dtype=torch.float64)
    t = torch.full((1,), 0.6, dtype=torch.float64)
    x = torch.lerp(x0_hat, eps, t[:, None]).requires_grad_()
    log = [torch.distributions.Normal(bed.mean(0.6), bed.std(0.6)).log_prob(x).sum() for bed in (given, null)]
    (classifier,) = torch.autograd.grad(log[0] - log[1], x)
    delta = self_guidance(lambda *a: exact(*a, given), lambda *a: exact(*a, null), x0_hat, t, eps)
    torch.testing.assert_close(-t[:, None] * delta, 0.6**2 / 0.4 * classifier, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("start", [0.3, 0.85, 1.0])
def test_a_warm_start_narrows_and_shifts_the_distribution_as_predicted(start):
    """One step from (1-t_w) a_warm + t_w eps; t_w = 1 forgets the old chunk and gives the data's distribution."""
    warm, rows = 1.5, 200_000
    eps = torch.randn(rows, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (1 - start) * warm + start * eps
    times = torch.full((rows,), start, dtype=torch.float64)
    sample = x - times[:, None] * exact(x, times, torch.zeros_like(times))
    width = BED.std(start)
    assert float(sample.mean()) == pytest.approx(0.7 + float(0.5 / width * (1 - start) * (warm - 0.7)), abs=5e-3)
    assert float(sample.std()) == pytest.approx(float(0.5 * start / width), rel=1e-2)


# ---- self-distillation ------------------------------------------------------------------------------------

derivatives = pytest.mark.parametrize(("derivative", "tolerance"), [("jvp", 1e-9), ("difference", 1e-4)])


@derivatives
def test_at_the_true_u_self_distillation_has_no_residual_although_points_are_sampled(derivative, tolerance):
    t, _, r, x0, eps, x = triples(500)
    target = self_distillation_target(exact, x, t, r, derivative=derivative)
    torch.testing.assert_close(target, exact(x, t, r), rtol=0, atol=tolerance)
    # MeanFlow's target with the sampled velocity is far from it.
    assert (mean_flow_target(exact, x, t, r, eps - x0) - exact(x, t, r)).abs().mean() > 0.1


def test_a_wrong_u_has_a_residual():
    t, _, r, _, _, x = triples(500)

    def wrong(x, t, r):
        return exact(x, t, r) + 0.1 * (t - r)[:, None] * x

    assert (self_distillation_target(wrong, x, t, r) - wrong(x, t, r)).abs().mean() > 0.005


@pytest.mark.parametrize("interpolant", ["linear", "trigonometric"])
def test_difference_and_derivative_agree_to_second_order(interpolant):
    t, _, r, _, _, x = triples(200)

    def wrong(x, t, r):
        return exact(x, t, r) + torch.sin(3 * x + t[:, None])

    true = self_distillation_target(wrong, x, t, r, interpolant)
    error = [
        (self_distillation_target(wrong, x, t, r, interpolant, "difference", step) - true).abs().mean()
        for step in (0.02, 0.01)
    ]
    assert 0 < float(error[1]) < 0.02
    assert float(error[0] / error[1]) == pytest.approx(4, rel=0.1)


def circular(x, t, r):
    """u* of the interpolant cos x0 + sin eps for x0 ~ N(0.7, 0.5^2), from its flow map; where r = t the velocity."""
    a, b = (time[:, None] * (math.pi / 2) for time in (t, r))

    def width(angle):
        return ((0.5 * angle.cos()) ** 2 + angle.sin() ** 2).sqrt()

    moved = 0.7 * b.cos() + width(b) / width(a) * (x - 0.7 * a.cos())
    d = torch.where(a == b, torch.ones_like(a), a - b)
    slope = 0.75 * a.sin() * a.cos() / width(a) ** 2  # d log width / d angle
    velocity = -0.7 * a.sin() + slope * (x - 0.7 * a.cos())
    return torch.where(a == b, velocity, (d.cos() * x - moved) / d.sin())


@derivatives
def test_at_the_true_map_the_trigonometric_form_has_no_residual(derivative, tolerance):
    t, _, r, _, _, x = triples(500)
    keep = t - r > 0.02
    t, r, x = t[keep], r[keep], x[keep]
    target = self_distillation_target(circular, x, t, r, "trigonometric", derivative)
    torch.testing.assert_close(target, circular(x, t, r), rtol=0, atol=max(tolerance, 1e-8))
    # The closed form is the flow of its own velocity: a short step along it is a step of the map.
    near = trigonometric_step(circular(x, t, t - 1e-6), x, t, t - 1e-6)
    velocity = (x - near) / (1e-6 * math.pi / 2)
    torch.testing.assert_close(velocity, circular(x, t, t), rtol=0, atol=1e-4)


def test_trigonometric_steps_compose_and_end_at_the_data():
    eps = torch.randn(100, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, half, zero = (torch.full((100,), value, dtype=torch.float64) for value in (1.0, 0.4, 0.0))
    direct = trigonometric_step(circular(eps, one, zero), eps, one, zero)
    middle = trigonometric_step(circular(eps, one, half), eps, one, half)
    torch.testing.assert_close(trigonometric_step(circular(middle, half, zero), middle, half, zero), direct)
    torch.testing.assert_close(direct, 0.7 + 0.5 * eps)


@pytest.mark.parametrize("derivative", ["jvp", "difference"])
def test_a_collapsed_map_is_its_own_target_so_that_only_flow_matching_rules_it_out(derivative):
    t, m, r, x0, eps, x_t = triples(300)
    keep = (r > 0.05) & (t - r > 1e-2)
    t, m, r, x0, eps, x_t = (a[keep] for a in (t, m, r, x0, eps, x_t))
    distilled = self_distillation_target(collapsed, x_t, t, r, derivative=derivative)
    torch.testing.assert_close(distilled, collapsed(x_t, t, r), rtol=0, atol=1e-9)
    # OFP: for r = 0 with the interpolated point, for every r with a point on the map's own path.
    zero = torch.zeros_like(r)
    x_m = torch.lerp(x0, eps, m[:, None])
    consistent = self_consistency_target(collapsed, x_t, x_m, t, m, zero)
    torch.testing.assert_close(consistent, collapsed(x_t, t, zero), rtol=0, atol=1e-9)
    on_path = x_t - (t - m)[:, None] * collapsed(x_t, t, m)
    torch.testing.assert_close(self_consistency_target(collapsed, x_t, on_path, t, m, r), collapsed(x_t, t, r))
    floor = BED.velocity_variance(t[:, None])
    flow_loss = (collapsed(x_t, t, t) - (eps - x0)).square()
    assert float(flow_loss.mean()) > 1.05 * float(floor.mean())
