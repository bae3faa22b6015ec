"""How good demonstrations are to imitate, measured on the data alone.

After "Data Quality in Imitation Learning" (arXiv 2306.02437). With D the (state, action) pairs, states standardised per
dimension, and C(s) the pairs of D whose state lies within eps of s:

    action variance        1/|D| sum_{(s,a)} | a - mean_{C(s)} a |^2       low is good: one action per state
    state similarity       1/|D| sum_s |C(s)| / |D|                       high is good: states are covered densely
    transition diversity   mean over balls of (s,a) of trace Cov(s' - s - its linear fit in (s,a))
                           noise of the system: high is good, it shows the policy how to return
    horizon                mean episode length                            short is good: errors add up over it

eps is a percentile of the distances between two random points, so that it adapts to the data; a curve over several is
reported, since the numbers depend on it. Large data sets are represented by a seeded subset of points, and averages are
taken over a smaller seeded subset of balls, in blocks: memory never grows with the square of the data.

Why they matter: for time-averaged state distributions of a policy A and an expert E over H steps,

    KL(rho_A | rho_E) <= 1/H sum_{t<H} (H - t) E_{s ~ rho_A at t} KL(A(.|s) | E(.|s))         (`visitation_bound`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from genrl.envs.data.episodes import DataError, Demonstrations

PERCENTILES = (1.0, 2.0, 5.0)
PAIRS = 200_000  # random pairs of points whose distances give eps
BLOCK = 4_000_000  # distances held at once
BALL = 300  # points of a ball that a linear fit uses at most


@dataclass(frozen=True)
class QualityPoint:
    """The metrics at one eps.

    Attributes:
        percentile: of the distances between states. eps: that distance, in standard deviations. neighbours: mean
            |C(s)|, extrapolated to all transitions. transition_diversity: None where no ball holds enough points for a
            linear fit.
    """

    percentile: float
    eps: float
    neighbours: float
    action_variance: float
    state_similarity: float
    transition_diversity: float | None


@dataclass(frozen=True)
class Quality:
    """Metrics of a data set; see the module.

    Attributes:
        horizon: mean episode length. points: the curve over eps. states: names of the observations that make the state.
        transitions: of the data set. used: of them, that the metrics were computed on.
    """

    horizon: float
    points: tuple[QualityPoint, ...]
    states: tuple[str, ...]
    transitions: int
    used: int

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) pairs for a table."""
        columns = {
            "action variance": [f"{point.action_variance:.4g}" for point in self.points],
            "state similarity": [f"{point.state_similarity:.4g}" for point in self.points],
            "neighbours of a state": [f"{point.neighbours:.0f}" for point in self.points],
            "transition diversity": [
                "unknown (too few neighbours)"
                if point.transition_diversity is None
                else f"{point.transition_diversity:.4g}"
                for point in self.points
            ],
        }
        at = [f"at {point.percentile:g} %" for point in self.points]
        curves = [
            (what, ", ".join(f"{value} {place}" for value, place in zip(values, at, strict=True)))
            for what, values in columns.items()
        ]
        return [("horizon (mean episode length)", f"{self.horizon:.1f}"), *curves]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_quality(
    demonstrations: Demonstrations,
    obs: Sequence[str] | None = None,
    percentiles: Sequence[float] = PERCENTILES,
    seed: int = 0,
    max_points: int = 20_000,
    max_balls: int = 2_000,
) -> Quality:
    """All metrics of a data set.

    Args:
        demonstrations: with at least one observation of kind ``"state"``.
        obs: the states to use; None takes all of that kind.
        percentiles: of the distances between states; each gives one point of the curve.
        seed: of the subsets.
        max_points: transitions that represent the data. max_balls: of them, around which balls are averaged.

    Raises:
        DataError: no state observation, or an unknown one.
    """
    states = [name for name, spec in demonstrations.specs.items() if spec.kind == "state"]
    chosen = list(states if obs is None else obs)
    if not chosen or set(chosen) - set(states):
        raise DataError(
            f"quality metrics need observations of kind 'state'; there are {states}, asked for were {chosen}",
            demonstrations.meta.get("path"),
        )
    rng = np.random.default_rng(seed)
    total = demonstrations.transitions
    kept = np.sort(rng.permutation(total)[:max_points])
    following, valid = [], []
    for episode in demonstrations.episodes:
        shifted, complete = episode.next_obs()
        following.append(np.concatenate([shifted[name] for name in chosen], axis=1))
        valid.append(complete)
    raw = np.concatenate([np.concatenate([e.obs[name] for name in chosen], axis=1) for e in demonstrations.episodes])
    center, scale = _moments(raw)
    s = (raw[kept] - center) / scale
    following_kept = (np.concatenate(following)[kept] - center) / scale
    a = np.concatenate([episode.actions for episode in demonstrations.episodes])[kept].astype(np.float64)
    balls = np.sort(rng.permutation(len(s))[:max_balls])
    eps = distance_percentiles(s, percentiles, rng)
    variances, similarities = action_variance(s, a, eps, balls), state_similarity(s, eps, balls)
    moved = np.concatenate(valid)[kept]
    joint = np.concatenate([s, standardise(a)], axis=1)[moved]
    joint_eps = distance_percentiles(joint, percentiles, rng)
    few = np.sort(rng.permutation(len(joint))[: max_balls // 10])
    diversities = transition_diversity(s[moved], standardise(a)[moved], following_kept[moved], joint_eps, few)
    points = tuple(
        QualityPoint(
            percentile=float(percentile),
            eps=float(eps[i]),
            neighbours=float(similarities[i] * total),
            action_variance=float(variances[i]),
            state_similarity=float(similarities[i]),
            transition_diversity=None if np.isnan(diversities[i]) else float(diversities[i]),
        )
        for i, percentile in enumerate(percentiles)
    )
    return Quality(total / len(demonstrations), points, tuple(chosen), total, len(s))


def standardise(x: np.ndarray) -> np.ndarray:
    """[N, D] with mean 0 and standard deviation 1 per dimension; constant dimensions become 0."""
    center, scale = _moments(x)
    return (x - center) / scale


def distance_percentiles(points: np.ndarray, percentiles: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Percentiles of the distance between two different random points of [N, D]; zeros for fewer than two points."""
    count = len(points)
    if count < 2:
        return np.zeros(len(percentiles))
    first = rng.integers(count, size=PAIRS)
    second = (first + rng.integers(1, count, size=PAIRS)) % count
    distances = np.concatenate(
        [
            np.linalg.norm(points[i] - points[j], axis=1)
            for i, j in zip(np.array_split(first, 50), np.array_split(second, 50), strict=True)
        ]
    )
    return np.percentile(distances, percentiles)


def action_variance(
    states: np.ndarray, actions: np.ndarray, eps: Sequence[float] | np.ndarray, balls: np.ndarray | None = None
) -> np.ndarray:
    """Mean squared deviation of an action from the mean action of its state's neighbours, summed over dimensions.

    Args:
        states: [N, D], standardised. actions: [N, A], in their own unit. eps: radii. balls: points to average over, all
            for None.

    Returns:
        [len(eps)]; 0 if equal states always have equal actions and eps is 0.
    """
    sums = np.zeros(len(eps))
    table = torch.from_numpy(np.asarray(actions, np.float64))
    centers = np.arange(len(states)) if balls is None else balls
    for rows, distances in _distances(states, centers):
        for k, radius in enumerate(eps):
            inside = (distances <= radius).double()  # [q, N]
            mean = (inside @ table) / inside.sum(1, keepdim=True)  # a point is its own neighbour: never empty
            sums[k] += float(((table[rows] - mean) ** 2).sum())
    return sums / max(1, len(centers))


def state_similarity(
    states: np.ndarray, eps: Sequence[float] | np.ndarray, balls: np.ndarray | None = None
) -> np.ndarray:
    """Mean share of the points that lie within eps of a point, itself included: in (0, 1]. Arguments as above."""
    sums = np.zeros(len(eps))
    centers = np.arange(len(states)) if balls is None else balls
    for _, distances in _distances(states, centers):
        sums += [float((distances <= radius).sum()) for radius in eps]
    return sums / max(1, len(centers) * len(states))


def transition_diversity(
    states: np.ndarray,
    actions: np.ndarray,
    following: np.ndarray,
    eps: Sequence[float] | np.ndarray,
    balls: np.ndarray | None = None,
) -> np.ndarray:
    """Noise of the system: variance of s' - s that a linear function of (s, a) does not explain within a ball.

    Args:
        states, following: [N, D] and what came after them, in one unit. actions: [N, A], in a unit comparable to
            states, since balls are drawn in (s, a). eps: radii. balls: as above.

    Returns:
        [len(eps)], summed over dimensions and corrected for the parameters of the fit; NaN where no ball holds more
        points than the fit has parameters.
    """
    joint = np.concatenate([states, actions], axis=1)
    step = following - states
    traces: list[list[float]] = [[] for _ in eps]
    centers = np.arange(len(states)) if balls is None else balls
    for rows, distances in _distances(joint, centers):
        for row, distance in zip(rows.tolist(), distances.numpy(), strict=True):
            for k, radius in enumerate(eps):
                members = np.flatnonzero(distance <= radius)
                members = members[:: len(members) // BALL + 1]
                design = np.concatenate([np.ones((len(members), 1)), joint[members] - joint[row]], axis=1)
                basis = _orthonormal(design)
                if len(members) > basis.shape[1]:
                    residual = step[members] - basis @ (basis.T @ step[members])
                    traces[k].append(float((residual**2).sum()) / (len(members) - basis.shape[1]))
    return np.array([np.mean(values) if values else np.nan for values in traces])


def knn_kl(a: np.ndarray, b: np.ndarray, k: int = 1) -> float:
    """KL(A | B) of the distributions that samples [n, D] and [m, D] come from, by distances to their k-th neighbours:

        d/n sum_i log(nu_i / rho_i) + log(m / (n - 1)),

    rho_i from a_i to its k-th neighbour among the other a, nu_i among the b. Consistent; with few samples it is too
    small where A reaches far beyond B, and in many dimensions. Points that occur more than k times have no density;
    they are left out of the sum.

    Raises:
        ValueError: other dimensions, too few samples, or nothing but repeated points.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"samples have shapes {a.shape} and {b.shape}; expected [n, D] and [m, D]")
    if len(a) <= k or len(b) < k:
        raise ValueError(f"{len(a)} and {len(b)} samples are too few for k = {k}")
    rho, nu = _kth_distance(a, a, k + 1), _kth_distance(a, b, k)
    usable = (rho > 0) & (nu > 0)
    if not usable.any():
        raise ValueError("every point occurs more than once; densities cannot be told from distances")
    log_ratio = np.log(nu[usable] / rho[usable])
    return float(a.shape[1] * log_ratio.mean() + np.log(len(b) / (len(a) - 1)))


def state_divergence(
    a: Demonstrations, b: Demonstrations, obs: Sequence[str] | None = None, seed: int = 0, max_points: int = 5_000
) -> float:
    """KL of the states of one data set against another's, by nearest neighbours, standardised by the second.

    0 for data of one distribution (up to the estimator's error), large where `a` visits what `b` never shows.
    """
    names = [n for n, spec in b.specs.items() if spec.kind == "state"] if obs is None else list(obs)
    if missing := sorted(set(names) - set(a.specs)) or not names:
        raise DataError(f"the data sets share no such states: {missing or 'none'}", a.meta.get("path"))
    rng = np.random.default_rng(seed)
    samples = []
    for data in (a, b):
        states = np.concatenate([np.concatenate([e.obs[n] for n in names], axis=1) for e in data.episodes])
        samples.append(states[np.sort(rng.permutation(len(states))[:max_points])])
    center, scale = _moments(samples[1])
    varies = np.ptp(np.concatenate(samples), axis=0) > 0
    left, right = (((x - center) / scale)[:, varies] for x in samples)
    return knn_kl(left, right)


def visitation_bound(action_kl: Sequence[float]) -> float:
    """Upper bound on KL(rho_A | rho_E) of time-averaged visits from the action KL under A at each of H steps."""
    kl = np.asarray(action_kl, np.float64)
    horizon = len(kl)
    return float(((horizon - np.arange(horizon)) * kl).sum() / horizon)


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per dimension; 1 where numbers are equal up to rounding."""
    center, scale = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    return center, np.where(scale > 1e-6 * np.maximum(1e-6, np.abs(center)), scale, 1.0)


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    """Orthonormal basis [n, rank] of the span of columns [n, k]; several times faster than singular values."""
    values, vectors = np.linalg.eigh(columns.T @ columns)
    kept = values > 1e-12 * max(values[-1], 1e-300)
    return np.linalg.qr(columns @ (vectors[:, kept] / np.sqrt(values[kept])))[0]


def _distances(points: np.ndarray, centers: np.ndarray) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """(positions of some centres, their distances [q, N] to all points), block by block."""
    table = torch.from_numpy(np.ascontiguousarray(points, np.float64))
    for rows in np.array_split(centers, max(1, -(-len(centers) * len(points) // BLOCK))):
        # Differences, not inner products: equal points have distance exactly 0.
        yield rows, torch.cdist(table[rows], table, compute_mode="donot_use_mm_for_euclid_dist")


def _kth_distance(queries: np.ndarray, points: np.ndarray, k: int) -> np.ndarray:
    """Distance of each query to its k-th nearest point."""
    q, p = (torch.from_numpy(np.ascontiguousarray(x, np.float64)) for x in (queries, points))
    blocks = np.array_split(np.arange(len(q)), max(1, -(-len(q) * len(p) // BLOCK)))
    found = [torch.cdist(q[rows], p, compute_mode="donot_use_mm_for_euclid_dist").kthvalue(k).values for rows in blocks]
    return torch.cat(found).numpy()
