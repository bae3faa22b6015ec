"""GRPO-Guard's ratio and step weights, and the automatic clip range, by Monte Carlo and closed forms."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from objective_steps import normal, plain_terms, step_terms
from torch import Tensor

from genrl.diffusion import KERNELS, DanceSDE, FlowSDE, Path, PathKernel, RectifiedFlow, VariancePreserving
from genrl.objectives import Guard, PPOClip, StepTerms, auto_clip_range

reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])
UNCLIPPED = Guard(0.99, delta_form="none")
NOISY = {name: kernel() for name, kernel in KERNELS.items() if name != "euler"}
ALPHAS = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2, 0)
PATHS: dict[str, Path] = {"rectified": RectifiedFlow(), "vp": VariancePreserving(ALPHAS)}


def normalized(terms: StepTerms) -> Tensor:
    """log of the ratio inside Guard's loss, read off an unclipped loss with A = 1."""
    return (-UNCLIPPED(terms)[0]).log()


# ---- the ratio --------------------------------------------------------------------------------------------


@reductions
def test_the_normalised_log_ratio_is_the_shift_times_the_stored_noise(reduction):
    shift, z = 0.01 * normal(50, 3, 4, seed=1, dtype=torch.float64), normal(50, 3, 4, dtype=torch.float64)
    inner = (shift * z).flatten(1)
    expected = inner.mean(1) if reduction == "mean" else inner.sum(1)
    for std in (0.01, 0.3, 2.0):
        torch.testing.assert_close(normalized(step_terms(shift, z, std=std, reduction=reduction)), expected)


def test_the_bias_term_carries_its_gradient():
    # shift . z is linear in the mean, so its gradient is z wherever the mean is; without the gradient of k it is not.
    z, shift = normal(3, 5, dtype=torch.float64), (0.1 * normal(3, 5, seed=1, dtype=torch.float64)).requires_grad_()
    terms = step_terms(shift, z, std=0.5, reduction="sum")
    normalized(terms).sum().backward()
    torch.testing.assert_close(shift.grad, z)


@reductions
def test_the_normalised_log_ratio_is_centred_and_has_the_same_spread_for_every_std(reduction):
    n, dim = 20_000, 16
    shift = (0.01 * normal(1, dim, seed=1, dtype=torch.float64)).expand(n, dim)
    z = normal(n, dim, dtype=torch.float64)
    norm = float(shift[0].norm())
    unit = 1 / dim if reduction == "mean" else 1.0
    raw_spread = []
    for std in (0.01, 0.1, 1.0):
        terms = step_terms(shift, z, std=std, reduction=reduction)
        value = normalized(terms)
        assert abs(float(value.mean())) < 4 * norm * unit / math.sqrt(n)
        # The standard error of a standard deviation is that over sqrt(2 n).
        assert float(value.std()) == pytest.approx(norm * unit, rel=4 / math.sqrt(2 * n))
        kl = unit * norm**2 / (2 * std**2)
        assert abs(float(terms.log_ratio.mean()) + kl) < 4 * unit * norm / std / math.sqrt(n)
        raw_spread.append(float(terms.log_ratio.std()))
    assert raw_spread[0] > 9 * raw_spread[1] > 81 * raw_spread[2]


def test_the_raw_mean_is_minus_the_kl_and_shows_at_small_std():
    n, dim = 4000, 256
    shift, z = (0.01 * normal(1, dim, seed=1)).expand(n, dim), normal(n, dim)
    _, metrics = UNCLIPPED(step_terms(shift, z, std=0.02, reduction="sum"))
    kl = float(shift[0].square().sum()) / (2 * 0.02**2)
    assert kl > 10 and float(metrics["log_ratio_mean"]) == pytest.approx(-kl, rel=0.05)
    assert abs(float(metrics["normalized_mean"])) < 4 * float(metrics["normalized_std"]) / math.sqrt(n)


def test_the_clipped_fraction_ignores_std_with_guard_only():
    n, dim = 4000, 64
    shift, z = (0.01 * normal(1, dim, seed=1, dtype=torch.float64)).expand(n, dim), normal(n, dim, dtype=torch.float64)
    fractions = {}
    for std in (0.1, 1.0):
        terms = step_terms(shift, z, std=std)
        for name, surrogate in (("guard", Guard(1e-3)), ("ppo", PPOClip(1e-3))):
            fractions[name, std] = float(surrogate(terms)[1]["clip_fraction"])
    assert fractions["guard", 0.1] == pytest.approx(fractions["guard", 1.0], abs=1 / n)
    assert 0.1 < fractions["guard", 1.0] < 0.4
    assert fractions["ppo", 0.1] > fractions["ppo", 1.0] + 0.05


# ---- the weight of a step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form, expected", [("inv_dt", 5.0), ("beta_over_dt", 7.5), ("inv_kappa", 10 / 3), ("none", 1)])
def test_forms_of_delta_by_hand(form, expected):
    zero, one = torch.zeros(1), torch.ones(1)
    terms = plain_terms(zero, zero, one, dt=0.2, kappa=0.3)
    assert Guard(delta_form=form).delta(terms) == pytest.approx(expected)
    assert Guard(delta_form=form, reference=0.1).delta(terms) == pytest.approx(0.1 * expected)
    assert float(Guard(delta_form=form)(terms)[0]) == pytest.approx(-expected)


def velocity_gradient(kernel: PathKernel, t: float, t_next: float, form, path: Path = PATHS["rectified"]) -> Tensor:
    """Gradient [1, 12] of Guard's loss with respect to v at unchanged weights, for A = 1 and one fixed noise."""
    t_, next_ = torch.tensor([t], dtype=torch.float64), torch.tensor([t_next], dtype=torch.float64)
    v = normal(1, 12, seed=1, dtype=torch.float64).requires_grad_()
    now = kernel.transition(normal(1, 12, seed=2, dtype=torch.float64), v, t_, next_, path)
    a, _, s = kernel.coefficients(t_, next_, path)
    terms = step_terms(
        now.mean - now.mean.detach(),
        normal(1, 12, dtype=torch.float64),
        std=s,
        a=a,
        dt=t_ - next_,
        kappa=kernel.kappa(t_, next_, path),
    )
    loss, _ = Guard(delta_form=form)(terms)
    return torch.autograd.grad(loss.sum(), v)[0]


STEPS = [(0.95, 0.9), (0.8, 0.6), (0.5, 0.45), (0.3, 0.1), (0.1, 0.05)]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("kernel", NOISY.values(), ids=NOISY)
def test_inv_kappa_gives_every_step_of_every_kernel_the_same_gradient(kernel, path):
    # -kappa of the velocity and 1 / kappa of the weight leave z / D, whatever the kernel, path and step.
    expected = normal(1, 12, dtype=torch.float64) / 12
    for t, t_next in STEPS:
        torch.testing.assert_close(velocity_gradient(kernel, t, t_next, "inv_kappa", path), expected)


def test_inv_dt_is_even_over_steps_with_flow_grpo_and_varies_as_beta_with_dance_grpo():
    base = normal(1, 12, dtype=torch.float64).norm() / 12
    for t, t_next in STEPS:
        flow = velocity_gradient(FlowSDE(0.7), t, t_next, "inv_dt").norm()
        torch.testing.assert_close(flow, base * (1 + 0.7**2 / 2))
        dance = velocity_gradient(DanceSDE(0.3), t, t_next, "inv_dt").norm()
        torch.testing.assert_close(dance, base * (1 + 0.3**2 * (1 - t) / (2 * t)))
        squared = velocity_gradient(DanceSDE(0.3), t, t_next, "beta_over_dt").norm()
        torch.testing.assert_close(squared, base * (1 + 0.3**2 * (1 - t) / (2 * t)) ** 2)


# ---- clip ranges --------------------------------------------------------------------------------------------

CLIPPING = {
    "ppo": PPOClip(1e-4),
    "ppo_asymmetric": PPOClip([1e-4, 3e-4]),
    "ppo_auto": PPOClip(),
    "guard": Guard(1e-4),
    "guard_asymmetric": Guard([1e-4, 3e-4]),
    "guard_auto": Guard(),
}


@pytest.mark.parametrize("std", [0.05, torch.tensor(0.4), torch.full((4,), 0.2)], ids=["number", "scalar", "[B]"])
@pytest.mark.parametrize("name", CLIPPING)
def test_clip_bounds_are_where_the_log_ratio_is_cut(name, std):
    zeros = torch.zeros(4)
    low, high = (torch.as_tensor(b) for b in CLIPPING[name].clip_bounds(plain_terms(zeros, zeros, zeros, std)))
    assert bool((low < 0).all() and (high > 0).all())
    high, low = high.expand(4)[0], low.expand(4)[0]
    log_ratio = torch.stack([0.99 * high, 1.01 * high, 0.99 * low, 1.01 * low]).float().requires_grad_()
    loss, _ = CLIPPING[name](plain_terms(log_ratio, zeros, torch.tensor([1.0, 1.0, -1.0, -1.0]), std))
    loss.sum().backward()
    assert (log_ratio.grad == 0).tolist() == [False, True, False, True]


def test_automatic_widths_by_hand():
    assert auto_clip_range(65_536, 0.3, "mean") == pytest.approx(0.02 / 256)
    assert auto_clip_range(65_536, 0.3, "sum") == pytest.approx(0.02 * 256)
    assert auto_clip_range(65_536, 0.3, "mean", normalized=True) == pytest.approx(0.3 * 0.02 / 256)
    assert auto_clip_range(64, 1.0, "mean", trust_region=0.016) == pytest.approx(2e-3)  # what works on the digits


def relative_shift(n: int, dim: int, size: float, std: float) -> tuple[Tensor, Tensor]:
    """shift with rms / std = size and noise, [n, dim]."""
    direction = normal(1, dim, seed=1, dtype=torch.float64)
    shift = size * std * direction / direction.square().mean().sqrt()
    return shift.expand(n, dim), normal(n, dim, dtype=torch.float64)


@reductions
@pytest.mark.parametrize("dim", [16, 256, 1024])
@pytest.mark.parametrize("std", [0.05, 1.0])
def test_the_automatic_range_cuts_the_same_share_whatever_the_size_std_and_reduction(dim, std, reduction):
    n, size, gauss = 4000, 0.03, NormalDist()
    shift, z = relative_shift(n, dim, size, std)
    terms = step_terms(shift, z, std=std, reduction=reduction)
    # l is N(-delta^2 / 2, delta^2 / D) times D for the sum: the edges are k*/delta standard deviations away, and the
    # raw mean is delta sqrt(D) / 2 of them below 0.
    edge, drift = 0.02 / size, size * math.sqrt(dim) / 2
    shares = {Guard(): 2 * gauss.cdf(-edge), PPOClip(): gauss.cdf(-edge - drift) + gauss.cdf(-edge + drift)}
    for surrogate, share in shares.items():
        measured = float(surrogate(terms)[1]["outside_fraction"])
        assert measured == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / n))


@pytest.mark.parametrize("kernel", NOISY.values(), ids=NOISY)
def test_the_automatic_range_cuts_the_same_share_for_every_kernel(kernel):
    shares = {"guard": 2 * NormalDist().cdf(-0.02 / 0.03)}
    for t, t_next in STEPS:
        s = float(kernel.coefficients(torch.tensor(t), torch.tensor(t_next))[2])
        shift, z = relative_shift(2000, 16, 0.03, s)
        measured = float(Guard()(step_terms(shift, z, std=s))[1]["outside_fraction"])
        assert measured == pytest.approx(shares["guard"], abs=4 * math.sqrt(0.25 / 2000))


def test_a_mean_that_drifts_past_the_lower_edge_needs_the_normalised_form():
    # From delta^2 > 2 k* / sqrt(D) on, the mean of the raw log-ratio itself is outside.
    shift, z = relative_shift(500, 4096, 0.08, 0.3)
    terms = step_terms(shift, z, advantage=-1.0, std=0.3)
    assert float(terms.log_ratio.mean()) < PPOClip().clip_bounds(terms)[0]
    assert float(PPOClip()(terms)[1]["clip_fraction"]) > 0.95
    assert float(Guard()(terms)[1]["clip_fraction"]) == pytest.approx(NormalDist().cdf(-0.25), abs=0.1)
