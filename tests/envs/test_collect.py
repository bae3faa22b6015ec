"""Demonstrations: successes only, labels that come back from noise, files that are complete and repeatable."""

import os

import numpy as np
import pytest
from toy_envs import line

from genrl.envs import (
    CollectSettings,
    EnvSettings,
    ExpertError,
    ScriptedDemonstrations,
    WorkerDiedError,
    collect,
    make_env,
)
from genrl.envs.data import open_demonstrations
from genrl.envs.demonstrate import Demonstrating, demonstrate
from genrl.envs.experts import OwnExpert, expert

h5py = pytest.importorskip("h5py")
HAND = "demonstrating_hands"

MODULE = """
import numpy as np

class Steady:
    '''Moves to the goal of toy_envs.Line; keeps away from goals on the left.'''
    def __call__(self, obs, env):
        x, goal = env.vectors["state"]
        return np.clip([10 * (abs(goal) - x)], -1, 1)

class Always(Steady):
    def __call__(self, obs, env):
        x, goal = env.vectors["state"]
        return np.clip([10 * (goal - x)], -1, 1)

class Never:
    def __call__(self, obs, env):
        return np.zeros(1)
"""


@pytest.fixture
def hands(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"{HAND}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    yield HAND
    import sys

    sys.modules.pop(HAND, None)


def goal(seed):
    return float(np.random.default_rng(seed).uniform(-1, 1))


def test_only_successes_are_kept_with_their_seeds_and_the_failed_ones_are_listed(tmp_path, hands):
    path = collect(line(), f"{hands}.Steady", episodes=8, seed=3, path=tmp_path / "a.hdf5")
    data = open_demonstrations(path)
    wanted = [seed for seed in range(3, 60) if goal(seed) > -0.025][:8]  # the expert fails for goals on the left
    assert [e.seed for e in data.episodes] == wanted == data.meta["seeds"]
    assert data.meta["failed_seeds"] == [seed for seed in range(3, wanted[-1]) if seed not in wanted] != []
    assert all(e.success for e in data.episodes) and len({len(e) for e in data.episodes}) > 2
    for episode in data.episodes:  # the start state is that of the seed
        obs, _ = make_env(line()).reset(seed=episode.seed)
        assert np.array_equal(episode.obs["state"][0], obs["state"])


def test_failures_are_kept_on_request_and_marked(tmp_path, hands):
    path = collect(line(), f"{hands}.Steady", episodes=8, seed=3, keep_failures=True, path=tmp_path / "a.hdf5")
    data = open_demonstrations(path)
    assert [e.seed for e in data.episodes] == list(range(3, 11))
    assert [e.success for e in data.episodes] == [goal(seed) > -0.025 for seed in range(3, 11)]
    good, bad = (open_demonstrations(path, filter_key=key) for key in ("success", "failure"))
    assert all(e.success for e in good.episodes) and not any(e.success for e in bad.episodes)
    assert len(good) + len(bad) == 8 and len(bad) > 0


@pytest.mark.parametrize("after", [0, 1, 7])
def test_an_episode_goes_on_for_some_steps_beyond_its_success(hands, after):
    settings = Demonstrating(line(), f"{hands}.Always", after_success=after)
    env, acting = settings.env.make(), expert(line(), f"{hands}.Always")
    for seed in range(4):
        episode = demonstrate(env, acting, settings, seed)
        x, at = episode.obs["state"][:, 0], episode.obs["state"][0, 1]
        reached = np.abs(np.append(x[1:], episode.final_obs["state"][0]) - at) < 0.05  # flag of each step
        assert reached.argmax() == len(episode) - 1 - after


def test_a_success_that_must_hold_at_the_end_is_waited_for():
    flags = [0, 1, 0, 0, 1, 1, 1, 1, 0]
    settings = Demonstrating(EnvSettings.of(line(flags=flags), success="final"), after_success=2)
    episode = demonstrate(settings.env.make(), OwnExpert(lambda obs, env: np.zeros(1)), settings, 0)
    assert len(episode) == 7 and episode.success  # steps 4, 5, 6 in a row
    held = Demonstrating(EnvSettings.of(line(flags=flags), success="hold:3"), after_success=0)
    assert len(demonstrate(held.env.make(), OwnExpert(lambda obs, env: np.zeros(1)), held, 0)) == 7


def test_noise_moves_the_robot_and_leaves_the_label_clean(hands):
    acting = expert(line(), f"{hands}.Always")

    def made(**how):
        settings = Demonstrating(line(), f"{hands}.Always", **how)
        return demonstrate(settings.env.make(), acting, settings, 1)

    calm, noisy, executed = made(), made(noise=0.4), made(noise=0.4, noise_label="executed")
    x = np.append(noisy.obs["state"][:, 0], noisy.final_obs["state"][0])
    target = noisy.obs["state"][0, 1]
    assert np.allclose(
        noisy.actions[:, 0], np.clip(10 * (target - x[:-1]), -1, 1), atol=1e-5
    )  # what the expert wants there
    moved = np.diff(x) / 0.1  # what was executed
    assert np.allclose(moved, executed.actions[:, 0], atol=1e-4) and np.array_equal(
        noisy.obs["state"], executed.obs["state"]
    )
    assert np.abs(moved - noisy.actions[:, 0]).max() > 0.1 and np.abs(moved).max() <= 1 + 1e-5
    assert not np.array_equal(noisy.obs["state"][:3], calm.obs["state"][:3])


def test_noise_has_the_stated_size_in_units_of_half_the_action_range():
    settings = Demonstrating(EnvSettings.of(line(flags=[0]), max_steps=3000), noise=0.2, noise_label="executed")
    episode = demonstrate(settings.env.make(), OwnExpert(lambda obs, env: np.zeros(1)), settings, 0)
    assert episode.actions.std() == pytest.approx(0.2, rel=0.05) and abs(episode.actions.mean()) < 0.02


def test_several_processes_write_the_same_file_byte_for_byte(tmp_path, hands):
    files = {
        collect(line(), f"{hands}.Steady", episodes=7, noise=0.1, path=tmp_path / f"{n}.hdf5", workers=n).read_bytes()
        for n in (1, 2, 3)
    }
    assert len(files) == 1
    again = collect(line(), f"{hands}.Steady", episodes=7, noise=0.1, path=tmp_path / "again.hdf5")
    assert {again.read_bytes()} == files


def test_a_file_says_what_it_holds_and_makes_its_environment_again(tmp_path):
    env = EnvSettings("metaworld/reach-v3", observations=("state",), max_steps=150)
    path = collect(env, episodes=2, noise=0.1, after_success=3, path=tmp_path / "deep" / "reach.hdf5")
    with h5py.File(path) as file:
        assert sorted(file["data"]) == ["demo_0", "demo_1"] and file["data/demo_0"].attrs["seed"] == 0
        assert file["data/demo_0/obs/state"].shape == (len(file["data/demo_0/actions"]), 39)
        assert file["data/demo_0/next_obs/state"].shape == file["data/demo_0/obs/state"].shape
    meta = open_demonstrations(path).meta
    assert EnvSettings.from_dict(meta["env"]) == env
    assert (meta["noise"], meta["noise_label"], meta["after_success"], meta["expert"]) == (0.1, "clean", 3, "auto")
    assert meta["versions"]["mujoco"] and meta["action_low"] == [-1] * 4
    assert os.listdir(path.parent) == ["reach.hdf5"]


def test_a_robosuite_file_names_its_environment_and_controller_as_robomimic_does(tmp_path):
    from genrl.envs import make_env_from_env_args

    path = collect("robosuite/Lift", episodes=1, after_success=2, path=tmp_path / "lift.hdf5")
    data = open_demonstrations(path)
    env_args = data.meta["env_args"]
    assert (env_args["env_name"], env_args["type"]) == ("Lift", 1)
    assert data.meta["action_representation"]["frame"] == "delta"
    env, episode = make_env_from_env_args(env_args), data.episodes[0]
    obs, _ = env.reset(seed=episode.seed)
    for seen, action in zip(episode.obs["state"], episode.actions, strict=True):
        assert np.array_equal(obs["state"], seen)  # the same simulator, replayed from the file alone
        obs, _, _, _, info = env.step(action)
    assert info["success"]


def test_points_and_images_are_collected_too(tmp_path):
    env = EnvSettings("metaworld/reach-v3", observations=("points", "image"), points=32, image_size=24, max_steps=150)
    data = open_demonstrations(collect(env, episodes=1, after_success=0, path=tmp_path / "a.hdf5"))
    assert {name: (spec.kind, spec.shape) for name, spec in data.specs.items()} == {
        "points": ("points", (32, 3)),
        "image": ("image", (3, 24, 24)),
    }
    assert data.episodes[0].success and data.episodes[0].obs["image"].dtype == np.uint8


def test_too_few_successes_are_an_error_with_numbers_and_leave_the_old_file(tmp_path, hands):
    path = tmp_path / "a.hdf5"
    path.write_bytes(b"old")
    settings = line(flags=[0])
    with pytest.raises(ExpertError, match=r"only 0 of 25 attempts .*keep_failures"):
        collect(settings, f"{hands}.Never", episodes=1, path=path)
    assert path.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["a.hdf5", "modules"]


def test_an_interrupted_collection_leaves_no_file(tmp_path, hands):
    calls = []

    def stop(obs, env):
        calls.append(1)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return np.zeros(1)

    import demonstrating_hands

    demonstrating_hands.stop = stop
    with pytest.raises(KeyboardInterrupt):
        collect(line(), f"{hands}.stop", episodes=3, path=tmp_path / "a.hdf5", keep_failures=True)
    assert os.listdir(tmp_path) == ["modules"]


def test_a_process_that_dies_is_an_error_not_a_hang(tmp_path, hands):
    with pytest.raises(WorkerDiedError, match="fewer workers"):
        collect(line(die=2), f"{hands}.Never", episodes=4, path=tmp_path / "a.hdf5", workers=2, keep_failures=True)
    assert not (tmp_path / "a.hdf5").exists()


@pytest.mark.parametrize(
    "changes, message",
    [({"episodes": 0}, "episodes = 0"), ({"workers": 0}, "workers = 0"), ({"noise": -0.1}, "noise = -0.1"),
     ({"noise": float("nan")}, "noise = nan"), ({"seed": -1}, "seed = -1"),
     ({"after_success": -1}, "after_success = -1"), ({"noise_label": "both"}, "'clean' and"),
     ({"path": "a.npz"}, "must end in .hdf5"),
     ({"env": "adroit/AdroitHandPen-v1"}, "no scripted expert")],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(tmp_path, changes, message):
    values = {"env": "metaworld/reach-v3", "path": tmp_path / "a.hdf5", "episodes": 1, **changes}
    with pytest.raises(ExpertError, match=message):
        collect(**values)


def test_a_configuration_collects_the_same(tmp_path):
    settings = CollectSettings(EnvSettings("maze/TwoWays"), out=str(tmp_path / "a.hdf5"), episodes=3, noise=0.05)
    direct = collect("maze/TwoWays", episodes=3, noise=0.05, path=tmp_path / "b.hdf5")
    assert settings.run().read_bytes() == direct.read_bytes()
    assert CollectSettings({"id": "maze/TwoWays"}).env == EnvSettings("maze/TwoWays")


# ---------------------------------------------------------------------------- the part of configurations


def test_scripted_demonstrations_are_collected_once_and_then_read(tmp_path, hands, monkeypatch):
    part = ScriptedDemonstrations(line(), episodes=3, expert=f"{hands}.Steady", cache_dir=str(tmp_path / "cache"))
    first = part.load(progress=False)
    (folder,) = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    monkeypatch.setattr(CollectSettings, "run", lambda *a, **k: pytest.fail("collected again"))
    again = part.load(progress=False)
    assert [e.seed for e in again.episodes] == [e.seed for e in first.episodes]
    assert all(np.array_equal(a.actions, b.actions) for a, b in zip(first.episodes, again.episodes, strict=True))
    assert folder.name.startswith("demonstrations-toy_envs-Line-")


@pytest.mark.parametrize(
    "change",
    [{"episodes": 4}, {"seed": 1}, {"noise": 0.1}, {"after_success": 2}, {"env": line(reuse=True)},
     {"keep_failures": True}, {"noise_label": "executed"}],
)  # fmt: skip
def test_every_setting_belongs_to_the_key_of_the_cache(tmp_path, hands, change):
    values = {"env": line(), "episodes": 2, "expert": f"{hands}.Always", "cache_dir": str(tmp_path)}
    ScriptedDemonstrations(**values).load(progress=False)
    ScriptedDemonstrations(**{**values, **change}).load(progress=False)
    assert (
        len([entry for entry in tmp_path.iterdir() if entry.name.startswith("demonstrations") and entry.is_dir()]) == 2
    )


def test_a_changed_expert_and_other_versions_are_collected_anew(tmp_path, hands, monkeypatch):
    part = ScriptedDemonstrations(line(), episodes=2, expert=f"{hands}.Always", cache_dir=str(tmp_path / "cache"))

    def folders():
        part.load(progress=False)
        return sum(entry.is_dir() for entry in (tmp_path / "cache").iterdir())

    assert folders() == 1 and folders() == 1
    file = tmp_path / "modules" / f"{hands}.py"
    file.write_text(file.read_text().replace("10 * (goal", "9 * (goal"))
    assert folders() == 2
    from genrl.envs.base import TaskEnv

    monkeypatch.setattr(TaskEnv, "versions", lambda self: {"mujoco": "9.9"})
    assert folders() == 3
