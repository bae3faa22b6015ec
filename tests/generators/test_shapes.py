import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from genrl.cli import main
from genrl.diffusion import Euler, RectifiedFlow, RowNoise, Sampler, Schedule
from genrl.generators import ShapePrompts, ShapesGenerator
from genrl.generators.recipe import BaseRecipe, seeded
from genrl.generators.shapes_base import base_objects, fit_codec, train_base, velocity_of
from genrl.generators.shapes_data import (
    KINDS,
    TRUNCATION,
    box,
    cell_centres,
    clean_shape,
    cylinder,
    make_shapes,
    shape_of,
    sphere,
)
from genrl.generators.shapes_view import (
    HALF_WIDTH,
    camera,
    condition_views,
    depth,
    read_view,
    shaded,
    silhouette,
    to_distance,
    to_media,
)
from genrl.networks.shapes import LatentMLP, VoxelDiT

TINY = {"latent_dim": 32, "dim": 32, "hidden": 64, "depth": 1, "base_shapes": 120, "base_steps": 5}
OBJECTS = [(kind, seed) for kind in KINDS for seed in range(20)]


@pytest.fixture(scope="module")
def shapes():
    return make_shapes(OBJECTS)[1]


@pytest.fixture(scope="module")
def generator(cache):
    made = ShapesGenerator(**TINY, cache_dir=cache)
    made.prepare("cpu", progress=False)
    return made


def ball(radius, centre=(0.0, 0.0, 0.0), resolution=24):
    line = cell_centres(resolution)
    p = np.meshgrid(line, line, line, indexing="ij")
    return torch.from_numpy(np.clip(sphere(p, centre, radius) / TRUNCATION, -1, 1))[None]


# ---------------------------------------------------------------------------------------------------------- objects


def test_distances_to_primitives_agree_with_the_nearest_of_many_points_on_them():
    rng = np.random.default_rng(0)
    places = rng.uniform(-1, 1, (60, 3))
    p = tuple(places.T)
    centre, half = (0.1, -0.2, 0.05), (0.3, 0.2, 0.4)
    side = rng.integers(0, 3, 60_000)
    on_box = rng.uniform(-1, 1, (60_000, 3)) * half
    on_box[np.arange(60_000), side] = np.take(half, side) * rng.choice([-1, 1], 60_000)
    angle, up, out = (
        rng.uniform(0, 2 * np.pi, 60_000),
        rng.uniform(-0.4, 0.4, 60_000),
        0.3 * np.sqrt(rng.random(60_000)),
    )
    wall = rng.random(60_000) < 0.5
    radius, height = np.where(wall, 0.3, out), np.where(wall, up, rng.choice([-0.4, 0.4], 60_000))
    on_can = np.stack([radius * np.cos(angle), radius * np.sin(angle), height], 1)
    for surface, found in ((on_box, box(p, centre, half)), (on_can, cylinder(p, centre, 0.3, 0.4))):
        nearest = torch.cdist(torch.from_numpy(places), torch.from_numpy(surface + centre)).amin(1).numpy()
        np.testing.assert_allclose(np.abs(found), nearest, atol=0.02)


def test_an_object_depends_on_its_kind_and_seed_alone(shapes):
    order = [70, 3, 101, 45]
    again = make_shapes([OBJECTS[i] for i in order])[1]
    assert torch.equal(again, shapes[order])
    assert torch.equal(clean_shape(*OBJECTS[3]), shapes[3])
    assert len({row.numpy().tobytes() for row in shapes}) == len(OBJECTS)


def test_objects_are_whole_lie_inside_and_broken_ones_differ(shapes):
    assert shapes.shape == (120, 16, 16, 16) and shapes.dtype == torch.float32
    assert shapes.min() >= -1 and shapes.max() == 1
    single = [ndimage.label((one < 0).numpy())[1] == 1 for one in shapes]
    assert np.mean(single) > 0.95
    dirty, clean = make_shapes(OBJECTS, broken_share=1.0)
    assert torch.equal(clean, shapes)
    assert all(not torch.equal(a, b) for a, b in zip(dirty, clean, strict=True))
    assert np.mean([ndimage.label((one < 0).numpy())[1] > 1 for one in dirty]) > 0.8
    half, _ = make_shapes(OBJECTS, broken_share=0.5)
    changed = np.mean([not torch.equal(a, b) for a, b in zip(half, clean, strict=True)])
    assert 0.35 < changed < 0.65


def test_a_finer_grid_shows_the_same_object(shapes):
    fine = make_shapes(OBJECTS[::10], 24)[1]
    coarse = torch.nn.functional.interpolate(fine[:, None], 16, mode="trilinear", align_corners=False)[:, 0]
    assert (coarse - shapes[::10]).abs().mean() < 0.03


def test_prompts_name_objects_and_errors_say_how():
    assert shape_of("A chair 17") == ("chair", 17) and shape_of("x", {"kind": "mug", "seed": 3}) == ("mug", 3)
    with pytest.raises(ValueError, match=r"'sofa 1' names no object.*chair 17"):
        shape_of("sofa 1")
    with pytest.raises(ValueError, match="'sofa' of a shape is unknown"):
        make_shapes([("sofa", 1)])


def test_prompt_sets_share_no_object_with_each_other_or_with_the_base():
    prompts = ShapePrompts()
    assert len(prompts.train) == 600 and len(prompts.held_out) == 48
    train, held_out = ({shape_of(p.text, p.metadata) for p in part} for part in (prompts.train, prompts.held_out))
    assert len(train) == 600 and len(held_out) == 48 and not train & held_out
    assert not (train | held_out) & set(base_objects(3000))
    assert all(shape_of(p.text) == shape_of("", p.metadata) for p in prompts.train)
    with pytest.raises(ValueError, match="sofa"):
        ShapePrompts(kinds=["sofa"])
    with pytest.raises(ValueError, match="train = 601"):
        ShapePrompts(train=601)


# ------------------------------------------------------------------------------------------------------------ views


def test_the_camera_is_a_rotation_that_looks_at_the_origin_from_above():
    right, up, into = camera(35.0, 25.0)
    frame = torch.stack([right, up, into])
    torch.testing.assert_close(frame @ frame.T, torch.eye(3), atol=1e-6, rtol=0)
    assert up[2] > 0 and into[2] < 0
    torch.testing.assert_close(torch.linalg.cross(right, up), -into)


def test_the_silhouette_of_a_ball_is_a_disc_where_the_ball_is():
    picture = silhouette(ball(0.6), size=48)[0] > 0.5
    assert picture.float().mean() == pytest.approx(np.pi * 0.36 / (2 * HALF_WIDTH) ** 2, rel=0.05)
    centre = (0.3, 0.2, 0.4)
    right, up, _ = camera(35.0, 25.0)
    moved = (silhouette(ball(0.3, centre), size=48)[0] > 0.5).nonzero().float().mean(0)
    place = ((moved + 0.5) * 2 / 48 - 1) * HALF_WIDTH  # down, right
    expected = torch.tensor([-float(up @ torch.tensor(centre)), float(right @ torch.tensor(centre))])
    torch.testing.assert_close(place, expected, atol=0.03, rtol=0)


def test_silhouettes_from_opposite_sides_mirror_each_other(shapes):
    front, back = silhouette(shapes[:5]), silhouette(shapes[:5], azimuth=35 + 180, elevation=-25)
    torch.testing.assert_close(front, back.flip(-1), atol=0.02, rtol=0)


def test_depth_is_the_nearness_of_the_first_hit_and_zero_beside_it():
    picture = depth(ball(0.5), size=25)[0]
    assert picture[12, 12].item() == pytest.approx((1 + 0.5 / 1.55) / 2, abs=0.03)
    assert picture[0, 0] < 1e-3


@pytest.mark.parametrize("render", [silhouette, depth])
def test_gradients_flow_through_views(render, shapes):
    distance = shapes[:2].clone().requires_grad_()
    render(distance).sum().backward()
    assert distance.grad.abs().flatten(1).amax(1).min() > 0 and distance.grad.isfinite().all()


def test_pictures_show_the_lit_side_of_a_ball_before_a_dark_ground():
    picture = shaded(to_media(ball(0.6)), size=48)[0]
    assert picture.shape == (3, 48, 48) and picture.min() >= 0 and picture.max() <= 1
    upper_left, lower_right = picture[:, 16, 16].sum(), picture[:, 32, 32].sum()
    assert upper_left > 1.3 * lower_right > 1.3 * picture[:, 1, 1].sum()
    assert shaded(torch.zeros(1, 16, 16, 16), size=24).std(dim=(-1, -2)).max() < 1e-6


def test_views_may_come_from_files(tmp_path):
    view = (silhouette(clean_shape("mug", 1)[None])[0] * 255).round().byte()
    Image.fromarray(view.numpy()).save(tmp_path / "grey.png")
    colour = Image.new("RGBA", (24, 24), (200, 10, 10, 255))
    colour.putalpha(Image.fromarray(view.numpy()))
    colour.save(tmp_path / "alpha.png")
    for name in ("grey.png", "alpha.png"):
        assert torch.equal(condition_views(["?"], [{"image": str(tmp_path / name)}], 16)[0], view / 255)
    Image.new("L", (240, 96), 255).save(tmp_path / "large.png")
    assert torch.equal(read_view(tmp_path / "large.png"), torch.ones(24, 24))
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        read_view(str(tmp_path / "none.png"))
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        read_view(torch.zeros(3, 4))


# ------------------------------------------------------------------------------------------------------------- base


def test_the_code_is_that_of_principal_components_with_half_whitening(shapes):
    codec = fit_codec(shapes, 16)
    centred = (shapes.flatten(1) - shapes.flatten(1).mean(0)).double()
    exact = torch.linalg.svdvals(centred)[:16] / (len(shapes) - 1) ** 0.5
    latents = codec.encode(shapes).double()
    std = latents.std(0)
    # Scaled by sqrt(s times the mean s): the rest is sqrt(s) over a constant, and the mean variance is 1.
    torch.testing.assert_close(std, (exact / exact.mean()).sqrt(), atol=0.02, rtol=0.05)
    assert latents.var(0).mean().item() == pytest.approx(1.0, abs=0.05)
    residual = (codec.decode(codec.encode(shapes)) - shapes).square().sum().item()
    assert residual == pytest.approx((torch.linalg.svdvals(centred)[16:] ** 2).sum().item(), rel=0.02)
    again = codec.encode(codec.decode(latents.float()))
    torch.testing.assert_close(again, latents.float(), atol=1e-3, rtol=1e-3)


def test_the_grid_code_loses_nothing_and_too_many_components_are_refused(shapes):
    codec = fit_codec(shapes, None)
    latents = codec.encode(shapes)
    assert latents.shape == (120, 1, 16, 16, 16)
    assert latents.square().mean().item() == pytest.approx(1.0, rel=1e-4)
    torch.testing.assert_close(codec.decode(latents), shapes, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="latent_dim = 120"):
        fit_codec(shapes, 120)


def test_the_velocity_of_a_predicted_x0_is_the_paths(shapes):
    x, x0 = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).unbind()
    t = torch.tensor([1.0, 0.7, 0.3, 0.05, 0.01])
    v = velocity_of(x0, x, t)
    torch.testing.assert_close(RectifiedFlow().x0_eps(x, v, t)[0][:4], x0[:4])
    torch.testing.assert_close(v[4], (x[4] - x0[4]) / 0.05)


def test_training_lowers_the_loss_and_depends_on_its_seed_alone():
    latents = 0.1 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) + torch.tensor([1.0, -1.0] * 4)
    runs = []
    for noise in (1, 2):
        with seeded(0):
            network = LatentMLP(8, 24, 16, 16, 1)
        torch.manual_seed(noise)
        recipe = BaseRecipe(40, batch_size=16, learning_rate=3e-3)
        runs.append(train_base(network, latents, torch.zeros(64, 24, 24), recipe, progress=False))
    assert runs[0] == runs[1]
    assert np.mean(runs[0][-8:]) < 0.3 * np.mean(runs[0][:4])


def test_cubes_of_the_voxel_transformer_are_cubes_of_the_grid():
    network = VoxelDiT(16, 24, dim=32, depth=1, heads=2)
    x = torch.randn(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    cubes = network.patches(x)
    assert cubes.shape == (2, 64, 64)
    assert torch.equal(cubes[:, (1 * 4 + 2) * 4 + 3], x[:, 0, 4:8, 8:12, 12:16].flatten(1))
    assert torch.equal(network.voxels(cubes), x)
    with pytest.raises(ValueError, match="resolution 18"):
        VoxelDiT(18, 24)


# -------------------------------------------------------------------------------------------------------- generator


def cond_of(generator):
    return generator.encode(["chair 100", "mug 7", "lamp 3"], [{}, {"kind": "mug", "seed": 7}, {}])


def draw(generator, cond, rows=(0, 1, 2), steps=3):
    noise = RowNoise.of((0, "test"), list(rows), "cpu")
    sampler = Sampler(Euler(), Schedule.uniform(steps), "all", generator.path)
    x1 = generator.initial_latents(cond, noise.initial)
    with torch.no_grad():
        return generator.decode(sampler.rollout(generator.velocity, x1, cond, noise, sampler.steps(0, 0)).x0)


def test_shapes_and_ranges_and_independence_of_the_batch(generator):
    cond = cond_of(generator)
    assert cond.shape == (3, 24, 24)
    assert torch.equal(cond[0], silhouette(clean_shape("chair", 100)[None])[0])
    media = draw(generator, cond)
    assert media.shape == (3, 16, 16, 16) and media.dtype == torch.float32
    assert media.min() >= 0 and media.max() <= 1
    torch.testing.assert_close(draw(generator, cond[1:2], rows=[1]), media[1:2], atol=1e-4, rtol=0)


def test_gradients_flow_from_media_to_latents_and_from_velocity_to_weights(generator):
    x0 = torch.zeros(2, 32, requires_grad=True)
    generator.decode(x0).sum().backward()
    assert x0.grad.abs().amin(1).min() >= 0 and x0.grad.abs().amax() > 0
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    loss = generator.velocity(x, torch.tensor([0.02, 0.5, 1.0]), cond_of(generator)).square().sum()
    gradients = torch.autograd.grad(loss, generator.trainable())
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) > len(gradients) / 2


def test_the_reference_is_the_start_and_saved_generators_sample_the_same(generator, cache, tmp_path):
    start = draw(generator, cond_of(generator))
    other = ShapesGenerator(**TINY, cache_dir=cache)
    other.prepare("cpu", progress=False)
    with torch.no_grad():
        for p in other.trainable():
            p.add_(0.05)
    changed = draw(other, cond_of(other))
    assert not torch.equal(changed, start)
    with other.reference():
        assert torch.equal(draw(other, cond_of(other)), start)
    assert torch.equal(draw(other, cond_of(other)), changed)
    other.save_pretrained(tmp_path / "saved")
    loaded = ShapesGenerator.from_pretrained(tmp_path / "saved")
    assert torch.equal(draw(loaded, cond_of(loaded)), changed)
    other.load_state_dict(generator.state_dict())
    assert torch.equal(draw(other, cond_of(other)), start)
    with pytest.raises(ValueError, match="do not fit"):
        other.load_state_dict({})
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ShapesGenerator.from_pretrained(tmp_path)
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"generator": "DigitsGenerator"}))
    with pytest.raises(ValueError, match="DigitsGenerator, not a ShapesGenerator"):
        ShapesGenerator.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("more", [{"network": "grid", "dim": 32}, {"view": "depth"}, {"resolution": 24}])
def test_other_networks_views_and_resolutions_train_a_step(more, cache):
    made = ShapesGenerator(**{**TINY, "base_steps": 1, "base_shapes": 40, **more, "cache_dir": cache})
    made.prepare("cpu", progress=False)
    cond = cond_of(made)
    side = more.get("resolution", 16)
    assert draw(made, cond).shape == (3, side, side, side)
    x = made.initial_latents(cond, torch.Generator().manual_seed(0))
    loss = made.velocity(x, torch.full((3,), 0.5), cond).square().mean()
    assert any(bool(g.any()) for g in torch.autograd.grad(loss, made.trainable()))


def test_wrong_arguments_and_missing_weights_are_named(tmp_path):
    for arguments, message in (
        ({"network": "mesh"}, "'mesh' is unknown"),
        ({"view": "colour"}, "'colour' is unknown"),
        ({"resolution": 8}, "resolution 8"),
    ):
        with pytest.raises(ValueError, match=message):
            ShapesGenerator(**arguments)
    with pytest.raises(RuntimeError, match="call prepare"):
        ShapesGenerator(cache_dir=tmp_path).module  # noqa: B018


def test_previews_and_meshes_of_media(generator, tmp_path):
    media = to_media(torch.stack([clean_shape("chair", 1), clean_shape("mug", 2)]))
    assert generator.preview(media).shape == (2, 3, 72, 72)
    assert torch.equal(to_distance(media) > 0, media < 0.5)
    files = generator.export_media(media, tmp_path, ["chair 1", "mug 2"])
    assert [file.name for file in files] == ["chair-1.ply", "mug-2.ply"]


def test_a_run_trains_shapes_shows_them_and_links_their_meshes(tmp_path, cache):
    tiny = [f"generator.init_args.{name}={value}" for name, value in TINY.items()]
    run = tmp_path / "run"
    changes = [
        *tiny, f"generator.init_args.cache_dir={cache}", f"run_dir={run}", "trainer.iterations=2",
        "trainer.prompts_per_iteration=2", "trainer.group_size=4", "evaluation.every=2", "prompts.init_args.held_out=3",
        "evaluation.samples_per_prompt=2", "evaluation.train_sampler=never",
    ]  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    task = Path(__file__).parents[2] / "configs" / "shapes" / "task.yaml"
    recipe.write_text(
        f"base: {task}\nalgorithm:\n  class_path: genrl.algorithms.ForwardProcess\n  init_args: {{steps: 2}}\n"
    )
    assert main(["train", str(recipe), *changes]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "eval"][-1]
    assert {"eval/fscore", "eval/volume", "eval/silhouette", "eval/diversity_shape_distance"} <= last.keys()
    for iteration in (0, 2):
        assert (run / "samples" / f"iteration-{iteration:06d}" / "chair-100.ply").is_file()
    assert 'href="samples/iteration-000002/table-100.ply"' in (run / "report.html").read_text()
    assert main(["sample", str(run), "--prompt", "mug 5", "-n", "2"]) == 0
    assert (run / "generated" / "prompt000-001-mug-5.ply").is_file()
    with Image.open(run / "generated" / "prompt000-001.png") as picture:
        assert picture.size == (72, 72) and picture.mode == "RGB"
