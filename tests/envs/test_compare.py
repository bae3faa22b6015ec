"""Paired comparison of evaluations."""

from dataclasses import replace

import numpy as np
import pytest
from test_evaluation_files import evaluation

from genrl.envs import ComparisonError, EnvSettings, compare_evaluations
from genrl.statistics import paired_means, paired_shares

A = [1] * 10 + [0] * 10 + [1] * 20
B = [1] * 10 + [1] * 9 + [0] * 3 + [1] * 18


def test_the_same_start_states_are_paired():
    found = compare_evaluations(evaluation(A), evaluation(B))
    assert (found.both, found.only_first, found.only_second, found.neither) == (28, 2, 9, 1)
    assert found.success == paired_shares([bool(x) for x in A], [bool(x) for x in B])
    stats = pytest.importorskip("scipy.stats")
    assert found.success.p_value == pytest.approx(stats.binomtest(2, 11).pvalue)
    assert found.success.difference == pytest.approx(7 / 40)
    assert found.total_reward is None  # of episodes that end at their success
    assert "do not show" in found.verdict()
    assert compare_evaluations(evaluation([0] * 20), evaluation([1] * 20)).verdict().startswith("B succeeds more often")


def test_a_paired_test_sees_what_two_intervals_do_not():
    hard = [0] * 25
    a, b = hard + [1] * 15 + [0] * 10, hard + [1] * 25
    found = compare_evaluations(evaluation(a), evaluation(b))
    assert evaluation(a).interval[1] > evaluation(b).interval[0]
    assert found.success.p_value < 0.01 and found.success.low > 0


def test_returns_are_compared_where_episodes_are_whole_and_lengths_where_both_succeed():
    rng = np.random.default_rng(0)

    def measured(outcomes, shift):
        base = evaluation(outcomes, stop_at_success=False)
        rewards, lengths = rng.normal(size=len(outcomes)), rng.integers(5, 50, len(outcomes))
        episodes = [
            replace(e, total_reward=float(r) + shift, length=int(n))
            for e, r, n in zip(base.episodes, rewards, lengths, strict=True)
        ]
        return replace(base, episodes=tuple(episodes))

    a, b = measured(A, 0.0), measured(B, 1.0)
    found = compare_evaluations(a, b)
    assert found.total_reward == paired_means(
        [e.total_reward for e in a.episodes], [e.total_reward for e in b.episodes]
    )
    both = [(x.length, y.length) for x, y in zip(a.episodes, b.episodes, strict=True) if x.success and y.success]
    assert found.length == paired_means(*zip(*both, strict=True)) and found.length.n == 28
    rows = found.rows()
    assert rows[0] == ("", "A", "B", "B - A", "95 % interval", "p") and {len(row) for row in rows} == {6}
    assert [row[0] for row in rows[1:]][:4] == ["policy", "success", "return", "steps where both succeed"]


def test_tasks_without_a_notion_of_success_are_compared_by_their_returns():
    a = evaluation([0, 0, 0], has_success=False)
    b = replace(a, episodes=tuple(replace(e, total_reward=e.total_reward + 1 + 0.01 * e.episode) for e in a.episodes))
    found = compare_evaluations(a, b)
    assert found.success is None and found.total_reward.difference == pytest.approx(1.01)
    assert found.verdict().startswith("B has higher returns") and not any(row[0] == "success" for row in found.rows())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"env": EnvSettings("metaworld/push-v3").to_dict()}, r"env.id: 'metaworld/reach-v3' and 'metaworld/push-v3'"),
        ({"env": EnvSettings("metaworld/reach-v3", kwargs={"reward_function_version": "v1"}).to_dict()}, "env.kwargs"),
        ({"success_rule": "final"}, "success_rule: 'any' and 'final'"),
        ({"max_steps": 200}, "max_steps: 500 and 200"),
        ({"stop_at_success": False}, "stop_at_success"),
        ({"planned": 50}, "B was interrupted after 40 of 50"),
    ],
)
def test_different_tasks_are_not_compared(changes, message):
    with pytest.raises(ComparisonError, match=message):
        compare_evaluations(evaluation(A), evaluation(B, **changes))


def test_different_start_states_are_not_compared():
    other = evaluation(B)
    moved = replace(other, episodes=tuple(replace(e, seed=e.seed + 1) for e in other.episodes))
    with pytest.raises(ComparisonError, match=r"start seeds: 40 from 100 and 40 from 101"):
        compare_evaluations(evaluation(A), moved)
    with pytest.raises(ComparisonError, match="39 from 100"):
        compare_evaluations(evaluation(A), evaluation(B[:-1]))


def test_what_a_policy_sees_may_differ_and_what_the_simulator_does_is_noted():
    points = evaluation(B, env=EnvSettings("metaworld/reach-v3", observations=("points",)).to_dict())
    assert compare_evaluations(evaluation(A), points).notes == ()
    newer = evaluation(B, versions={"mujoco": "3.6.0"})
    assert compare_evaluations(evaluation(A), newer).notes == ("versions differ: mujoco 3.3.0 and 3.6.0",)
    other = evaluation(B)
    started = replace(other, episodes=(replace(other.episodes[0], start="else"), *other.episodes[1:]))
    assert compare_evaluations(evaluation(A), started).notes[0].startswith("1 first observations differ")
    same = {"class": "P", "weights": "ema", "fingerprint": "ab"}
    twins = compare_evaluations(evaluation(A, policy=same), evaluation(A, policy=same))
    assert twins.notes == ("A and B have the same weights",) and twins.success.p_value == 1


def test_the_comparison_is_plain_values_too():
    import json

    found = compare_evaluations(evaluation(A), evaluation(B))
    assert json.loads(json.dumps(found.to_dict()))["success"]["n"] == 40
    assert "B - A" in str(found)
