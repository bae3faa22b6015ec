"""The kernels against published formulas, closed forms and each other (all in float64 unless a test says otherwise)."""

from __future__ import annotations

import math

import pytest
import torch
from diffusion_members import ALL, DETERMINISTIC, INEXACT, NOISY, PATHS, WITHOUT_NOISE, random_steps

from genrl.diffusion import (
    CPS,
    DDIM,
    SAGE,
    Consistency,
    DanceSDE,
    DeterministicTransitionError,
    Euler,
    FlowSDE,
    RectifiedFlow,
    Renoise,
)
from genrl.diffusion.kernels import PathKernel


def f64(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


all_kernels = pytest.mark.parametrize("name", ALL)
noisy_kernels = pytest.mark.parametrize("name", NOISY)
all_paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


# ---- coefficients ---------------------------------------------------------------------------------------

GOLDEN = {  # t = 0.6, t' = 0.5: b, s, b^2 + s^2, kappa
    "flow_sde": (FlowSDE(0.7), 0.438750, 0.271109, 0.266002, 0.124500),
    "dance_sde": (DanceSDE(0.3), 0.492500, 0.094868, 0.251556, 0.103000),
    "sage": (SAGE(0.7), 0.449716, 0.245643, 0.262585, 0.120113),
    "cps": (CPS(0.8), 0.154508, 0.475528, 0.250000, 0.238197),
    "ddim_1": (DDIM(1.0), 0.333333, 0.372678, 0.250000, 0.166667),
    "ddim_half": (DDIM(0.5), 0.463980, 0.186339, 0.250000, 0.114408),
    "flow_exact": (FlowSDE(0.7, "exact"), 0.452718, 0.212242, 0.250000, 0.118913),
    "dance_exact": (DanceSDE(0.3, "exact"), 0.492556, 0.085957, 0.250000, 0.102978),
    "renoise": (Renoise(0.5), 0.166667, 0.471405, 0.250000, 0.233333),
    "consistency": (Consistency(), 0.0, 0.5, 0.25, 0.3),
    "euler": (Euler(), 0.5, 0.0, 0.25, 0.1),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_values(case: str) -> None:
    kernel, b, s, total, kappa = GOLDEN[case]
    got_a, got_b, got_s = kernel.coefficients(f64(0.6), f64(0.5))
    got = [float(g) for g in (got_a, got_b, got_s, got_b**2 + got_s**2, kernel.kappa(f64(0.6), f64(0.5)))]
    assert got == pytest.approx([0.5, b, s, total, kappa], abs=1e-6)


def test_golden_values_name_every_kernel() -> None:
    assert {type(case[0]) for case in GOLDEN.values()} == {type(kernel) for kernel in ALL.values()}


@all_paths
@all_kernels
def test_velocity_form_equals_prediction_form(name, path) -> None:
    t, t_next = random_steps(64)
    generator = torch.Generator().manual_seed(1)
    x, v = torch.randn(2, 64, 5, generator=generator, dtype=torch.float64)
    x0_hat, eps_hat = path.x0_eps(x, v, t)
    a, b, s = ALL[name].coefficients(t, t_next, path)
    transition = ALL[name].transition(x, v, t, t_next, path)
    torch.testing.assert_close(transition.mean, a[:, None] * x0_hat + b[:, None] * eps_hat, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.as_tensor(transition.std), s, rtol=0, atol=0)


@all_paths
@all_kernels
def test_jacobian_of_the_mean_is_minus_kappa(name, path) -> None:
    x, v = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    t, t_next = f64(0.7), f64(0.45)
    jacobian = torch.autograd.functional.jacobian(lambda v: ALL[name].transition(x, v, t, t_next, path).mean[0], v)
    kappa = ALL[name].kappa(t, t_next, path)
    assert kappa > 0
    torch.testing.assert_close(jacobian[:, 0], -kappa * torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ALL)
def test_kappa_on_the_rectified_flow_is_a_t_minus_b_times_one_minus_t(name) -> None:
    t, t_next = random_steps(50)
    a, b, _ = ALL[name].coefficients(t, t_next)
    torch.testing.assert_close(ALL[name].kappa(t, t_next), a * t - b * (1 - t), rtol=0, atol=1e-14)


# ---- marginals ------------------------------------------------------------------------------------------


@all_paths
@pytest.mark.parametrize("name", [name for name in ALL if name not in INEXACT])
def test_marginal_is_preserved_by_exact_kernels(name, path) -> None:
    t, t_next = random_steps(200)
    a, b, s = ALL[name].coefficients(t, t_next, path)
    torch.testing.assert_close(a, path.alpha(t_next), rtol=0, atol=1e-12)
    torch.testing.assert_close(b**2 + s**2, path.beta(t_next) ** 2, rtol=0, atol=1e-12)


def step_variance(name: str, t: torch.Tensor, t_next: torch.Tensor) -> torch.Tensor:
    """g^2 D of the Euler-Maruyama kernels at their default noise level, S for SAGE."""
    step = t - t_next
    if name == "flow_sde":
        return 0.49 * t / (1 - t) * step
    if name == "dance_sde":
        return 0.09 * step
    return 0.49 * (-step + torch.log((1 - t_next) / (1 - t)))


@pytest.mark.parametrize("name", INEXACT)
def test_excess_variance_of_inexact_kernels(name) -> None:
    t, t_next = random_steps(200)
    variance, step = step_variance(name, t, t_next), t - t_next
    a, b, s = ALL[name].coefficients(t, t_next)
    torch.testing.assert_close(a, 1 - t_next, rtol=0, atol=1e-12)
    torch.testing.assert_close(s**2, variance, rtol=1e-10, atol=1e-13)
    excess = variance * step / t + variance**2 / (4 * t**2)
    torch.testing.assert_close(b**2 + s**2 - t_next**2, excess, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", INEXACT)
def test_excess_variance_falls_fourfold_when_the_step_halves(name) -> None:
    def excess(step: float) -> float:
        _, b, s = ALL[name].coefficients(f64(0.6), f64(0.6 - step))
        return float(b**2 + s**2 - (0.6 - step) ** 2)

    assert excess(2e-3) / excess(1e-3) == pytest.approx(4, rel=0.01)


def test_sage_noise_lies_between_the_integrand_at_both_ends() -> None:
    t, t_next = random_steps(500, low=1e-3, high=0.999)
    variance = SAGE(0.7).coefficients(t, t_next)[2] ** 2
    step = t - t_next
    assert (variance >= 0.49 * step * t_next / (1 - t_next) - 1e-15).all()
    assert (variance <= 0.49 * step * t / (1 - t) + 1e-15).all()


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde"])
def test_exact_integrator_is_the_limit_of_many_small_steps_with_x0_held(name) -> None:
    """An Euler-Maruyama recursion of the published SDE, dx = (v - g^2 S / 2) dt + g dW, with x0_hat frozen."""
    t, t_next, x0, n = 0.8, 0.3, 1.0, 20_000
    mean, variance, step = (1 - t) * x0 + t * 1.0, 0.0, (t - t_next) / n  # started at eps = 1
    for k in range(n):
        tau = t - k * step
        g2 = 0.49 * tau / (1 - tau) if name == "flow_sde" else 0.09
        # v = (x - x0) / tau and S = -(x - (1 - tau) x0) / tau^2 are linear in x.
        slope = 1 / tau + g2 / (2 * tau**2)
        shift = -x0 / tau - g2 * (1 - tau) * x0 / (2 * tau**2)
        mean, variance = mean - step * (slope * mean + shift), variance * (1 - step * slope) ** 2 + g2 * step
    a, b, s = ALL[f"{name}_exact"].coefficients(f64(t), f64(t_next))
    assert float(a * x0 + b * 1.0) == pytest.approx(mean, abs=1e-4)
    assert float(s**2) == pytest.approx(variance, rel=1e-3)


# ---- published forms and equalities ---------------------------------------------------------------------


def published_mean(x, v, t, step, g2):
    """x (1 - g^2 D / (2 t)) - v D (1 + g^2 (1 - t) / (2 t)), the common form of Flow-GRPO and DanceGRPO."""
    return x * (1 - g2 * step / (2 * t)) - v * step * (1 + g2 * (1 - t) / (2 * t))


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.2])
def test_flow_sde_is_flow_grpos_published_step(eta: float) -> None:
    t, t_next = random_steps(64)
    x, v = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    step = t - t_next
    expected = x * (1 - eta**2 * step / (2 * (1 - t)))[:, None] - v * (step * (1 + eta**2 / 2))[:, None]
    got = FlowSDE(eta).transition(x, v, t, t_next)
    torch.testing.assert_close(got.mean, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.mean, published_mean(x.T, v.T, t, step, eta**2 * t / (1 - t)).T, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.std, eta * torch.sqrt(t * step / (1 - t)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("eta", [0.3, 0.9])
def test_dance_sde_is_dancegrpos_published_step(eta: float) -> None:
    t, t_next = random_steps(64)
    x, v = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    got = DanceSDE(eta).transition(x, v, t, t_next)
    torch.testing.assert_close(got.mean, published_mean(x.T, v.T, t, t - t_next, eta**2).T, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.std, eta * torch.sqrt(t - t_next), rtol=1e-12, atol=0)


def test_sage_mean_is_the_ode_step_minus_half_the_variance_times_the_score() -> None:
    path = RectifiedFlow()
    t, t_next = random_steps(64)
    x, v = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    variance = step_variance("sage", t, t_next)[:, None]
    expected = x - (t - t_next)[:, None] * v + 0.5 * variance * path.score(x, v, t)
    torch.testing.assert_close(SAGE(0.7).transition(x, v, t, t_next).mean, expected, rtol=0, atol=1e-12)


def test_renoise_is_an_ode_step_below_and_forward_diffusion_back() -> None:
    t, t_next = random_steps(64)
    end = 0.7 * t_next  # eta = 0.3
    # Forward from e to t': x_t' = r x_e + noise, with r the ratio of the data shares.
    ratio = (1 - t_next) / (1 - end)
    a, b, s = Renoise(0.3).coefficients(t, t_next)
    torch.testing.assert_close(a, ratio * (1 - end), rtol=0, atol=1e-14)
    torch.testing.assert_close(b, ratio * end, rtol=0, atol=1e-14)
    torch.testing.assert_close(s**2, t_next**2 - (ratio * end) ** 2, rtol=0, atol=1e-14)


EQUAL = {
    "cps at 1 is the consistency kernel": (CPS(1.0), Consistency()),
    "renoise at 1 is the consistency kernel": (Renoise(1.0), Consistency()),
    "exact flow sde at sqrt 2 is the ddpm posterior": (FlowSDE(math.sqrt(2), "exact"), DDIM(1.0)),
}


@all_paths
@pytest.mark.parametrize("case", EQUAL)
def test_kernels_that_must_coincide(case: str, path) -> None:
    t, t_next = random_steps(100)
    for left, right in zip(*(kernel.coefficients(t, t_next, path) for kernel in EQUAL[case]), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@all_kernels
def test_variance_preserving_kernels_are_the_image_of_rectified_flow_kernels(name) -> None:
    """x_rf = c x_vp with c = sqrt((1-t)^2 + t^2) keeps x0 and eps, so (a, b, s) of the target scales with c(t')."""
    path = PATHS["variance_preserving"]
    index = torch.tensor([[980, 900], [700, 300], [500, 480], [20, 3]])
    t, t_next = ((index + 1) / 1000).double().T
    ab, ab_next = path.alphas_cumprod(t), path.alphas_cumprod(t_next)

    def rf_time(ab: torch.Tensor) -> torch.Tensor:  # ab = (1 - t)^2 / ((1 - t)^2 + t^2)
        odds = torch.sqrt(1 / ab - 1)
        return odds / (1 + odds)

    u, u_next = rf_time(ab), rf_time(ab_next)
    scale = torch.sqrt((1 - u_next) ** 2 + u_next**2)
    on_vp = ALL[name].coefficients(t, t_next, path)
    on_rf = ALL[name].coefficients(u, u_next)
    for vp, rf in zip(on_vp, on_rf, strict=True):
        torch.testing.assert_close(scale * vp, rf, rtol=1e-10, atol=1e-12)


@all_paths
@pytest.mark.parametrize("name", WITHOUT_NOISE)
def test_no_noise_is_the_euler_step(name, path) -> None:
    t, t_next = random_steps(100)
    got, expected = WITHOUT_NOISE[name].coefficients(t, t_next, path), Euler().coefficients(t, t_next, path)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0 if isinstance(path, RectifiedFlow) else 1e-15)
    assert (got[2] == 0).all()


@pytest.mark.parametrize("make", [FlowSDE, DanceSDE, SAGE, CPS, DDIM, Renoise, lambda eta: FlowSDE(eta, "exact")])
def test_noise_tends_to_zero_with_its_level(make) -> None:
    a, b, s = make(1e-5).coefficients(f64(0.6), f64(0.5))
    assert [float(a), float(b), float(s)] == pytest.approx([0.5, 0.5, 0], abs=2e-5 if make is not Renoise else 4e-3)
    assert s > 0


def test_euler_on_the_rectified_flow_is_x_minus_step_times_v() -> None:
    x, v = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    t, t_next = random_steps(6)
    torch.testing.assert_close(Euler().transition(x, v, t, t_next).mean, x - (t - t_next)[:, None] * v)


# ---- the ends and odd steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("t_next", [0.999, 0.9, 0.5, 1e-3])
def test_first_step_of_flow_sde_has_std_eta(t_next: float) -> None:
    """1 - t is replaced by 1 - t', as published: s = eta and b = t' - eta^2 / 2, whatever the step."""
    _, b, s = FlowSDE(0.7).coefficients(f64(1.0), f64(t_next))
    assert float(s) == pytest.approx(0.7, abs=1e-12)
    assert float(b) == pytest.approx(t_next - 0.245, abs=1e-12)


def test_first_step_of_sage_has_positive_variance() -> None:
    t_next = torch.linspace(1e-6, 1 - 1e-6, 999, dtype=torch.float64)
    s = SAGE(0.7).coefficients(f64(1.0), t_next)[2]
    assert (s > 0).all() and torch.isfinite(s).all()
    # Integrated from t' up to the middle of t' and 1: eta^2 [log 2 - (1 - t') / 2].
    torch.testing.assert_close(s**2, 0.49 * (math.log(2) - (1 - t_next) / 2), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@all_paths
@all_kernels
def test_coefficients_are_finite_for_every_step(name, path, dtype) -> None:
    t = torch.rand(4000, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype).clamp(1e-6, 1)
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    below = t * torch.rand(4000, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(dtype)
    starts = torch.cat([t, one, t, t, one[:1], one[:1]])
    ends = torch.cat([below, below, zero, torch.nextafter(t, zero), zero[:1], torch.nextafter(one, zero)[:1]])
    keep = ends < starts
    for path_form in (ALL[name].coefficients, ALL[name].linear_coefficients):
        a, b, s = path_form(starts[keep], ends[keep], path)
        assert torch.isfinite(a).all() and torch.isfinite(b).all() and torch.isfinite(s).all()
        assert (s >= 0).all()


def test_exact_dance_sde_is_finite_below_its_floor() -> None:
    """The floor under t' must not turn 1/t' - 1/t negative, where rho would be infinite."""
    for coefficient in DanceSDE(0.3, "exact").coefficients(f64(1e-14), f64(0.0)):
        assert torch.isfinite(coefficient)


@noisy_kernels
def test_noise_is_positive_between_the_ends(name) -> None:
    t, t_next = random_steps(300, low=1e-3, high=1.0)
    assert (NOISY[name].coefficients(t, t_next)[2] > 0).all()
    assert (NOISY[name].coefficients(f64(1.0), t_next)[2] > 0).all()


@all_paths
@all_kernels
def test_a_step_down_to_data_keeps_x0(name, path) -> None:
    a, b, s = ALL[name].coefficients(f64(0.1), f64(0.0), path)
    assert float(a) == pytest.approx(1, abs=1e-12)
    if name not in INEXACT:
        assert float(b) == pytest.approx(0, abs=1e-12) and float(s) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", [*WITHOUT_NOISE, *DETERMINISTIC])
def test_a_step_without_noise_has_no_density(name) -> None:
    kernel = WITHOUT_NOISE.get(name, Euler())
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(9))
    transition = kernel.transition(x, x, torch.tensor(0.6), torch.tensor(0.5))
    assert transition.is_deterministic
    torch.testing.assert_close(transition.sample(), transition.mean, rtol=0, atol=0)
    for density in (transition.log_prob, lambda x: transition.log_ratio(transition, x), transition.kl):
        with pytest.raises(DeterministicTransitionError, match="std = 0"):
            density(transition if density == transition.kl else x)


@all_paths
def test_times_may_be_numbers_and_integers(path) -> None:
    as_tensors = FlowSDE().linear_coefficients(torch.tensor(1.0), torch.tensor(0.5), path)
    for t in (1, 1.0):
        for left, right in zip(FlowSDE().linear_coefficients(t, 0.5, path), as_tensors, strict=True):
            torch.testing.assert_close(left, right)


# ---- refusals -------------------------------------------------------------------------------------------


@all_kernels
@pytest.mark.parametrize("t, t_next", [(0.5, 0.5), (0.4, 0.6)])
def test_steps_that_do_not_go_down_are_refused(name, t, t_next) -> None:
    with pytest.raises(ValueError, match="flip an ascending table"):
        ALL[name].coefficients(f64(t), f64(t_next))


def test_times_outside_the_unit_interval_are_refused() -> None:
    with pytest.raises(ValueError, match="divide by 1000"):
        FlowSDE().coefficients(f64(999.0), f64(0.5))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        FlowSDE().coefficients(f64(0.5), f64(-0.1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FlowSDE(-0.1),
        lambda: DanceSDE(-1),
        lambda: SAGE(-1),
        lambda: CPS(1.1),
        lambda: DDIM(1.5),
        lambda: Renoise(-0.2),
        lambda: FlowSDE(math.nan),
    ],
)
def test_noise_levels_outside_their_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="is outside"):
        make()


def test_unknown_integrator_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'euler'.*'exact'"):
        FlowSDE(0.7, "heun")  # type: ignore[arg-type]


def test_a_kernel_of_ones_own_needs_three_numbers_only() -> None:
    class Half(PathKernel):
        def rf_coefficients(self, t, t_next):
            return 1 - t_next, 0.5 * t_next + 0 * t, 0.75**0.5 * t_next + 0 * t

    a, b, s = Half().coefficients(f64(0.6), f64(0.5), PATHS["variance_preserving"])
    assert float(a**2 + b**2 + s**2) == pytest.approx(1)  # variance preserving, as its rectified-flow form promises
    with pytest.raises(TypeError, match="rf_coefficients"):
        PathKernel().coefficients(f64(0.6), f64(0.5))
