"""Preprocessing on tensors against the libraries' own processors on 8-bit images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genrl.rewards.pixels import Pixels

# Sizes are chosen so that something is up-scaled, down-scaled, odd and cut by half a pixel.
SIDES = [(32, 32), (80, 57), (45, 91), (20, 33), (64, 31)]


def smooth_images(height, width, count=2):
    """Images [N, 3, H, W] on the 8-bit grid, with edges that bicubic interpolation overshoots, and as PIL images."""
    from PIL import Image

    generator = torch.Generator().manual_seed(height * width)
    coarse = torch.rand(count, 3, 6, 6, generator=generator)
    tensor = (torch.nn.functional.interpolate(coarse, (height, width), mode="nearest") * 255).round() / 255
    arrays = (tensor.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)
    return tensor, [Image.fromarray(array) for array in arrays]


def compare(pixels, tensor, expected, levels):
    """Largest difference in levels of 8-bit images, after undoing the normalisation."""
    ours = pixels(tensor)
    assert ours.shape == expected.shape and ours.dtype == torch.float32
    std = torch.tensor(pixels.std).view(3, 1, 1)
    assert ((ours - expected) * std).abs().max() * 255 <= levels


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        {"size": {"shortest_edge": 38}, "crop_size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.4, 0.3]},
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 33, "width": 33}},
        {"size": {"height": 32, "width": 48}, "do_center_crop": False, "resample": 2},
        {"size": {"shortest_edge": 32}, "do_center_crop": False, "do_normalize": False},
    ],
    ids=["clip", "larger than the crop", "padded", "squashed", "no crop"],
)
def test_equals_the_processor_of_transformers(side, settings):
    from transformers import CLIPImageProcessor

    processor = CLIPImageProcessor(**settings)
    tensor, images = smooth_images(*side)
    expected = processor(images=images, return_tensors="pt")["pixel_values"]
    compare(Pixels.of_processor(processor), tensor, expected, levels=2)


@pytest.mark.parametrize("side", SIDES[:-1])  # the last is resized height first by Pillow 13
@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", [32, (32, 24)])
def test_equals_the_transform_of_open_clip(side, mode, size):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    config = PreprocessCfg(size=size, resize_mode=mode)
    transform = image_transform_v2(config, is_train=False)
    tensor, images = smooth_images(*side)
    expected = torch.stack([transform(image) for image in images])
    compare(Pixels.of_open_clip(vars(config)), tensor, expected, levels=2)


def test_without_resizing_only_rounding_differs():
    from transformers import CLIPImageProcessor

    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    tensor, images = smooth_images(32, 32)
    expected = processor(images=images, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(Pixels.of_processor(processor)(tensor), expected, rtol=0, atol=2e-6)


def test_grey_images_and_gradients():
    pixels = Pixels((8, 8), "shortest", (8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    grey = torch.rand(2, 1, 12, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.testing.assert_close(pixels(grey), pixels(grey.expand(-1, 3, -1, -1)))
    pixels(grey).square().sum().backward()
    assert grey.grad.isfinite().all() and grey.grad.abs().sum() > 0


@pytest.mark.parametrize("frames", [torch.rand(2, 2, 8, 8), torch.rand(3, 8, 8), torch.zeros(2, 3, 8, 8).byte()])
def test_what_is_no_batch_of_images_is_refused(frames):
    with pytest.raises(ValueError, match="take floats"):
        Pixels((8, 8), "squash", None, (0.0,) * 3, (1.0,) * 3)(frames)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resample": 1}, "filter 1"),
        ({"size": {"longest_edge": 32, "shortest_edge": 16}}, "resizes to"),
        ({"do_rescale": False}, "does not rescale"),
    ],
)
def test_unknown_steps_of_a_processor_are_refused(settings, message):
    from transformers import CLIPImageProcessor

    with pytest.raises(ValueError, match=message):
        Pixels.of_processor(CLIPImageProcessor(**settings))
