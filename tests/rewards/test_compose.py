from __future__ import annotations

import jsonargparse
import pytest
import torch

from genrl.rewards import Compose, DigitJudge, DigitProxy, FunctionReward, Reward, RewardError, as_compose, score


def bright(media, prompts, metadata):
    return media.mean(dim=(1, 2, 3))


def pair(media, prompts, metadata):
    return {"low": media.amin(dim=(1, 2, 3)), "high": media.amax(dim=(1, 2, 3))}


def broken(media, prompts, metadata):
    return torch.zeros(1)


def listed(media, prompts, metadata, scale=1.0):
    return [scale, None, *[0.0] * (len(media) - 2)]


def test_raw_values_are_neither_weighted_nor_capped(batch):
    compose = Compose({"bright": bright, "pair": pair}, weights={"bright": 5.0}, caps={"bright": 0.0})
    raw = score(compose, *batch)
    assert list(raw) == ["bright", "pair/low", "pair/high"]
    torch.testing.assert_close(raw["bright"], bright(*batch))


def test_cap_takes_the_gain_away_above_it_and_keeps_nan():
    raw = torch.tensor([0.2, 0.95, float("nan"), 0.9], requires_grad=True)
    capped, weights = Compose({"a": bright}, caps={"a": 0.9}).for_advantage({"a": raw})
    torch.testing.assert_close(capped["a"], torch.tensor([0.2, 0.9, float("nan"), 0.9]), equal_nan=True)
    capped["a"][:2].sum().backward()
    assert raw.grad.tolist()[:2] == [1.0, 0.0]
    assert weights == {"a": 1.0}


def test_weight_zero_is_logged_but_not_in_the_advantage(batch):
    compose = Compose({"bright": bright, "pair": pair}, weights={"pair": 0.0})
    raw = score(compose, *batch)
    values, weights = compose.for_advantage(raw)
    assert "pair/low" in raw and list(values) == ["bright"] and weights == {"bright": 1.0}


def test_inner_names_take_their_own_weight_or_the_outer_one():
    raw = {"pair/low": torch.zeros(2, 3), "pair/high": torch.ones(2, 3)}
    compose = Compose({"pair": pair}, weights={"pair": 2.0, "pair/high": 0.5}, caps={"pair/high": 0.25})
    values, weights = compose.for_advantage(raw)
    assert weights == {"pair/low": 2.0, "pair/high": 0.5}
    assert values["pair/high"].unique().tolist() == [0.25] and values["pair/high"].shape == (2, 3)


def test_nested_compositions_multiply_weights_and_keep_caps(batch):
    inner = Compose({"a": bright, "b": bright}, weights={"a": 0.5, "b": 0.0}, caps={"a": 0.1})
    compose = Compose({"in": inner}, weights={"in": 4.0})
    values, weights = compose.for_advantage(score(compose, *batch))
    assert weights == {"in/a": 2.0} and values["in/a"].max() == pytest.approx(0.1)


@pytest.mark.parametrize("table", ["weights", "caps"])
def test_an_unknown_name_is_answered_with_the_nearest(table, batch):
    with pytest.raises(ValueError, match=rf"{table} names 'brigth'.*did you mean 'bright'"):
        Compose({"bright": bright}, **{table: {"brigth": 1.0}})
    compose = Compose({"pair": pair}, **{table: {"pair/hihg": 1.0}})
    with pytest.raises(ValueError, match="did you mean 'pair/high'"):
        compose(*batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": {}}, "no rewards"),
        ({"rewards": {"a/b": bright}}, "'a/b'"),
        ({"rewards": {"a": bright}, "weights": {"a": float("nan")}}, "nan"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Compose(**arguments)


def test_all_weights_zero_is_an_error_only_when_optimised(batch):
    compose = Compose({"a": bright}, weights={"a": 0.0})
    raw = score(compose, *batch)
    with pytest.raises(ValueError, match="weight 0"):
        compose.for_advantage(raw)


def test_a_judge_is_never_optimised_by_accident():
    assert Compose({"bright": bright, "judge": DigitJudge()}).weights == {"bright": 1.0, "judge": 0.0}
    with pytest.raises(ValueError, match="log_only"):
        Compose({"judge": DigitJudge()}, weights={"judge": 1.0})
    assert Compose({"judge": DigitJudge()}, weights={"judge": 1.0}, allow_log_only=True).weights["judge"] == 1.0


def test_the_member_that_fails_is_named(batch):
    with pytest.raises(RewardError, match=r"'wrong' returned shape \(1,\)"):
        score(Compose({"bright": bright, "wrong": broken}), *batch)


def test_as_compose_wraps_once():
    compose = as_compose(bright)
    assert list(compose.rewards) == ["bright"] and as_compose(compose) is compose
    assert list(as_compose(DigitProxy()).rewards) == ["digit_proxy"]
    assert list(as_compose(bright, "light").rewards) == ["light"]


def test_declarations_follow_the_members():
    compose = Compose({"proxy": DigitProxy(), "judge": DigitJudge()})
    assert compose.differentiable and compose.range == (0.0, 1.0)
    assert not Compose({"proxy": DigitProxy(), "bright": bright}).differentiable


class Loose:
    """A user's reward with other argument names and no annotations."""

    def __init__(self, weight: float = 0.5):
        self.weight = weight

    def __call__(self, images, texts, info):
        return images.mean(dim=(1, 2, 3)) * self.weight


def test_a_config_builds_any_callable_class_by_its_import_path(batch):
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--reward", type=Reward)
    config = {
        "class_path": "genrl.rewards.Compose",
        "init_args": {
            "rewards": {
                "own": {"class_path": f"{__name__}.Loose", "init_args": {"weight": 2.0}},
                "fn": {"class_path": "genrl.rewards.FunctionReward", "init_args": {"path": f"{__name__}:bright"}},
            }
        },
    }
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.49
    compose = instantiate(parser.parse_object({"reward": config})).reward
    raw = score(compose, *batch)
    torch.testing.assert_close(raw["own"], 2 * raw["fn"])


def test_a_function_by_import_path_may_return_a_list_with_none(batch):
    result = score(FunctionReward(f"{__name__}:listed", arguments={"scale": 3.0}), *batch)["listed"]
    torch.testing.assert_close(result, torch.tensor([3.0, float("nan"), 0.0, 0.0]), equal_nan=True)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("no_colon", ValueError, "package.module:function"),
        ("no_such_module_here:f", ModuleNotFoundError, "no module 'no_such_module_here'"),
        (f"{__name__}:brigth", ValueError, "did you mean 'bright'"),
        (f"{__name__}:__name__", ValueError, "must be a function"),
    ],
)
def test_a_wrong_import_path_says_what_is_wrong(path, error, message):
    with pytest.raises(error, match=message):
        FunctionReward(path)
