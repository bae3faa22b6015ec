"""Alarms about rewards that are hacked, and the best evaluation so far."""

import math
import random

import pytest
import torch
import toy

from genrl.algorithms import PolicyGradient
from genrl.diffusion import FlowSDE, Sampler, Schedule
from genrl.rewards import Compose, image_statistics
from genrl.training.checkpoint import find_checkpoint, load_state
from genrl.training.monitor import Monitor


def values(reward, noise=0.0, judge=None, **others):
    """An evaluation: a reward and a judge with their intervals, and numbers without one."""
    named = {"reward": reward} if judge is None else {"reward": reward, "judge": judge}
    found = {f"eval/{name}": value for name, value in (named | others).items()}
    found |= {f"eval/{n}_{side}": v + s * noise for n, v in named.items() for side, s in (("low", -1), ("high", 1))}
    return found


def test_an_alarm_is_raised_once_when_the_reward_rises_and_the_judge_falls():
    monitor = Monitor(margin=0.05)
    assert monitor.after_evaluation(0, values(0.5, judge=0.8)) == (True, [], "")
    assert monitor.after_evaluation(5, values(0.6, judge=0.78))[1] == []  # within the margin
    _, messages, stop = monitor.after_evaluation(10, values(0.7, judge=0.7))
    assert len(messages) == 1 and not stop
    for part in ("alarm", "0.500 to 0.700", "judge", "0.800 to 0.700"):
        assert part in messages[0]
    assert monitor.after_evaluation(15, values(0.8, judge=0.6))[1] == []


def test_no_alarm_while_both_rise_or_both_fall():
    for path in ([(0.5, 0.8), (0.7, 0.9)], [(0.5, 0.8), (0.3, 0.5)]):
        monitor = Monitor(margin=0.05)
        assert [m for i, (r, j) in enumerate(path) for m in monitor.after_evaluation(i, values(r, judge=j))[1]] == []


def test_the_judge_is_compared_with_its_best_value_and_not_with_the_first():
    monitor = Monitor(margin=0.05)
    monitor.after_evaluation(0, values(0.5, judge=0.6))
    monitor.after_evaluation(1, values(0.7, judge=0.9))
    assert "0.900 to 0.800" in monitor.after_evaluation(2, values(0.8, judge=0.8))[1][0]


def test_distances_intervals_and_bookkeeping_are_not_judges():
    monitor = Monitor(margin=0.05)
    names = ("spread_nn", "spread_rec", "judge_low", "judge_high", "weight_change", "uses_ema")
    monitor.after_evaluation(0, values(0.5, judge=0.8, **dict.fromkeys(names, 0.8)))
    assert monitor.after_evaluation(1, values(0.9, judge=0.8, **dict.fromkeys(names, 0.1)))[1] == []


def test_a_reward_that_is_trained_to_fall_may_fall():
    """A weight below 0; `bytes` here, while `judge` goes on being watched."""
    monitor = Monitor(margin=0.05)
    monitor.after_evaluation(0, values(0.5, judge=0.8, bytes=9.0), {"eval/bytes"})
    assert monitor.after_evaluation(1, values(0.9, judge=0.8, bytes=1.0), {"eval/bytes"})[1] == []
    assert "judge" in monitor.after_evaluation(2, values(0.9, judge=0.1, bytes=1.0), {"eval/bytes"})[1][0]


def test_a_run_with_a_negative_weight_is_not_taken_for_hacked(tmp_path):
    reward = Compose({"dark": toy.Darkness()}, {"dark": -1.0})
    evaluation = {"every": 1, "drift_margin": 100.0}
    toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=reward, trainer={"iterations": 4, "learning_rate": 0.05},
                  evaluation=evaluation).run()  # fmt: skip
    rows = toy.rows(tmp_path, "eval")
    assert rows[-1]["eval/dark"] < rows[0]["eval/dark"] - 0.05  # as it should
    assert not [row for row in toy.rows(tmp_path, "event") if " dark " in row["message"]]


def test_a_judge_within_its_noise_or_while_the_reward_has_not_clearly_risen_is_silent():
    for noise, reward, judge, alarm in [
        (0.00, 0.6, 0.70, True),
        (0.10, 0.6, 0.70, False),  # the reward's rise is within its noise
        (0.05, 0.6, 0.74, False),  # the judge's fall is
        (0.05, 0.6, 0.70, True),
    ]:
        monitor = Monitor(0.05)
        monitor.after_evaluation(0, values(0.5, noise, judge=0.8))
        assert bool(monitor.after_evaluation(1, values(reward, noise, judge=judge))[1]) == alarm


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, -1.0])
def test_alarms_do_not_depend_on_the_scale_of_a_reward(scale):
    """HPSv2 reads .28 and PickScore 21; both have the same alarms."""
    monitor = Monitor(0.05)
    rise, fall = (0.1, 0.12) if scale > 0 else (-0.1, -0.12)
    monitor.after_evaluation(0, values(0.5 * scale, abs(0.01 * scale), judge=0.8 * scale))
    assert monitor.after_evaluation(1, values((0.5 + rise) * scale, abs(0.01 * scale), judge=0.8 * scale))[1] == []
    found = monitor.after_evaluation(2, values((0.5 + rise) * scale, abs(0.01 * scale), judge=(0.8 - fall) * scale))
    assert len(found[1]) == 1


def test_diversity_is_compared_with_the_base_model_and_only_its_fall_counts():
    for last, alarm in [(0.30, False), (0.16, False), (0.13, True)]:
        monitor = Monitor(0.05, drift_margin=0.3)
        monitor.after_evaluation(0, values(0.5, diversity_pairwise_distance=0.2))
        _, messages, _ = monitor.after_evaluation(1, values(0.7, diversity_pairwise_distance=last))
        assert bool(messages) == alarm
        if alarm:
            assert "diversity_pairwise_distance fell from 0.200 to 0.130; the samples become alike" in messages[0]


# ------------------------------------------------------------------------------------------------ image statistics

# What UniRL#407 reports of an OCR reward without a KL penalty: pictures turn black within 21 evaluations.
UNIRL = {"stats/dark_share": (0.451, 0.926), "stats/edge_energy": (0.0080, 0.0032), "stats/color_entropy": (5.0, 2.3)}


def test_the_numbers_of_a_run_that_turned_black_raise_alarms_long_before_its_end():
    monitor, when = Monitor(0.05), {}
    for k in range(21):
        stats = {name: a + (b - a) * k / 20 for name, (a, b) in UNIRL.items()}
        for message in monitor.after_evaluation(5 * k, values(0.3 + 0.03 * k, 0.01, **stats))[1]:
            name = next(n for n in UNIRL if n in message)
            when[name] = k
            assert f"the reward rose from 0.300 to {0.3 + 0.03 * k:.3f} while {name} moved from" in message
            assert "may be hacked" in message
    assert set(when) == set(UNIRL) and max(when.values()) <= 12


def test_ordinary_fluctuation_is_silent():
    """Rising reward, statistics that wander by 15 % (what healthy digit runs show) or differ by a small share."""
    rng = random.Random(0)
    base = {"stats/dark_share": 0.45, "stats/saturated_share": 0.01, "stats/edge_energy": 0.008, "stats/entropy": 3.2,
            "stats/color_entropy": 5.0, "stats/color_saturation": 0.2, "stats/brightness": 0.3,
            "diversity_pairwise_distance": 0.2}  # fmt: skip
    monitor = Monitor(0.05)
    for k in range(50):
        moved = {n: v * (1 + (k > 0) * rng.uniform(-0.15, 0.15)) for n, v in base.items()}
        moved["stats/saturated_share"] = rng.uniform(0, 0.05)
        judge = 0.8 + 0.15 * k / 50 + rng.uniform(-0.015, 0.015)
        assert monitor.after_evaluation(k, values(0.5 + 0.4 * k / 50, 0.02, judge=judge, **moved))[1] == []


def pictures(darkness):
    """Eight coloured pictures with texture, of which a share of the rows has gone black."""
    generator = torch.Generator().manual_seed(0)
    media = torch.nn.functional.interpolate(
        torch.rand(8, 3, 12, 12, generator=generator), scale_factor=4, mode="bilinear"
    )
    media[:, :, : int(48 * darkness)] = 0.0
    return media


def test_pictures_that_turn_black_raise_alarms_and_others_of_the_same_kind_do_not():
    monitor = Monitor(0.05)
    found = []
    for k in range(11):
        stats = {f"stats/{name}": value for name, value in image_statistics(pictures(k / 10)).items()}
        found += monitor.after_evaluation(k, values(0.5 + 0.04 * k, **stats))[1]
    named = {
        name for name in ("dark_share", "edge_energy", "color_entropy", "color_saturation") for m in found if name in m
    }
    assert named == {"dark_share", "edge_energy", "color_entropy", "color_saturation"}
    monitor = Monitor(0.05)
    for k, shift in enumerate((0.0, 0.05, -0.05, 0.02)):
        media = (pictures(0.2) + shift).clamp(0, 1)
        stats = {f"stats/{name}": value for name, value in image_statistics(media).items()}
        assert monitor.after_evaluation(k, values(0.5 + 0.1 * k, **stats))[1] == []


def test_a_drift_without_a_rising_reward_is_told_as_such():
    monitor = Monitor(margin=0.05)
    monitor.after_evaluation(0, values(0.5, **{"stats/dark_share": 0.45}))
    messages = monitor.after_evaluation(1, values(0.5, **{"stats/dark_share": 0.93}))[1]
    assert messages == ["alarm: stats/dark_share moved from 0.45 to 0.93 since the start"]


def test_a_number_that_comes_later_or_was_not_scored_at_first_starts_where_it_is_first_seen():
    monitor = Monitor(margin=0.05)
    monitor.after_evaluation(0, values(math.nan, **{"stats/entropy": math.nan}))
    monitor.after_evaluation(1, values(0.5, diversity_pairwise_distance=0.4, **{"stats/entropy": 3.0}))
    messages = monitor.after_evaluation(2, values(0.8, diversity_pairwise_distance=0.1, **{"stats/entropy": 1.0}))[1]
    assert len(messages) == 2 and "from 0.400 to 0.100" in messages[0] and "from 3 to 1" in messages[1]


def test_a_run_that_goes_on_with_other_evaluations_compares_only_what_can_be_compared(tmp_path):
    algorithm = PolicyGradient(steps=3)
    evaluation = {"every": 1, "samples_per_prompt": 2}
    toy.make_loop(tmp_path, algorithm, trainer={"iterations": 1}, evaluation=evaluation).run()
    same = toy.make_loop(tmp_path, algorithm, trainer={"iterations": 2}, evaluation=evaluation)
    same.run()
    assert same.monitor.first["eval/reward"] == toy.rows(tmp_path, "eval")[0]["eval/reward"] and not same.notes
    other = toy.make_loop(tmp_path, algorithm, trainer={"iterations": 3}, evaluation={**evaluation, "steps": 4})
    other.run()
    assert other.monitor.first["eval/reward"] == toy.rows(tmp_path, "eval")[-1]["eval/reward"]
    assert any("alarms compare with the next evaluation" in row["message"] for row in toy.rows(tmp_path, "event"))


def test_collapse_stops_only_when_asked_for():
    for fraction, stop in [(None, ""), (0.5, "collapsed")]:
        monitor = Monitor(0.05, fraction)
        monitor.after_evaluation(0, values(0.5))
        assert monitor.after_evaluation(1, values(0.8))[2] == ""
        assert monitor.after_evaluation(2, values(0.45))[2] == ""
        _, messages, found = monitor.after_evaluation(3, values(0.35))
        assert found == stop
        assert bool([m for m in messages if "below 0.5 of its best 0.800 at iteration 1" in m]) == bool(stop)


def test_collapse_of_a_negative_reward_is_judged_by_its_size():
    """A penalty of -1 that becomes -0.9 has not collapsed, and -3 has."""
    monitor = Monitor(0.05, 0.5)
    monitor.after_evaluation(0, values(-1.0))
    assert monitor.after_evaluation(1, values(-0.9))[2] == ""
    assert monitor.after_evaluation(2, values(-1.0))[2] == ""
    assert monitor.after_evaluation(3, values(-3.0))[2] == "collapsed"


def test_the_best_is_the_first_highest_and_nan_is_never_the_best():
    monitor = Monitor(0.05)
    found = [monitor.after_evaluation(i, values(r))[0] for i, r in enumerate([0.5, math.nan, 0.7, 0.7, 0.6])]
    assert found == [True, False, True, False, False]
    assert (monitor.best_reward, monitor.best_iteration) == (0.7, 2)


def test_unscored_rewards_and_flat_groups_are_reported_once():
    monitor = Monitor(0.05)
    assert "60% of the rewards" in monitor.after_iteration({"advantage/nan_share": 0.6})[0]
    assert monitor.after_iteration({"advantage/nan_share": 0.9}) == []
    assert "equal rewards" in monitor.after_iteration({"advantage/zero_std_groups": 0.95})[0]
    assert Monitor(0.05).after_iteration({"advantage/nan_share": 0.1, "advantage/zero_std_groups": 0.5}) == []


class Unscored(toy.HalfBrightness):
    def __call__(self, media, prompts, metadata):
        return super().__call__(media, prompts, metadata) * float("nan")


def test_a_run_whose_rewards_are_never_scored_stops_after_three_iterations_with_a_checkpoint(tmp_path, capsys):
    def loop(reward, iterations=20):
        trainer = {"iterations": iterations, "checkpoint_every": 0}
        return toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=reward, trainer=trainer,
                             evaluation={"every": 0, "train_sampler": "never"})  # fmt: skip

    summary = loop(Unscored()).run()
    assert (summary.status, summary.iteration, summary.resumes_from) == ("unscored", 3, 3)
    assert "no reward was scored in 3 iterations" in toy.rows(tmp_path, "event")[-1]["message"]
    assert "go on from iteration 3" in " ".join(capsys.readouterr().out.split())
    assert loop(toy.HalfBrightness(), 5).run().status == "finished"  # once the reward is mended it goes on


def test_unscored_iterations_count_only_in_a_row():
    monitor = Monitor(0.05)
    for share, stops in [(1, False), (1, False), (0.9, False), (1, False), (1, False), (1, True), (1, True)]:
        monitor.after_iteration({"advantage/nan_share": share})
        assert bool(monitor.hopeless()) == stops
    again = Monitor(0.05)
    again.load_state_dict(monitor.state_dict())
    assert again.hopeless()


def test_state_goes_on_where_it_was():
    monitor, other = Monitor(0.05), Monitor(0.05)
    monitor.after_evaluation(0, values(0.5, judge=0.8))
    monitor.after_evaluation(1, values(0.7, judge=0.7))
    other.load_state_dict(monitor.state_dict())
    assert other.after_evaluation(2, values(0.8, judge=0.6)) == monitor.after_evaluation(2, values(0.8, judge=0.6))


def test_step_metrics_take_gaps_from_the_first_update_and_ratios_from_the_later_ones():
    sampler = Sampler(FlowSDE(), Schedule.uniform(4))
    first = {"step_0/gap_max": 1e-6, "step_1/gap_max": 3e-6, "step_0/clip_width_min": 0.1, "step_0/ratio_mean": 1.0}
    later = {
        "step_0/gap_max": 9.0, "step_0/ratio_mean": 0.9, "step_1/ratio_mean": 1.3, "step_0/ratio_min": 0.5,
        "step_1/ratio_min": 0.7, "step_0/ratio_max": 1.5, "step_1/ratio_max": 1.9, "nft/optimality": 0.4,
    }  # fmt: skip
    found = Monitor.by_step(first, later, sampler)
    assert found["step_0/first_step_gap"] == 1e-6 and found["ratio/first_step_gap"] == 3e-6
    assert (found["ratio/mean"], found["ratio/min"], found["ratio/max"]) == (pytest.approx(1.1), 0.5, 1.9)
    assert (found["step_0/t"], found["step_1/t"]) == (1.0, 0.75) and found["nft/optimality"] == 0.4
    assert not [k for k in found if k.endswith(("gap_max", "clip_width_min"))]


class Falling(toy.HalfBrightness):
    """A reward whose value is set from outside."""

    def __init__(self, levels):
        self.levels, self.calls = levels, 0

    def __call__(self, media, prompts, metadata):
        level = self.levels[min(self.calls, len(self.levels) - 1)]
        self.calls += 1
        return super().__call__(media, prompts, metadata) * 1e-3 + level


def test_a_run_that_collapses_stops_keeps_its_best_checkpoint_and_says_so(tmp_path):
    # Calls: evaluation, then (iteration, evaluation) again and again.
    reward = Falling([0.5, 0.5, 0.8, 0.5, 0.7, 0.5, 0.2])
    loop = toy.make_loop(
        tmp_path, PolicyGradient(steps=3), reward=reward, trainer={"iterations": 9, "collapse_fraction": 0.5},
        evaluation={"every": 1},
    )  # fmt: skip
    summary = loop.run()
    assert (summary.status, summary.iteration, summary.best_iteration) == ("collapsed", 3, 1)
    assert load_state(find_checkpoint(tmp_path, "best"))["iteration"] == 1
    assert any("stopping" in r["message"] for r in toy.rows(tmp_path, "event"))


def test_an_evaluation_without_a_score_is_said_once():
    monitor = Monitor(0.05)
    found = [monitor.after_evaluation(i, {"eval/reward": math.nan}) for i in range(2)]
    assert ["no held-out sample was scored" in " ".join(messages) for _, messages, _ in found] == [True, False]
    assert [best for best, _, _ in found] == [False, False]
