"""Temporal consistency: closed forms, other libraries, and policies whose consistency is known."""

import itertools
import math

import numpy as np
import pytest
import torch

from genrl.envs.stac import DISTANCES, StacSettings, kde_kl, mmd, overlap, paired_error


def normal(*shape, seed=0, **kwargs):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, **kwargs)


def test_overlap_pairs_the_actions_of_the_same_time_steps():
    time = torch.arange(10, dtype=torch.float64)
    previous = time[None, 0:8, None].expand(3, 8, 2)  # predicted at time 0
    current = time[None, 3:11, None].expand(3, 7, 2)  # predicted at time 3
    first, second = overlap(previous[:, :7], current, executed=3)
    assert first.shape == (3, 4, 2) and torch.equal(first, second)
    first, second = overlap(previous[:, :7], current, executed=3, skip=2, action_dims=[1])
    assert first[0, :, 0].tolist() == [5, 6] and torch.equal(first, second)


@pytest.mark.parametrize(
    "executed, skip, dims, message",
    [(4, 0, None, "share no future action"), (2, 2, None, "share no future action"), (0, 0, None, "n_action_steps"),
     (1, 0, [5], "action_dims")],
)  # fmt: skip
def test_chunks_without_an_overlap_are_refused(executed, skip, dims, message):
    chunk = torch.zeros(2, 4, 3)
    with pytest.raises(ValueError, match=message):
        overlap(chunk, chunk, executed, skip, dims)


def test_chunks_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 4, 3\) and \(2, 4, 2\)"):
        overlap(torch.zeros(2, 4, 3), torch.zeros(2, 4, 2), 1)


@pytest.mark.parametrize("bandwidth", ["dimension", "median", "eigenvalue", 1.0, 0.1, 100.0])
def test_mmd_is_zero_for_equal_samples_symmetric_and_never_negative(bandwidth):
    x, y = normal(40, 6), normal(30, 6, seed=1) + 0.3
    assert mmd(x, x.clone(), bandwidth) == 0.0
    assert mmd(x, y, bandwidth) == pytest.approx(mmd(y, x, bandwidth), rel=1e-12)
    assert mmd(x, y, bandwidth) > 1e-4
    assert all(mmd(normal(5, 2, seed=i), normal(5, 2, seed=i + 50), bandwidth) >= 0 for i in range(20))


@pytest.mark.parametrize("bandwidth", ["dimension", "median", "eigenvalue", 0.7])
def test_mmd_equals_scikit_learns_kernels_with_every_bandwidth_rule(bandwidth):
    from sklearn.metrics.pairwise import euclidean_distances, rbf_kernel

    x, y = normal(33, 5).numpy(), (normal(21, 5, seed=1) * 1.4 + 0.5).numpy()
    pooled = np.concatenate([x, y])
    squared = euclidean_distances(pooled, squared=True)
    gamma = {
        "dimension": None,  # the library's own default
        "median": 1 / (2 * np.median(squared[~np.eye(len(pooled), dtype=bool)])),
        "eigenvalue": 1 / np.linalg.eigvalsh(np.cov(pooled.T)).max(),
        0.7: 0.7,
    }[bandwidth]
    expected = rbf_kernel(x, x, gamma).mean() + rbf_kernel(y, y, gamma).mean() - 2 * rbf_kernel(x, y, gamma).mean()
    assert mmd(torch.from_numpy(x), torch.from_numpy(y), bandwidth) == pytest.approx(expected, rel=1e-9)


def test_the_largest_eigenvalue_is_right_with_fewer_samples_than_dimensions():
    x, y = normal(4, 30), normal(4, 30, seed=1)
    g = 1 / np.linalg.eigvalsh(np.cov(torch.cat([x, y]).numpy().T)).max()
    assert mmd(x, y, "eigenvalue") == pytest.approx(mmd(x, y, float(g)), rel=1e-9)


@pytest.mark.parametrize("g, s, shift, d", [(0.5, 1.0, 1.5, 2), (0.25, 0.7, 2.0, 4), (1 / 3, 1.3, 2.5, 3)])
def test_mmd_of_shifted_gaussians_equals_the_gaussian_integral(g, s, shift, d):
    """2 (1 + 4 g s^2)^(-d/2) [1 - exp(-g |delta|^2 / (1 + 4 g s^2))], plus the biased estimate's known excess."""
    n, repeats = 300, 60
    delta = torch.zeros(d, dtype=torch.float64)
    delta[0] = shift
    x, y = s * normal(repeats, n, d), s * normal(repeats, n, d, seed=1) + delta
    values = [mmd(a, b, g) for a, b in zip(x, y, strict=True)]
    spread = 1 + 4 * g * s * s
    population = 2 * spread ** (-d / 2) * (1 - math.exp(-g * shift**2 / spread))
    excess = 2 / n * (1 - spread ** (-d / 2))  # the diagonal of k(x, x) and k(y, y) is 1
    error = np.std(values, ddof=1) / repeats**0.5
    assert abs(np.mean(values) - population - excess) < 4 * error and error < 0.02 * population


@pytest.mark.parametrize("bandwidth", [1.0, 0.4, "eigenvalue", "median", "dimension"])
@pytest.mark.parametrize("forward", [True, False])
def test_kde_kl_equals_scikit_learns_density_estimates(bandwidth, forward):
    from sklearn.neighbors import KernelDensity

    x, y = normal(30, 4).numpy(), (normal(25, 4, seed=1) + 0.4).numpy()
    pooled = np.concatenate([x, y])
    squared = ((pooled[:, None] - pooled[None]) ** 2).sum(-1)
    width = {
        "eigenvalue": np.linalg.eigvalsh(np.cov(pooled.T)).max() ** 0.5,
        "median": np.median(squared[squared > 0]) ** 0.5,
        "dimension": 2**0.5,
    }.get(bandwidth, bandwidth)
    previous, current = (KernelDensity(bandwidth=width).fit(z) for z in (x, y))
    if forward:
        expected = (current.score_samples(y) - previous.score_samples(y)).mean()
    else:
        expected = (previous.score_samples(x) - current.score_samples(x)).mean()
    found = kde_kl(torch.from_numpy(x), torch.from_numpy(y), bandwidth, forward)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_kde_kl_is_zero_for_equal_samples_and_may_be_negative():
    x = normal(30, 4)
    assert kde_kl(x, x.clone()) == 0.0
    assert kde_kl(torch.ones(5, 2), torch.ones(5, 2), "eigenvalue") == 0.0
    # the current sample lies within the previous one, where both estimates are about equally dense
    assert min(kde_kl(normal(20, 3, seed=i), normal(20, 3, seed=i + 99), 0.3, True) for i in range(5)) > 0
    wide, narrow = torch.tensor([[-3.0], [0.0], [0.1], [3.0]]), torch.tensor([[-2.0], [0.05], [2.0]])
    assert min(kde_kl(wide, narrow, w, f) for w in (1.0, 2.0) for f in (True, False)) < 0


def test_paired_errors_equal_their_definition():
    x, y = normal(4, 3, 2), normal(4, 3, 2, seed=1)
    gaps = (x - y).numpy()
    expected = {
        "mse": [np.mean(gap**2) for gap in gaps],
        "ssd": [np.sum(gap**2) for gap in gaps],
        "ate": [np.mean([np.hypot(*gap[: t + 1].sum(0)) for t in range(3)]) for gap in gaps],
    }
    for measure, values in expected.items():
        for aggregate in ("mean", "min", "max", "std"):
            found = paired_error(x, y, measure, aggregate)
            assert found == pytest.approx(getattr(np, aggregate)(values), rel=1e-12)
            assert paired_error(x, x.clone(), measure, aggregate) == 0.0


@pytest.mark.parametrize("measure", ["mmd", "kde_kl", "kde_kl_reverse", "mse", "ssd", "ate"])
def test_a_policy_that_replays_its_plan_scores_zero_and_one_that_changes_its_mind_does_not(measure):
    settings = StacSettings(measure=measure, samples=8)
    horizon, k, noise = 8, 3, 0.01 * normal(8, 26, 2)
    plan = torch.linspace(-1, 1, 26, dtype=torch.float64)[None, :, None] + noise  # 8 sampled plans of the whole episode
    replay = [plan[:, t : t + horizon] for t in range(0, 18, k)]
    flip = [chunk * (-1) ** i for i, chunk in enumerate(replay)]
    consistent = [settings.score(a, b, k) for a, b in itertools.pairwise(replay)]
    erratic = [settings.score(a, b, k) for a, b in itertools.pairwise(flip)]
    assert consistent == [0.0] * 5
    assert all(score > 1e-3 for score in erratic) and max(erratic) > 0.05


@pytest.mark.parametrize("measure", sorted(DISTANCES))
def test_a_running_sum_of_distances_never_falls(measure):
    settings = StacSettings(measure=measure)
    chunks = [normal(6, 5, 2, seed=i) for i in range(9)]
    steps = [settings.score(a, b, 2) for a, b in itertools.pairwise(chunks)]
    scores = settings.episode_scores(steps)
    assert scores == pytest.approx(np.cumsum(steps)) and all(b >= a for a, b in itertools.pairwise(scores))
    assert StacSettings(measure=measure, cumulative=False).episode_scores(steps) == steps


def test_one_sample_is_enough_for_a_deterministic_policy_only():
    assert StacSettings(measure="mse", samples=1).paired
    with pytest.raises(ValueError, match=r"samples = 1 .*'mmd' needs at least 2"):
        StacSettings(samples=1)


def test_left_out_action_elements_do_not_count():
    chunk = normal(5, 6, 3)
    other = chunk.clone()
    other[:, :, 2] += 10
    assert StacSettings(measure="mse", action_dims=(0, 1)).score(chunk, other[:, :], 1) == pytest.approx(
        StacSettings(measure="mse", action_dims=(0, 1)).score(chunk, chunk, 1)
    )
    assert StacSettings(measure="mse").score(chunk, other, 1) > 30


@pytest.mark.parametrize(
    "values, message",
    [({"measure": "wasserstein"}, "mmd, kde_kl"), ({"bandwidth": 0.0}, "positive number"),
     ({"bandwidth": "silverman"}, "median"), ({"alpha": 1.0}, "alpha"), ({"aggregate": "sum"}, "mean, min, max, std"),
     ({"action_dims": ()}, "one or more indices"), ({"action_dims": (-1,)}, "indices from 0")],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        StacSettings(**values)
