"""Consistency training against closed forms on Gaussians, its schedules, and small trainings."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from gaussian_bed import GaussianBed, MixtureBed
from torch import Tensor

from genrl.networks import VelocityMLP
from genrl.objectives import (
    boundary_coefficients,
    cauchy,
    cauchy_scale,
    consistency_sample,
    doubling_count,
    easy_successor,
    flow_boundary_coefficients,
    karras_grid,
    log_time,
    lognormal_levels,
    lognormal_probabilities,
    nearness,
    optimal_coupling,
    original_count,
    pick,
    posterior_mean,
    pseudo_huber,
    relative_distances,
    sampling_levels,
    sigma_of,
    successor,
    time_of,
)

SIGMA_MIN, SIGMA_MAX, SIGMA_DATA = 0.002, 80.0, 0.5
BED = GaussianBed(0.7, 0.5)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# ---- parameterisation -------------------------------------------------------------------------------------


def test_the_function_is_the_identity_at_the_lowest_level_whatever_the_network():
    sigma = torch.full((4,), SIGMA_MIN, dtype=torch.float64)
    c_skip, c_out, _ = boundary_coefficients(sigma)
    y, network = normal(4), 100 * normal(4, seed=1)
    assert torch.equal(c_skip * y + c_out * network, y)


def test_inputs_have_unit_variance_and_outputs_the_data_at_every_level():
    sigma = torch.tensor([0.002, 0.1, 0.5, 3.0, 80.0], dtype=torch.float64)
    c_skip, c_out, c_in = boundary_coefficients(sigma)
    torch.testing.assert_close(c_in.square() * (sigma.square() + SIGMA_DATA**2), torch.ones_like(sigma))
    above = sigma - SIGMA_MIN
    torch.testing.assert_close(c_skip, 0.25 / (above.square() + 0.25))
    torch.testing.assert_close(c_out, 0.5 * above / (sigma.square() + 0.25).sqrt())


def test_rectified_flow_form_is_the_same_function_and_reaches_pure_noise():
    t = torch.tensor([0.003, 0.2, 0.5, 0.9, 0.99], dtype=torch.float64)
    sigma = t / (1 - t)
    torch.testing.assert_close(sigma_of(t), sigma)
    torch.testing.assert_close(time_of(sigma), t)
    x_t = normal(5)
    y = x_t / (1 - t)
    skip_y, out_y, in_y = boundary_coefficients(sigma)
    skip_x, out_x, in_x = flow_boundary_coefficients(t)
    torch.testing.assert_close(skip_x * x_t, skip_y * y)
    torch.testing.assert_close(in_x * x_t, in_y * y)
    torch.testing.assert_close(out_x, out_y)
    skip, out, scale = flow_boundary_coefficients(torch.ones(1, dtype=torch.float64))
    assert (float(skip), float(out), float(scale)) == (0.0, SIGMA_DATA, 1.0)


def test_time_of_the_network_is_bounded_and_even_in_the_logarithm():
    sigma = torch.tensor([SIGMA_MIN, math.sqrt(SIGMA_MIN * SIGMA_MAX), SIGMA_MAX], dtype=torch.float64)
    torch.testing.assert_close(log_time(sigma), torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))


# ---- levels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 11, 1281])
def test_grid_is_even_in_the_seventh_root(n):
    grid = karras_grid(n, dtype=torch.float64)
    assert float(grid[0]) == SIGMA_MIN and float(grid[-1]) == SIGMA_MAX and (grid.diff() > 0).all()
    roots = (grid ** (1 / 7)).diff()
    torch.testing.assert_close(roots, roots[:1].expand_as(roots), rtol=1e-6, atol=0)


def test_original_schedule_grows_from_its_first_to_its_last_count():
    counts = [original_count(k / 1000) for k in range(1001)]
    assert counts[0] == 2 and counts[-1] == 150
    assert counts == sorted(counts)
    assert original_count(0.5) == math.ceil(math.sqrt(0.5 * (150**2 - 4) + 4) - 1) + 1


def test_doubling_schedule_has_the_published_sequence():
    """K = 400,000: K' = 50,000 updates at each of 10, 20, ..., 1280 intervals."""
    counts = [doubling_count(k / 400_000) - 1 for k in range(0, 400_000, 50_000)]
    assert counts == [10, 20, 40, 80, 160, 320, 640, 1280]
    assert [doubling_count((k - 1) / 400_000) - 1 for k in range(50_000, 400_001, 50_000)] == counts
    assert doubling_count(1.0) - 1 == 1280


def test_lognormal_probabilities_are_those_of_the_intervals():
    grid = torch.logspace(-6, 4, 101, base=math.e, dtype=torch.float64)
    p = lognormal_probabilities(grid)
    assert float(p.sum()) == pytest.approx(1.0)
    middle = ((grid[1:] * grid[:-1]).sqrt().log())[p.argmax()]
    assert abs(float(middle) - -1.1) <= 0.05  # half an interval of the grid
    drawn = -1.1 + 2.0 * normal(400_000)
    inside = drawn[(drawn > -6) & (drawn < 4)]
    share = torch.histogram(inside, grid.log()).hist / len(inside)
    assert (share - p).abs().max() < 4 * math.sqrt(float(p.max()) / len(inside))


def test_picked_indices_follow_their_probabilities():
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    index = pick(p, torch.arange(1000) / 1000)
    assert index.bincount(minlength=4).tolist() == pytest.approx([100, 0, 600, 300], abs=1)
    assert pick(p, torch.tensor([0.0, 1 - 1e-7])).tolist() == [0, 3]


def test_continuous_levels_are_lognormal():
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    logs = lognormal_levels(u, -1.1, 2.0).log()
    assert float(logs.mean()) == pytest.approx(-1.1, abs=1e-3) and float(logs.std()) == pytest.approx(2.0, rel=1e-3)


def test_easy_tuning_has_its_published_levels():
    sigma = torch.tensor([0.5, 5.0, 80.0], dtype=torch.float64)
    torch.testing.assert_close(
        easy_successor(sigma, 0), torch.tensor([0.0, 2.366, 40.0], dtype=torch.float64), rtol=0, atol=5e-4
    )
    torch.testing.assert_close(
        easy_successor(sigma, 3), torch.tensor([0.374, 4.671, 75.0], dtype=torch.float64), rtol=0, atol=5e-3
    )


def test_easy_tuning_closes_the_gap_stage_by_stage():
    sigma = torch.logspace(-2, 1.9, 50, dtype=torch.float64)
    levels = torch.stack([easy_successor(sigma, stage / 2) for stage in range(40)])
    assert (levels < sigma).all() and (levels.diff(dim=0) >= 0).all()
    assert (levels[0][sigma < 1] == 0).all()  # diffusion training where noise is small
    n = 1 + 8 * torch.sigmoid(-sigma)
    torch.testing.assert_close((sigma - easy_successor(sigma, 12)) / sigma, 2.0**-13 * n)


def test_levels_of_the_sampler():
    assert sampling_levels(1) == [80.0]
    assert sampling_levels(3, 80, 2, "linear") == pytest.approx([80, 41, 2])
    assert sampling_levels(3, 81, 1) == pytest.approx([81, 9, 1])
    assert sampling_levels(3, 81, 1, edge=0.1) == pytest.approx([81, 8.1, 0.9])
    for bad in ({"steps": 0}, {"last": 90.0}, {"edge": 1.0}, {"spacing": "cubic"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            sampling_levels(**({"steps": 2} | bad))
    for arguments in [(1,), (5, 1.0, 0.5), (5, 0.0)]:
        with pytest.raises(ValueError, match="sigma_min < sigma_max"):
            karras_grid(*arguments)


# ---- distances --------------------------------------------------------------------------------------------


def test_pseudo_huber_is_quadratic_and_then_linear_in_the_norm():
    x = normal(6, 3, 4)
    zero = torch.zeros_like(x)
    norm = x.flatten(1).norm(dim=1)
    torch.testing.assert_close(pseudo_huber(x, zero, 1e4), norm.square() / 2e4, rtol=1e-6, atol=0)
    torch.testing.assert_close(pseudo_huber(x, zero, 1e-4), norm - 1e-4, rtol=1e-6, atol=0)
    torch.testing.assert_close(pseudo_huber(x, zero), pseudo_huber(x, zero, 0.00054 * math.sqrt(12)))
    # Of the whole sample: the same distance however it is spread over the elements.
    one = torch.zeros(2, 4, dtype=torch.float64)
    one[0, 0], one[1] = 2.0, 1.0
    assert pseudo_huber(one, torch.zeros_like(one), 0.7).diff().abs() < 1e-12


def test_cauchy_influence_peaks_at_root_two_c_and_decays():
    c = 0.3
    r = torch.linspace(0.01, 30, 3000, dtype=torch.float64).requires_grad_()
    cauchy(r[:, None], torch.zeros_like(r)[:, None], c).sum().backward()
    influence, at = r.grad.max(0)
    assert abs(float(r[at].detach()) - math.sqrt(2) * c) < 0.01
    assert float(influence) == pytest.approx(1 / (math.sqrt(2) * c), rel=1e-3)
    assert float(r.grad[-1]) == pytest.approx(2 / 30, rel=1e-3)


def test_outliers_hardly_change_the_cauchy_gradient():
    x = normal(1000, 4).requires_grad_()
    outliers = torch.zeros(1000, 4, dtype=torch.float64)
    outliers[:50] = 100 * normal(50, 4, seed=1).sign()

    def gradient(target: Tensor, loss) -> Tensor:
        return torch.autograd.grad(loss(x, target).sum(), x)[0].norm()

    clean = torch.zeros_like(outliers)

    def squared(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().sum(1)

    change = gradient(outliers, lambda a, b: cauchy(a, b, 1.0)) / gradient(clean, lambda a, b: cauchy(a, b, 1.0))
    assert abs(float(change) - 1) < 0.1
    assert gradient(outliers, squared) / gradient(clean, squared) > 10


def test_cauchy_scale_falls_with_the_number_of_levels():
    scales = [cauchy_scale(n) for n in (11, 21, 41, 641, 1281)]
    assert scales == sorted(scales, reverse=True) and len(set(scales)) == 5
    assert scales[0] == pytest.approx(10**-1.18 * math.exp(-0.72))


# ---- the fixed point --------------------------------------------------------------------------------------

RATIOS = {11: 0.753, 21: 0.868, 41: 0.931, 81: 0.965, 161: 0.982, 641: 0.9956, 1281: 0.9978}


def biased_slope(grid: Tensor, s0: float) -> Tensor:
    """A_n of the fixed point f_n(y) = m + A_n (y - m), [N]."""
    product = (s0**2 + grid[:-1] * grid[1:]) / (s0**2 + grid[1:].square())
    return torch.cat([torch.ones(1, dtype=torch.float64), product.cumprod(0)])


def fitted_slopes(n: int, samples: int, references: int = 0) -> Tensor:
    """Slopes of f_n where the squared loss is least: each level is fitted to its target, f_n-1 at the successor."""
    grid, rng = karras_grid(n, dtype=torch.float64), generator(3)
    slope, offset = torch.ones(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    pool = BED.sample((references, 1), rng)
    for k in range(n - 1):
        x0, z = BED.pair((samples, 1), rng)
        # Noise made orthogonal to the data and of unit variance leaves little but the bias.
        x0 = BED.m + (x0 - x0.mean()) * BED.s0 / x0.std(correction=0)
        z = z - z.mean() - (x0 - x0.mean()) * ((x0 - x0.mean()) * z).mean() / x0.var(correction=0)
        z = z / z.std(correction=0)
        y, sigma = x0 + grid[k + 1] * z, grid[k + 1].expand(samples)
        x0_hat = posterior_mean(y, sigma, pool) if references else x0
        target = offset[k] + slope[k] * successor(y, sigma, grid[k].expand(samples), x0_hat)
        centred = y - y.mean()
        slope[k + 1] = (centred * target).sum() / centred.square().sum()
        offset[k + 1] = target.mean() - slope[k + 1] * y.mean()
    return slope


@pytest.mark.parametrize("n", [11, 21, 41])
def test_consistency_training_reaches_its_biased_fixed_point_on_gaussians(n):
    grid = karras_grid(n, dtype=torch.float64)
    fitted, expected = fitted_slopes(n, 20_000), biased_slope(grid, BED.s0)
    assert (fitted / expected - 1).abs().max() < 0.02
    exact = (BED.s0**2 + SIGMA_MIN**2) ** 0.5 / (BED.s0**2 + grid[-1] ** 2) ** 0.5
    assert float(fitted[-1] / exact) == pytest.approx(RATIOS[n], abs=0.02)


def test_the_bias_shrinks_with_the_number_of_levels_as_tabulated():
    for n, ratio in RATIOS.items():
        grid = karras_grid(n, dtype=torch.float64)
        exact = (BED.s0**2 + SIGMA_MIN**2) ** 0.5 / (BED.s0**2 + grid.square()) ** 0.5
        assert float(biased_slope(grid, BED.s0)[-1] / exact[-1]) == pytest.approx(ratio, abs=6e-4)


# ---- targets of less variance -----------------------------------------------------------------------------


def test_one_reference_gives_the_sampled_successor():
    x0, z = BED.pair((6, 3), generator())
    sigma, r = torch.tensor([1.0, 5.0]).double().repeat(3), torch.tensor([0.5, 0.0]).double().repeat(3)
    y = x0 + sigma[:, None] * z
    for i in range(6):
        alone = posterior_mean(y[i : i + 1], sigma[i : i + 1], x0[i : i + 1])
        torch.testing.assert_close(alone, x0[i : i + 1])
        lower = successor(y[i : i + 1], sigma[i : i + 1], r[i : i + 1], alone)
        torch.testing.assert_close(lower, x0[i : i + 1] + r[i] * z[i : i + 1])
    weights = torch.eye(6).double().log()  # references of another condition do not count
    torch.testing.assert_close(posterior_mean(y, sigma, x0, weights), x0)


def test_masked_elements_do_not_choose_references():
    x0, y, sigma = normal(7, 4), normal(3, 4, seed=1), torch.tensor([0.5, 1.0, 2.0]).double()
    mask = torch.tensor([1.0, 1, 0, 0]).double().expand(3, 4)
    masked = posterior_mean(y, sigma, x0, mask=mask)
    torch.testing.assert_close(masked[:, :2], posterior_mean(y[:, :2], sigma, x0[:, :2]))


def test_posterior_mean_approaches_the_denoiser():
    """s0 = 0.5, m = 0.7, y = 0.9, sigma = 0.5: 0.8."""
    y, sigma = torch.tensor([[0.9]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    t = 0.5 / 1.5
    exact = BED.denoised(y * (1 - t), t)
    assert float(exact) == pytest.approx(0.8)
    estimate = posterior_mean(y, sigma, BED.sample((200_000, 1), generator(4)))
    assert abs(float(estimate - exact)) < 0.005


def test_references_reduce_the_variance_of_the_target_and_keep_its_mean():
    sigma, r, repeats = 0.8, 0.5, 400
    y = torch.full((repeats, 1), 1.1, dtype=torch.float64)
    mean = BED.m + BED.s0**2 / (BED.s0**2 + sigma**2) * (1.1 - BED.m)
    std = BED.s0 * sigma / math.sqrt(BED.s0**2 + sigma**2)
    x0 = mean + std * normal(repeats, 1, seed=5)  # the samples that may have made y
    targets = {}
    for size in (1, 8, 64):
        others = BED.sample((repeats, size - 1, 1), generator(6))
        pools = torch.cat([x0[:, None], others], 1)
        hats = torch.cat(
            [posterior_mean(y[i : i + 1], torch.tensor([sigma]).double(), pools[i]) for i in range(repeats)]
        )
        targets[size] = successor(y, torch.full((repeats,), sigma).double(), torch.full((repeats,), r).double(), hats)
    variance = [float(target.var()) for target in targets.values()]
    assert variance[0] > 2 * variance[1] > 8 * variance[2]
    expected = 1.1 + (r - sigma) * (1.1 - mean) / sigma
    for target in targets.values():
        assert abs(float(target.mean()) - expected) < 4 * float(target.std()) / math.sqrt(repeats) + 1e-3


def test_the_fixed_point_is_the_same_with_references():
    grid = karras_grid(11, dtype=torch.float64)
    fitted = fitted_slopes(11, 2000, references=2000)
    assert (fitted / biased_slope(grid, BED.s0) - 1).abs().max() < 0.04


# ---- coupling ---------------------------------------------------------------------------------------------


def cost(noise: Tensor, data: Tensor) -> float:
    return float((noise - data).square().sum())


def test_coupling_is_the_cheapest_of_all_pairings():
    for seed in range(5):
        noise, data = normal(6, 2, seed=seed), normal(6, 2, seed=seed + 50) + 1
        best = min(cost(noise[list(order)], data) for order in itertools.permutations(range(6)))
        index = optimal_coupling(noise, data)
        assert sorted(index.tolist()) == list(range(6))
        assert cost(noise[index], data) == pytest.approx(best)
        assert best < cost(noise, data)


def test_free_coupling_makes_noise_depend_on_the_condition_and_coupling_within_equal_ones_does_not():
    """Two conditions with actions at -1 and +1: whoever knows the condition must not know the noise."""
    rng, means = generator(8), {"free": [], "within": [], "gain": []}
    for _ in range(60):
        state = torch.arange(16).remainder(2).double()
        data = (2 * state - 1)[:, None] + 0.5 * torch.randn(16, 1, generator=rng, dtype=torch.float64)
        noise = torch.randn(16, 1, generator=rng, dtype=torch.float64)
        free, within = optimal_coupling(noise, data), optimal_coupling(noise, data, state[:, None])
        means["free"].append(float(noise[free][state == 1].mean()))
        means["within"].append(float(noise[within][state == 1].mean()))
        means["gain"].append(cost(noise, data) - cost(noise[within], data))
    error = 4 / math.sqrt(60 * 8)
    assert sum(means["free"]) / 60 > 0.5
    assert abs(sum(means["within"]) / 60) < error
    assert min(means["gain"]) > 0  # and paths do get shorter


def test_noises_stay_within_the_radius_and_a_condition_that_occurs_once_keeps_its_own():
    states = torch.tensor([[0.0], [0.01], [1.0], [1.01], [7.0]])
    noise, data = normal(5, 1, seed=2), normal(5, 1, seed=3)
    assert optimal_coupling(noise, data, states).tolist() == [0, 1, 2, 3, 4]
    index = optimal_coupling(noise, data, states, radius=0.05).tolist()
    assert set(index[:2]) == {0, 1} and set(index[2:4]) == {2, 3} and index[4] == 4
    assert cost(noise[index], data) <= cost(noise, data)


def test_nearness_is_relative_to_the_spread_of_the_states():
    states = normal(6, 3)
    distance = torch.cdist(states, states)
    mean = distance[~torch.eye(6, dtype=torch.bool)].mean()
    torch.testing.assert_close(relative_distances(states).double(), distance / mean, rtol=1e-5, atol=1e-6)
    near = nearness(states, 0.5)
    torch.testing.assert_close(near, nearness(100 * states + 3, 0.5), rtol=1e-3, atol=1e-5)
    assert torch.equal(near.diagonal(), torch.ones(6))
    assert torch.equal(relative_distances(torch.ones(3, 2)), torch.zeros(3, 3))  # no spread, no NaN
    assert torch.equal(relative_distances(torch.ones(1, 2)), torch.zeros(1, 1))


def test_bad_couplings_are_refused():
    with pytest.raises(ValueError, match="3 noises, 2 samples"):
        optimal_coupling(torch.zeros(3, 1), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="radius = -1"):
        optimal_coupling(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, 1), -1)
    with pytest.raises(ValueError, match="bandwidth = 0"):
        nearness(torch.zeros(2, 1), 0)


# ---- sampling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("spacing", ["log", "linear"])
def test_samples_of_the_exact_function_keep_mean_and_variance(steps, spacing):
    rng, n = generator(9), 200_000
    levels = sampling_levels(steps, last=0.8, spacing=spacing)

    def noise(step: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    y = SIGMA_MAX * noise(-1, (n, 1))
    x = consistency_sample(lambda y, sigma: BED.consistency(y, sigma[:, None]), y, levels, noise)
    assert abs(float(x.mean()) - BED.m) < 4 * BED.s0 / math.sqrt(n) + BED.m * BED.s0 / SIGMA_MAX
    assert float(x.std()) == pytest.approx(BED.s0, rel=0.01)


def test_steps_use_fresh_noise_in_order_and_gradients_flow_through_all_of_them():
    calls, steps = [], []

    def f(y: Tensor, sigma: Tensor) -> Tensor:
        calls.append(float(sigma[0]))
        return 0.5 * weight * y

    def noise(step: int, shape: tuple[int, ...]) -> Tensor:
        steps.append(step)
        return torch.zeros(shape)

    weight = torch.ones((), requires_grad=True)
    x = consistency_sample(f, torch.ones(2, 3), [80.0, 8.0, 1.0], noise)
    assert calls == [80.0, 8.0, 1.0] and steps == [0, 1]
    x.sum().backward()
    assert float(weight.grad) == pytest.approx(6 * 3 * 0.125)  # d w^3 / dw = 3


# ---- training ---------------------------------------------------------------------------------------------

MODES = MixtureBed(means=((-1.0,), (1.0,)), stds=(0.1, 0.1))


def test_a_small_network_keeps_both_modes_in_one_step():
    """Improved consistency training; the data's spread is 1, so sigma_data = 1."""
    rng, updates = generator(12), 400
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = VelocityMLP(1, width=32, depth=2, max_frequency=20.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def f(y: Tensor, sigma: Tensor) -> Tensor:
        c_skip, c_out, c_in = (c[:, None] for c in boundary_coefficients(sigma, 1.0))
        return c_skip * y + c_out * net(c_in * y, log_time(sigma))

    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - update / updates)
        grid = karras_grid(doubling_count(update / updates, 10, 40))
        index = pick(lognormal_probabilities(grid), torch.rand(256, generator=rng))
        sigma, r = grid[index + 1], grid[index]
        x0, z = MODES.sample(256, rng).float(), torch.randn(256, 1, generator=rng)
        with torch.no_grad():
            target = f(x0 + r[:, None] * z, r)
        loss = (pseudo_huber(f(x0 + sigma[:, None] * z, sigma), target) / (sigma - r)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        x = f(SIGMA_MAX * torch.randn(2000, 1, generator=rng), torch.full((2000,), SIGMA_MAX))
    shares = MODES.mode_shares(x)
    assert shares.min() > 0.28 and shares.sum() > 0.65  # of the noise at unit scale: 0.19 and 0.38
