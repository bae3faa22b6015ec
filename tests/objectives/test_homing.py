"""Homing: matching against brute force and scipy, targets against their closed forms."""

import itertools
import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from genrl.diffusion import RectifiedFlow, VariancePreserving
from genrl.objectives import flow_matching_loss
from genrl.objectives.homing import (
    chamfer_distances,
    corrective_velocity,
    endpoint,
    homing_loss,
    homing_velocity,
    match,
    remaining,
    split,
    squared_distances,
    without_surplus,
)

SHAPES = [(n, m) for n in range(1, 7) for m in range(n, 7)]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vp():
    return VariancePreserving(torch.linspace(0.9999, 0.98, 1000, dtype=torch.float64).cumprod(0))


# ------------------------------------------------------------------------------------------------- splitting


def test_groups_are_split_by_the_sign_outside_a_dead_band():
    advantage = torch.tensor([[2.0, -1.0, 0.1, -0.1, 0.0, math.nan]])
    assert split(advantage).tolist() == [[1, -1, 1, -1, 0, 0]]
    assert split(advantage, dead_band=0.1).tolist() == [[1, -1, 0, 0, 0, 0]]
    assert split(torch.zeros(1, 4)).tolist() == [[0, 0, 0, 0]]


def test_top_takes_the_best_and_the_worst_only():
    advantage = torch.tensor([0.5, -2.0, 1.5, -0.2, 0.1, 0.1])
    assert split(advantage, top=1).tolist() == [0, -1, 1, 0, 0, 0]
    assert split(advantage, top=2).tolist() == [1, -1, 1, -1, 0, 0]
    assert split(torch.tensor([1.0, 2.0, 3.0, -1.0]), top=2).tolist() == [0, 1, 1, -1]  # no positive becomes a negative
    with pytest.raises(ValueError, match="top = 4 best and 4 worst do not fit groups of 6"):
        split(advantage, top=4)
    with pytest.raises(ValueError, match="dead_band = -1"):
        split(advantage, dead_band=-1)


def test_only_the_worst_negatives_are_kept_where_there_are_too_many():
    advantage = torch.tensor([[3.0, -0.1, -2.0, -0.5, -0.4], [-1.0, -1.0, -1.0, 1.5, 1.5]])
    kept = without_surplus(split(advantage), advantage)
    assert kept.tolist() == [[1, 0, -1, 0, 0], [-1, -1, 0, 1, 1]]
    none = torch.tensor([-1.0, -2.0])
    assert without_surplus(split(none), none).tolist() == [0, 0]


# ------------------------------------------------------------------------------------------------- matching


@pytest.mark.parametrize("n, m", SHAPES)
def test_the_matching_is_injective_and_as_cheap_as_scipy_and_every_permutation(n, m):
    cost = squared_distances(draw(n, 3, seed=n), draw(m, 3, seed=10 + m))
    found = match(cost)
    total = float(cost[torch.arange(n), found].sum())
    assert len(set(found.tolist())) == n
    rows, columns = linear_sum_assignment(cost.numpy())
    assert total == pytest.approx(float(cost.numpy()[rows, columns].sum()), abs=1e-12)
    brute = min(sum(float(cost[i, j]) for i, j in enumerate(p)) for p in itertools.permutations(range(m), n))
    assert total == pytest.approx(brute, abs=1e-12)


def test_permuting_the_inputs_permutes_the_matching():
    cost = squared_distances(draw(5, 4, seed=1), draw(6, 4, seed=2))
    found = match(cost)
    rows, columns = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([5, 2, 0, 4, 1, 3])
    again = match(cost[rows][:, columns])
    assert torch.equal(columns[again], found[rows])


def test_a_constant_in_a_row_or_in_a_column_of_a_square_changes_nothing():
    cost = squared_distances(draw(5, 4, seed=3), draw(5, 4, seed=4))
    assert torch.equal(match(cost + 7 * torch.arange(5)[:, None]), match(cost))
    assert torch.equal(match(cost + 7 * torch.arange(5)[None, :]), match(cost))


@pytest.mark.parametrize("n, m", [(5, 2), (6, 3), (7, 4)])
def test_with_a_capacity_positives_are_shared_evenly_at_the_least_cost(n, m):
    cost, capacity = squared_distances(draw(n, 3, seed=5), draw(m, 3, seed=6)), -(-n // m)
    found = match(cost, capacity)
    assert torch.bincount(found, minlength=m).max() <= capacity
    fits = (p for p in itertools.product(range(m), repeat=n) if max(map(p.count, range(m))) <= capacity)
    brute = min(sum(float(cost[i, j]) for i, j in enumerate(p)) for p in fits)
    assert float(cost[torch.arange(n), found].sum()) == pytest.approx(brute, abs=1e-12)


def test_impossible_matchings_are_refused():
    with pytest.raises(ValueError, match=r"3 negatives do not fit 2 positives of capacity 1.*capacity 2"):
        match(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="not finite"):
        match(torch.tensor([[math.nan]]))


def test_squared_distances_are_means_over_elements():
    a, b = draw(3, 2, 5, seed=7), draw(4, 2, 5, seed=8)
    expected = (a[:, None] - b[None]).square().mean((2, 3))
    torch.testing.assert_close(squared_distances(a, b), expected)


def test_the_set_distance_ignores_the_order_of_vectors():
    a, b = draw(3, 6, 2, seed=9), draw(4, 5, 2, seed=10)
    expected = torch.empty(3, 4, dtype=torch.float64)
    for i, j in itertools.product(range(3), range(4)):
        apart = (a[i][:, None] - b[j][None]).square().sum(-1)
        expected[i, j] = (apart.min(1).values.mean() + apart.min(0).values.mean()) / 2
    torch.testing.assert_close(chamfer_distances(a, b), expected)
    shuffled = a[:, torch.tensor([5, 2, 0, 1, 4, 3])]
    torch.testing.assert_close(chamfer_distances(shuffled, b), expected)
    torch.testing.assert_close(chamfer_distances(shuffled, a).diagonal(), torch.zeros(3, dtype=torch.float64))
    assert squared_distances(shuffled, a).diagonal().min() > 0.1
    with pytest.raises(ValueError, match="needs sets of vectors"):
        chamfer_distances(a.flatten(1), b.flatten(1))


# ------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("grid", ["uniform", "random", "one step"])
def test_the_homing_velocity_lands_on_the_target_along_a_straight_line(grid):
    start, target, eps, t = draw(4, 6, seed=1), draw(4, 6, seed=2), draw(4, 6, seed=3), 0.8
    inner = {
        "uniform": torch.linspace(0.8, 0, 9, dtype=torch.float64)[1:-1],
        "random": torch.rand(12, generator=torch.Generator().manual_seed(4), dtype=torch.float64).sort().values.flip(0)
        * 0.8,
        "one step": torch.empty(0, dtype=torch.float64),
    }[grid]
    times = torch.cat([torch.tensor([t], dtype=torch.float64), inner, torch.zeros(1, dtype=torch.float64)])
    x = first = (1 - t) * start + t * eps
    constant = (first - target) / t
    for now, then in itertools.pairwise(times):
        v = (x - target) / now
        torch.testing.assert_close(v, constant, rtol=1e-9, atol=1e-9)
        x = x + (then - now) * v
    torch.testing.assert_close(x, target, rtol=0, atol=1e-13)
    at = torch.full((4,), t, dtype=torch.float64)
    torch.testing.assert_close(homing_velocity(start, target, eps, at, t_clamp=1e-3), constant, rtol=1e-12, atol=1e-12)


def test_the_two_decompositions_agree_and_the_clamp_costs_nothing_above_it():
    start, target, eps = draw(5, 3, seed=1), draw(5, 3, seed=2), draw(5, 3, seed=3)
    t = torch.tensor([0.01, 0.05, 0.2, 0.7, 1.0], dtype=torch.float64)
    tt = t[:, None]
    x_t = (1 - tt) * start + tt * eps
    v = homing_velocity(start, target, eps, t, t_clamp=0.05)
    own = (eps - start) + corrective_velocity(start, target, t)
    leftover = (eps - target) + (1 - tt) / tt * (start - target)
    torch.testing.assert_close(v, own)
    torch.testing.assert_close(v[1:], leftover[1:])
    torch.testing.assert_close((x_t - tt * v)[1:], target[1:])  # reaches the target exactly from t >= t_clamp on
    reached = (x_t - tt * v)[0]  # and a fifth of the way from t = .01
    torch.testing.assert_close(reached, start[0] + 0.2 * (target[0] - start[0]))


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("path", [RectifiedFlow(), vp()], ids=["flow", "vp"])
def test_a_strength_ends_between_sample_and_target(path, strength):
    start, target, eps = draw(3, 4, seed=1), draw(3, 4, seed=2), draw(3, 4, seed=3)
    t = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    x_t = path.interpolate(start, eps, t)
    v = homing_velocity(start, target, eps, t, strength, 1e-3, path)
    end = (1 - strength) * start + strength * target
    torch.testing.assert_close(path.x0_eps(x_t, v, t)[0], end, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(endpoint(start, target, strength), end)


def test_a_pair_that_coincides_and_strength_zero_are_flow_matching():
    x0, target, eps, v = draw(3, 4, seed=1), draw(3, 4, seed=2), draw(3, 4, seed=3), draw(3, 4, seed=4)
    t = torch.tensor([0.01, 0.5, 0.9], dtype=torch.float64)
    x_t = RectifiedFlow().interpolate(x0, eps, t)
    plain = flow_matching_loss(v, x0, eps)
    for goal, strength in [(x0, 1.0), (target, 0.0)]:
        loss = homing_loss(v, x_t, t, x0, goal, eps, strength, "velocity")
        torch.testing.assert_close(loss.float(), plain)
        in_data = homing_loss(v, x_t, t, x0, goal, eps, strength, "x0")
        torch.testing.assert_close(in_data.float(), plain * t.float() ** 2)


def test_data_space_is_velocity_space_weighted_by_the_squared_remaining_time():
    x0, target, eps, v = draw(3, 4, seed=1), draw(3, 4, seed=2), draw(3, 4, seed=3), draw(3, 4, seed=4)
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    for path in (RectifiedFlow(), vp()):
        x_t = path.interpolate(x0, eps, t)
        loss = [homing_loss(v, x_t, t, x0, target, eps, 0.7, space, 1e-3, path) for space in ("x0", "velocity")]
        torch.testing.assert_close(loss[0], loss[1] * remaining(t, path) ** 2, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="space = 'pixels'"):
        homing_loss(v, x_t, t, x0, target, eps, space="pixels")


def test_no_gradient_flows_through_the_target():
    x0, target, eps = (draw(2, 3, seed=s).requires_grad_() for s in (1, 2, 3))
    assert not homing_velocity(x0, target, eps, torch.full((2,), 0.5, dtype=torch.float64)).requires_grad
