from __future__ import annotations

import time

import numpy as np
import pytest
from data_members import toy_demonstrations

from genrl.envs.data import DataError, Demonstrations, Episode
from genrl.envs.data.quality import (
    action_variance,
    distance_percentiles,
    knn_kl,
    measure_quality,
    standardise,
    state_divergence,
    state_similarity,
    transition_diversity,
    visitation_bound,
)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def repeated(rng, states=2000, times=5):
    """States that occur several times, with the action of a deterministic expert."""
    s = np.repeat(rng.normal(size=(states, 3)), times, axis=0)
    return s, np.tanh(s[:, :2] * 2)


def test_a_deterministic_expert_at_repeated_states_has_no_action_variance(rng):
    s, a = repeated(rng, 100)
    assert action_variance(s, a, [0.0])[0] < 1e-28  # rounding of a mean of equal numbers
    assert action_variance(s, a, [1.0])[0] > 0.01  # neighbours that are other states do differ


@pytest.mark.parametrize("times", [2, 5])
@pytest.mark.parametrize("sigma", [0.05, 0.5])
def test_action_noise_raises_action_variance_by_its_own_variance(rng, times, sigma):
    s, a = repeated(rng, 6000 // times, times)
    noisy = a + sigma * rng.normal(size=a.shape)
    expected = a.shape[1] * sigma**2 * (1 - 1 / times)
    rise = action_variance(s, noisy, [0.0])[0] - action_variance(s, a, [0.0])[0]
    assert rise == pytest.approx(expected, rel=0.05)


def rolled_out(rng, process_noise, episodes=200, steps=25):
    """A linear system under a linear expert."""
    A, B, K = np.array([[1.0, 0.1], [0.0, 0.95]]), np.array([[0.0], [0.1]]), np.array([[1.0, 0.8]])
    s, states, actions, following = rng.normal(size=(episodes, 2)), [], [], []
    for _ in range(steps):
        a = -s @ K.T
        new = s @ A.T + a @ B.T + process_noise * rng.normal(size=s.shape)
        states.append(s), actions.append(a), following.append(new)
        s = new
    return [np.concatenate(parts) for parts in (states, actions, following)]


def test_process_noise_raises_transition_diversity_but_not_action_variance():
    quiet = rolled_out(np.random.default_rng(0), 0.0)
    noisy = rolled_out(np.random.default_rng(0), 0.1)
    balls = np.arange(0, 5000, 25)
    before, after = (transition_diversity(s, a, n, [0.3], balls)[0] for s, a, n in (quiet, noisy))
    assert before < 1e-12  # a linear system is explained exactly
    assert after == pytest.approx(2 * 0.1**2, rel=0.05)
    variances = [action_variance(s, a, [0.3], balls)[0] for s, a, _ in (quiet, noisy)]
    assert abs(variances[1] - variances[0]) < 0.1 * variances[0]


def test_action_noise_is_not_mistaken_for_transition_diversity():
    s, a, following = rolled_out(np.random.default_rng(1), 0.1)
    extra = 0.3 * np.random.default_rng(2).normal(size=a.shape)
    pushed = following + extra @ np.array([[0.0, 0.1]])  # the system answers to the noise in the action
    diversity = transition_diversity(s, a + extra, pushed, [0.5], np.arange(0, 5000, 25))[0]
    assert diversity == pytest.approx(2 * 0.1**2, rel=0.05)


def test_metrics_equal_their_definitions_written_as_loops(rng):
    s, a = rng.normal(size=(40, 3)), rng.normal(size=(40, 2))
    for eps in (0.0, 0.8, 2.0, 100.0):
        variance = similarity = 0.0
        for i in range(40):
            near = [j for j in range(40) if np.sqrt(((s[i] - s[j]) ** 2).sum()) <= eps]
            variance += ((a[i] - np.mean([a[j] for j in near], axis=0)) ** 2).sum() / 40
            similarity += len(near) / 40 / 40
        assert action_variance(s, a, [eps])[0] == pytest.approx(variance)
        assert state_similarity(s, [eps])[0] == pytest.approx(similarity)
        assert 0 < state_similarity(s, [eps])[0] <= 1


def demonstrations_of(states, actions, length=50):
    pieces = zip(np.split(states, len(states) // length), np.split(actions, len(states) // length), strict=True)
    return Demonstrations.of([Episode({"state": s.astype(np.float32)}, a.astype(np.float32)) for s, a in pieces])


def test_metrics_do_not_depend_on_the_units_of_states(rng):
    s, a = repeated(rng, 200)
    plain = measure_quality(demonstrations_of(s, a))
    scaled = measure_quality(demonstrations_of(s * [1000.0, 0.01, 3.0] + [5.0, 0.0, -1.0], a))
    for one, other in zip(plain.points, scaled.points, strict=True):
        assert 0 < one.state_similarity <= 1
        assert other.state_similarity == pytest.approx(one.state_similarity, rel=1e-2)
        assert other.action_variance == pytest.approx(one.action_variance, rel=1e-2)
        assert other.transition_diversity == pytest.approx(one.transition_diversity, rel=1e-2)


def test_the_curve_over_eps_is_monotone_where_the_definition_is(rng):
    s, a = repeated(rng, 200)
    quality = measure_quality(demonstrations_of(s, a), percentiles=(1, 5, 20, 100))
    similarities = [point.state_similarity for point in quality.points]
    assert similarities == sorted(similarities) and similarities[-1] == pytest.approx(1.0, abs=1e-3)
    # With everything in one ball the action variance is the variance of the actions.
    assert quality.points[-1].action_variance == pytest.approx(a.var(axis=0).sum(), rel=1e-3)
    assert quality.horizon == 50 and quality.states == ("state",)


def test_percentiles_are_those_of_all_pairs(rng):
    points = rng.normal(size=(300, 4))
    every = np.linalg.norm(points[:, None] - points[None], axis=-1)[np.triu_indices(300, 1)]
    found = distance_percentiles(points, (1, 5, 50), np.random.default_rng(0))
    np.testing.assert_allclose(found, np.percentile(every, (1, 5, 50)), rtol=0.03)


def test_constant_dimensions_do_not_count(rng):
    s = np.concatenate([rng.normal(size=(100, 2)), np.full((100, 1), 0.1)], axis=1)
    assert np.array_equal(standardise(s.astype(np.float32))[:, 2].round(6), np.zeros(100))


@pytest.mark.parametrize(
    ("mean", "std", "exactness"), [(0.0, 1.0, 0.1), (0.7, 1.0, 0.1), (0.5, 0.7, 0.1), (0.0, 1.5, 0.3)]
)
def test_nearest_neighbours_estimate_the_kl_of_two_gaussians(mean, std, exactness):
    rng = np.random.default_rng(0)
    a, b = mean + std * rng.normal(size=(4000, 2)), rng.normal(size=(4000, 2))
    exact = 2 * (std**2 / 2 + mean**2 / 2 - 0.5 - np.log(std))
    errors = {n: np.mean([abs(knn_kl(x, y) - exact) for x, y in pieces(a, b, n)]) for n in (100, 4000)}
    assert errors[4000] < exactness and errors[4000] < errors[100]
    assert knn_kl(a, b, k=5) == pytest.approx(exact, abs=exactness)


def pieces(a, b, size):
    return [(a[i : i + size], b[i : i + size]) for i in range(0, min(len(a), 1000), size)]


def test_kl_of_repeated_points_leaves_them_out_and_says_when_nothing_is_left(rng):
    a, b = rng.normal(size=(500, 2)), rng.normal(size=(500, 2))
    doubled = np.concatenate([a, a[:50]])
    assert knn_kl(doubled, b) == pytest.approx(knn_kl(a, b), abs=0.3)
    with pytest.raises(ValueError, match="more than once"):
        knn_kl(np.zeros((10, 2)), b)
    with pytest.raises(ValueError, match="shapes"):
        knn_kl(a, b[:, :1])
    with pytest.raises(ValueError, match="too few"):
        knn_kl(a[:1], b)


def test_divergence_of_data_sets_is_small_for_equal_and_large_for_shifted_states(rng):
    def data(shift):
        return demonstrations_of(rng.normal(size=(1000, 3)) + shift, np.zeros((1000, 1)))

    assert abs(state_divergence(data(0.0), data(0.0))) < 0.2
    assert state_divergence(data(2.0), data(0.0)) > 3


@pytest.mark.parametrize("seed", range(5))
def test_action_kl_bounds_the_kl_of_visits_on_random_linear_systems(seed):
    """Both sides in closed form: Gaussian states under linear policies, mixtures over time, the left by sampling."""
    rng = np.random.default_rng(seed)
    n, m, horizon = 2, 1, 8
    A = rng.normal(size=(n, n))
    A *= 0.8 / max(1e-6, np.abs(np.linalg.eigvals(A)).max())
    B = rng.normal(size=(n, m))
    gains = {"A": 0.3 * rng.normal(size=(m, n))}
    gains["E"] = gains["A"] + 0.3 * rng.normal(size=(m, n))
    sigmas, system = {"A": 0.4, "E": 0.5}, 0.2
    laws = {}
    for who in "AE":
        mean, cov = np.ones(n), np.eye(n)
        closed = A + B @ gains[who]
        laws[who] = []
        for _ in range(horizon):
            laws[who].append((mean, cov))
            mean = closed @ mean
            cov = closed @ cov @ closed.T + sigmas[who] ** 2 * B @ B.T + system**2 * np.eye(n)
    difference = gains["A"] - gains["E"]
    ratio = sigmas["A"] ** 2 / sigmas["E"] ** 2
    action_kl = []
    for mean, cov in laws["A"]:
        square = np.trace(difference @ (cov + np.outer(mean, mean)) @ difference.T)
        action_kl.append(0.5 * (m * (ratio - 1 - np.log(ratio)) + square / sigmas["E"] ** 2))

    def log_density(x, law):
        parts = []
        for mean, cov in law:
            gap = x - mean
            parts.append(
                -0.5 * np.einsum("ni,ij,nj->n", gap, np.linalg.inv(cov), gap)
                - 0.5 * np.linalg.slogdet(2 * np.pi * cov)[1]
            )
        return np.logaddexp.reduce(parts, axis=0) - np.log(len(law))

    visits = np.concatenate([rng.multivariate_normal(*law, size=4000) for law in laws["A"]])
    visits_expert = np.concatenate([rng.multivariate_normal(*law, size=4000) for law in laws["E"]])
    log_ratio = log_density(visits, laws["A"]) - log_density(visits, laws["E"])
    exact, error = log_ratio.mean(), log_ratio.std() / np.sqrt(len(visits))
    bound = visitation_bound(action_kl)
    assert exact > 3 * error and exact + 3 * error <= bound
    # The estimator of the module sees the same divergence in samples of the two.
    some = rng.permutation(len(visits))[:4000]
    assert knn_kl(visits[some], visits_expert[some], k=3) == pytest.approx(exact, rel=0.35, abs=0.05)


def test_the_bound_counts_early_steps_more():
    assert visitation_bound([1.0, 0.0]) == 1.0 and visitation_bound([0.0, 1.0]) == 0.5


def test_without_states_there_are_no_metrics():
    images = toy_demonstrations((4,), images=True)
    only = Demonstrations.of([Episode({"image": e.obs["image"]}, e.actions) for e in images.episodes])
    with pytest.raises(DataError, match="kind 'state'"):
        measure_quality(only)
    with pytest.raises(DataError, match=r"'state'.*velocity"):
        measure_quality(images, obs=["velocity"])


def test_tiny_data_sets_have_metrics_or_say_that_neighbours_are_missing():
    quality = measure_quality(toy_demonstrations((1, 2)))
    assert quality.points[0].transition_diversity is None
    assert any("too few neighbours" in value for _, value in quality.rows())


def test_a_hundred_thousand_transitions_take_seconds():
    rng = np.random.default_rng(0)
    data = demonstrations_of(rng.normal(size=(100_000, 10)), rng.normal(size=(100_000, 4)), length=100)
    start = time.process_time()
    quality = measure_quality(data)
    assert time.process_time() - start < 40
    assert quality.transitions == 100_000 and quality.used == 20_000
    # Independent of states, actions vary as much within a ball as they do at all.
    assert quality.points[-1].action_variance == pytest.approx(4.0, rel=0.05)
    assert measure_quality(data, seed=0).to_dict() == quality.to_dict()
