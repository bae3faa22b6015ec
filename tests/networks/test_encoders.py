"""Encoders of observations: shapes, history, crops, names, and errors that say what to change."""

import pytest
import torch

from genrl.networks import EncoderSettings, ImageEncoder, ObservationEncoder, ObservationError, ObsSpec, crop_images
from genrl.networks.images import resnet18

SPECS = {
    "state": ObsSpec((4,), "state"),
    "cam.front": ObsSpec((3, 20, 24), "image"),
    "points": ObsSpec((10, 6), "points"),
}


def observations(batch=3, steps=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(batch, steps, *spec.shape, generator=generator) * 2 - 1 for name, spec in SPECS.items()}


def encoder(steps=2, **settings):
    torch.manual_seed(0)
    return ObservationEncoder(SPECS, steps, EncoderSettings(**settings))


@pytest.mark.parametrize("image", ["cnn", "resnet18"])
@pytest.mark.parametrize("state", ["identity", "mlp"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_vector_has_the_declared_size_for_any_history(image, state, steps):
    net = encoder(steps, image=image, state=state, state_features=7, image_features=5, points_features=6)
    out = net(observations(steps=steps))
    assert out.shape == (3, net.out_dim)
    assert net.out_dim == steps * ((7 if state == "mlp" else 4) + 5 + 6)


@pytest.mark.parametrize("name", SPECS)
def test_one_encoder_serves_all_steps_of_the_history(name):
    torch.manual_seed(0)
    settings = EncoderSettings(state="mlp")
    net = ObservationEncoder({name: SPECS[name]}, 2, settings)
    obs = observations()
    first, second = net(obs).chunk(2, dim=1)
    swapped = net({name: obs[name].flip(1)})
    torch.testing.assert_close(swapped, torch.cat([second, first], 1), atol=1e-5, rtol=1e-5)
    assert (first - second).abs().max() > 1e-3


def test_observations_are_taken_by_name_and_others_ignored():
    net = encoder()
    obs = observations()
    reordered = {name: obs[name] for name in reversed(SPECS)} | {"extra": torch.zeros(3, 2, 9)}
    assert torch.equal(net(obs), net(reordered))


@pytest.mark.parametrize(
    ("name", "shape", "hint"),
    [
        ("state", (3, 2, 5), r"'state' has shape \[3, 2, 5\]; expected \[B, 2, 4\].*same settings"),
        ("state", (3, 1, 4), r"history has 1 steps; chunking.n_obs_steps is 2"),
        ("state", (2, 4), "batch dimension is missing"),
        ("points", (3, 2, 10, 3), r"'points' .* expected \[B, 2, 10, 6\].*xyz and rgb"),
        ("points", (3, 2, 1024, 6), r"number of points"),
    ],
)
def test_a_wrong_shape_is_answered_with_key_expected_found_and_remedy(name, shape, hint):
    with pytest.raises(ObservationError, match=hint):
        encoder()(observations() | {name: torch.zeros(shape)})


def test_a_missing_observation_is_named():
    obs = observations()
    del obs["points"]
    with pytest.raises(ObservationError, match="'points' is missing"):
        encoder()(obs)


def test_crops_are_random_in_training_and_central_otherwise():
    torch.manual_seed(0)
    net = ObservationEncoder({"cam.front": SPECS["cam.front"]}, 2, EncoderSettings(crop=16))
    obs = observations()

    def uniform(seed):
        generator = torch.Generator().manual_seed(seed)
        return lambda shape: torch.rand(shape, generator=generator)

    assert torch.equal(net(obs, uniform(0)), net(obs, uniform(0)))
    assert not torch.equal(net(obs, uniform(0)), net(obs, uniform(1)))
    central = net(obs)
    net.eval()
    assert torch.equal(net(obs, uniform(0)), central) and torch.equal(net(obs, uniform(1)), central)
    cut = {"cam.front": obs["cam.front"][..., 2:18, 4:20]}  # (20 - 16) / 2 and (24 - 16) / 2
    whole = ObservationEncoder({"cam.front": ObsSpec((3, 16, 16), "image")}, 2, EncoderSettings())
    whole.load_state_dict(net.state_dict())
    assert torch.equal(whole(cut), central)


def test_random_crops_are_windows_of_the_picture_at_one_place_for_a_history():
    images = torch.arange(2 * 3 * 1 * 5 * 6, dtype=torch.float32).reshape(2, 3, 1, 5, 6)
    places = set()
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        cropped = crop_images(images, 4, lambda shape, g=generator: torch.rand(shape, generator=g))
        assert cropped.shape == (2, 3, 1, 4, 4)
        for row in range(2):
            corner = int(cropped[row, 0, 0, 0, 0] - images[row, 0, 0, 0, 0])
            top, left = divmod(corner, 6)
            assert torch.equal(cropped[row], images[row, :, :, top : top + 4, left : left + 4])
            places.add((top, left))
    assert places == {(top, left) for top in range(2) for left in range(3)}


@pytest.mark.parametrize("image", ["cnn", "resnet18"])
def test_image_encoders_have_no_batch_statistics_and_see_where_things_are(image):
    torch.manual_seed(0)
    net = ImageEncoder((3, 32, 32), image, features=8)
    assert not list(net.buffers()) and not any("BatchNorm" in type(m).__name__ for m in net.modules())
    images = torch.randn(4, 1, 3, 32, 32)
    torch.testing.assert_close(torch.cat([net(image[None]) for image in images]), net(images), atol=1e-5, rtol=1e-4)
    spot = torch.full((2, 1, 3, 32, 32), -1.0)
    spot[0, ..., 4:8, 4:8] = 1
    spot[1, ..., 20:24, 20:24] = 1
    left, right = net(spot)
    assert (left - right).abs().max() > 1e-3


def test_resnet_takes_local_weights_and_any_number_of_channels(tmp_path):
    from torchvision.models import resnet18 as published

    torch.manual_seed(0)
    state = published(weights=None).state_dict()
    torch.save(state, tmp_path / "resnet18.pth")
    net = resnet18(3, 5, str(tmp_path / "resnet18.pth"))
    assert torch.equal(net.conv1.weight, state["conv1.weight"])
    assert torch.equal(net.layer3[1].conv2.weight, state["layer3.1.conv2.weight"])
    assert net.fc.out_features == 5 and net.bn1.num_groups == 4
    assert resnet18(4, 5)(torch.zeros(1, 4, 32, 32)).shape == (1, 5)
    with pytest.raises(FileNotFoundError, match="is no file"):
        resnet18(3, 5, str(tmp_path / "missing.pth"))
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"no fitting weights for conv1\.weight"):
        resnet18(3, 5, str(tmp_path / "other.pth"))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((3, 4), "state"), ((10, 4), "points"), ((3,), "points"), ((84, 84), "image"), ((0,), "state"), ((3,), "depth")],
)
def test_impossible_specs_are_refused(shape, kind):
    with pytest.raises(ValueError, match=r"observation (has shape|of kind)"):
        ObsSpec(shape, kind)


def test_a_spec_survives_json():
    for spec in SPECS.values():
        assert ObsSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state": "lstm"}, "encoder.state"),
        ({"image": "vit"}, "encoder.image"),
        ({"crop": 0}, "encoder.crop"),
        ({"image_features": 0}, "image_features"),
        ({"points_widths": ()}, "points_widths"),
        ({"image_weights": "x.pth"}, "no effect"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EncoderSettings(**settings)


def test_a_crop_larger_than_the_image_is_refused_with_its_name():
    with pytest.raises(ValueError, match=r"'cam.front': crop = 21 is larger than the image of 20 x 24"):
        encoder(crop=21)
    with pytest.raises(ValueError, match="at least one observation"):
        ObservationEncoder({}, 1)
