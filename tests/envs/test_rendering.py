"""Pictures: top is up in every adapter, both renderers see the same, and contexts do not disturb each other."""

import mujoco
import numpy as np
import pytest
from env_members import WITH_SCENE, shared_env
from picture_world import SIZE, world

from genrl.envs import make_env
from genrl.envs.pictures import Pictures
from genrl.envs.rays import RayRenderer, shape_distance
from genrl.envs.rendering import GLRenderer, make_renderer
from genrl.envs.settings import EnvSettings


@pytest.fixture(params=["egl", "rays"])
def renderer(request):
    made = make_renderer(request.param, colours=False)
    yield made
    made.close()


def middle(mask):
    rows, columns = np.nonzero(mask)
    return rows.mean(), columns.mean()


def seen(renderer, scene, name, camera=None, kind="geom"):
    """Mask of the pixels where something is seen."""
    types = {"geom": mujoco.mjtObj.mjOBJ_GEOM, "site": mujoco.mjtObj.mjOBJ_SITE}
    found = renderer.segmentation(scene, camera, SIZE)
    index = getattr(scene.model, kind)(name).id
    return (found[..., 0] == index) & (found[..., 1] == types[kind].value)


class TestWorld:
    """A scene whose picture is known."""

    @pytest.mark.parametrize("camera", ["south", "flipped"])
    def test_top_is_up_and_right_is_right(self, renderer, camera):
        scene = world(camera=camera)
        ball, box = middle(seen(renderer, scene, "ball")), middle(seen(renderer, scene, "box"))
        goal = middle(seen(renderer, scene, "goal", kind="site"))
        assert ball[0] < box[0]  # the ball is higher
        assert goal[1] < 48 < box[1]  # the goal is on the left, the box on the right
        picture = renderer.rgb(scene, None, SIZE).astype(int)
        red = (picture[..., 0] > picture[..., 1] + 40) & (picture[..., 0] > picture[..., 2] + 40)
        assert abs(middle(red)[0] - box[0]) < 3 and abs(middle(red)[1] - box[1]) < 3

    def test_turned_cameras_see_what_upright_ones_see(self, renderer):
        scene = world()
        pairs = [getattr(renderer, what) for what in ("rgb", "depth", "segmentation")]
        for draw in pairs:
            upright, turned = draw(scene, "south", SIZE), draw(scene, "flipped", SIZE)
            assert (upright == turned).mean() > 0.99

    def test_depth_is_the_distance_along_the_view(self, renderer):
        scene = world()
        depth = renderer.depth(scene, None, SIZE)
        box = seen(renderer, scene, "box")
        # The box's front is a plane at y = -0.2, the camera at y = -3.
        front = np.abs(depth[box] - 2.8) < 1e-3
        assert front.mean() > 0.85
        # A pinhole camera of 45 degrees: half the picture's height is 2.8 tan(22.5 deg) metres there.
        rows = np.nonzero(box.any(1))[0]
        height = (rows[-1] + 1 - rows[0]) / 96 * 2 * 2.8 * np.tan(np.radians(22.5))
        assert abs(height - 0.4) < 0.06
        assert np.isinf(depth[0]).all()  # the sky

    def test_points_lie_on_the_surfaces(self, renderer):
        scene = world()
        for camera in ("south", "above"):
            depth = renderer.depth(scene, camera, SIZE)
            points = scene.last_camera.points(depth)
            floor = points[seen(renderer, scene, "floor", camera)]
            assert np.abs(floor[:, 2]).max() < 5e-3
            ball = points[seen(renderer, scene, "ball", camera)]
            radii = np.linalg.norm(ball - [0.4, 0, 0.9], axis=1)
            assert np.abs(radii - 0.2).max() < 0.01

    def test_points_and_projection_are_inverse(self):
        scene = world()
        renderer = make_renderer("rays", False)
        depth = renderer.depth(scene, None, (20, 30))
        points = scene.last_camera.points(depth).reshape(-1, 3)
        finite = np.isfinite(points).all(1)
        pixels = scene.last_camera.project(points[finite])
        rows, columns = np.divmod(np.nonzero(finite)[0], 30)
        np.testing.assert_allclose(pixels[:, :2], np.stack([columns, rows], 1) + 0.5, atol=1e-6)
        np.testing.assert_allclose(pixels[:, 2], depth.reshape(-1)[finite], rtol=1e-6)

    def test_what_is_invisible_is_not_in_depth(self, renderer):
        """Shapes and markers with no opacity or in hidden groups stand between camera and scene."""
        above_horizon = renderer.depth(world(), None, SIZE)[:45]
        near = above_horizon[np.isfinite(above_horizon)]
        assert near.size and near.min() > 2.4

    def test_a_camera_inside_a_shape_looks_through_it(self, renderer):
        scene = world(camera="inside")
        assert not seen(renderer, scene, "box").any()

    @pytest.mark.parametrize(
        "shape, size",
        [
            ("sphere", "0.2 0 0"),
            ("ellipsoid", "0.1 0.2 0.3"),
            ("box", "0.1 0.2 0.3"),
            ("cylinder", "0.1 0.3 0"),
            ("capsule", "0.1 0.2 0"),
        ],
    )
    @pytest.mark.parametrize("camera", ["south", "above"])
    def test_markers_have_their_shape_in_both_renderers(self, shape, size, camera):
        scene = world(shape, size)
        gl, rays = GLRenderer("egl"), RayRenderer()
        mask_gl, mask_rays = (seen(each, scene, "goal", camera, "site") for each in (gl, rays))
        assert mask_gl.sum() > 30 and (mask_gl != mask_rays).sum() <= 0.1 * mask_gl.sum() + 2
        both = mask_gl & mask_rays
        gap = np.abs(gl.depth(scene, camera, SIZE)[both] - rays.depth(scene, camera, SIZE)[both])
        assert np.median(gap) < 3e-3
        gl.close()

    def test_markers_can_be_left_out(self):
        scene = world()
        for renderer in (GLRenderer("egl", sites=False), RayRenderer(sites=False)):
            assert not seen(renderer, scene, "goal", kind="site").any()

    def test_a_picture_larger_than_the_model_s_buffer(self, renderer):
        scene = world()
        assert renderer.rgb(scene, None, (16, 16)).shape == (16, 16, 3)
        picture = renderer.rgb(scene, None, (150, 210))
        assert picture.shape == (150, 210, 3) and picture[-1, -1].any() and picture[-1, 0].any()
        assert scene.model.vis.global_.offwidth == 64  # the model is as it was

    def test_pixels_are_square_in_wide_pictures(self, renderer):
        scene = world()
        found = renderer.segmentation(scene, None, (60, 180))
        ball = (found[..., 0] == scene.model.geom("ball").id) & (found[..., 1] == mujoco.mjtObj.mjOBJ_GEOM.value)
        rows, columns = np.nonzero(ball)
        assert abs(np.ptp(rows) - np.ptp(columns)) <= 1

    def test_shading_falls_off_to_the_side(self):
        scene = world()
        rays = RayRenderer()
        picture = rays.rgb(scene, None, SIZE)
        ball = seen(rays, scene, "ball")
        row, column = (int(value) for value in middle(ball))
        edge = np.nonzero(ball[row])[0][1]
        assert picture[row, column, 1] > picture[row, edge, 1] + 30
        assert (picture[ball][:, 1] > picture[ball][:, 0]).all()  # green


def test_rays_from_inside_and_beside_shapes():
    """Distances in closed form."""

    class Marker:
        mat, pos = np.eye(3), np.zeros(3)

        def __init__(self, kind, size):
            self.type, self.size = kind, np.array(size, float)

    right = np.array([[1.0, 0, 0], [0, 0, 1.0], [0.6, 0, 0.8]])
    start = np.array([-2.0, 0, 0])
    far = np.inf
    kinds = mujoco.mjtGeom
    expected = {
        (kinds.mjGEOM_SPHERE, (0.5, 0, 0)): (1.5, far, far),
        (kinds.mjGEOM_BOX, (0.5, 0.5, 0.5)): (1.5, far, far),
        (kinds.mjGEOM_BOX, (0.5, 0.5, 3.0)): (1.5, far, 2.5),
        (kinds.mjGEOM_CYLINDER, (0.5, 0, 3.0)): (1.5, far, 2.5),
        (kinds.mjGEOM_CAPSULE, (0.5, 0, 1.0)): (1.5, far, far),
        (kinds.mjGEOM_BOX, (3, 3, 3)): (5, 3, 3.75),  # from within
        (kinds.mjGEOM_PLANE, (1, 1, 1)): (far, far, far),  # not drawn as a marker
    }
    for (kind, size), distances in expected.items():
        np.testing.assert_allclose(shape_distance(Marker(kind, size), start, right), distances, err_msg=str(kind))


class TestAdapters:
    """A marker is drawn above, and one right of, the point in the middle of each adapter's usual picture."""

    @pytest.fixture
    def markers(self, monkeypatch):
        """Balls [(position, colour, radius)] added to what MuJoCo draws."""
        balls = []
        real = mujoco.mjv_updateScene

        def update(model, data, option, perturb, eye, category, scene):
            real(model, data, option, perturb, eye, category, scene)
            for position, colour, radius in balls:
                geom = scene.geoms[scene.ngeom]
                sizes = np.full(3, radius)
                mujoco.mjv_initGeom(
                    geom,
                    mujoco.mjtGeom.mjGEOM_SPHERE,
                    sizes,
                    np.array(position),
                    np.eye(3).reshape(9),
                    np.array(colour),
                )
                geom.emission = 1.0
                scene.ngeom += 1

        monkeypatch.setattr(mujoco, "mjv_updateScene", update)
        return balls

    @pytest.mark.parametrize("env_id", WITH_SCENE)
    def test_top_is_up_and_nothing_is_mirrored(self, env_id, markers):
        env = shared_env(env_id)
        env.reset(seed=0)
        scene, renderer = env.simulator.scene(), GLRenderer("egl")
        renderer.depth(scene, None, SIZE)
        camera = scene.last_camera
        forward = camera.rotation[:, 2]
        # From straight above, north (y) is up; else the world's up is. Right is what a person there has on the right.
        up = np.array([0.0, 1, 0]) if forward[2] < -0.99 else np.array([0.0, 0, 1])
        right = np.cross(forward, up)
        right /= np.linalg.norm(right)
        near = 5 * scene.model.vis.map.znear * scene.model.stat.extent
        centre = camera.position + near * forward
        without = renderer.rgb(scene, None, SIZE).astype(int)

        def place(offset):
            markers[:] = [(centre + 0.15 * near * offset, [1, 0, 1, 1], 0.03 * near)]
            changed = np.abs(renderer.rgb(scene, None, SIZE) - without).max(-1) > 20
            return middle(changed)

        above, beside = place(up), place(right)
        renderer.close()
        assert above[0] < 42 and abs(above[1] - 47.5) < 3
        assert beside[1] > 54 and abs(beside[0] - 47.5) < 3

    @pytest.mark.parametrize("env_id", [*WITH_SCENE, "pusht/PushT-v0"])
    def test_every_adapter_draws_videos(self, env_id):
        env = make_env(env_id, render_size=64)
        env.reset(seed=0)
        frame = env.render()
        assert frame.shape == (64, 64, 3) and frame.dtype == np.uint8 and frame.std() > 5
        env.close()

    @pytest.mark.parametrize("env_id", ["robosuite/Lift", "ogbench/cube-single-v0", "robotics/FetchPickAndPlace-v4"])
    def test_both_renderers_agree_on_depth(self, env_id):
        assert_depth_agrees(env_id, None)

    @pytest.mark.parametrize("camera", ["corner2", "corner", "topview", "behindGripper", "gripperPOV"])
    def test_both_renderers_agree_on_depth_in_meta_world(self, camera):
        assert_depth_agrees("metaworld/drawer-open-v3", camera)

    def test_the_goal_s_marker_is_at_the_goal(self):
        env = shared_env("metaworld/reach-v3")
        obs, _ = env.reset(seed=5)
        env.step(np.zeros(4))
        scene, rays = env.simulator.scene(), RayRenderer()
        mask = seen(rays, scene, "goal", kind="site")
        points = scene.last_camera.points(rays.depth(scene, None, SIZE))[mask]
        assert len(points) and np.linalg.norm(points.mean(0) - obs["state"][-3:]) < 0.03

    def test_robosuite_shows_no_collision_shapes(self):
        env = shared_env("robosuite/Lift")
        env.reset(seed=0)
        scene = env.simulator.scene()
        found = GLRenderer("egl").segmentation(scene, None, SIZE)
        geoms = np.unique(found[..., 0][found[..., 1] == mujoco.mjtObj.mjOBJ_GEOM.value])
        assert len(geoms) > 3 and (scene.model.geom_group[geoms] == 1).all()


def assert_depth_agrees(env_id, camera):
    env = shared_env(env_id)
    env.reset(seed=0)
    scene = env.simulator.scene()
    gl = GLRenderer("egl")
    one, two = gl.depth(scene, camera, SIZE), RayRenderer().depth(scene, camera, SIZE)
    gl.close()
    seen_by_both = np.isfinite(one) & np.isfinite(two)
    assert seen_by_both.mean() > 0.2
    assert (np.isfinite(one) != np.isfinite(two)).mean() < 0.005
    gap = np.abs(one[seen_by_both] - two[seen_by_both])
    assert np.median(gap) < 1e-4 and (gap > 5e-3).mean() < 0.01  # outlines


def test_depth_pictures_use_their_range():
    scene = world()
    pictures = Pictures(EnvSettings("a/b", ("depth",), image_size=96, renderer="rays", depth_range=(2.0, 4.0)))
    metres, steps = pictures.metres(scene), pictures.depth(scene)
    assert steps.shape == (1, 96, 96) and steps.dtype == np.uint8
    inside = (metres > 2.0) & (metres < 4.0)
    assert inside.mean() > 0.2
    assert np.abs(2.0 + steps[0][inside] / 255 * 2.0 - metres[inside]).max() <= 1.01 / 255
    assert (steps[0][np.isinf(metres)] == 255).all()


def test_cameras_of_their_own_names():
    env = make_env(
        "robosuite/Lift", observations=("agentview_image", "robot0_eye_in_hand_image", "image"), image_size=40
    )
    obs, _ = env.reset(seed=0)
    assert np.array_equal(obs["image"], obs["agentview_image"])  # the usual camera
    assert not np.array_equal(obs["image"], obs["robot0_eye_in_hand_image"])
