from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from genrl.policies.normalizer import MODES, Normalizer

VECTOR_MODES = [mode for mode in MODES if mode != "image"]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def actions(rng):
    """Dimensions of very different size, one constant, one on a large offset, one that is nearly always 0."""
    data = rng.normal(size=(500, 5)) * [1.0, 1e3, 0.0, 0.1, 1.0] + [0.0, -5.0, 0.3, 1000.0, 0.0]
    data[:, 4] = 0.0
    data[:3, 4] = [1.0, -1.0, 2.0]
    return data.astype(np.float32)


def test_each_mode_brings_the_data_where_its_definition_says(rng):
    data = rng.normal(size=(4000, 3)) * [1.0, 50.0, 0.01] + [3.0, -7.0, 0.0]

    def scaled(mode):
        return Normalizer.fit({"action": data}, mode).normalize("action", torch.from_numpy(data))

    minmax, meanstd, quantile = scaled("minmax"), scaled("meanstd"), scaled("quantile")
    torch.testing.assert_close(minmax.amin(0), -torch.ones(3).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(minmax.amax(0), torch.ones(3).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(meanstd.mean(0), torch.zeros(3).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(meanstd.std(0, correction=0), torch.ones(3).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        (quantile.abs() <= 1).double().mean(0), torch.full((3,), 0.98).double(), atol=1e-3, rtol=0
    )
    assert torch.equal(scaled("identity"), torch.from_numpy(data))


@pytest.mark.parametrize("mode", VECTOR_MODES)
def test_every_chunk_comes_back_with_stored_statistics_only(mode, actions):
    fitted = Normalizer.fit({"action": actions}, mode)
    stored = Normalizer.from_spec(json.loads(json.dumps(fitted.spec())))
    stored.load_state_dict(fitted.state_dict())
    chunks = torch.from_numpy(actions).reshape(50, 10, 5) * 3  # also far outside the fitted range
    normalized = stored.normalize("action", chunks)
    assert normalized.isfinite().all() and normalized.shape == chunks.shape
    torch.testing.assert_close(stored.unnormalize("action", normalized), chunks, rtol=1e-5, atol=1e-5)
    # A chunk alone gives the same numbers as within its batch: no statistics of the chunk itself are involved.
    assert torch.equal(stored.normalize("action", chunks[7:8]), normalized[7:8])


@pytest.mark.parametrize("mode", ["minmax", "meanstd", "quantile"])
@pytest.mark.parametrize("value", [0.0, 0.1, -1234.567])
def test_constant_dimensions_become_zero_and_return_exactly(mode, value):
    data = np.full((1001, 2), value, dtype=np.float32)
    normalizer = Normalizer.fit({"action": data}, mode)
    x = torch.from_numpy(data)
    assert torch.equal(normalizer.normalize("action", x), torch.zeros_like(x))
    assert torch.equal(normalizer.unnormalize("action", normalizer.normalize("action", x)), x)
    # A later deviation keeps its physical size.
    torch.testing.assert_close(normalizer.normalize("action", x + 0.5), torch.full_like(x, 0.5), atol=1e-4, rtol=0)


def test_jitter_below_the_least_range_is_not_blown_up(rng):
    data = 1e-6 * rng.normal(size=(100, 1))
    at_rest = Normalizer.fit({"state": data}, "minmax")
    assert at_rest.normalize("state", torch.tensor([[0.1]])).item() == pytest.approx(0.1, abs=1e-4)
    fine = Normalizer.fit({"state": data}, "minmax", min_range=1e-9)
    assert fine.normalize("state", torch.from_numpy(data)).abs().max().item() == pytest.approx(1.0, abs=1e-4)


def test_a_dimension_that_is_flat_between_its_quantiles_uses_its_extremes(actions):
    normalizer = Normalizer.fit({"action": actions}, "quantile")
    center, spread = normalizer.statistics("action")
    assert center[4].item() == pytest.approx(0.5) and spread[4].item() == pytest.approx(1.5)


def test_values_outside_the_fitted_range_are_extrapolated_not_clipped():
    normalizer = Normalizer.fit({"action": np.array([[0.0], [2.0]])}, "minmax")
    assert normalizer.normalize("action", torch.tensor([[5.0], [-1.0]])).tolist() == [[4.0], [-2.0]]
    assert normalizer.unnormalize("action", torch.tensor([[4.0]])).tolist() == [[5.0]]


def test_small_ranges_on_large_offsets_keep_their_resolution():
    data = np.linspace(1000.0, 1000.5, 64, dtype=np.float32)[:, None]
    normalizer = Normalizer.fit({"state": data}, "minmax")
    y = normalizer.normalize("state", torch.from_numpy(data))[:, 0]
    torch.testing.assert_close(y, torch.linspace(-1, 1, 64), atol=5e-4, rtol=0)


@pytest.mark.parametrize("mode", ["minmax", "meanstd", "quantile"])
def test_point_clouds_are_scaled_alike_in_all_directions(mode, rng):
    clouds = rng.uniform(size=(40, 128, 6)) * [2.0, 0.5, 0.1, 255, 255, 255] + [1.0, 0.0, -3.0, 0, 0, 0]
    normalizer = Normalizer.fit({"points": clouds}, mode)
    x = torch.from_numpy(clouds[:4]).float()[:, None]  # [B, history, N, 6]
    y = normalizer.normalize("points", x)

    def distances(cloud):
        return torch.cdist(cloud, cloud)

    ratio = distances(y[..., :3]) / distances(x[..., :3]).clamp_min(1e-9)
    off_diagonal = ~torch.eye(128, dtype=torch.bool).expand_as(ratio)
    # One factor for all pairs of points, so shapes keep their proportions.
    assert ratio[off_diagonal].std() / ratio[off_diagonal].mean() < 1e-3
    torch.testing.assert_close(normalizer.unnormalize("points", y), x, rtol=1e-4, atol=1e-3)
    # Another number of points is no other feature; other channels are.
    assert normalizer.normalize("points", x[..., :17, :]).shape == (4, 1, 17, 6)
    with pytest.raises(ValueError, match=r"points.*128, 6"):
        normalizer.normalize("points", x[..., :3])


def test_min_max_of_clouds_uses_all_points_and_the_longest_axis():
    clouds = np.zeros((2, 2, 3))
    clouds[0, 1] = [4.0, 1.0, 0.0]
    clouds[1, 0] = [-4.0, 0.0, 2.0]
    center, spread = Normalizer.fit({"points": clouds}, "minmax").statistics("points")
    assert center.tolist() == [0.0, 0.5, 1.0] and spread.tolist() == [4.0, 4.0, 4.0]


def test_images_need_no_statistics_and_return_bit_for_bit():
    image = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    normalizer = Normalizer.fit({"image": image.numpy(), "action": np.eye(2)}, "minmax")
    y = normalizer.normalize("image", image)
    assert y.dtype == torch.float32 and y.min() == -1 and y.max() == 1
    assert torch.equal(normalizer.unnormalize("image", y), image)
    assert not any("image" in key for key in normalizer.state_dict())
    with pytest.raises(ValueError, match=r"image.*float32.*uint8"):
        normalizer.normalize("image", y)


def test_save_and_rebuild_is_exact_for_any_key_name(actions, rng):
    arrays = {
        "action": actions,
        "observation.state": actions,
        "observation_state": actions[:, :2] * 2,
        "robot0_eef_pos": rng.normal(size=(10, 3)),
        "a%2Eb": np.eye(2),
        "a.b": 2 * np.eye(2),
        "image": np.zeros((2, 3, 4, 4), np.uint8),
    }
    modes = {name: "meanstd" for name in arrays if name != "image"} | {"action": "quantile", "a.b": "minmax"}
    fitted = Normalizer.fit(arrays, modes)
    rebuilt = Normalizer.from_spec(json.loads(json.dumps(fitted.spec())))
    rebuilt.load_state_dict(fitted.state_dict())
    assert rebuilt.spec() == fitted.spec()
    for name, array in arrays.items():
        x = torch.from_numpy(array)
        assert torch.equal(fitted.normalize(name, x), rebuilt.normalize(name, x))


def test_missing_statistics_are_an_error_at_load_that_names_the_feature(actions):
    fitted = Normalizer.fit({"state": actions, "action": actions}, "minmax")
    weights = {key: value for key, value in fitted.state_dict().items() if "state" not in key}
    policy = torch.nn.ModuleDict({"normalizer": Normalizer.from_spec(fitted.spec())})
    with pytest.raises(ValueError, match="statistics of state are missing"):
        policy.load_state_dict({f"normalizer.{key}": value for key, value in weights.items()}, strict=False)


def test_statistics_stay_in_float32_when_the_network_is_cast(actions):
    normalizer = Normalizer.fit({"action": actions}, "minmax")
    before = {key: value.clone() for key, value in normalizer.state_dict().items()}
    torch.nn.ModuleDict({"normalizer": normalizer}).half()
    for key, value in normalizer.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("arrays", "modes", "message"),
    [
        ({"action": np.array([[1.0], [np.nan]])}, "minmax", r"action.*NaN.*\[\[0\]\]"),
        ({"action": np.array([[1.0, 2.0], [1.0, np.inf]])}, "minmax", r"action.*infinite.*\[\[1\]\]"),
        ({"action": np.zeros((0, 2))}, "minmax", r"action.*N >= 1"),
        ({"action": np.zeros((3, 2))}, "maxmin", r"maxmin.*minmax, meanstd, quantile, identity"),
        ({"action": np.zeros((3, 2))}, {}, r"action.*minmax"),
        ({"action": np.zeros((3, 2))}, {"action": "minmax", "stat": "minmax"}, r"stat.*action"),
        ({"image": np.zeros((3, 3, 8, 8), np.float32)}, "minmax", r"image.*float32.*uint8"),
        ({"state": np.zeros((3, 8))}, "image", r"state.*uint8"),
    ],
)
def test_wrong_data_and_settings_are_refused_with_their_key(arrays, modes, message):
    with pytest.raises(ValueError, match=message):
        Normalizer.fit(arrays, modes)


def test_wrong_keys_and_shapes_are_refused_with_what_is_expected(actions):
    normalizer = Normalizer.fit({"action": actions}, "minmax")
    with pytest.raises(ValueError, match=r"'actions'.*keys are action"):
        normalizer.normalize("actions", torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"\(2, 4\).*5"):
        normalizer.normalize("action", torch.zeros(2, 4))
