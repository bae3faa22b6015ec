"""Previews: tiles in their places, small files for large media, films that play."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from genrl.prompts import Prompt
from genrl.training.evaluation import SampleSet
from genrl.training.pictures import evenly, heat, image_grid, moving_grid, picture_counts, save_animation, save_image


def videos(rows, columns, frames, size, channels=3):
    """Every frame is one grey level that names its row, column and number."""
    level = torch.arange(rows * columns * frames, dtype=torch.float32).reshape(rows, columns, frames) / 100
    return level[..., None, None, None].expand(rows, columns, frames, channels, size, size)


def test_a_video_is_a_strip_of_frames_from_its_first_to_its_last():
    media = videos(2, 2, 9, 40)
    grid = image_grid(media, gap=1)
    assert grid.shape == (3, 2 * 41 + 1, 2 * 161 + 1)
    for r in range(2):
        for c in range(2):
            strip = grid[0, 1 + 41 * r + 20, 1 + 161 * c : 161 * (c + 1)]
            shown = [media[r, c, frame].max().item() for frame in (0, 3, 5, 8)]
            assert strip.reshape(4, 40)[:, 5].tolist() == pytest.approx(shown)
    assert image_grid(videos(1, 1, 2, 40), gap=0).shape == (3, 40, 80)  # fewer frames than a strip has


def test_frames_are_spread_evenly():
    assert [evenly(n, 4) for n in (1, 2, 4, 9)] == [[0], [0, 1], [0, 1, 2, 3], [0, 3, 5, 8]]


def test_large_pictures_are_averaged_down_and_single_ones_on_request_not():
    image = torch.rand(1, 1, 3, 600, 300, generator=torch.Generator().manual_seed(0))
    grid = image_grid(image, gap=0)
    assert grid.shape == (3, 200, 100)
    torch.testing.assert_close(grid[:, 7, 9], image[0, 0, :, 21:24, 27:30].mean((1, 2)))
    assert torch.equal(image_grid(image, gap=0, most=600), image[0, 0])


@pytest.mark.parametrize("shape", [(8, 1, 8, 8), (40, 3, 1024, 1024), (40, 81, 3, 64, 64), (4, 5, 3, 480, 832)])
def test_a_preview_stays_small_whatever_the_media_are(shape):
    columns, rows = picture_counts(torch.empty(shape))
    tile = min(256, max(32, *shape[-2:])) ** 2 * (4 if len(shape) == 5 else 1)
    assert columns >= 1 and rows >= 1 and columns * rows * tile <= 2**21


def test_a_film_has_every_frame_at_its_time(tmp_path):
    frames = moving_grid(videos(1, 2, 5, 40) * 10)
    path = save_animation(frames, tmp_path / "sub" / "a.png", frames_per_second=10)
    assert [p.name for p in (tmp_path / "sub").iterdir()] == [path.name] and path.suffix in (".webp", ".gif")
    with Image.open(path) as film:
        assert film.n_frames == 5 and film.size == (2 * 41 + 1, 42)
        for f in range(5):
            film.seek(f)
            film.load()
            assert film.info["duration"] == 100
            assert film.convert("RGB").getpixel((60, 20))[0] == pytest.approx(255 * (5 + f) / 10, abs=5)


@pytest.mark.parametrize("video", [False, True])
def test_samples_are_saved_as_a_grid_and_videos_also_as_a_film(tmp_path, video):
    media = torch.rand(6, *([4] if video else []), 3, 16, 16, generator=torch.Generator().manual_seed(0))
    samples = SampleSet(media, [Prompt("a")] * 3 + [Prompt("b")] * 3, 3)
    samples.save(tmp_path / "iteration-000000.png")
    names = {"iteration-000000.png"} | ({"iteration-000000.webp"} if video else set())
    assert {p.name for p in tmp_path.iterdir()} == names
    shown = samples.shown()
    assert torch.equal(shown[1, 0], media[3]) and shown.shape[:2] == ((2, 2) if video else (2, 3))


def test_grey_pictures_are_written_as_grey(tmp_path):
    save_image(torch.full((1, 2, 2), 0.5), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "L" and image.getpixel((0, 0)) == 128


def test_a_glow_is_brightest_where_the_value_is_and_leaves_the_rest_grey():
    media = torch.full((2, 3, 1, 4, 4), 0.5)
    values = torch.zeros(2, 3, 4, 4)
    values[0, 1, 2, 3] = 7.0
    shown = heat(media, values)
    assert shown.shape == (2, 3, 3, 4, 4) and float(shown.min()) >= 0 and float(shown.max()) <= 1
    assert shown[0, 1, :, 2, 3].tolist() == pytest.approx([1, 1, 0])  # yellow
    assert torch.allclose(shown[1], torch.full((3, 3, 4, 4), 0.225))  # nothing to show: darkened grey
    assert torch.allclose(heat(media, 5 * values), shown)
    assert heat(media[:, 0], values[:, 1]).shape == (2, 3, 4, 4)
