from __future__ import annotations

import pytest
import torch

from genrl.rewards import RewardError, check_reward, score
from genrl.rewards.motion import DynamicDegree, MotionSmoothness, displacement

MODES = [MotionSmoothness(), MotionSmoothness("displacement"), DynamicDegree(), DynamicDegree("displacement")]


def values(reward, video):
    (result,) = score(reward, video, ["a"] * len(video)).values()
    return result


def texture(size: int = 32, seed: int = 0) -> torch.Tensor:
    """[3, H, W] in [0, 1]."""
    return torch.rand(3, size, size, generator=torch.Generator().manual_seed(seed))


def moved(image: torch.Tensor, path: list[tuple[int, int]]) -> torch.Tensor:
    """A video [1, F, C, H, W] of the image at these places."""
    return torch.stack([image.roll(place, dims=(-2, -1)) for place in path])[None]


def square(places: list[tuple[int, int]], size: int = 24) -> torch.Tensor:
    """A bright square of 6 pixels before black, [1, F, 3, H, W]."""
    video = torch.zeros(1, len(places), 3, size, size)
    for frame, (row, column) in enumerate(places):
        video[0, frame, :, row : row + 6, column : column + 6] = 0.8
    return video


def fourier_shift(image: torch.Tensor, down: float, right: float) -> torch.Tensor:
    """The band-limited image, moved by any distance; built from the shift theorem."""
    height, width = image.shape[-2:]
    phase = torch.fft.fftfreq(height)[:, None] * down + torch.fft.fftfreq(width)[None] * right
    return torch.fft.ifft2(torch.fft.fft2(image) * torch.exp(-2j * torch.pi * phase)).real


@pytest.mark.parametrize("shift", [(0, 0), (3, 0), (0, -5), (7, 9), (-11, 4), (15, -15)])
def test_whole_shifts_of_a_texture_are_found_exactly(shift):
    image = texture()
    found = displacement(image[None], image.roll(shift, dims=(-2, -1))[None])
    assert torch.allclose(found, torch.tensor([shift], dtype=torch.float32), atol=2e-2)


@pytest.mark.parametrize("shift", [(0.5, 0.0), (2.25, -1.75), (-0.3, 3.4)])
def test_fractions_of_a_pixel_are_found_to_a_tenth(shift):
    low = torch.nn.functional.interpolate(texture(8)[None], size=33, mode="bicubic")[0]
    found = displacement(low, fourier_shift(low, *shift))
    assert (found - torch.tensor(shift)).abs().max() < 0.1


def test_an_object_before_an_even_background_is_followed():
    places = [(4, 4), (6, 5), (9, 5), (9, 12)]
    video = square(places)
    found = displacement(video[:, :-1], video[:, 1:])[0]
    assert torch.allclose(found, torch.tensor([[2.0, 1.0], [3.0, 0.0], [0.0, 7.0]]), atol=0.05)


def test_frames_without_content_or_change_do_not_move():
    still = texture()[None]
    assert displacement(still, still).abs().max() < 1e-3
    assert displacement(torch.full_like(still, 0.4), torch.full_like(still, 0.9)).abs().max() == 0
    assert displacement(still, still * 0.5 + 0.2).abs().max() < 1e-3  # brightness is no motion


def test_a_steady_motion_is_smooth_and_there_and_back_is_not():
    steady = moved(texture(), [(2 * t, t) for t in range(6)])
    back = moved(texture(), [(4 * (t % 2), 0) for t in range(6)])
    both = torch.cat([steady, back])
    assert torch.allclose(values(MotionSmoothness("displacement"), both), torch.tensor([1.0, 0.0]), atol=0.02)
    assert torch.allclose(
        values(DynamicDegree("displacement"), both), torch.tensor([5**0.5, 4.0]), atol=0.02
    )  # pixels a frame


def test_smoothness_of_pixels_is_one_for_a_fade_and_zero_for_flicker():
    image = texture()
    fade = torch.stack([image * t / 7 for t in range(8)])
    flicker = torch.stack([image * (t % 2) for t in range(8)])
    found = values(MotionSmoothness(pool=1), torch.stack([fade, flicker]))
    assert torch.allclose(found, torch.tensor([1.0, 0.0]), atol=1e-5)


def test_smoothness_of_pixels_is_the_error_of_interpolation_over_the_motion():
    video = torch.rand(2, 5, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    expected = []
    for sample in video:
        error = sum((sample[t] - (sample[t - 1] + sample[t + 1]) / 2).abs().mean() for t in (1, 2, 3))
        motion = sum(
            ((sample[t] - sample[t - 1]).abs().mean() + (sample[t + 1] - sample[t]).abs().mean()) / 2 for t in (1, 2, 3)
        )
        expected.append(1 - error / motion)
    assert torch.allclose(values(MotionSmoothness(pool=1), video), torch.stack(expected), atol=1e-6)


def test_a_jump_costs_more_than_the_same_way_in_even_steps():
    even = square([(2 + 2 * t, 8) for t in range(6)])
    jump = square([(2, 8), (2, 8), (2, 8), (12, 8), (12, 8), (12, 8)])
    both = torch.cat([even, jump])
    for reward in (MotionSmoothness(), MotionSmoothness("displacement")):
        smooth, jerky = values(reward, both)
        assert smooth > jerky + 0.2


def test_a_still_video_is_smooth_and_does_not_move():
    still = texture()[None, None].expand(1, 4, -1, -1, -1)
    assert [values(reward, still).item() for reward in MODES] == pytest.approx([1, 1, 0, 0], abs=1e-3)


def test_difference_is_the_mean_change_of_a_pixel():
    video = torch.stack([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 0.25), torch.full((3, 8, 8), 0.75)])[None]
    assert values(DynamicDegree(), video).item() == pytest.approx((0.25 + 0.5) / 2)


@pytest.mark.parametrize("reward", MODES, ids=lambda r: f"{r.name}_{r.mode}")
def test_checker_finds_nothing(reward):
    video = torch.rand(3, 6, 3, 16, 20, generator=torch.Generator().manual_seed(2))
    assert check_reward(reward, video) == []


def test_gradients_equal_finite_differences():
    video = torch.rand(1, 4, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for reward in (MotionSmoothness(pool=2), DynamicDegree()):
        leaf = video.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(reward(leaf, ["a"], [{}]).sum(), leaf)
        step = torch.zeros_like(video)
        step[0, 2, 0, 1, 3] = 1e-2
        slope = (reward(video + step, ["a"], [{}]) - reward(video - step, ["a"], [{}])) / 2e-2
        assert gradient[0, 2, 0, 1, 3].item() == pytest.approx(slope.item(), abs=1e-4)


@pytest.mark.parametrize(("reward", "frames"), [(MotionSmoothness(), 3), (DynamicDegree(), 2)])
def test_images_and_short_videos_are_refused(reward, frames):
    for media in (torch.rand(2, 3, 8, 8), torch.rand(2, frames - 1, 3, 8, 8)):
        with pytest.raises(RewardError, match=rf"takes videos .* of {frames} frames or more"):
            score(reward, media, ["a", "b"])


def test_unknown_modes_are_named():
    with pytest.raises(ValueError, match="'optical'; give one of pixels, displacement"):
        MotionSmoothness("optical")
    with pytest.raises(ValueError, match="difference, displacement"):
        DynamicDegree("pixels")
    with pytest.raises(ValueError, match="pool is 0"):
        MotionSmoothness(pool=0)
