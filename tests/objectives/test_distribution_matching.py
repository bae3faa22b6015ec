"""Distribution matching: the two forms, the fixed point, and the Frechet distance against scipy."""

import numpy as np
import pytest
import torch

from genrl.objectives.distribution_matching import dmd_direction, dmd_loss, dmd_norm, frechet_distance


def samples(seed=0, shape=(3, 4, 1, 2, 2)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def gradient(form, weight=None):
    x0, real, fake = (x.float() for x in samples())
    x0.requires_grad_()
    dmd_loss(x0, real, fake, weight, form).sum().backward()
    return x0.grad, real, fake, x0.detach()


def test_the_gradient_of_the_regression_is_minus_two_directions_a_mean_over_elements():
    grad, real, fake, x0 = gradient("regression")
    norm = np.abs(x0.numpy() - real.numpy()).reshape(3, -1).mean(1).reshape(3, 1, 1, 1, 1)
    expected = -2 * (real.numpy() - fake.numpy()) / norm / 16
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_linear_form_has_half_the_gradient_of_the_regression(weighted):
    weight = torch.tensor([0.5, 0.5, 1.0, 2.0])[:, None, None, None] if weighted else None
    torch.testing.assert_close(2 * gradient("linear", weight)[0], gradient("regression", weight)[0])


def test_weights_scale_the_gradient_of_their_elements():
    weight = torch.tensor([0.0, 1.0, 1.0, 2.0])[:, None, None, None]
    torch.testing.assert_close(gradient("regression", weight)[0], weight * gradient("regression")[0])


@pytest.mark.parametrize("form", ["regression", "linear"])
def test_nothing_moves_where_teacher_and_critic_agree(form):
    x0, real, _ = samples()
    x0.requires_grad_()
    dmd_loss(x0, real, real.clone(), form=form).sum().backward()
    assert torch.equal(x0.grad, torch.zeros_like(x0))


def test_gradients_stop_at_teacher_critic_and_norm():
    x0, real, fake = (x.requires_grad_() for x in samples())
    dmd_loss(x0, real, fake).sum().backward()
    assert x0.grad is not None and real.grad is None and fake.grad is None
    assert not dmd_norm(x0, real).requires_grad and not dmd_direction(x0, real, fake).requires_grad


def test_the_norm_is_one_number_a_sample_and_never_zero():
    x0, real, fake = samples()
    torch.testing.assert_close(dmd_norm(x0, real), (x0 - real).abs().mean((1, 2, 3, 4)).float())
    assert bool((dmd_norm(x0, x0) > 0).all()) and bool(dmd_loss(x0, x0, fake).isfinite().all())


def test_a_descent_step_moves_samples_toward_the_teacher_and_away_from_the_critic():
    grad, real, fake, _ = gradient("regression")
    assert float((-grad * (real - fake)).sum()) > 0


def test_unknown_forms_and_shapes_are_refused():
    x0, real, fake = samples()
    with pytest.raises(ValueError, match=r"'cubic'.*'regression' and 'linear'"):
        dmd_loss(x0, real, fake, form="cubic")
    with pytest.raises(ValueError, match=r"\(3, 4, 1, 2, 2\).*must be equal"):
        dmd_loss(x0, real[:, :2], fake)


def test_frechet_distance_is_that_of_scipy_and_zero_for_the_same_set():
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 5)) @ rng.normal(size=(5, 5)), rng.normal(size=(50, 5)) + 0.5
    ca, cb = np.cov(a.T), np.cov(b.T)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * sqrtm(ca @ cb).real)
    assert frechet_distance(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(torch.from_numpy(a), torch.from_numpy(a)) == pytest.approx(0, abs=1e-8)
    with pytest.raises(ValueError, match=r"\(1, 5\)"):
        frechet_distance(torch.zeros(1, 5), torch.zeros(3, 5))
