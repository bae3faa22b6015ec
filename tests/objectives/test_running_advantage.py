"""Statistics kept per prompt against a brute-force loop, and the choice of the best and worst samples."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from genrl.objectives import RunningAdvantage, best_and_worst

NAN = math.nan


def draw(prompts: int, group: int, seed: int = 0) -> Tensor:
    return torch.randn(prompts, group, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def brute_force(calls, window: int, min_count: int, eps: float) -> list[list[list[float]]]:
    """DDPO's tracker with plain lists: remember first, then normalise with what is remembered."""
    memory, results = defaultdict(list), []
    for ids, rewards in calls:
        everyone = [r for row in rewards for r in row if not math.isnan(r)]
        for key, row in zip(ids, rewards, strict=True):
            memory[key] = (memory[key] + [r for r in row if not math.isnan(r)])[-window:]
        table = []
        for key, row in zip(ids, rewards, strict=True):
            pool = memory[key] if len(memory[key]) >= min_count else everyone
            mean, std = statistics.fmean(pool), statistics.pstdev(pool)
            table.append([0.0 if math.isnan(r) else (r - mean) / (std + eps) for r in row])
        results.append(table)
    return results


@pytest.mark.parametrize("window, min_count", [(128, 16), (10, 4), (5, 1), (7, 7)])
def test_running_statistics_equal_a_brute_force_loop_over_many_calls(window, min_count):
    generator = torch.Generator().manual_seed(3)
    calls = []
    for _ in range(8):
        ids = torch.randint(0, 3, (4,), generator=generator)  # repeats within a call happen
        rewards = torch.randn(4, 3, generator=generator, dtype=torch.float64) + ids[:, None]
        rewards[torch.rand(4, 3, generator=generator) < 0.1] = NAN
        calls.append((ids, rewards))
    expected = brute_force([(i.tolist(), r.tolist()) for i, r in calls], window, min_count, 1e-4)
    estimator = RunningAdvantage(window, min_count, clip=None)
    for (ids, rewards), table in zip(calls, expected, strict=True):
        torch.testing.assert_close(estimator(rewards, prompt_ids=ids).values, torch.tensor(table))


def test_rows_of_one_prompt_share_their_statistics():
    r = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    values = RunningAdvantage(min_count=4, eps=0)(r, prompt_ids=torch.tensor([7, 7])).values
    torch.testing.assert_close(values, (r - 1.5) / 1.25**0.5)


def test_running_statistics_survive_a_save_and_are_not_shared_with_it():
    ids, first, second = torch.tensor([5, 2**40]), draw(2, 20, seed=1), draw(2, 20, seed=2)
    straight, resumed = RunningAdvantage(), RunningAdvantage()
    straight(first, prompt_ids=ids)
    state = straight.state_dict()
    resumed.load_state_dict(state)
    assert torch.equal(straight(second, prompt_ids=ids).values, resumed(second, prompt_ids=ids).values)
    again = RunningAdvantage()
    again.load_state_dict(state)  # unchanged by what came later
    assert {key: len(kept) for key, kept in again.history.items()} == {5: 20, 2**40: 20}


def test_running_statistics_need_one_id_a_prompt():
    for ids, given in ((None, "none"), (torch.arange(3), r"shape \(3,\)"), (torch.zeros(2, 1), r"shape \(2, 1\)")):
        with pytest.raises(ValueError, match=rf"prompt_ids \[2\].*got {given}"):
            RunningAdvantage()(torch.zeros(2, 3), prompt_ids=ids)
    with pytest.raises(ValueError, match=r"min_count = 20.*window = 10"):
        RunningAdvantage(window=10, min_count=20)


# ---- best and worst ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_and_worst_equal_a_sort(k):
    values = draw(5, 6)
    keep = best_and_worst(values, k)
    for row, kept in zip(values.tolist(), keep.tolist(), strict=True):
        ordered = sorted(row)
        assert sorted(v for v, is_kept in zip(row, kept, strict=True) if is_kept) == ordered[:k] + ordered[-k:]


def test_ties_still_keep_k_of_each():
    values = torch.tensor([[0.0] * 6, [1.0, 1, 1, 0, 0, 0], [0.0, 0, 0, 0, 0, 1]])
    keep = best_and_worst(values, 2)
    assert keep.sum(1).tolist() == [4, 4, 4]
    assert bool(keep[2, 5])


def test_unscored_samples_are_never_kept():
    keep = best_and_worst(torch.tensor([[NAN, 1.0, 2.0, 3.0, NAN, 4.0, 5.0, NAN], [NAN] * 8, [NAN] * 7 + [0.0]]), 2)
    assert keep[0].tolist() == [False, True, True, False, False, True, True, False]
    assert not bool(keep[1].any())
    assert keep[2].tolist() == [False] * 7 + [True]


@pytest.mark.parametrize("k", [0, -1, 3])
def test_more_than_a_group_holds_is_refused(k):
    with pytest.raises(ValueError, match=rf"k = {k} .*groups of 5; use 1 to 2"):
        best_and_worst(torch.zeros(2, 5), k)
