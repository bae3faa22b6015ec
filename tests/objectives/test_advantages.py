"""Group advantages against tables worked out by hand, brute-force loops and exact invariances."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from genrl.objectives import (
    GDPO,
    GRPO,
    RLOO,
    DrGRPO,
    FlowGRPO,
    GroupRelative,
    RunningAdvantage,
    flat_groups,
    group_relative,
)

NAN = math.nan
MEMBERS = {
    "GRPO": GRPO(clip=None),
    "DrGRPO": DrGRPO(),
    "RLOO": RLOO(),
    "FlowGRPO": FlowGRPO(clip=None),
    "GDPO": GDPO(clip=None),
    "batch_mean": GroupRelative("batch", "batch", clip=None),
    "batch_mean_group_std": GroupRelative("batch", "group", clip=None),
    "batch_leave_one_out": GroupRelative("batch", "none", leave_one_out=True, clip=None),
    "running": RunningAdvantage(clip=None),
}
GROUP_CENTRED = ("GRPO", "DrGRPO", "RLOO", "FlowGRPO", "GDPO")
members = pytest.mark.parametrize("name", MEMBERS)


def call(name: str, rewards, **options) -> Tensor:
    estimator = RunningAdvantage(clip=None) if name == "running" else MEMBERS[name]
    first = rewards if isinstance(rewards, Tensor) else next(iter(rewards.values()))
    return estimator(rewards, prompt_ids=torch.arange(len(first)), **options).values


def draw(prompts: int = 4, group: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(prompts, group, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- values by hand -------------------------------------------------------------------------------------

# Group means 2 and 4, group variances 2/3 and 32/3, mean of all 3, variance of all 20/3.
TABLE = torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, 8.0]])
S1, S2, S = math.sqrt(2 / 3), math.sqrt(32 / 3), math.sqrt(20 / 3)
BY_HAND = {
    "GRPO": (GRPO(eps=0), [[-1 / S1, 0, 1 / S1], [-4 / S2, 0, 4 / S2]]),
    "DrGRPO": (DrGRPO(), [[-1, 0, 1], [-4, 0, 4]]),
    "RLOO": (RLOO(), [[-1.5, 0, 1.5], [-6, 0, 6]]),
    "FlowGRPO": (FlowGRPO(eps=0), [[-1 / S, 0, 1 / S], [-4 / S, 0, 4 / S]]),
    "batch mean, no std": (GroupRelative("batch", "none"), [[-2, -1, 0], [-3, 1, 5]]),
    "batch mean, batch std": (GroupRelative("batch", "batch", eps=0), [[-2 / S, -1 / S, 0], [-3 / S, 1 / S, 5 / S]]),
    "batch mean, group std": (
        GroupRelative("batch", "group", eps=0),
        [[-2 / S1, -1 / S1, 0], [-3 / S2, 1 / S2, 5 / S2]],
    ),
    "batch mean of the others": (
        GroupRelative("batch", "none", leave_one_out=True, clip=None),
        [[-2.4, -1.2, 0], [-3.6, 1.2, 6]],
    ),
    # The mean of the others as baseline; the spread stays that of the rewards.
    "RLOO with std": (
        GroupRelative("group", "group", leave_one_out=True, eps=0),
        [[-1.5 / S1, 0, 1.5 / S1], [-6 / S2, 0, 6 / S2]],
    ),
    # Both rows are (-1, 0, 1) sqrt(3/2), whose variance over the batch is 1.
    "GDPO": (GDPO(eps=0), [[-(1.5**0.5), 0, 1.5**0.5]] * 2),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_two_prompts_of_three_samples_match_the_table_worked_out_by_hand(case):
    estimator, expected = BY_HAND[case]
    torch.testing.assert_close(estimator(TABLE).values, torch.tensor(expected, dtype=torch.float32))


def test_eps_is_added_to_the_population_standard_deviation():
    values = GRPO(eps=0.5, clip=None)(TABLE).values
    torch.testing.assert_close(values[1, 2], torch.tensor(4 / (S2 + 0.5)))


def test_two_rewards_of_gdpo_match_the_table_worked_out_by_hand():
    # Group z-scores of a: (-1, 1) and (1, -1); of b: (-1, 1) and (0, 0). With weights 1 and 0.5 the sums are
    # (-1.5, 1.5) and (1, -1), with the batch variance (2 * 2.25 + 2) / 4 = 1.625.
    rewards = {"a": torch.tensor([[0.0, 2.0], [5.0, 3.0]]), "b": torch.tensor([[10.0, 30.0], [7.0, 7.0]])}
    values = GDPO(eps=0)(rewards, {"b": 0.5}).values
    torch.testing.assert_close(values, torch.tensor([[-1.5, 1.5], [1.0, -1.0]]) / 1.625**0.5)


def test_gdpo_may_normalise_the_sum_in_its_group_as_cm_grpo_does():
    # The same sums (-1.5, 1.5) and (1, -1), each divided by the standard deviation of its group.
    rewards = {"a": torch.tensor([[0.0, 2.0], [5.0, 3.0]]), "b": torch.tensor([[10.0, 30.0], [7.0, 7.0]])}
    values = GDPO(eps=0, whiten="group")(rewards, {"b": 0.5}).values
    torch.testing.assert_close(values, torch.tensor([[-1.0, 1.0], [1.0, -1.0]]))
    with pytest.raises(ValueError, match="'prompt'"):
        GDPO(whiten="prompt")(rewards)


def test_rloo_subtracts_the_mean_of_the_other_samples():
    r = draw()
    others = torch.stack([torch.stack([torch.cat([g[:i], g[i + 1 :]]).mean() for i in range(len(g))]) for g in r])
    torch.testing.assert_close(RLOO()(r).values, (r - others).float())


# ---- invariances ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUP_CENTRED)
def test_full_groups_sum_to_zero(name):
    torch.testing.assert_close(call(name, draw()).sum(1), torch.zeros(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["batch_mean", "batch_leave_one_out"])
def test_batch_centred_advantages_sum_to_zero_over_the_batch(name):
    assert abs(float(call(name, draw()).sum())) < 1e-5


@members
def test_a_constant_added_to_all_rewards_changes_nothing(name):
    torch.testing.assert_close(call(name, draw() + 1000.0), call(name, draw()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["GRPO", "DrGRPO", "RLOO", "GDPO"])  # a std over the batch sees the constants
def test_a_constant_per_group_changes_nothing_without_a_batch_std(name):
    shift = torch.tensor([0.0, 3.0, -7.0, 100.0], dtype=torch.float64)[:, None]
    torch.testing.assert_close(call(name, draw() + shift), call(name, draw()), atol=1e-5, rtol=1e-5)


@members
def test_permuting_samples_permutes_advantages(name):
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(call(name, draw()[:, order]), call(name, draw())[:, order])  # to the last bit


@pytest.mark.parametrize("name", GROUP_CENTRED)
def test_permuting_prompts_permutes_advantages(name):
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(call(name, draw()[order]), call(name, draw())[order])


@members
def test_scale_of_rewards(name):
    small, large = call(name, draw()), call(name, 1000 * draw())
    equivariant = name in ("DrGRPO", "RLOO", "batch_leave_one_out")
    torch.testing.assert_close(large, 1000 * small if equivariant else small, rtol=1e-3, atol=1e-5)


def test_small_differences_on_large_rewards_are_not_lost():
    r = torch.tensor([[1e6, 1e6 + 0.25, 1e6 + 0.5, 1e6 + 0.75]])
    torch.testing.assert_close(DrGRPO()(r).values, torch.tensor([[-0.375, -0.125, 0.125, 0.375]]))


def test_groups_with_equal_spread_get_the_same_from_group_and_batch_std():
    r = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]])
    torch.testing.assert_close(GRPO()(r).values, FlowGRPO()(r).values)


def test_clip_bounds_the_advantages_and_none_does_not():
    r = torch.zeros(1, 100)
    r[0, 0] = 1.0  # z-score sqrt(99) = 9.95
    assert float(GRPO()(r).values.max()) == 5.0
    assert float(GRPO(clip=2.0)(r).values.max()) == 2.0
    assert float(GRPO(eps=0, clip=None)(r).values.max()) == pytest.approx(99**0.5, rel=1e-6)


def test_results_are_float32_without_gradient_and_integers_are_accepted():
    r = draw().requires_grad_()
    result = GRPO()(r)
    assert result.values.dtype == torch.float32 and not result.values.requires_grad
    assert all(isinstance(value, float) for value in result.metrics.values())
    torch.testing.assert_close(DrGRPO()(TABLE.long()).values, DrGRPO()(TABLE).values)


# ---- several rewards ------------------------------------------------------------------------------------


def two(factor: float = 1.0) -> dict[str, Tensor]:
    return {"easy": draw(seed=1), "hard": factor * draw(seed=2)}


def test_a_reward_times_100_changes_the_sum_and_not_the_normalised_sum():
    torch.testing.assert_close(GDPO(eps=0)(two(100)).values, GDPO(eps=0)(two()).values)
    assert float((GRPO()(two(100)).values - GRPO()(two()).values).abs().max()) > 0.5


def test_one_reward_under_gdpo_is_grpo_up_to_whitening():
    grpo, gdpo = GRPO(clip=None)(draw()).values, GDPO(clip=None)(draw()).values
    ratio = gdpo / grpo
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio))
    torch.testing.assert_close(gdpo.square().mean(), torch.tensor(1.0), atol=1e-3, rtol=0)


def test_weights_multiply_rewards_in_the_sum_and_missing_ones_are_one():
    rewards = two()
    expected = DrGRPO()(rewards["easy"] + 3 * rewards["hard"]).values
    torch.testing.assert_close(DrGRPO()(rewards, {"hard": 3.0}).values, expected)


@members
def test_a_reward_of_weight_zero_does_not_count_even_where_it_is_nan(name):
    rewards = two()
    rewards["hard"] = torch.full_like(rewards["hard"], NAN)
    values = call(name, rewards, weights={"hard": 0.0})
    torch.testing.assert_close(values, call(name, {"easy": rewards["easy"]}))


@members
def test_a_weight_without_its_reward_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"hrad.*easy, hard"):
        call(name, two(), weights={"hrad": 2.0})


def test_variance_shares_say_which_reward_decides():
    rewards = {"a": torch.tensor([[0.0, 2.0], [5.0, 5.0]]), "b": torch.tensor([[1.0, 1.0], [0.0, 1.0]])}
    metrics = GRPO()(rewards, {"b": 2.0}).metrics  # squares about group means: a 1 + 1, b 4 (1/4 + 1/4)
    assert metrics["advantage/variance_share_a"] == pytest.approx(0.5)
    assert metrics["advantage/variance_share_b"] == pytest.approx(0.5)
    assert not any("share_" in name for name in GRPO()(rewards["a"]).metrics if "variance" in name)
    flat = GRPO()({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}).metrics
    assert flat["advantage/variance_share_a"] == 0.0


def test_a_group_is_flat_for_gdpo_only_when_every_reward_is():
    rewards = {"a": torch.tensor([[0.0, 1.0], [1.0, 1.0]]), "b": torch.tensor([[2.0, 0.0], [3.0, 3.0]])}
    weights = {"b": 0.5}  # sums are (1, 1) and (2.5, 2.5)
    assert GRPO()(rewards, weights).metrics["advantage/zero_std_groups"] == 1.0
    result = GDPO()(rewards, weights)
    assert result.metrics["advantage/zero_std_groups"] == 0.5
    assert result.values[0].abs().min() > 0.1 and result.values[1].abs().max() == 0


# ---- groups without spread, samples without score ---------------------------------------------------------


@pytest.mark.parametrize("value", [0.1, 0.7, -3.3, 1e6 + 0.1])
@members
def test_equal_rewards_give_exactly_zero_and_are_counted(name, value):
    # The sum of 8 equal numbers is exact in float64; that of 7 or 11 is not, and their mean is another number.
    for r in [torch.full((2, n), value, dtype=d) for n in (2, 7, 8, 11) for d in (torch.float32, torch.float64)]:
        estimator = RunningAdvantage(min_count=2) if name == "running" else MEMBERS[name]
        result = estimator(r, prompt_ids=torch.arange(2))
        assert torch.equal(result.values, torch.zeros_like(result.values))
        assert result.metrics["advantage/zero_std_groups"] == 1.0


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("std_scope", ["group", "batch", "none"])
@pytest.mark.parametrize("mean_scope", ["group", "batch"])
def test_equal_rewards_give_zero_under_every_scope_and_eps(mean_scope, std_scope, eps):
    r = torch.full((3, 7), 0.1, dtype=torch.float64)
    values = group_relative(r, mean_scope=mean_scope, std_scope=std_scope, eps=eps)
    assert torch.equal(values, torch.zeros(3, 7))


def test_a_flat_group_among_others_is_zero_when_compared_with_itself():
    r = torch.stack([torch.full((8,), 0.1), torch.linspace(0, 1, 8)])
    for estimator in (GRPO(eps=0), DrGRPO(), RLOO(), FlowGRPO(), GDPO()):
        result = estimator(r)
        assert torch.equal(result.values[0], torch.zeros(8)) and result.values[1].abs().max() > 0.4
        assert result.metrics["advantage/zero_std_groups"] == 0.5


def test_a_flat_group_still_counts_against_the_mean_of_the_batch():
    r = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(GroupRelative("batch", "none")(r).values, torch.tensor([[0.5, 0.5], [-0.5, -0.5]]))
    torch.testing.assert_close(GroupRelative("batch", "batch", eps=0)(r).values, torch.tensor([[1.0, 1], [-1, -1]]))
    # It has no spread of its own to be measured in.
    assert torch.equal(GroupRelative("batch", "group")(r).values, torch.zeros(2, 2))


@members
def test_one_different_value_among_eight_keeps_all_eight(name):
    r = torch.full((1, 8), 0.1)
    r[0, 3] = 0.9
    values = call(name, r)
    assert bool(values.isfinite().all()) and bool((values != 0).all())
    assert abs(float(values.sum())) < 1e-5 and bool((values[0, 3] > 0) & (values[0, 0] < 0))


def test_float_noise_is_not_blown_up():
    r = 0.5 + 1e-9 * draw(1, 8)
    assert float(GRPO()(r).values.abs().max()) < 1e-4


@members
def test_unscored_samples_get_zero_and_enter_no_statistic(name):
    r = draw(3, 5)
    padded = torch.cat([r[:, :2], torch.full((3, 2), NAN, dtype=torch.float64), r[:, 2:]], 1)
    values = call(name, padded)
    assert torch.equal(values[:, 2:4], torch.zeros(3, 2))
    torch.testing.assert_close(torch.cat([values[:, :2], values[:, 4:]], 1), call(name, r))


@members
def test_share_of_unscored_samples_is_counted(name):
    r = draw(2, 4)
    r[0, 0] = NAN
    metrics = MEMBERS[name](r, prompt_ids=torch.tensor([100, 101])).metrics
    assert metrics["advantage/nan_share"] == 1 / 8


def test_a_lone_scored_sample_has_nobody_to_be_compared_with():
    r = torch.tensor([[NAN, 3.0, NAN], [1.0, 2.0, 3.0]])
    for estimator in (GRPO(), DrGRPO(), RLOO(), FlowGRPO(), GDPO()):
        values = estimator(r).values
        assert torch.equal(values[0], torch.zeros(3)) and bool(values.isfinite().all())


@members
def test_all_unscored_gives_zeros(name):
    result = MEMBERS[name](torch.full((2, 3), NAN), prompt_ids=torch.tensor([200, 201]))
    assert torch.equal(result.values, torch.zeros(2, 3))
    assert result.metrics["advantage/nan_share"] == 1.0
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_a_sample_that_one_of_two_rewards_left_out():
    a, b = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[NAN, 1.0, 5.0, 0.0]])
    assert float(GRPO()({"a": a, "b": b}).values[0, 0]) == 0.0
    alone = group_relative(a, eps=0, clip=None)
    both = group_relative({"a": a, "b": b}, per_reward=True, eps=0, clip=None)
    torch.testing.assert_close(both[0, 0], alone[0, 0])


def test_flat_groups_are_decided_exactly():
    r = torch.tensor([[0.1] * 8, [0.1] * 7 + [0.1 + 1e-7], [NAN] * 8, [NAN] * 7 + [1.0]])
    assert flat_groups(r).tolist() == [True, False, True, True]


# ---- refusals -------------------------------------------------------------------------------------------


@members
def test_infinite_rewards_are_refused_by_name_and_value(name):
    rewards = {"aesthetic": draw(2, 3), "ocr": torch.tensor([[1.0, -math.inf, 2.0], [0.0, 1.0, 2.0]])}
    with pytest.raises(ValueError, match=r"'ocr' holds -inf .*NaN"):
        call(name, rewards)


@pytest.mark.parametrize("rewards", [torch.zeros(3), torch.zeros(2, 3, 1)], ids=["[P]", "[P, G, 1]"])
def test_other_shapes_are_refused(rewards):
    with pytest.raises(ValueError, match=r"shape \(.*\[P, G\]"):
        group_relative(rewards)


def test_rewards_of_different_shapes_and_no_rewards_are_refused():
    with pytest.raises(ValueError, match=r"'b' has shape \(2, 4\)"):
        group_relative({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)})
    with pytest.raises(ValueError, match="no rewards"):
        group_relative({})


def test_unknown_scopes_are_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"mean_scope = 'prompt'.*group, batch"):
        group_relative(TABLE, mean_scope="prompt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"std_scope = 'all'.*group, batch, none"):
        group_relative(TABLE, std_scope="all")  # type: ignore[arg-type]


def test_estimators_without_memory_have_an_empty_state():
    estimator = GRPO()
    assert estimator.state_dict() == {}
    estimator.load_state_dict({})
