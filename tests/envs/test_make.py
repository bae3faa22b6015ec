"""Environments from ids, settings and import paths, and the messages where that fails."""

import builtins
import itertools
import os
import subprocess
import sys

import faulty_envs
import gymnasium as gym
import numpy as np
import pytest

from genrl.envs import (
    EnvError,
    EnvSettings,
    EnvVersionWarning,
    MissingExtraError,
    episode_success,
    list_envs,
    list_families,
    make_env,
    make_env_from_env_args,
    settings_from_env_args,
)
from genrl.envs.make import FAMILIES, family_module
from genrl.envs.settings import picture_of


def run(code, **environment):
    """Standard output and error of Python code in a fresh process."""
    env = {**os.environ, **environment}
    env = {key: value for key, value in env.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return done.stdout, done.stderr


class TestIds:
    def test_every_family_lists_environments_under_its_name(self):
        assert set(list_families()) == set(FAMILIES)
        for family in FAMILIES:
            names = list_envs(family)
            assert names and all(name.startswith(f"{family}/") for name in names) and len(set(names)) == len(names)

    def test_meta_world_has_fifty_tasks(self):
        assert len(list_envs("metaworld")) == 50

    @pytest.mark.parametrize(
        "wrong, nearest",
        [
            ("metaworld/pick-plce-v3", "metaworld/pick-place-v3"),
            ("metaworld/drawer-open-v2", "metaworld/drawer-open-v3"),
            ("metawrld/reach-v3", "metaworld/reach-v3"),
            ("Lift", "robosuite/Lift"),
            ("robosuite/lift", "robosuite/Lift"),
            ("robotics/PointMaze_UMaze", "maze/PointMaze_UMaze-v3"),
        ],
    )
    def test_an_unknown_id_names_the_nearest_and_how_to_list(self, wrong, nearest):
        with pytest.raises(EnvError, match="list_envs") as error:
            make_env(wrong)
        assert nearest in str(error.value) and wrong in str(error.value)

    def test_a_missing_simulator_names_its_extra(self, monkeypatch):
        real = builtins.__import__

        def without_ogbench(name, *args, **kwargs):
            if name.split(".")[0] == "ogbench":
                raise ImportError("No module named 'ogbench'")
            return real(name, *args, **kwargs)

        monkeypatch.delitem(sys.modules, "genrl.envs.ogbench", raising=False)
        monkeypatch.setattr(builtins, "__import__", without_ogbench)
        with pytest.raises(MissingExtraError, match=r'pip install "genrl\[ogbench\]"'):
            make_env("ogbench/cube-single-v0")

    def test_every_extra_exists(self):
        import tomllib
        from pathlib import Path

        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
        assert {family.extra for family in FAMILIES.values()} <= set(project["project"]["optional-dependencies"])


class TestSettings:
    def test_dict_round_trip(self):
        settings = EnvSettings(
            "metaworld/reach-v3", ("points", "state"), 100, crop=((0, 0, 0), (1, 1, 1)), kwargs={"a": [1, {"b": 2}]}
        )
        values = settings.to_dict()
        assert EnvSettings.from_dict(values) == settings
        assert isinstance(values["crop"], list) and isinstance(values["observations"], list)

    def test_changes_leave_the_rest(self):
        settings = EnvSettings.of(EnvSettings("a/b", max_steps=5), image_size=64)
        assert (settings.id, settings.max_steps, settings.image_size) == ("a/b", 5, 64)

    @pytest.mark.parametrize(
        "values, message",
        [
            ({"observations": "state"}, "must be a list"),
            ({"observations": ["state", "state"]}, "twice"),
            ({"observations": []}, "must be a list"),
            ({"max_steps": 0}, "max_steps"),
            ({"image_size": 0}, "image_size"),
            ({"crop": [[0, 0, 0], [1, 0, 1]]}, "crop"),
            ({"depth_range": [2, 1]}, "depth_range"),
            ({"renderer": "glfw"}, "egl, osmesa, rays"),
            ({"point_method": "grid"}, "fps, random"),
            ({"success": "hold"}, "hold:K"),
            ({"success": "count:0"}, "K >= 1"),
            ({"observatons": ["state"]}, "did you mean 'observations'"),
        ],
    )
    def test_a_wrong_value_says_what_is_allowed(self, values, message):
        with pytest.raises(EnvError, match=message):
            EnvSettings.of({"id": "metaworld/reach-v3", **values})

    def test_names_of_pictures(self):
        assert picture_of("image") == ("image", None)
        assert picture_of("robot0_eye_in_hand_image") == ("image", "robot0_eye_in_hand")
        assert picture_of("front_depth") == ("depth", "front")
        assert picture_of("robot0_eef_pos") is None and picture_of("state") is None and picture_of("_image") is None


class TestSuccessRules:
    """Against all sequences of six flags."""

    SEQUENCES = tuple(itertools.product([False, True], repeat=6))

    def test_any_and_final(self):
        for flags in self.SEQUENCES:
            assert episode_success(flags, "any") == any(flags)
            assert episode_success(flags, "final") == flags[-1]

    @pytest.mark.parametrize("k", [1, 2, 4, 6, 7])
    def test_hold_is_a_run_and_count_a_total(self, k):
        for flags in self.SEQUENCES:
            text = "".join("x" if flag else "." for flag in flags)
            assert episode_success(flags, f"hold:{k}") == ("x" * k in text)
            assert episode_success(np.array(flags), f"count:{k}") == (text.count("x") >= k)

    def test_an_empty_episode_is_no_success(self):
        assert not any(episode_success([], rule) for rule in ("any", "final", "hold:1", "count:1"))


class TestObservations:
    def test_an_unknown_name_lists_the_known_ones(self):
        with pytest.raises(EnvError, match="state, image, depth, points"):
            make_env("metaworld/reach-v3", observations=("stat",))

    def test_an_unknown_camera_lists_the_known_ones(self):
        for changes in ({"camera": "cornr", "observations": ("image",)}, {"observations": ("cornr_image",)}):
            with pytest.raises(EnvError, match="corner2"):
                make_env("metaworld/reach-v3", **changes)

    def test_a_simulator_without_depth_says_so(self):
        with pytest.raises(EnvError, match="no depth"):
            make_env("pusht/PushT-v0", observations=("points",))

    def test_specs_keep_the_order_of_the_settings(self):
        names = ("state", "image", "points", "corner_depth")
        env = make_env("metaworld/reach-v3", observations=names, image_size=32, points=50)
        assert tuple(env.specs) == names == tuple(env.observation_space.spaces)
        assert {name: (spec.kind, spec.shape) for name, spec in env.specs.items()} == {
            "state": ("state", (39,)),
            "image": ("image", (3, 32, 32)),
            "points": ("points", (50, 3)),
            "corner_depth": ("image", (1, 32, 32)),
        }

    def test_kwargs_that_do_not_fit_are_named(self):
        with pytest.raises(EnvError, match=r"env\.kwargs.*frobnicate"):
            make_env("gymnasium/Hopper-v5", kwargs={"frobnicate": 1})


class TestActions:
    @pytest.fixture
    def env(self):
        env = make_env("faulty_envs:Reach")
        env.reset(seed=0)
        return env

    def test_actions_are_clipped_to_their_bounds(self, env):
        outside = env.step(np.array([5.0, -5.0]))[0]["state"]
        env.reset(seed=0)
        assert np.array_equal(outside, env.step(np.array([1.0, -1.0]))[0]["state"])

    @pytest.mark.parametrize("action", [[0.0], [0.0, 0.0, 0.0], [np.nan, 0.0], [np.inf, 0.0]])
    def test_an_action_that_is_none_is_refused(self, env, action):
        with pytest.raises(EnvError, match="2 finite numbers"):
            env.step(np.array(action))

    def test_a_step_before_the_reset_is_refused(self):
        with pytest.raises(EnvError, match="reset"):
            make_env("faulty_envs:Reach").step(np.zeros(2))


class TestSeeds:
    def test_a_drawn_seed_is_reported_and_repeats_the_episode(self):
        env = make_env("faulty_envs:Reach")
        obs, info = env.reset()
        assert np.array_equal(env.reset(seed=info["seed"])[0]["state"], obs["state"])
        assert env.reset()[1]["seed"] != env.reset()[1]["seed"]


class TestOwn:
    def test_class_and_function_by_import_path(self):
        assert make_env("faulty_envs:Reach").max_steps == 1000
        assert make_env("faulty_envs.Reach").family == "own"
        env = make_env("faulty_envs:make_limited", kwargs={"size": 0.0})
        assert env.max_steps == 7 and make_env("faulty_envs:make_limited", max_steps=3).max_steps == 3
        assert np.array_equal(env.reset(seed=4)[0]["state"], np.zeros(4))

    def test_the_time_limit_around_it_does_not_stop_it(self):
        env = make_env("faulty_envs:make_limited")
        env.reset(seed=0)
        ends = [env.step(np.zeros(2))[3] for _ in range(9)]
        assert ends == [False] * 6 + [True] * 3

    def test_a_goal_dictionary_becomes_state_in_the_documented_order(self):
        env = make_env("faulty_envs:Parts", observations=("state", "desired_goal", "observation"))
        obs, _ = env.reset(seed=0)
        assert np.array_equal(obs["state"], np.concatenate([obs["observation"], obs["desired_goal"]]))

    def test_pictures_need_render_mode_at_the_start(self):
        assert make_env("faulty_envs:Reach", render=True).render().shape == (20, 30, 3)
        with pytest.raises(EnvError, match="render=True"):
            make_env("faulty_envs:Reach").render()
        env = make_env("faulty_envs:Reach", observations=("image",), image_size=10)
        assert env.reset(seed=0)[0]["image"].shape == (3, 10, 10)

    @pytest.mark.parametrize(
        "path, message",
        [
            ("faulty_envs:NOT_CALLABLE", "class or a function"),
            ("faulty_envs:make_nothing", "not a gymnasium.Env"),
            ("faulty_envs:Absent", "Absent"),
            ("no_such_module:make", "no_such_module"),
        ],
    )
    def test_what_is_no_environment_is_refused(self, path, message):
        with pytest.raises(ValueError, match=message):
            make_env(path)

    def test_kwargs_that_do_not_fit_are_named(self):
        with pytest.raises(EnvError, match="colour"):
            make_env("faulty_envs:Reach", kwargs={"colour": 3})

    def test_discrete_actions_are_refused(self):
        with pytest.raises(EnvError, match="bounded Box"):
            make_env("gymnasium.envs.classic_control.cartpole:CartPoleEnv")


OLD_CONTROLLER = {
    "type": "OSC_POSE",
    "input_max": 1,
    "input_min": -1,
    "output_max": [0.05, 0.05, 0.05, 0.5, 0.5, 0.5],
    "output_min": [-0.05, -0.05, -0.05, -0.5, -0.5, -0.5],
    "kp": 150,
    "damping": 1,
    "impedance_mode": "fixed",
    "kp_limits": [0, 300],
    "damping_limits": [0, 10],
    "uncouple_pos_ori": True,
    "control_delta": True,
}


class TestEnvArgs:
    def args(self, version="1.4.1", **controller):
        kwargs = {
            "robots": ["Panda"],
            "has_renderer": True,
            "use_camera_obs": True,
            "camera_names": ["agentview"],
            "camera_heights": [64],
            "camera_widths": [64],
            "control_freq": 20,
            "ignore_done": False,
            "controller_configs": {**OLD_CONTROLLER, **controller},
        }
        return {"env_name": "Lift", "type": 1, "env_version": version, "env_kwargs": kwargs}

    def test_an_old_robomimic_file_opens_its_environment(self):
        with pytest.warns(EnvVersionWarning, match=r"1\.4\.1"):
            env = make_env_from_env_args(self.args(), observations=("robot0_eef_pos", "object"))
        assert env.id == "robosuite/Lift" and env.settings.image_size == 64
        assert env.action_representation == {"frame": "delta", "rotation": "axis_angle"}
        # Ten full steps of 5 cm to +x are commanded; the arm lags behind but moves along x only.
        start = env.reset(seed=0)[0]["robot0_eef_pos"]
        for _ in range(10):
            obs = env.step(np.array([1.0, 0, 0, 0, 0, 0, -1.0]))[0]
        moved = obs["robot0_eef_pos"] - start
        assert moved[0] > 0.08 and abs(moved[1]) < 0.02 and abs(moved[2]) < 0.02

    @pytest.mark.filterwarnings("ignore::genrl.envs.env_args.EnvVersionWarning")
    def test_absolute_targets_stay_absolute(self):
        env = make_env_from_env_args(self.args(control_delta=False))
        assert env.action_representation["frame"] == "absolute"

    def test_a_file_of_ours_gives_back_its_settings(self):
        settings = EnvSettings("metaworld/reach-v3", max_steps=77)
        args = {"env_name": settings.id, "type": 2, "env_kwargs": settings.to_dict()}
        assert settings_from_env_args(args) == settings
        assert settings_from_env_args(args, max_steps=5).max_steps == 5

    def test_a_gym_name_finds_its_family(self):
        assert settings_from_env_args({"env_name": "AdroitHandDoor-v1", "type": 2}).id == "adroit/AdroitHandDoor-v1"
        with pytest.raises(EnvError, match="hopper-medium"):
            settings_from_env_args({"env_name": "hopper-medium-v0", "type": 2})


class TestImports:
    def test_importing_the_package_loads_no_simulator(self):
        code = (
            "import sys, genrl.envs\n"
            "print([m for m in ('mujoco', 'gymnasium', 'torch', 'metaworld', 'robosuite', 'h5py') if m in sys.modules])"
        )
        assert run(code)[0].strip() == "[]"

    def test_a_simulator_loads_only_its_own(self):
        code = (
            "import sys; from genrl.envs import make_env; make_env('metaworld/reach-v3').reset(seed=0)\n"
            "print([m for m in ('torch', 'robosuite', 'gymnasium_robotics', 'ogbench') if m in sys.modules])"
        )
        assert run(code)[0].strip() == "[]"

    @pytest.mark.parametrize(
        "env_id", ["metaworld/reach-v3", "robosuite/Lift", "robotics/FetchReach-v4", "ogbench/cube-single-v0"]
    )
    def test_simulators_are_silent(self, env_id):
        code = f"from genrl.envs import make_env; e = make_env({env_id!r}); e.reset(seed=0); e.render(); e.close()"
        assert run(code) == ("", "")

    def test_egl_is_chosen_without_a_display(self):
        code = (
            "from genrl.envs import make_env; import os; make_env('gymnasium/Hopper-v5'); print(os.getenv('MUJOCO_GL'))"
        )
        assert run(code, MUJOCO_GL=None, DISPLAY=None)[0].strip() == "egl"
        assert run(code, MUJOCO_GL="disabled", DISPLAY=None)[0].strip() == "disabled"

    def test_family_modules_have_what_make_needs(self):
        for family in FAMILIES:
            module = family_module(family)
            assert callable(module.list_envs) and callable(module.build) and module.__doc__


def test_versions_name_simulator_and_python():
    versions = make_env("metaworld/reach-v3").versions()
    assert versions["mujoco"] == "3.3.0" and versions["metaworld"] and versions["python"].count(".") == 2


def test_task_environments_are_gymnasium_environments():
    env = make_env("faulty_envs:Reach")
    assert isinstance(env, gym.Env)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert isinstance(faulty_envs.Reach(), gym.Env)
