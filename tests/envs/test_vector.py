"""Several environments at once give what single ones give, and say what happened when a process dies."""

import os
import signal
import time

import numpy as np
import pytest

from genrl.envs import EnvError, EnvSettings, WorkerDiedError, default_n_envs, make_env, make_vec
from genrl.envs import vector as vector_module

BACKENDS = [("sync", None), ("async", "fork"), ("async", "spawn")]
SCENE = {"id": "metaworld/reach-v3", "observations": ["state", "image", "points"], "image_size": 24, "points": 40}


def vec(env, n, backend, context=None, **changes):
    return make_vec(env, n, backend=backend, context=context, **changes)


def singles(env, seeds, actions):
    """Observations, rewards and flags of single environments, per row: [steps + 1] dictionaries."""
    rows = []
    for row, seed in enumerate(seeds):
        single = make_env(env)
        seen = [single.reset(seed=seed)[0]]
        results = [single.step(action[row]) for action in actions]
        rows.append((seen + [result[0] for result in results], [result[1:] for result in results]))
        single.close()
    return rows


class TestEqualsSingles:
    @pytest.mark.parametrize("backend, context", BACKENDS)
    @pytest.mark.parametrize("env", ["metaworld/drawer-open-v3", "robotics/FetchReach-v4"])
    def test_states_rewards_and_flags(self, env, backend, context):
        settings = EnvSettings(env, max_steps=5)
        actions = np.random.default_rng(0).uniform(-1, 1, (5, 2, 4))
        expected = singles(settings, [3, 8], actions)
        rows = vec(settings, 2, backend, context)
        try:
            obs, info = rows.reset(seed=[3, 8])
            assert list(info["seed"]) == [3, 8]
            steps = [(obs, None, None, None, None), *(rows.step(action) for action in actions)]
        finally:
            rows.close()
        for row, (seen, results) in enumerate(expected):
            for step, (obs, reward, terminated, truncated, info) in enumerate(steps):
                assert np.array_equal(obs["state"][row], seen[step]["state"])
                if step:
                    single = results[step - 1]
                    assert (reward[row], terminated[row], truncated[row]) == single[:3]
                    assert info["success"][row] == single[3]["success"]
        # The last observation is that of the end, not that of a new episode.
        assert steps[-1][3].all()

    @pytest.mark.parametrize("backend, context", [*BACKENDS[:1], BACKENDS[2]])
    def test_pictures_and_points(self, backend, context):
        actions = np.random.default_rng(0).uniform(-1, 1, (2, 2, 4))
        expected = singles(SCENE, [3, 8], actions)
        rows = vec(SCENE, 2, backend, context)
        try:
            seen = [rows.reset(seed=[3, 8])[0], *(rows.step(action)[0] for action in actions)]
        finally:
            rows.close()
        for row, (single, _) in enumerate(expected):
            for step, obs in enumerate(single):
                for name in obs:
                    assert np.array_equal(seen[step][name][row], obs[name]), (name, step)

    def test_forked_processes_draw_where_the_parent_has_not(self):
        """In a fresh process, since this one has drawn."""
        import subprocess
        import sys

        code = (
            "import numpy as np; from genrl.envs import make_vec, make_env\n"
            f"scene = {SCENE!r}\n"
            "rows = make_vec(scene, 2, backend='async', context='fork')\n"
            "a = rows.reset(seed=[3, 8])[0]; rows.close()\n"
            "single = make_env(scene)\n"
            "starts = [single.reset(seed=seed)[0] for seed in (3, 8)]\n"
            "print(all(np.array_equal(a[k][i], v) for i in (0, 1) for k, v in starts[i].items()))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == "True", done.stderr


class TestRows:
    @pytest.mark.parametrize("backend, context", BACKENDS[:2])
    def test_rows_start_alone_and_ended_rows_stand_still(self, backend, context):
        rows = vec("faulty_envs:Countdown", 3, backend, context)
        try:
            rows.reset(seed=[0, 1, 2])
            go = np.ones((3, 2))
            for _ in range(2):
                obs, *_ = rows.step(go)
            # Row 1 starts anew while the others go on to their end at their third step.
            options = {"reset_mask": np.array([False, True, False])}
            obs, _ = rows.reset(seed=[5, 6, 7], options=options)
            assert list(options) == ["reset_mask"]
            assert list(obs["state"][:, 2]) == [2, 0, 2]
            obs, reward, terminated, _, _ = rows.step(go)
            assert list(obs["state"][:, 2]) == [3, 1, 3] and list(terminated) == [True, False, True]
            final = obs["state"].copy()
            obs, reward, terminated, truncated, info = rows.step(go)
            assert np.array_equal(obs["state"][[0, 2]], final[[0, 2]]) and obs["state"][1, 2] == 2
            assert list(reward[[0, 2]]) == [0, 0] and reward[1] != 0
            assert list(terminated) == [True, False, True] and not truncated.any()
            assert list(info["still"]) == [True, False, True]
        finally:
            rows.close()

    @pytest.mark.parametrize("backend, context", BACKENDS[:2])
    def test_halted_rows_wait_for_their_reset(self, backend, context):
        rows = vec("faulty_envs:Reach", 2, backend, context)
        try:
            rows.reset(seed=0)
            before = rows.step(np.ones((2, 2)))[0]["state"].copy()
            rows.halt(np.array([True, False]))
            after = rows.step(np.ones((2, 2)))[0]["state"].copy()
            assert np.array_equal(after[0], before[0]) and not np.array_equal(after[1], before[1])
            rows.reset(seed=[4, 0], options={"reset_mask": np.array([True, False])})
            moved = rows.step(np.ones((2, 2)))[0]["state"]
            assert not np.array_equal(moved, after)
        finally:
            rows.close()

    @pytest.mark.parametrize("backend, context", BACKENDS[:2])
    def test_stored_observations_stay(self, backend, context):
        rows = vec("faulty_envs:SharedBuffer", 2, backend, context)
        try:
            kept = [rows.reset(seed=0)[0]["state"]]
            kept += [rows.step(np.full((2, 2), 0.5))[0]["state"] for _ in range(3)]
            assert len({array.tobytes() for array in kept}) == 4
        finally:
            rows.close()

    def test_seeds_count_up_from_the_first(self):
        rows = vec("faulty_envs:Reach", 3, "sync", seed=10)
        assert list(rows.reset()[1]["seed"]) == [10, 11, 12]
        assert list(rows.reset(seed=np.int64(4))[1]["seed"]) == [4, 5, 6]
        assert list(rows.reset(seed=np.array([7, 1, 7]))[1]["seed"]) == [7, 1, 7]

    @pytest.mark.parametrize("backend, context", BACKENDS[:2])
    def test_videos_and_versions_of_rows(self, backend, context):
        rows = vec("faulty_envs:Reach", 2, backend, context, render=True)
        try:
            rows.reset(seed=0)
            assert rows.render_row(1).shape == (20, 30, 3)
            assert rows.versions()["gymnasium"]
        finally:
            rows.close()


class TestFailures:
    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_a_dead_process_is_named_with_its_exit_code(self, context):
        rows = vec("faulty_envs:Dies", 2, "async", context)
        rows.reset(seed=0)
        rows.step(np.zeros((2, 2)))
        with pytest.raises(WorkerDiedError, match="exit code 3"):
            rows.step(np.zeros((2, 2)))

    def test_a_killed_process_hints_at_memory(self):
        rows = vec("faulty_envs:Reach", 2, "async", "fork")
        rows.reset(seed=0)
        os.kill(rows.processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"row 1 ended with exit code -9.*fewer n_envs"):
            for _ in range(3):
                rows.step(np.zeros((2, 2)))

    @pytest.mark.filterwarnings("ignore")
    def test_a_mistake_in_the_environment_comes_through(self):
        for backend, context in BACKENDS[:2]:
            rows = vec("faulty_envs:Fails", 2, backend, context)
            rows.reset(seed=0)
            with pytest.raises(RuntimeError, match="a mistake in the environment"):
                rows.step(np.zeros((2, 2)))
            rows.close()

    def test_closing_after_a_death_does_not_hang(self):
        rows = vec("faulty_envs:Reach", 2, "async", "fork")
        rows.reset(seed=0)
        os.kill(rows.processes[0].pid, signal.SIGKILL)
        begin = time.monotonic()
        rows.close()
        assert time.monotonic() - begin < 10

    def test_values_out_of_range(self):
        with pytest.raises(EnvError, match="n_envs"):
            make_vec("faulty_envs:Reach", 0)
        with pytest.raises(EnvError, match="sync"):
            make_vec("faulty_envs:Reach", 1, backend="threads")


class TestDefaults:
    def test_rows_follow_cores_and_memory(self, monkeypatch):
        monkeypatch.setattr(vector_module.os, "sched_getaffinity", lambda _: set(range(6)))
        monkeypatch.setattr(vector_module, "_free_memory", lambda: None)
        assert default_n_envs() == 6
        monkeypatch.setattr(vector_module, "_free_memory", lambda: 3.5 * vector_module.WORKER_BYTES)
        assert default_n_envs() == 3
        monkeypatch.setattr(vector_module, "_free_memory", lambda: 0)
        assert default_n_envs() == 1

    def test_memory_is_read_where_the_system_tells(self):
        free = vector_module._free_memory()
        assert free is None or 2**20 < free < 2**50

    def test_processes_spawn_where_forking_is_unsafe(self, monkeypatch):
        state, image = EnvSettings("a/b"), EnvSettings("a/b", ("image",))
        monkeypatch.setattr(vector_module, "gl_in_use", lambda: False)
        assert vector_module.default_context(state) == "fork"
        assert vector_module.default_context(image) == "spawn"
        monkeypatch.setattr(vector_module, "gl_in_use", lambda: True)
        assert vector_module.default_context(state) == "spawn"

    def test_a_fork_that_would_draw_after_its_parent_is_refused(self, monkeypatch):
        monkeypatch.setattr(vector_module, "gl_in_use", lambda: True)
        with pytest.raises(EnvError, match="spawn"):
            make_vec(SCENE, 1, backend="async", context="fork")
