"""Scripted experts solve their tasks; yours come in by their import path."""

import sys
import textwrap
import warnings

import numpy as np
import pytest

from genrl.envs import EnvSettings, ExpertError, MissingExtraError, expert, list_envs, list_experts, make_env
from genrl.envs.demonstrate import Demonstrating, demonstrate


def solved(env_id, seeds, noise=0.0, **changes):
    """Share of demonstrations that succeed, and the demonstrations."""
    settings = Demonstrating(EnvSettings.of(env_id, **changes), noise=noise, after_success=0)
    env, acting = settings.env.make(), expert(env_id)
    try:
        episodes = [demonstrate(env, acting, settings, seed) for seed in seeds]
    finally:
        env.close()
    return sum(e.success for e in episodes) / len(episodes), episodes


def test_each_of_the_50_meta_world_tasks_has_an_expert():
    assert sorted(list_experts("metaworld")) == sorted(list_envs("metaworld")) and len(list_experts("metaworld")) == 50
    policies = {type(expert(task).policy) for task in list_experts("metaworld")}
    assert len(policies) >= 48  # nearly every task has a policy of its own


@pytest.mark.parametrize("task", ["reach", "drawer-open", "pick-place", "door-lock", "push", "coffee-button", "hammer"])
def test_meta_world_experts_succeed_with_actions_in_bounds_and_without_warnings(task):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the package warns on most steps
        share, episodes = solved(f"metaworld/{task}-v3", [0, 1])
    assert share == 1
    assert max(np.abs(episode.actions).max() for episode in episodes) <= 1


def test_a_meta_world_expert_sees_the_state_of_a_task_whose_policy_sees_something_else():
    env = make_env("metaworld/reach-v3")
    obs, _ = env.reset(seed=3)
    acting = expert("metaworld/reach-v3")
    assert np.array_equal(acting({"unrelated": np.zeros(1)}, env), acting(obs, env))


@pytest.mark.parametrize("task", ["PointMaze_UMaze-v3", "PointMaze_Medium-v3", "PointMaze_Large-v3", "TwoWays"])
def test_point_mazes_are_solved_from_every_start(task):
    share, episodes = solved(f"maze/{task}", range(6))
    assert share == 1
    assert all(np.abs(episode.actions).max() <= 1 for episode in episodes)


def test_of_two_equal_ways_each_is_taken_about_as_often_and_the_seed_decides():
    share, episodes = solved("maze/TwoWays", range(24))
    assert share == 1
    sides = []
    for episode in episodes:
        x, y = episode.obs["state"][:, 0], episode.obs["state"][:, 1]
        beside = y[np.abs(x) < 0.3]  # while passing the wall
        assert (beside > 0.5).all() or (beside < -0.5).all()
        sides.append(bool(beside[0] > 0))
    assert 5 <= sum(sides) <= 19  # outside with probability 0.3 % for a fair coin
    again = solved("maze/TwoWays", range(3))[1]
    assert all(np.array_equal(a.actions, b.actions) for a, b in zip(again, episodes, strict=False))


def test_a_maze_of_your_own_is_solved_too():
    maze = [[1, 1, 1, 1, 1, 1], [1, "r", 1, 0, 0, 1], [1, 0, 1, 0, 1, 1], [1, 0, 0, 0, "g", 1], [1, 1, 1, 1, 1, 1]]
    settings = EnvSettings("maze/PointMaze_UMaze-v3", kwargs={"maze_map": maze})
    env, acting = settings.make(), expert(settings)
    assert demonstrate(env, acting, Demonstrating(settings), 0).success


@pytest.mark.parametrize("task", ["FetchReach-v4", "FetchPickAndPlace-v4", "FetchPush-v4"])
def test_the_fetch_arm_holds_its_goal_at_the_end(task):
    share, episodes = solved(f"robotics/{task}", range(5))
    assert share == 1 and all(len(episode) <= 50 for episode in episodes)


def test_lift_is_lifted():
    share, episodes = solved("robosuite/Lift", range(3))
    assert share == 1 and max(map(len, episodes)) < 80


@pytest.mark.parametrize("task", ["cube-single-v0", "cube-double-singletask-task5-v0", "puzzle-3x3-v0", "scene-v0"])
def test_ogbench_tasks_are_solved_by_plans_of_its_oracles(task):
    assert solved(f"ogbench/{task}", [0])[0] == 1


def test_lights_out_is_solved_with_the_fewest_presses():
    from genrl.envs.experts.ogbench import lights, solve_lights_out

    rng = np.random.default_rng(0)
    for shape in ((3, 3), (2, 3), (4, 4)):
        presses = rng.integers(0, 2, shape)
        found = solve_lights_out(lights(presses))
        assert (lights(found) == lights(presses)).all() and found.sum() <= presses.sum()
    brute = [np.array([(i >> b) & 1 for b in range(6)]).reshape(2, 3) for i in range(64)]
    for goal in brute:
        sizes = [p.sum() for p in brute if (lights(p) == goal).all()]
        found = solve_lights_out(goal)
        assert (found is None) == (not sizes) and (found is None or found.sum() == min(sizes))


def test_experts_come_back_to_their_path_under_noise():
    share, episodes = solved("metaworld/reach-v3", range(5), noise=0.3)
    calm = solved("metaworld/reach-v3", range(5))[1]
    assert share == 1
    assert not np.array_equal(episodes[0].obs["state"][3], calm[0].obs["state"][3])


@pytest.mark.parametrize("task", ["maze/TwoWays", "robotics/FetchPush-v4", "robosuite/Lift", "ogbench/cube-single-v0"])
def test_an_experts_episode_depends_on_its_seed_and_not_on_what_it_did_before(task):
    settings = Demonstrating(EnvSettings.of(task, max_steps=30), noise=0.1)
    env, acting = settings.env.make(), expert(task)
    first = demonstrate(env, acting, settings, 5)
    demonstrate(env, acting, settings, 6)
    again = demonstrate(env, acting, settings, 5)
    assert np.array_equal(first.actions, again.actions)
    assert all(np.array_equal(first.obs[name], again.obs[name]) for name in first.obs)


@pytest.mark.parametrize(
    "task, message",
    [
        ("metaworld/reach-v2", r"no scripted expert; experts: .*metaworld/reach-v3"),
        ("adroit/AdroitHandPen-v1", r"families that have some: metaworld, maze"),
        ("robosuite/Stack", r"experts: robosuite/Lift"),
        ("robotics/FetchSlide-v4", r"FetchPush-v4"),
    ],
)
def test_a_task_without_an_expert_is_answered_with_those_that_exist(task, message):
    with pytest.raises(ExpertError, match=message):
        expert(task)


def test_only_installed_families_are_listed(monkeypatch):
    from genrl.envs import make

    def missing(family):
        if family == "ogbench":
            raise MissingExtraError('pip install "genrl[ogbench]"')
        return real(family)

    real = make.family_module
    monkeypatch.setattr(make, "family_module", missing)
    listed = list_experts()
    assert "metaworld/reach-v3" in listed and not any(name.startswith("ogbench") for name in listed)
    with pytest.raises(MissingExtraError, match=r"genrl\[ogbench\]"):
        expert("ogbench/cube-single-v0")
    with pytest.raises(ExpertError, match="pusht has no scripted experts"):
        list_experts("pusht")


OWN = """
import numpy as np

def still(obs, env):
    return np.zeros(4)

class Counting:
    def __init__(self):
        self.resets = []
    def reset(self, seed):
        self.resets.append(seed)
    def __call__(self, obs, env):
        return np.full(4, 0.1)

class Forgetful(Counting):
    def reset(self):
        self.resets.append("without seed")

class Demanding:
    def __init__(self, weight):
        pass

class Silent:
    pass

def broken(obs, env):
    raise KeyError("gripper")

def endless(obs, env):
    return np.full(4, np.nan)

def short(obs, env):
    return np.zeros(3)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_own_experts.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_own_experts"
    sys.modules.pop("my_own_experts", None)


def test_your_own_expert_is_a_function_or_a_class_at_an_import_path(own):
    env = make_env("metaworld/reach-v3", max_steps=5)
    obs, _ = env.reset(seed=0)
    function = expert("metaworld/reach-v3", f"{own}.still")
    function.reset(3)
    assert np.array_equal(function(obs, env), np.zeros(4))
    counting, forgetful = (expert("metaworld/reach-v3", f"{own}:{name}") for name in ("Counting", "Forgetful"))
    counting.reset(7)
    forgetful.reset(7)
    assert counting.call.resets == [7] and forgetful.call.resets == ["without seed"]


@pytest.mark.parametrize(
    "name, message",
    [("missing", "there is no class"), ("Demanding", "without arguments"), ("Silent", "cannot be called as")],
)
def test_an_import_path_without_a_usable_expert_says_why(own, name, message):
    with pytest.raises(ExpertError, match=message):
        expert("metaworld/reach-v3", f"{own}.{name}")


@pytest.mark.parametrize("name, message", [("broken", "KeyError"), ("endless", "4 finite"), ("short", "4 finite")])
def test_an_expert_that_fails_is_reported_with_seed_and_step(own, name, message):
    settings = Demonstrating(EnvSettings("metaworld/reach-v3"))
    acting = expert("metaworld/reach-v3", f"{own}.{name}")
    with pytest.raises(ExpertError, match=rf"seed 4 at step 0 .*{message}"):
        demonstrate(settings.env.make(), acting, settings, 4)
