"""Gates and conjunctive groups against plain loops over samples, and held-out rewards that training never computes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import yaml

from genrl.config import build_part, load_config
from genrl.objectives import GDPO, GRPO, group_relative
from genrl.rewards import Compose, Conjunction, Gate, score

NAN = float("nan")


class Given:
    """Returns the numbers in the first pixels of its channel."""

    differentiable = True

    def __init__(self, channel: int = 0, low: float = 0.0, high: float = 1.0) -> None:
        self.channel, self.range, self.calls = channel, (low, high), 0

    def __call__(self, media, prompts, metadata):
        self.calls += 1
        return media[:, self.channel, 0, 0]


def pair(media, prompts, metadata):
    return {"low": media.amin((1, 2, 3)), "high": media.amax((1, 2, 3))}


def media_of(*columns):
    """Media [B, C, 1, 1] that hold one column of values a channel."""
    return torch.tensor(columns).T[:, :, None, None].float()


def scored(reward, *columns):
    media = media_of(*columns)
    return score(reward, media, ["p"] * len(media))


# -------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("otherwise", [None, 0.3])
@pytest.mark.parametrize("limits", [{"at_least": 0.5}, {"at_most": 0.5}, {"at_least": 0.2, "at_most": 0.6}])
def test_gated_values_equal_a_loop_over_samples(limits, otherwise):
    generator = torch.Generator().manual_seed(0)
    raw = {"easy": torch.rand(4, 6, generator=generator), "hard": torch.rand(4, 6, generator=generator)}
    raw["hard"][0, 0] = raw["easy"][1, 1] = NAN
    gate = Gate("hard", otherwise=otherwise, **limits)
    compose = Compose({"easy": Given(), "hard": Given(1)}, gates={"easy": gate}, caps={"easy": 0.9})
    values, weights = compose.for_advantage(raw)
    assert weights == {"easy": 1.0, "hard": 1.0} and torch.equal(values["hard"].nan_to_num(), raw["hard"].nan_to_num())
    for p, g in itertools.product(range(4), range(6)):
        easy, hard = raw["easy"][p, g].item(), raw["hard"][p, g].item()
        passed = limits.get("at_least", -math.inf) <= hard <= limits.get("at_most", math.inf)
        expected = min(easy, 0.9) if passed else (0.0 if otherwise is None else otherwise)
        expected = NAN if math.isnan(easy) or math.isnan(hard) else expected
        assert values["easy"][p, g].item() == pytest.approx(expected, nan_ok=True, abs=1e-6)
    count = sum(limits.get("at_least", -1) <= h <= limits.get("at_most", 2) for h in raw["hard"].flatten().tolist())
    assert compose.gate_shares(raw) == {"easy": pytest.approx(count / 24)}


def test_failing_a_gate_is_worse_than_the_worst_that_passes_it_and_nan_would_not_be():
    """Why a failed gate is a low value: with "not scored" a sample gains by failing."""
    hard = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    easy = torch.tensor([[0.2, 0.6, 0.9, 0.9]])
    compose = Compose({"easy": Given(), "hard": Given(1)}, gates={"easy": Gate("hard", at_least=0.5)})
    for estimator in (GRPO(), GDPO()):
        advantage = estimator(*compose.for_advantage({"easy": easy, "hard": hard})).values[0]
        assert advantage.argmin() == 3
    unscored = group_relative(torch.where(hard < 0.5, NAN, easy))[0]
    assert unscored[3] > unscored[0]  # failing would have been better than passing with a low value


def test_gdpo_is_not_moved_by_the_scale_of_a_gated_reward():
    generator = torch.Generator().manual_seed(1)
    hard, easy = torch.rand(3, 8, generator=generator), torch.rand(3, 8, generator=generator)
    found = []
    for scale in (1.0, 100.0):
        gates = {"easy": Gate("hard", at_least=0.5)}
        compose = Compose({"easy": Given(high=scale), "hard": Given(1)}, gates=gates)
        found.append(GDPO(eps=0.0)(*compose.for_advantage({"easy": easy * scale, "hard": hard})).values)
    torch.testing.assert_close(*found)
    # By hand: each reward normalised in its group, summed, then whitened over the batch.
    parts = [torch.where(hard >= 0.5, easy, 0.0), hard]
    total = sum((p - p.mean(1, keepdim=True)) / p.std(1, correction=0, keepdim=True) for p in parts)
    torch.testing.assert_close(found[0], total / total.std(correction=0), rtol=1e-4, atol=1e-5)


def test_a_gate_reads_the_raw_value_of_a_reward_that_is_capped_gated_or_unweighted():
    rewards = {"a": Given(0), "b": Given(1), "c": Given(2)}
    gates = {"b": Gate("a", at_least=0.5), "c": Gate("b", at_least=0.5)}
    compose = Compose(rewards, weights={"a": 0.0}, caps={"a": 0.1}, gates=gates)
    raw = scored(compose, [0.9, 0.1], [0.8, 0.8], [0.7, 0.7])
    values, weights = compose.for_advantage(raw)
    assert values["b"].tolist() == pytest.approx([0.8, 0.0]) and values["c"].tolist() == pytest.approx([0.7, 0.7])
    assert "a" not in weights
    assert raw["b"].tolist() == pytest.approx([0.8, 0.8])  # what is logged


def test_gates_of_entries_and_of_nested_compositions():
    inner = Compose({"x": Given(0), "y": Given(1)}, gates={"x": {"reward": "y", "at_least": 0.5}})
    gates = {"in": Gate("ok", at_least=0.5, otherwise=-1.0), "pair/low": Gate("pair/high", at_least=0.9, otherwise=0.0)}
    compose = Compose({"in": inner, "pair": pair, "ok": Given(2)}, gates=gates)
    raw = scored(compose, [0.4, 0.4, 0.4], [0.9, 0.1, 0.9], [1.0, 1.0, 0.0])
    values, _ = compose.for_advantage(raw)
    assert values["in/x"].tolist() == pytest.approx([0.4, 0.0, -1.0])
    assert values["in/y"].tolist() == pytest.approx([0.9, 0.1, -1.0])
    assert values["pair/low"].tolist() == pytest.approx([0.4, 0.1, 0.0])
    assert set(compose.gate_shares(raw)) == {"in/x", "in/y", "pair/low"}


def test_gradients_stop_at_a_closed_gate():
    easy = torch.tensor([0.3, 0.6], requires_grad=True)
    compose = Compose({"easy": Given(), "hard": Given(1)}, gates={"easy": Gate("hard", at_least=0.5)})
    compose.for_advantage({"easy": easy, "hard": torch.tensor([0.0, 1.0])})[0]["easy"].sum().backward()
    assert easy.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({"esy": Gate("hard", at_least=0)}, "gates names 'esy'.*did you mean 'easy'"),
        ({"easy": Gate("hrd", at_least=0)}, "a gate names 'hrd'.*did you mean 'hard'"),
        ({"easy": Gate("easy", at_least=0)}, "decided by 'easy' itself"),
        ({"free": Gate("hard", at_least=0)}, r"gates\['free'\] needs `otherwise`.*0 is not the worst"),
        ({"easy": Gate("later", at_least=0)}, "'later', which is held out"),
    ],
)
def test_gates_that_cannot_work_are_refused(gates, message):
    rewards = {"easy": Given(), "hard": Given(1), "free": pair, "later": Given(2)}
    with pytest.raises(ValueError, match=message):
        Compose(rewards, gates=gates, held_out=["later"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({}, "no condition"), ({"at_least": 2, "at_most": 1}, "no value meets"), ({"at_least": NAN}, "at_least = nan")],
)
def test_conditions_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Gate("x", **arguments)


def test_a_gate_needs_one_number_and_not_a_dictionary_of_them():
    compose = Compose({"easy": Given(), "pair": pair}, gates={"easy": Gate("pair", at_least=0.5)})
    with pytest.raises(ValueError, match=r"a gate names 'pair'.*did you mean 'pair/"):
        compose(media_of([0.5]), ["p"], [{}])


# --------------------------------------------------------------------------------------------------- conjunctions


@pytest.mark.parametrize("mode", ["all", "product", "min"])
def test_a_group_scores_what_a_loop_gives(mode):
    generator = torch.Generator().manual_seed(2)
    raw = {name: torch.rand(40, generator=generator) for name in "abc"}
    raw["b"][3] = NAN
    thresholds = {"a": 0.3, "b": 0.2, "c": 0.1} if mode == "all" else {"a": 0.3}
    group = Conjunction({name: Given(i) for i, name in enumerate("abc")}, thresholds, mode)
    expected = []
    for i in range(40):
        row = {name: raw[name][i].item() for name in "abc"}
        passed = all(row[name] >= limit for name, limit in thresholds.items())
        value = {"all": 1.0, "product": math.prod(row.values()), "min": min(row.values())}[mode]
        expected.append(NAN if math.isnan(sum(row.values())) else value * passed)
    assert group.combine(raw).tolist() == pytest.approx(expected, nan_ok=True)


def test_groups_of_one_criterion_add_up_to_the_weighted_sum_and_one_group_is_their_and():
    """The two ends of ProRubric."""
    columns = [[1, 1, 0, 0], [1, 0, 1, 0]]
    parts = {name: Given(i) for i, name in enumerate("ab")}
    single = Compose({n: Conjunction({"c": r}, {"c": 0.5}) for n, r in parts.items()}, weights={"a": 2.0})
    values, weights = single.for_advantage(scored(single, *columns))
    assert list(weights) == ["a/score", "b/score"]
    assert sum(weights[n] * v for n, v in values.items()).tolist() == [3, 2, 1, 0]
    whole = Compose({"both": Conjunction(parts, {"a": 0.5, "b": 0.5})})
    raw = scored(whole, *columns)
    assert raw["both/score"].tolist() == [1, 0, 0, 0] and raw["both/a"].tolist() == [1, 1, 0, 0]
    assert whole.for_advantage(raw)[1] == {"both/score": 1.0}


def test_a_group_declares_its_range_and_passes_gradients_on():
    parts = {"a": Given(0), "b": Given(1, high=2.0)}
    group = Conjunction(parts, mode="product")
    assert (group.range, group.differentiable) == ((0.0, 2.0), True)
    assert Conjunction(parts, mode="min").range == (0.0, 1.0)
    assert not Conjunction(parts, {"a": 0, "b": 0}).differentiable
    compose = Compose({"g": group})
    assert compose.range_of("g/score") == (0.0, 2.0) and compose.range_of("g/a") == (0.0, 1.0)
    a, b = torch.tensor([0.5], requires_grad=True), torch.tensor([0.25])
    group.combine({"a": a, "b": b}).sum().backward()
    assert a.grad.item() == 0.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": {}}, "no rewards"),
        ({"rewards": {"a": pair}, "mode": "any"}, "'any' is unknown"),
        ({"rewards": {"a": pair}}, "needs a threshold for every criterion; a have none"),
        ({"rewards": {"score": pair}}, "'score'"),
        ({"rewards": {"a": pair}, "thresholds": {"b": 1.0}}, "thresholds names 'b'"),
        ({"rewards": {"a": Given(low=-1.0)}, "mode": "min"}, "reaches down to -1"),
    ],
)
def test_groups_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Conjunction(**arguments)


def test_values_that_a_product_cannot_take_are_refused():
    group = Conjunction({"a": lambda media, *_: media[:, 0, 0, 0] - 1}, mode="product")
    with pytest.raises(RuntimeError, match=r"'a' is -0\.5"):
        scored(group, [0.5, 1.0])
    with pytest.raises(RuntimeError, match="criterion 'a' returns a/low, a/high"):
        scored(Conjunction({"a": pair}, {"a": 0.5}), [0.5])


# ------------------------------------------------------------------------------------------------------- held out


class Judge(Given):
    held_out = True


def test_training_never_computes_what_is_held_out_and_evaluation_does():
    rewards = {"proxy": Given(0), "slow": Given(1), "judge": Judge(1)}
    compose = Compose(rewards, held_out=["slow"], caps={"slow": 0.5})
    training = compose.for_training()
    assert list(scored(training, [0.1], [0.2])) == ["proxy"]
    assert rewards["slow"].calls == rewards["judge"].calls == 0
    raw = scored(compose, [0.1], [0.2])
    assert list(raw) == ["proxy", "slow", "judge"] and compose.for_advantage(raw)[1] == {"proxy": 1.0}
    assert Compose({"proxy": Given()}).for_training().weights == {"proxy": 1.0}
    with pytest.raises(ValueError, match="'slow' is held out, but has weight 1"):
        Compose(rewards, held_out=["slow"], weights={"slow": 1.0})
    with pytest.raises(ValueError, match=r"held_out names 'slo'.*did you mean 'slow'"):
        Compose(rewards, held_out=["slo"])


def test_held_out_members_of_a_nested_composition_are_left_out_too():
    inner = Compose({"x": Given(0), "y": Given(1)}, held_out=["y"])
    outer = Compose({"in": inner}, caps={"in/y": 0.5, "in/x": 0.5})
    assert list(scored(outer.for_training(), [0.1], [0.2])) == ["in/x"]
    assert list(scored(outer, [0.1], [0.2])) == ["in/x", "in/y"]


# ---------------------------------------------------------------------------------------------------------- config


def test_a_configuration_builds_gates_groups_and_held_out_rewards(tmp_path):
    given = {"class_path": f"{__name__}.Given", "init_args": {"channel": 0}}
    reward = {
        "class_path": "genrl.rewards.Compose",
        "init_args": {
            "rewards": {
                "ocr": given, "pickscore": given, "later": given,
                "rubric": {"class_path": "genrl.rewards.Conjunction",
                           "init_args": {"rewards": {"a": given, "b": given}, "thresholds": {"a": 0.5, "b": 0.5}}},
            },
            "gates": {"pickscore": {"reward": "ocr", "at_least": 0.5}},
            "held_out": ["later"],
        },
    }  # fmt: skip
    path = tmp_path / "c.yaml"
    tree = {"generator": "toy.ToyGenerator", "prompts": "toy.ToyPrompts", "reward": reward,
            "algorithm": "genrl.algorithms.PolicyGradient"}  # fmt: skip
    path.write_text(yaml.safe_dump(tree))
    raw = load_config(path).raw["reward"]
    compose = build_part(raw, "reward")
    assert compose.gates["pickscore"] == Gate("ocr", at_least=0.5)
    assert compose.held_out == ["later"] and compose.rewards["rubric"].mode == "all"
    with pytest.raises(ValueError, match="at_leest"):
        reward["init_args"]["gates"]["pickscore"]["at_leest"] = 1
        path.write_text(yaml.safe_dump(tree))
        load_config(path)
