"""Evaluation files, their table, videos and latencies."""

import json
import os
import time

import numpy as np
import pytest
import torch
from acting_members import flow_policy, proportional, slow_for_negative_goals
from toy_envs import line

from genrl.envs import EnvError, EnvSettings, Evaluation, Latency, evaluate, make_env, measure_latency
from genrl.envs.evaluation import Consistency, EpisodeResult, EvaluationFileError, write_json
from genrl.envs.film import Camera, chosen
from genrl.envs.videos import VideoError
from genrl.statistics import wilson_interval

imageio = pytest.importorskip("imageio.v3")


def episode(number, success, total=0.0, length=10, stac=None):
    return EpisodeResult(
        number, 100 + number, success, 3 if success else None, total, length, "truncated", f"s{number}", stac
    )


def evaluation(outcomes, **changes):
    episodes = tuple(episode(i, bool(o), total=float(i)) for i, o in enumerate(outcomes))
    values = {
        "env": EnvSettings("metaworld/reach-v3").to_dict(),
        "success_rule": "any",
        "max_steps": 500,
        "stop_at_success": True,
        "seed": 100,
        "planned": len(episodes),
        "policy": {"class": "MeanFlowPolicy", "weights": "ema", "nfe": 1},
        "versions": {"mujoco": "3.3.0"},
        "episodes": episodes,
    }
    return Evaluation(**{**values, **changes})


def test_a_file_gives_back_the_evaluation_that_was_saved(tmp_path):
    stac = {"settings": {"samples": 4}, "calibration": "leave one out", "calibrated_episodes": 0, "metrics": None}
    episodes = (episode(0, True, 1 / 3), episode(1, False, -1e-17, stac=Consistency((0.1, 0.2), None, None)))
    saved = evaluation([], episodes=episodes, planned=2, stac=stac, videos=("a.mp4",), warnings=("careful",))
    path = saved.save(tmp_path / "deep" / "a.json")
    found = Evaluation.load(path)
    assert found == saved and found.episodes[0].total_reward == 1 / 3
    assert found.latency is None and path.with_name("a.timing.json").is_file()
    timed = evaluation([1], latency=Latency(1.0, 2.0, 1.1, 100, 1, "cpu", 1), timing={"seconds": 3.0})
    again = Evaluation.load(timed.save(tmp_path / "b.json"))
    assert again.latency == timed.latency and again.timing == {"seconds": 3.0}
    path.with_name("a.timing.json").unlink()
    assert Evaluation.load(path) == saved


def test_the_numbers_follow_from_the_episodes():
    result = evaluation([1, 1, 0, 1, 0, 1, 1, 1])
    assert result.success_rate == 0.75 and result.interval == wilson_interval(0.75, 8)
    summary = result.summary()
    assert (summary["success_low"], summary["success_high"]) == result.interval
    stats = pytest.importorskip("scipy.stats")
    low, high = stats.t.interval(0.95, 7, loc=3.5, scale=np.std(range(8), ddof=1) / 8**0.5)
    assert (summary["total_reward_low"], summary["total_reward_high"]) == pytest.approx((low, high))
    rows = dict(result.table())
    assert rows["success"] == "75.0 % (6 of 8), 95 % interval 40.9 % to 92.9 %"
    assert rows["start seeds"] == "100 to 107, 8 different starts" and rows["network calls per chunk"] == "1"


def test_nothing_that_json_lacks_is_written(tmp_path):
    single = evaluation([1]).save(tmp_path / "a.json")
    assert "NaN" not in single.read_text() and "Infinity" not in single.read_text()
    empty = evaluation([], planned=3)
    assert (
        np.isnan(empty.success_rate) and not empty.complete and dict(empty.table())["success"].startswith("- (0 of 0)")
    )


@pytest.mark.parametrize(
    "text, message",
    [("", "not an evaluation"), ("{}", "not an evaluation"), ('{"format": 99, "summary": {}}', "format 99"),
     ("[1]", "not an evaluation"), ('{"format": 1, "summary": {}, "episodes": [{}]}', "not an evaluation")],
)  # fmt: skip
def test_files_that_are_no_evaluations_are_refused(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(EvaluationFileError, match=message):
        Evaluation.load(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError, match="genrl evaluate"):
        Evaluation.load(tmp_path / "b.json")


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": 1, "b": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(tmp_path) == ["a.json"]


# ---------------------------------------------------------------------------- videos


def test_the_first_and_the_worst_episodes_are_filmed_and_show_what_happened(tmp_path):
    result = evaluate(slow_for_negative_goals, line(), episodes=20, videos=3, video_dir=tmp_path)
    failures = sorted((e for e in result.episodes if not e.success), key=lambda e: e.total_reward)
    expected = [result.episodes[0], *[e for e in failures if e.episode]][:3]
    assert [int(name[8:12]) for name in result.videos] == [e.episode for e in expected]
    assert sorted(os.listdir(tmp_path)) == sorted(result.videos)
    for name, shown in zip(result.videos, expected, strict=True):
        assert name == f"episode-{shown.episode:04d}-{'success' if shown.success else 'failure'}.mp4"
        frames = imageio.imread(tmp_path / name, plugin="FFMPEG")
        assert len(frames) == shown.length + 1
        env = make_env(line(), render=True)
        obs, _ = env.reset(seed=shown.seed)
        for frame in frames:
            bright = (frame[16, :, 0] > 100).sum()  # its width says where the point is
            assert bright == pytest.approx(32 + 28 * env.simulator.env.unwrapped.x, abs=3)
            obs, *_ = env.step(slow_for_negative_goals({"state": obs["state"][None]})[0])
    assert imageio.immeta(tmp_path / name, plugin="FFMPEG")["fps"] == 10


def test_worst_are_failures_with_the_lowest_return_then_the_longest_successes():
    episodes = [
        episode(0, True, 9, 5), episode(1, True, 3, 9), episode(2, False, -4, 30), episode(3, False, -9, 30),
        episode(4, True, 1, 20),
    ]  # fmt: skip
    assert [e.episode for e in chosen(episodes, 9)] == [0, 3, 2, 4, 1]
    assert [e.episode for e in chosen(episodes, 2)] == [0, 3] and [e.episode for e in chosen(episodes[:1], 2)] == [0]


def test_filming_changes_no_result_and_needs_a_folder(tmp_path):
    filmed = evaluate(proportional, line(), episodes=4, n_envs=2, video_dir=tmp_path)
    plain = evaluate(proportional, line(), episodes=4, videos=0, video_dir=tmp_path / "none")
    assert filmed.episodes == plain.episodes and plain.videos == () and not (tmp_path / "none").exists()
    assert evaluate(proportional, line(), episodes=1).videos == ()


def test_a_chunk_policys_and_an_experts_episodes_are_filmed_from_their_actions(tmp_path):
    settings = EnvSettings("metaworld/reach-v3", max_steps=20, render_size=64)
    for name, policy in (("flow", flow_policy(settings)), ("expert", "expert")):
        result = evaluate(policy, settings, episodes=2, video_dir=tmp_path / name)
        assert len(result.videos) == 2 and not any("not-reproduced" in video for video in result.videos)
        frames = imageio.imread(tmp_path / name / result.videos[0], plugin="FFMPEG")
        assert frames.shape == (result.episodes[0].length + 1, 64, 64, 3)
        assert np.abs(frames[-1].astype(int) - frames[0]).max() > 30


def test_a_simulator_that_does_not_repeat_itself_is_seen_in_the_videos_name(tmp_path):
    result = evaluate(proportional, line(), episodes=1)
    wrong = {0: np.ones((result.episodes[0].length, 1), np.float32) * 0.01}
    names = Camera(line(), 0).film(result.episodes, wrong, 1, tmp_path)
    assert names == ("episode-0000-success-not-reproduced.mp4",) and os.listdir(tmp_path) == list(names)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_environment_without_pictures_is_found_before_its_first_episode(tmp_path, backend):
    calls = []
    with pytest.raises((EnvError, VideoError), match="picture"):
        evaluate(lambda obs: calls.append(1), line(dark=True), episodes=1, video_dir=tmp_path, backend=backend)
    assert not calls and not os.listdir(tmp_path)


def test_a_missing_encoder_stops_the_evaluation_before_its_first_episode(tmp_path, monkeypatch):
    from genrl.envs import film

    def missing():
        raise VideoError('pip install "imageio[ffmpeg]"')

    monkeypatch.setattr(film, "find_encoder", missing)
    calls = []
    with pytest.raises(VideoError, match="imageio"):
        evaluate(lambda obs: calls.append(1), line(), episodes=1, video_dir=tmp_path)
    assert not calls


# ---------------------------------------------------------------------------- latency


def test_latency_counts_calls_after_the_warm_up_and_takes_their_percentiles(monkeypatch):
    from genrl.envs import latency

    clock, calls = [0.0], []
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock[0])

    def act(value):
        calls.append(value)
        clock[0] += 1.0 if len(calls) <= 3 else (len(calls) - 3) / 1000  # 1, 2, ..., 40 ms after the warm-up

    found = measure_latency(act, ["a", "b"], calls=40, warm_up=3)
    assert calls == ["ab"[i % 2] for i in range(43)]
    assert found.p50_ms == pytest.approx(20.5) and found.p95_ms == pytest.approx(np.percentile(range(1, 41), 95))
    assert (found.mean_ms, found.calls, found.batch, found.device) == (pytest.approx(20.5), 40, 1, "cpu")


def test_a_devices_queue_is_waited_for_around_every_call(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(device))
    measure_latency(lambda value: order.append("call"), [0], device="cuda:0", calls=3, warm_up=1)
    assert order == ["cuda:0", "call", "cuda:0"] * 4


def test_latency_of_a_policy_is_that_of_act_without_the_simulator(tmp_path):
    class Slow(type(flow_policy(line()))):
        def _sample(self, cond, noise, start):
            assert len(cond) in (1, 16)  # act on one observation, or a padded batch of the evaluation
            time.sleep(0.003)
            return super()._sample(cond, noise, start)

    policy = flow_policy(line())
    policy.__class__ = Slow
    found = evaluate(policy, line(), episodes=2).latency
    assert found.p50_ms >= 3 and found.batch == 1 and found.calls >= 10
