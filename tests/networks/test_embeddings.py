import math

import pytest
import torch

from genrl.networks import TimeEmbedding, fourier_features, grid_positions


def test_features_are_sines_and_cosines_of_the_stated_frequencies():
    t = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    features = fourier_features(t, 4, max_frequency=5.0)
    expected = [[math.sin(0.5 * s), math.sin(5 * s), math.cos(0.5 * s), math.cos(5 * s)] for s in t.tolist()]
    torch.testing.assert_close(features, torch.tensor(expected, dtype=torch.float64))


def test_default_frequencies_keep_the_derivative_in_t_small():
    t = torch.rand(16, requires_grad=True)
    for column in fourier_features(t, 32).unbind(1):
        (slope,) = torch.autograd.grad(column.sum(), t, retain_graph=True)
        assert slope.abs().max() <= 5.0


@pytest.mark.parametrize(("dim", "frequency", "message"), [(3, 5.0, "even"), (4, 0.1, "max_frequency")])
def test_bad_sizes_are_refused(dim, frequency, message):
    with pytest.raises(ValueError, match=message):
        TimeEmbedding(8, features=dim, max_frequency=frequency)


def test_every_cell_has_its_own_position_and_the_mean_cosine_falls_with_distance():
    positions = grid_positions(4, 6, 32)
    assert positions.shape == (24, 32)
    gram = positions @ positions.T
    assert torch.allclose(gram.diagonal(), torch.full((24,), 16.0))  # sin^2 + cos^2 for each of 16 pairs
    assert (gram - torch.diag(gram.diagonal())).max() < 16.0 - 1e-3
    assert gram[0, 1] > gram[0, 2]
    with pytest.raises(ValueError, match="multiple of 4"):
        grid_positions(2, 2, 6)
