"""What every family promises: seeds, bounds, flags, lengths; and each family's own promises."""

import hashlib
import json
import pickle
import subprocess
import sys

import metaworld
import mujoco
import numpy as np
import pytest
from env_members import MEMBERS, fixed_actions, play, shared_env
from metaworld.types import Task

from genrl.envs import list_envs, make_env, probe

STEPS = 12


def digest(env_id):
    """Fingerprint of a start and the steps after it."""
    env = shared_env(env_id)
    seen = play(env, 11, fixed_actions(env, STEPS))
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in seen.items()}


class TestEveryFamily:
    @pytest.mark.parametrize("env_id", MEMBERS)
    def test_the_probe_finds_no_fault(self, env_id, monkeypatch):
        monkeypatch.setattr("genrl.envs.probing.PATIENCE", 0.2)
        report = probe(shared_env(env_id), steps=STEPS)
        assert report.ok, str(report)

    @pytest.mark.parametrize("env_id", MEMBERS)
    def test_a_long_episode_in_between_changes_nothing(self, env_id):
        env = shared_env(env_id)
        actions = fixed_actions(env, STEPS)
        first = play(env, 3, actions)
        play(env, 4, fixed_actions(env, 60, seed=8))
        again = play(env, 3, actions)
        assert all(np.array_equal(first[name], again[name]) for name in first)

    def test_another_process_gets_the_same_episodes(self):
        code = (
            "import sys, json; sys.path[:0] = json.loads(sys.argv[1])\n"
            "from test_families import MEMBERS, digest\n"
            "print(json.dumps({m: digest(m) for m in reversed(MEMBERS)}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(sys.path)], capture_output=True, text=True, check=True
        )
        theirs = json.loads(done.stdout.splitlines()[-1])
        assert theirs == {member: digest(member) for member in MEMBERS}

    @pytest.mark.parametrize("env_id", MEMBERS)
    def test_numpy_global_generator_is_left_alone(self, env_id):
        env = shared_env(env_id)
        np.random.seed(5)
        before = pickle.dumps(np.random.get_state())
        play(env, 0, fixed_actions(env, 3))
        assert pickle.dumps(np.random.get_state()) == before
        np.random.seed(6)
        other = play(env, 0, fixed_actions(env, 3))
        np.random.seed(7)
        again = play(env, 0, fixed_actions(env, 3))
        assert all(np.array_equal(other[name], again[name]) for name in other)

    @pytest.mark.parametrize("env_id", MEMBERS)
    def test_flags_rewards_and_types(self, env_id):
        env = shared_env(env_id)
        _, info = env.reset(seed=0)
        assert info["seed"] == 0 and info["success"] is False
        obs, reward, terminated, truncated, info = env.step(fixed_actions(env, 1)[0])
        assert isinstance(reward, float) and type(terminated) is bool and type(truncated) is bool
        assert type(info["success"]) is bool
        assert env.observation_space.contains(obs) and obs["state"].dtype == np.float32

    @pytest.mark.parametrize("env_id", MEMBERS)
    def test_versions_name_the_simulator(self, env_id):
        versions = shared_env(env_id).versions()
        assert len(versions) >= 4 and "unknown" not in versions.values()


class TestMetaWorld:
    TASKS = tuple(list_envs("metaworld"))

    @pytest.mark.parametrize("env_id", TASKS)
    def test_all_tasks_start_where_the_seed_says(self, env_id):
        env = make_env(env_id)
        actions = fixed_actions(env, 4)
        first = play(env, 0, actions)["state"]
        other = play(env, 1, fixed_actions(env, 10, seed=3))["state"]
        assert np.array_equal(play(env, 0, actions)["state"], first)
        assert not np.array_equal(other[0], first[0])

    @pytest.mark.parametrize(
        "name", ["pick-place-v3", "door-close-v3", "disassemble-v3", "basketball-v3", "stick-pull-v3"]
    )
    def test_starts_are_those_of_the_benchmark_with_the_same_vector(self, name):
        """A fresh task of the package, set to the vector that our seed drew, starts equally (as MT1 does it)."""
        ours = make_env(f"metaworld/{name}")
        obs, _ = ours.reset(seed=21)
        vector = ours.simulator.env._last_rand_vec
        theirs = metaworld.env_dict.ALL_V3_ENVIRONMENTS[name]()
        data = {"rand_vec": vector, "env_cls": type(theirs), "partially_observable": False}
        theirs.set_task(Task(name, pickle.dumps(data)))
        start, _ = theirs.reset()
        np.testing.assert_allclose(obs["state"], start, rtol=0, atol=1e-6)
        action = np.array([0.3, -0.2, 0.5, 1.0], np.float32)
        np.testing.assert_allclose(ours.step(action)[0]["state"], theirs.step(action)[0], rtol=0, atol=1e-6)

    def test_starts_fill_the_task_s_range(self):
        env = make_env("metaworld/reach-v3")
        vectors = []
        for seed in range(40):
            env.reset(seed=seed)
            vectors.append(env.simulator.env._last_rand_vec)
        space = env.simulator.env._random_reset_space
        share = (np.array(vectors) - space.low)[:, [0, 1, 3, 4, 5]] / (space.high - space.low)[[0, 1, 3, 4, 5]]
        assert share.min() >= 0 and share.max() <= 1
        assert (share.min(0) < 0.2).all() and (share.max(0) > 0.8).all()

    def test_the_goal_is_part_of_the_state(self):
        env = shared_env("metaworld/pick-place-v3")
        goals = [env.reset(seed=seed)[0]["state"][-3:] for seed in (0, 1)]
        assert not np.array_equal(*goals) and np.abs(goals).min() > 0
        assert np.allclose(goals[1], env.simulator.env._target_pos)

    def test_five_hundred_steps_and_more(self):
        env = make_env("metaworld/reach-v3")
        assert env.max_steps == 500 and env.success_rule == "any"
        env.reset(seed=0)
        ends = [env.step(np.zeros(4))[2:4] for _ in range(503)]
        assert [truncated for _, truncated in ends] == [False] * 499 + [True] * 4
        assert not any(terminated for terminated, _ in ends)

    @pytest.mark.filterwarnings("ignore:Constant")
    def test_the_package_s_expert_succeeds(self):
        from metaworld.policies import ENV_POLICY_MAP

        env = make_env("metaworld/drawer-open-v3")
        expert = ENV_POLICY_MAP["drawer-open-v3"]()
        obs, _ = env.reset(seed=1)
        flags = []
        for _ in range(150):
            obs, _, _, _, info = env.step(expert.get_action(obs["state"].astype(float)))
            flags.append(info["success"])
        assert any(flags) and not flags[0]


def set_position(env, **joints):
    """Put named joints of the simulator where they should be."""
    inner = env.simulator.env
    data, model = inner.data, inner.model
    for name, value in joints.items():
        joint = model.joint(name)
        data.qpos[joint.qposadr[0] : joint.qposadr[0] + np.size(value)] = value
        data.qvel[joint.dofadr[0]] = 0
    mujoco.mj_forward(model, data)


class TestSuccessIsSeen:
    """A state in the goal is a success, and the start is not."""

    def succeed(self, env, seed, place, action=None):
        assert env.reset(seed=seed)[1]["success"] is False
        place()
        action = np.zeros(env.action_space.shape) if action is None else action
        return env.step(action)

    def test_adroit_door(self):
        env = shared_env("adroit/AdroitHandDoor-v1")
        _, _, terminated, _, info = self.succeed(env, 0, lambda: set_position(env, door_hinge=1.45))
        assert info["success"] and not terminated and env.success_rule == "count:26"
        assert shared_env("adroit/AdroitHandPen-v1").success_rule == "count:21"

    def test_fetch(self):
        env = shared_env("robotics/FetchPickAndPlace-v4")

        def place():
            inner = env.simulator.env
            inner.goal = inner._utils.get_site_xpos(inner.model, inner.data, "object0").copy()

        _, _, terminated, _, info = self.succeed(env, 0, place)
        assert info["success"] and not terminated and env.success_rule == "final" and env.max_steps == 50

    def test_mazes_end_in_the_goal_and_do_not_move_it(self):
        env = shared_env("maze/TwoWays")
        goal = env.reset(seed=0)[0]["state"][-2:]

        def place():
            inner = env.simulator.env
            inner.data.qpos[:2] = goal

        obs, reward, terminated, _, info = self.succeed(env, 0, place)
        assert info["success"] and terminated and reward == 1.0
        assert np.array_equal(obs["state"][-2:], goal)

    def test_kitchen_needs_all_its_tasks(self):
        from gymnasium_robotics.envs.franka_kitchen.kitchen_env import OBS_ELEMENT_GOALS, OBS_ELEMENT_INDICES

        env = shared_env("kitchen/FrankaKitchen-v1")
        tasks = list(env.simulator.env.goal)
        assert len(tasks) == 4

        def place(number):
            for task in tasks[:number]:
                env.simulator.env.data.qpos[OBS_ELEMENT_INDICES[task]] = OBS_ELEMENT_GOALS[task]
            mujoco.mj_forward(env.simulator.env.model, env.simulator.env.data)

        assert not self.succeed(env, 0, lambda: place(3))[4]["success"]
        _, _, terminated, _, info = self.succeed(env, 0, lambda: place(4))
        assert info["success"] and terminated
        assert env.reset(seed=0)[1]["success"] is False

    def test_robosuite_lift(self):
        env = shared_env("robosuite/Lift")

        def place():
            sim = env.simulator.env.sim
            sim.data.set_joint_qpos("cube_joint0", np.array([0, 0, 1.1, 1, 0, 0, 0]))
            sim.forward()

        _, _, terminated, _, info = self.succeed(env, 0, place)
        assert info["success"] and not terminated

    def test_ogbench_cube(self):
        env = make_env("ogbench/cube-single-singletask-v0")

        def place():
            inner = env.simulator.env
            target = inner.data.mocap_pos[inner._cube_target_mocap_ids[0]]
            inner.data.joint("object_joint_0").qpos[:3] = target
            mujoco.mj_forward(inner.model, inner.data)

        # The single-task variants judge the state before an action; the flag here is of the state after it.
        _, _, terminated, _, info = self.succeed(env, 0, place)
        assert info["success"] and not terminated
        assert env.step(np.zeros(5))[2]

    def test_pusht(self):
        env = shared_env("pusht/PushT-v0")

        def place():
            inner = env.simulator.env
            inner.agent.position = [40.0, 40.0]
            inner.block.angle = inner.goal_pose[2]
            inner.block.position = list(inner.goal_pose[:2])

        _, reward, terminated, _, info = self.succeed(env, 0, place, action=np.array([40.0, 40.0]))
        assert info["success"] and terminated and reward == 1.0

    def test_locomotion_has_no_success(self):
        env = shared_env("gymnasium/HalfCheetah-v5")
        assert not env.has_success and shared_env("maze/TwoWays").has_success


class TestStates:
    """The documented order of what makes the state."""

    def test_robosuite_has_robomimic_s_names_and_order(self):
        names = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object")
        env = make_env("robosuite/Lift", observations=("state", *names, "robot0_joint_pos"))
        obs, _ = env.reset(seed=0)
        assert np.array_equal(obs["state"], np.concatenate([obs[name] for name in names]))
        assert {name: obs[name].shape for name in names} == {
            "robot0_eef_pos": (3,),
            "robot0_eef_quat": (4,),
            "robot0_gripper_qpos": (2,),
            "object": (10,),
        }
        # The cube's position leads `object`: it stands on the table.
        assert 0.8 < obs["object"][2] < 0.85
        assert env.action_representation == {"frame": "delta", "rotation": "axis_angle"}

    def test_goal_conditioned_states_end_with_the_goal(self):
        for env_id, goal in (("robotics/FetchPickAndPlace-v4", "desired_goal"), ("ogbench/cube-single-v0", "goal")):
            env = make_env(env_id, observations=("state", "observation", goal))
            obs, _ = env.reset(seed=0)
            assert np.array_equal(obs["state"], np.concatenate([obs["observation"], obs[goal]]))

    def test_ogbench_draws_its_task_by_the_seed_or_fixes_it(self):
        env = shared_env("ogbench/cube-single-v0")
        drawn = [env.reset(seed=seed)[1]["task_id"] for seed in range(12)]
        assert len(set(drawn)) > 2 and drawn == [env.reset(seed=seed)[1]["task_id"] for seed in range(12)]
        fixed = make_env("ogbench/cube-single-v0", kwargs={"task_id": 3})
        assert {fixed.reset(seed=seed)[1]["task_id"] for seed in range(4)} == {3}
        with pytest.raises(ValueError, match="1 to 5"):
            make_env("ogbench/cube-single-v0", kwargs={"task_id": 9})

    def test_two_ways_is_its_own_mirror_image(self):
        from genrl.envs.maze import TWO_WAYS_MAP

        cells = np.array(TWO_WAYS_MAP, dtype=object)
        assert cells.shape == (7, 7) and (cells == cells[::-1]).all()
        middle = cells[:, 3]
        assert list(middle) == [1, 0, 1, 1, 1, 0, 1]  # the wall leaves one way above and one below
        env = shared_env("maze/TwoWays")
        states = np.stack([env.reset(seed=seed)[0]["state"] for seed in range(30)])
        assert (np.abs(states[:, 0] + 2) <= 0.25).all() and (np.abs(states[:, 4] - 2) <= 0.25).all()
        assert (np.abs(states[:, [1, 5]]) <= 0.25).all() and states[:, 1].std() > 0.05

    def test_robosuite_kwargs_reach_the_simulator(self):
        env = make_env("robosuite/Lift", kwargs={"reward_shaping": True, "control_freq": 10})
        env.reset(seed=0)
        assert 0 < env.step(np.zeros(7))[1] < 1
        assert env.simulator.env.control_freq == 10 and env.simulator.env.ignore_done
