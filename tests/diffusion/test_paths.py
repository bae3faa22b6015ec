"""Paths: conversions between predictions, the table of the variance-preserving path, and its ends."""

from __future__ import annotations

import pytest
import torch
from diffusion_members import ALPHAS_CUMPROD, PATHS

from genrl.diffusion import RectifiedFlow, VariancePreserving

all_paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


def triple(seed: int = 0):
    """x0, eps [16, 3] and times [16] on the table, float64."""
    generator = torch.Generator().manual_seed(seed)
    x0, eps = torch.randn(2, 16, 3, generator=generator, dtype=torch.float64)
    index = torch.randperm(998, generator=generator)[:16] + 1
    return x0, eps, index.double() / 1000


@all_paths
def test_predictions_round_trip(path) -> None:
    x0, eps, t = triple()
    x = path.interpolate(x0, eps, t)
    v = path.velocity(x0, eps, t)
    x0_hat, eps_hat = path.x0_eps(x, v, t)
    torch.testing.assert_close(x0_hat, x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(eps_hat, eps, rtol=0, atol=1e-12)
    torch.testing.assert_close(path.velocity(x0_hat, eps_hat, t), v, rtol=0, atol=1e-12)


@all_paths
def test_interpolation_and_score_are_those_of_the_marginal(path) -> None:
    x0, eps, t = triple()
    a, b = path.alpha(t)[:, None], path.beta(t)[:, None]
    x, v = path.interpolate(x0, eps, t), path.velocity(x0, eps, t)
    torch.testing.assert_close(x, a * x0 + b * eps, rtol=0, atol=0)
    # The score of N(A x0, B^2) at x.
    torch.testing.assert_close(path.score(x, v, t), -(x - a * x0) / b**2, rtol=1e-9, atol=1e-9)


@all_paths
@pytest.mark.parametrize("kind", ["velocity", "epsilon", "sample", "v_prediction"])
def test_every_kind_of_prediction_gives_the_same_velocity(path, kind) -> None:
    x0, eps, t = triple()
    a, b = path.alpha(t)[:, None], path.beta(t)[:, None]
    x, v = path.interpolate(x0, eps, t), path.velocity(x0, eps, t)
    prediction = {"velocity": v, "epsilon": eps, "sample": x0, "v_prediction": a * eps - b * x0}[kind]
    torch.testing.assert_close(path.velocity_from(prediction, x, t, kind), v, rtol=0, atol=1e-9)


@all_paths
def test_velocity_is_regular_at_both_ends(path) -> None:
    x0, eps, _ = triple()
    for t in (torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)):
        x, v = path.interpolate(x0, eps, t), path.velocity(x0, eps, t)
        x0_hat, eps_hat = path.x0_eps(x, v, t)
        torch.testing.assert_close(x0_hat, x0, rtol=0, atol=1e-12)
        torch.testing.assert_close(eps_hat, eps, rtol=0, atol=1e-12)


def test_rectified_flow_velocity_is_the_time_derivative_of_the_path() -> None:
    path = RectifiedFlow()
    x0, eps, t = triple()
    later = path.interpolate(x0, eps, t + 1e-6)
    torch.testing.assert_close(
        (later - path.interpolate(x0, eps, t)) / 1e-6, path.velocity(x0, eps, t), atol=1e-8, rtol=0
    )
    assert (path.velocity(x0, eps, t) == eps - x0).all()


def test_unknown_prediction_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'noise' is unknown; allowed are velocity, epsilon, sample, v_prediction"):
        RectifiedFlow().velocity_from(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor(0.5), "noise")  # type: ignore[arg-type]


# ---- the table ------------------------------------------------------------------------------------------


def test_table_entries_are_exact_for_float32_times() -> None:
    path = PATHS["variance_preserving"]
    index = torch.arange(1000)
    t = ((index + 1).double() / 1000).float()
    torch.testing.assert_close(path.alphas_cumprod(t.double()), ALPHAS_CUMPROD, rtol=0, atol=0)
    torch.testing.assert_close(path.alpha(t) ** 2 + path.beta(t) ** 2, torch.ones(1000), rtol=0, atol=3e-7)
    # 1 - ab is small near data; float32 arithmetic would lose half of its digits.
    exact = (1 - ALPHAS_CUMPROD).sqrt().float()
    torch.testing.assert_close(path.beta(t), exact, rtol=1e-7, atol=0)


def test_between_entries_the_table_is_linear_and_decreasing() -> None:
    path = PATHS["variance_preserving"]
    middle = torch.tensor([10.5, 499.5, 999.5], dtype=torch.float64) / 1000
    expected = [(ALPHAS_CUMPROD[k - 1] + ALPHAS_CUMPROD[k]) / 2 for k in (10, 499, 999)]
    torch.testing.assert_close(path.alphas_cumprod(middle), torch.stack(expected), rtol=1e-12, atol=0)
    fine = path.alphas_cumprod(torch.linspace(0, 1, 20_001, dtype=torch.float64))
    assert (fine.diff() <= 0).all()


@pytest.mark.parametrize("final", [1.0, 0.99915])
def test_time_zero_is_the_final_value(final) -> None:
    path = VariancePreserving(ALPHAS_CUMPROD, final)
    zero = torch.zeros((), dtype=torch.float64)
    assert float(path.alphas_cumprod(zero)) == final
    assert float(path.beta(zero)) == pytest.approx((1 - final) ** 0.5, abs=1e-12)


def test_zero_terminal_signal_to_noise_tables_are_accepted() -> None:
    """Schedulers with rescale_betas_zero_snr end at ab = 0, where v-prediction is still regular."""
    table = ALPHAS_CUMPROD.clone()
    table[-1] = 0
    path = VariancePreserving(table)
    one = torch.ones((), dtype=torch.float64)
    assert float(path.alpha(one)) == 0 and float(path.beta(one)) == 1
    x0, eps, _ = triple()
    torch.testing.assert_close(path.x0_eps(eps, -x0, one)[0], x0, rtol=0, atol=0)


@pytest.mark.parametrize(
    "table, message",
    [
        (ALPHAS_CUMPROD.flip(0), "reversed"),
        (1 - ALPHAS_CUMPROD, "betas"),
        (torch.tensor([1.0, 0.5]), "decrease inside"),
        (torch.tensor([0.5, 0.0, 0.0]), "decrease inside"),
        (torch.tensor([0.5, -0.1]), "decrease inside"),
        (torch.tensor([0.9, float("nan")]), "decrease inside"),
        (torch.tensor([0.5]), "N >= 2"),
        (ALPHAS_CUMPROD[None], "N >= 2"),
    ],
)
def test_tables_that_are_not_alphas_are_refused(table, message) -> None:
    with pytest.raises(ValueError, match=message):
        VariancePreserving(table)
