"""OpenGL contexts: none before the first picture, none disturbs another, and what happens where OpenGL is missing."""

import os
import subprocess
import sys

import numpy as np
import pytest
from picture_world import SIZE, world

from genrl.envs import RendererError, make_env
from genrl.envs import gl as gl_module
from genrl.envs.rendering import GLRenderer, make_renderer


class TestContexts:
    def test_two_environments_drawn_in_turn_look_as_they_do_alone(self):
        """Of different models and sizes, with renderers made and closed in between."""
        ids = ("metaworld/reach-v3", "maze/TwoWays", "metaworld/drawer-open-v3")
        settings = [{"id": id_, "observations": ["image"], "image_size": 40 + 8 * k} for k, id_ in enumerate(ids)]

        def frames(env):
            actions = np.linspace(-1, 1, 4 * env.action_space.shape[0]).reshape(4, -1)
            yield env.reset(seed=1)[0]["image"]
            for action in actions:
                yield env.step(action)[0]["image"]

        alone = []
        for setting in settings:
            env = make_env(setting)
            alone.append(list(frames(env)))
            env.close()
        together = [make_env(setting) for setting in settings]
        for step, images in enumerate(zip(*(frames(env) for env in together), strict=True)):
            for row, image in enumerate(images):
                assert np.array_equal(image, alone[row][step])
            passing = make_env(settings[step % 3])
            passing.reset(seed=step)
            passing.close()

    def test_nothing_is_drawn_before_the_first_reset(self):
        code = (
            "from genrl.envs import make_env; from genrl.envs.gl import gl_in_use\n"
            "env = make_env('metaworld/reach-v3', observations=('image',)); print(gl_in_use())\n"
            "env.reset(seed=0); print(gl_in_use())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "True"]
        assert done.stderr == ""  # also at the end of a process that closed nothing

    def test_a_fork_is_refused_the_context_of_its_parent(self):
        renderer, scene = GLRenderer("egl"), world()
        renderer.rgb(scene, None, SIZE)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                renderer.rgb(scene, None, SIZE)
            except RendererError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        renderer.rgb(scene, None, SIZE)
        renderer.close()


class TestWithoutOpenGL:
    """No library is found."""

    @pytest.fixture(autouse=True)
    def no_library(self, monkeypatch):
        monkeypatch.setattr(gl_module, "has_library", lambda backend: False)

    def test_points_and_videos_come_from_rays(self):
        env = make_env("metaworld/reach-v3", observations=("points",), points=50, render_size=32)
        assert env.reset(seed=0)[0]["points"].shape == (50, 3)
        assert env.render().shape == (32, 32, 3)
        assert env.versions()["renderer"] == "rays"

    def test_colours_that_a_policy_sees_are_not_replaced_silently(self):
        env = make_env("metaworld/reach-v3", observations=("image",))
        with pytest.raises(RendererError, match=r"libegl1.*rays"):
            env.reset(seed=0)
        chosen = make_env("metaworld/reach-v3", observations=("image",), renderer="rays", image_size=24)
        assert chosen.reset(seed=0)[0]["image"].shape == (3, 24, 24)

    def test_mujoco_can_be_imported(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "mujoco")
        monkeypatch.delenv("MUJOCO_GL", raising=False)
        monkeypatch.delenv("DISPLAY", raising=False)
        gl_module.prepare_rendering()
        chosen = os.environ.pop("MUJOCO_GL")
        assert chosen == "disabled"
        code = "import mujoco; print(mujoco.MjModel.from_xml_string('<mujoco/>').ngeom)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "MUJOCO_GL": chosen}
        )
        assert done.stdout.strip() == "0", done.stderr

    def test_a_variable_that_names_a_missing_library_is_an_error(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "mujoco")
        monkeypatch.setenv("MUJOCO_GL", "egl")
        with pytest.raises(RendererError, match=r"MUJOCO_GL=egl.*apt-get install.*unset"):
            gl_module.prepare_rendering()


def test_a_library_that_fails_names_packages_and_the_way_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco.osmesa", None)
    with pytest.raises(RendererError, match=r"osmesa.*libosmesa6.*rays"):
        make_renderer("osmesa", colours=True)


def test_a_driver_that_fails_leaves_points_and_no_noise():
    code = (
        "from genrl.envs import make_env\n"
        "env = make_env('metaworld/reach-v3', observations=('points',), points=40)\n"
        "env.reset(seed=0); print(env.versions()['renderer'])"
    )
    environment = {**os.environ, "MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "99"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout.strip(), done.stderr) == ("rays", "")


def test_the_first_library_is_what_mujoco_gl_says(monkeypatch):
    monkeypatch.setattr(gl_module, "has_library", lambda backend: True)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert gl_module.candidates() == ["osmesa", "egl"]
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert gl_module.candidates() == ["egl", "osmesa"]
