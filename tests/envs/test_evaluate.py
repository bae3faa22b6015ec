"""Evaluation: the same episodes however they are run, counted without bias, with errors that name the place."""

import json
import os

import numpy as np
import pytest
import torch
from acting_members import flow_policy, proportional, slow_for_negative_goals, trained_policy, with_random_weights
from toy_envs import line

import genrl.policies
from genrl.envs import (
    EnvError,
    EnvSettings,
    Evaluation,
    PolicyError,
    StacSettings,
    WorkerDiedError,
    episode_success,
    evaluate,
    make_env,
)
from genrl.networks import DiTBackbone, MLPBackbone, UNetBackbone
from genrl.policies import Chunking, ChunkPolicy, DiffusionPolicy, FlowPolicy, OneStepFlowPolicy
from genrl.policies.chunking import ChunkExecutor

REACH = EnvSettings("metaworld/reach-v3", max_steps=80)


@pytest.fixture(scope="module")
def policy():
    return trained_policy(REACH)


def written(tmp_path, result, name="a.json"):
    return result.save(tmp_path / name).read_bytes()


# ---------------------------------------------------------------------------- the same episodes


def test_a_real_policy_gets_the_same_file_with_1_4_and_16_environments_in_one_process_or_two(policy, tmp_path):
    files = {
        written(tmp_path, evaluate(policy, episodes=16, stac=2, **how))
        for how in (
            {"n_envs": 1},
            {"n_envs": 4},
            {"n_envs": 16},
            {"n_envs": 5, "backend": "async", "workers": 2},
        )
    }
    assert len(files) == 1
    result = json.loads(files.pop())
    assert 0 < result["summary"]["successes"] < 16  # else equal successes would say little
    assert len({episode["length"] for episode in result["episodes"]}) > 3


KINDS = {
    name: lambda cls=getattr(genrl.policies, name): cls(
        network=MLPBackbone(width=32),
        chunking=Chunking(8, 2, 3),
        **({"train_steps": 10, "steps": 10} if cls is DiffusionPolicy else {}),
    )
    for name in genrl.policies.__all__
    if isinstance(getattr(genrl.policies, name), type)
    and issubclass(getattr(genrl.policies, name), ChunkPolicy)
    and getattr(genrl.policies, name) is not ChunkPolicy
} | {
    "warm start": lambda: OneStepFlowPolicy(network=MLPBackbone(width=32), chunking=Chunking(8, 1, 3, warm_start=0.85)),
    "U-Net": lambda: FlowPolicy(steps=1, network=UNetBackbone(widths=(16, 32)), chunking=Chunking(8, 2, 3)),
    "transformer": lambda: FlowPolicy(
        steps=1, network=DiTBackbone(dim=32, depth=1, heads=2), chunking=Chunking(8, 2, 3)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_policy_and_network_gets_the_same_episodes_for_any_number_of_environments(kind):
    assert len(KINDS) >= 9
    policy, settings = with_random_weights(KINDS[kind](), line()), EnvSettings.of(line(), max_steps=12)
    results = [evaluate(policy, settings, episodes=7, n_envs=n, stac=2).to_dict() for n in (1, 7)]
    assert json.dumps(results[0]) == json.dumps(results[1])
    assert len({episode["total_reward"] for episode in results[0]["episodes"]}) == 7


@pytest.mark.parametrize(
    "chunking",
    [Chunking(8, 2, 4), Chunking(6, 1, 6), Chunking(5, 2, 1, ensembling=0.1), Chunking(4, 3, 2)],
    ids=["history", "open loop", "ensembling", "long history"],
)
def test_an_evaluation_is_what_single_steps_of_a_single_environment_give(chunking):
    settings = EnvSettings("metaworld/push-v3", max_steps=25)
    policy = flow_policy(settings, chunking, seed=3).eval()
    result = evaluate(policy, settings, episodes=3, n_envs=3, policy_seed=11, stop_at_success=False)
    env = make_env(settings)
    for number, episode in enumerate(result.episodes):
        executor = ChunkExecutor(policy, rows=1, seed=11)
        obs, _ = env.reset(seed=100_000 + number)
        executor.start(0, number, obs)
        total, flags, steps = 0.0, [], 0
        while steps < 25:
            action = executor.act({name: value[None] for name, value in obs.items()})[0]
            obs, reward, _, _, info = env.step(action)
            total, steps = total + reward, steps + 1
            flags.append(info["success"])
        assert episode.total_reward == pytest.approx(total, rel=1e-12)
        assert (episode.length, episode.success) == (25, episode_success(flags, "any"))


def test_a_row_cannot_have_executed_more_than_its_chunk():
    executor = ChunkExecutor(flow_policy(line(), Chunking(8, 1, 4)).eval(), rows=1)
    obs = {"state": np.zeros((3, 2), np.float32)}
    with pytest.raises(ValueError, match="0 actions of its chunk left"):
        executor.executed(0, obs)
    executor.start(0, 0, {"state": obs["state"][0]})
    executor.act({"state": obs["state"][:1]})
    executor.executed(0, obs)
    with pytest.raises(ValueError, match="cannot have executed 3 more"):
        executor.executed(0, obs)


def test_two_evaluations_with_the_same_seed_write_identical_files_and_clocks_go_elsewhere(policy, tmp_path):
    first = evaluate(policy, episodes=4, weights="ema", source="runs/a", out=tmp_path / "a.json")
    evaluate(policy, episodes=4, weights="ema", source="runs/b", n_envs=2, out=tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    timing = json.loads((tmp_path / "b.timing.json").read_text())
    assert timing["source"] == "runs/b" and timing["n_envs"] == 2 and timing["latency"]["batch"] == 1
    assert first.policy["weights"] == "ema" and first.policy["nfe"] == 2
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.timing.json", "b.json", "b.timing.json"]


def test_another_policy_seed_gives_other_noise_and_other_weights_another_fingerprint(policy):
    base = evaluate(policy, episodes=2, stop_at_success=False)
    other = evaluate(policy, episodes=2, policy_seed=1, stop_at_success=False)
    assert base.episodes[0].start == other.episodes[0].start
    assert base.episodes[0].total_reward != other.episodes[0].total_reward
    assert base.policy["fingerprint"] == other.policy["fingerprint"]
    parameter = next(policy.net.parameters())
    with torch.no_grad():
        parameter[0] += 1e-3
        changed = evaluate(policy, episodes=1).policy["fingerprint"]
        parameter[0] -= 1e-3
    assert changed != base.policy["fingerprint"]


def test_an_environment_that_overwrites_its_observations_is_evaluated_like_one_that_does_not():
    results = [evaluate(flow_policy(line(reuse=reuse)), line(reuse=reuse), episodes=5, n_envs=3) for reuse in (0, 1)]
    assert results[0].episodes == results[1].episodes
    assert results[0].distinct_starts == 5


def test_processes_that_draw_are_spawned_and_see_the_same_points():
    settings = EnvSettings(
        "metaworld/reach-v3",
        observations=("points", "state"),
        points=16,
        image_size=16,
        max_steps=60,
    )
    one, two = (evaluate("expert", settings, episodes=2, n_envs=1, backend=b, workers=1) for b in ("sync", "async"))
    assert one.episodes == two.episodes and one.distinct_starts == 2


def test_threads_and_training_mode_are_as_before(policy):
    policy.train()
    torch.set_num_threads(2)
    try:
        evaluate(policy, episodes=1)
        assert policy.training and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
        policy.eval()


# ---------------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("n_envs", [1, 3, 20])
def test_every_start_state_counts_once_however_long_its_episode_takes(n_envs):
    result = evaluate(slow_for_negative_goals, line(), episodes=20, n_envs=n_envs, seed=7)
    assert [(e.episode, e.seed) for e in result.episodes] == [(i, 7 + i) for i in range(20)]
    goals = [np.random.default_rng(7 + i).uniform(-1, 1) for i in range(20)]

    def reached(goal):
        x = 0.0
        for _ in range(30):
            x += 0.1 * (0.15 if goal < 0 else 1) * np.clip(10 * (goal - x), -1, 1)
            if abs(x - goal) < 0.05:
                return True
        return False

    reachable = [reached(goal) for goal in goals]
    assert [e.success for e in result.episodes] == reachable
    assert result.success_rate == sum(reachable) / 20 and 0.5 < result.success_rate < 1
    slow = [e.length for e, goal in zip(result.episodes, goals, strict=True) if goal < -0.3]
    fast = [e.length for e, goal in zip(result.episodes, goals, strict=True) if goal > 0.3]
    assert min(slow) > max(fast)  # short episodes would come first


@pytest.mark.parametrize(
    "rule, flags, success, step, length",
    [
        ("any", [0, 0, 1, 0, 0], True, 2, 3),
        ("any", [0, 0, 0, 0, 0], False, None, 5),
        ("final", [0, 1, 0, 1, 1], True, 1, 5),
        ("final", [1, 1, 1, 1, 0], False, 0, 5),
        ("hold:2", [1, 0, 1, 1, 0], True, 0, 4),
        ("hold:3", [1, 1, 0, 1, 1], False, 0, 5),
        ("count:3", [1, 0, 1, 0, 1], True, 0, 5),
    ],
)
def test_success_follows_the_rule_and_an_episode_ends_when_it_is_certain(rule, flags, success, step, length):
    settings = EnvSettings.of(line(flags=flags), max_steps=5)
    result = evaluate(proportional, settings, episodes=2, success=rule)
    for episode in result.episodes:
        assert (episode.success, episode.success_step, episode.length) == (success, step, length)
        assert episode.success == episode_success(flags, rule)
        ended = "success" if success and rule != "final" else "truncated"
        assert episode.ended == ended
    assert result.success_rule == rule
    played_on = evaluate(proportional, settings, episodes=1, success=rule, stop_at_success=False).episodes[0]
    assert (played_on.success, played_on.length) == (success, 5)


def test_returns_and_lengths_are_sums_until_the_end():
    settings = line(terminate=True)
    result = evaluate(proportional, settings, episodes=3, stop_at_success=False)
    for episode in result.episodes:
        env = make_env(settings)
        obs, _ = env.reset(seed=episode.seed)
        total, length, done = 0.0, 0, False
        while not done:
            obs, reward, done, _, _ = env.step(proportional({"state": obs["state"][None]})[0])
            total, length = total + reward, length + 1
        assert (episode.total_reward, episode.length, episode.ended) == (pytest.approx(total), length, "terminated")
    assert result.mean("length") == np.mean([e.length for e in result.episodes])


def test_the_number_of_distinct_starts_is_reported_and_one_of_n_is_a_warning():
    assert evaluate(proportional, line(), episodes=4).warnings == ()
    same = evaluate(proportional, line(fixed=True), episodes=4)
    assert same.distinct_starts == 1 and "1 distinct start of 4" in same.warnings[0]
    assert any(what == "warning" and "1 distinct" in text for what, text in same.table())


def test_start_states_that_are_successes_already_are_a_warning():
    result = evaluate(proportional, line(solved=True), episodes=2, seed=5)
    assert "2 start states are successes before the first action (seeds 5, 6)" in result.warnings


def test_a_task_without_a_notion_of_success_reports_returns_only():
    result = evaluate(lambda obs: np.zeros((len(obs["state"]), 6)), "gymnasium/HalfCheetah-v5", 2, stop_at_success=True)
    assert [e.success for e in result.episodes] == [None, None] and all(e.length == 1000 for e in result.episodes)
    assert np.isnan(result.success_rate) and result.summary()["success_rate"] is None
    assert not any("success" in what for what, _ in result.table())


# ---------------------------------------------------------------------------- who acts


class Remembering:
    """Moves towards the goal only in every second step of an episode."""

    def __init__(self):
        self.count, self.episode = {}, {}

    def start(self, row, episode, obs):
        assert obs["state"].shape == (2,)
        self.count[row], self.episode[row] = 0, episode

    def act(self, obs, active):
        action = proportional(obs)
        for row in np.flatnonzero(active):
            self.count[row] += 1
            action[row] *= self.count[row] % 2
        return action


def test_policies_of_yours_are_functions_or_remember_their_episodes():
    fast = evaluate(proportional, line(), episodes=6, n_envs=4)
    slow = [evaluate(Remembering(), line(), episodes=6, n_envs=n).episodes for n in (1, 4)]
    assert slow[0] == slow[1]
    for quick, halting in zip(fast.episodes, slow[0], strict=True):
        assert halting.length == 2 * quick.length - 1
    as_tensor = evaluate(lambda obs: torch.from_numpy(proportional(obs)), line(), episodes=6)
    assert as_tensor.episodes == fast.episodes


class Planner:
    """Plans three steps ahead from two observations; the noise of a prediction is its generator's."""

    n_obs_steps = 2

    def act(self, obs, generator=None):
        assert obs["state"].shape == (1, 2, 2)
        x, goal = obs["state"][0, -1]
        speed = x - obs["state"][0, 0, 0]
        noise = 0.1 * torch.randn(3, generator=generator)
        return (torch.clamp(5 * (goal - x) - speed + noise, -1, 1)).reshape(1, 3, 1)


def test_anything_with_the_act_of_a_chunk_policy_can_be_evaluated():
    results = [evaluate(Planner(), line(), episodes=6, n_envs=n) for n in (1, 4)]
    assert results[0].episodes == results[1].episodes and results[0].latency.batch == 1
    assert results[0].policy["class"] == "Planner" and results[0].success_rate > 0.5
    other = evaluate(Planner(), line(), episodes=6, policy_seed=1)
    assert [e.total_reward for e in other.episodes] != [e.total_reward for e in results[0].episodes]


def test_an_exported_policy_is_evaluated_like_the_original(tmp_path):
    from genrl.policies.export import OnnxPolicy, export_onnx

    policy = flow_policy(line(), Chunking(8, 2, 4), steps=1, scale=1.0).eval()
    export_onnx(policy, tmp_path / "policy.onnx")
    exported = evaluate(OnnxPolicy(tmp_path / "policy.onnx"), line(), episodes=5, n_envs=3)
    assert exported.seeds == evaluate(policy, line(), episodes=5).seeds
    assert exported.episodes == evaluate(OnnxPolicy(tmp_path / "policy.onnx"), line(), episodes=5, n_envs=1).episodes


def test_robomimics_rollout_interface_is_evaluated_one_environment_at_a_time():
    policy = flow_policy(line(), Chunking(8, 2, 4), scale=1.0)
    rollout = policy.rollout_policy()
    result = evaluate(rollout, line(), episodes=4, n_envs=3)
    assert result.timing["n_envs"] == 1
    chunked = evaluate(policy, line(), episodes=4)
    for ours, theirs in zip(chunked.episodes, result.episodes, strict=True):
        assert theirs.total_reward == pytest.approx(ours.total_reward, rel=1e-4) and theirs.start == ours.start


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_the_scripted_expert_is_the_upper_bound(backend):
    result = evaluate("expert", "metaworld/drawer-open-v3", episodes=5, n_envs=3, backend=backend, workers=2)
    assert result.success_rate == 1 and result.policy["class"] == "expert"
    assert result.episodes == evaluate("expert", "metaworld/drawer-open-v3", episodes=5, n_envs=1).episodes


def test_what_cannot_act_is_refused_with_what_can():
    with pytest.raises(
        EnvError, match=r"dict cannot be evaluated; give a ChunkPolicy, an object with act, or with start, act"
    ):
        evaluate({}, line(), episodes=1)
    with pytest.raises(EnvError, match="give env="):
        evaluate(proportional, episodes=1)
    with pytest.raises(EnvError, match="no ChunkPolicy"):
        evaluate(proportional, line(), episodes=1, stac=8)
    for wrong in ({"episodes": 0}, {"n_envs": 0}, {"videos": -1}, {"backend": "threads"}, {"cpu_threads": 0}):
        with pytest.raises(EnvError, match=f"{next(iter(wrong))} = "):
            evaluate(proportional, line(), **{"episodes": 1, **wrong})


def test_an_environment_that_does_not_give_what_the_policy_sees_is_refused_before_it_runs(policy):
    with pytest.raises(EnvError, match=r"state \[39\] \(the environment gives \[2\]\)"):
        evaluate(policy, line(), episodes=1)
    with pytest.raises(EnvError, match=r"state \[39\] \(the environment was made with points"):
        evaluate(policy, EnvSettings.of(REACH, observations=("points",), renderer="rays"), episodes=1)
    other = evaluate(policy, "metaworld/push-v3", episodes=1)
    assert other.warnings == ("the policy was trained for metaworld/reach-v3",)


# ---------------------------------------------------------------------------- what goes wrong


class Broken:
    """Right until step 4 of episode 2, then as told."""

    def __init__(self, how):
        self.how, self.steps, self.episode = how, {}, {}

    def start(self, row, episode, obs):
        self.steps[row], self.episode[row] = 0, episode

    def act(self, obs, active):
        action = proportional(obs) * 0.1
        for row in np.flatnonzero(active):
            if self.episode[row] == 2 and self.steps[row] == 4:
                if self.how == "raises":
                    raise ValueError("no inverse")
                if self.how == "interrupt":
                    raise KeyboardInterrupt
                if self.how == "shape":
                    return np.zeros((len(action), 3))
                action[row] = np.nan
            self.steps[row] += 1
        return action


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    "how, message", [("raises", "no inverse"), ("nan", "must be finite"), ("shape", r"expected \(1,\)")]
)
def test_a_policy_that_fails_is_reported_with_episode_seed_and_step(how, message, backend):
    with pytest.raises(PolicyError, match=message) as found:
        evaluate(Broken(how), line(), episodes=3, n_envs=1, backend=backend)
    assert "episode 2 (seed 100002) at step 4" in str(found.value)


def test_nan_in_the_middle_of_a_chunk_is_reported_with_its_step():
    policy = flow_policy(line(), Chunking(8, 1, 4))
    sample = policy._sample

    def poisoned(cond, noise, start):
        chunk = sample(cond, noise, start)
        chunk[:, 2] = torch.nan
        return chunk

    policy._sample = poisoned
    with pytest.raises(PolicyError, match=r"nan.* in episode 0 \(seed 9\) at step 2"):
        evaluate(policy, line(), episodes=1, seed=9)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_environment_that_fails_is_reported_with_episode_seed_and_step(backend):
    with pytest.raises(EnvError, match=r"ArithmeticError: joint limit") as found:
        evaluate(lambda obs: np.zeros((len(obs["state"]), 1)), line(fail=42), episodes=4, seed=40, backend=backend)
    assert "episode 2 (seed 42) at step 2" in str(found.value)


def test_a_process_that_dies_is_reported_with_its_exit_code():
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        evaluate(
            lambda obs: np.zeros((len(obs["state"]), 1)), line(die=41), episodes=4, seed=40, backend="async", workers=2
        )


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_interrupted_evaluation_leaves_what_was_measured(tmp_path, backend):
    whole = evaluate(Broken("nothing"), line(), episodes=2, n_envs=1)
    path = tmp_path / "a.json"
    with pytest.raises(KeyboardInterrupt) as stop:
        evaluate(Broken("interrupt"), line(), episodes=5, n_envs=1, backend=backend, out=path)
    found = Evaluation.load(path)
    assert found.episodes == whole.episodes and found.planned == 5 and not found.complete
    assert stop.value.partial == found and "2 of 5 episodes" in stop.value.__notes__[0]
    assert ("interrupted", "2 of 5 episodes; short ones are over-represented") in found.table()
    import multiprocessing

    assert not multiprocessing.active_children()


# ---------------------------------------------------------------------------- consistency


def test_consistency_is_logged_for_every_replanning_and_its_alarm_is_calibrated_without_the_episode_itself(policy):
    result = evaluate(policy, episodes=24, stac=StacSettings(samples=8, alpha=0.3))
    assert result.stac["settings"]["samples"] == 8 and result.stac["calibration"] == "leave one out"
    for episode in result.episodes:
        assert len(episode.stac.scores) == max(0, -(-episode.length // 4) - 1)
        assert list(episode.stac.scores) == sorted(episode.stac.scores) and min(episode.stac.scores) >= 0
    good = [e for e in result.episodes if e.success]
    from genrl.envs.alarms import conformal_threshold

    for episode in result.episodes:
        others = [e.stac.score for e in good if e is not episode]
        assert episode.stac.threshold == pytest.approx(conformal_threshold(others, 0.3))
        late = episode.stac.score > episode.stac.threshold
        assert (episode.stac.alarm_step is not None) == late
        if late:
            first = next(i for i, score in enumerate(episode.stac.scores) if score > episode.stac.threshold)
            assert episode.stac.alarm_step == 4 * (first + 1)
    metrics = result.stac["metrics"]
    assert metrics["failures"] + metrics["successes"] == 24 and metrics["tnr"] >= 0.5
    assert any(what == "consistency alarm" for what, _ in result.table())


def test_a_calibration_file_sets_the_threshold_and_must_have_been_scored_alike(policy, tmp_path):
    calibration = tmp_path / "calibration.json"
    source = evaluate(policy, episodes=24, seed=50_000, stac=StacSettings(samples=8, alpha=0.3), out=calibration)
    from genrl.envs.alarms import conformal_threshold

    expected = conformal_threshold([e.stac.score for e in source.episodes if e.success], 0.25)
    settings = StacSettings(samples=8, alpha=0.25, calibration=str(calibration))
    result = evaluate(policy, episodes=3, stac=settings)
    assert {e.stac.threshold for e in result.episodes} == {expected if np.isfinite(expected) else None}
    with pytest.raises(EnvError, match=r"samples \(8, here 4\)"):
        evaluate(policy, episodes=1, stac=StacSettings(samples=4, calibration=str(calibration)))
    plain = tmp_path / "plain.json"
    evaluate(policy, episodes=1, out=plain)
    with pytest.raises(EnvError, match="no consistency scores"):
        evaluate(policy, episodes=1, stac=StacSettings(samples=8, calibration=str(plain)))


def test_without_enough_successes_nothing_is_calibrated_and_the_table_says_what_is_missing():
    policy = flow_policy(line(flags=[0]), Chunking(8, 1, 4)).eval()
    result = evaluate(policy, line(flags=[0]), episodes=3, stac=4)
    assert result.stac["calibrated_episodes"] == 0 and all(e.stac.threshold is None for e in result.episodes)
    assert dict(result.table())["consistency alarm"].startswith("not calibrated: that takes 19 other successful")
    short = evaluate(policy, EnvSettings.of(line(), max_steps=3), episodes=2, stac=4)
    assert short.stac["metrics"] is None and "nothing to score" in dict(short.table())["consistency alarm"]


def test_scoring_consistency_changes_no_action(policy):
    assert [e.total_reward for e in evaluate(policy, episodes=3).episodes] == [
        e.total_reward for e in evaluate(policy, episodes=3, stac=4).episodes
    ]


def test_consistency_needs_chunks_that_overlap():
    policy = flow_policy(line(), Chunking(4, 1, 4))
    with pytest.raises(EnvError, match="n_action_steps = 4 of horizon 4"):
        evaluate(policy, line(), episodes=1, stac=4)
