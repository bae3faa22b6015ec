"""Weights of chunks and tokens, against their definitions."""

import math

import pytest
import torch

from genrl.objectives.credit import chunk_weights, credit_map, pool_frames, pool_space, spread_frames, unpool


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# ---- chunks ----------------------------------------------------------------------------------------------


def test_chunk_weights_are_the_published_ones_for_seven_equal_chunks():
    # arXiv 2605.15190, figure: about .37 to 2.7; p_J / p_j = 1 / (J - j + 1) at a = -1
    raw = torch.tensor([1 / (7 - j) for j in range(7)], dtype=torch.float64)
    torch.testing.assert_close(chunk_weights([3] * 7).double(), raw / raw.mean(), rtol=1e-6, atol=0)
    assert float(chunk_weights([3] * 7)[-1]) == pytest.approx(2.6997, abs=1e-4)


@pytest.mark.parametrize("a", [-4.0, -1.0, -0.3, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("tokens", [[1], [1] * 5, [4, 1, 7, 2]])
def test_chunk_weights_have_mean_one_over_tokens_and_are_monotone(a, tokens):
    weights = chunk_weights(tokens, a)
    assert float((weights * torch.tensor(tokens)).sum() / sum(tokens)) == pytest.approx(1)
    steps = weights.diff() * (-a if a else 1)
    assert bool((steps > 0).all()) if a else torch.equal(weights, torch.ones(len(tokens)))


def test_the_last_chunk_weighs_as_much_as_there_are_chunks():
    for count in (2, 5, 9):
        weights = chunk_weights([1] * count)
        assert float(weights[-1] / weights[0]) == pytest.approx(count)


@pytest.mark.parametrize("tokens", [[], [1, 0]])
def test_chunks_without_tokens_are_refused(tokens):
    with pytest.raises(ValueError, match="have no weights"):
        chunk_weights(tokens)


# ---- pooling ---------------------------------------------------------------------------------------------


def test_a_causal_video_autoencoder_groups_frames_as_it_encodes_them():
    magnitude = torch.arange(9.0)[:, None, None].expand(9, 2, 2)
    assert pool_frames(magnitude, 3)[:, 0, 0].tolist() == [0, (1 + 2 + 3 + 4) / 4, (5 + 6 + 7 + 8) / 4]
    assert pool_frames(magnitude, 3, "plain")[:, 0, 0].tolist() == [1, 4, 7]
    assert pool_frames(magnitude, 9)[:, 0, 0].tolist() == list(range(9))
    assert pool_frames(magnitude[:8], 4)[:, 0, 0].tolist() == [0.5, 2.5, 4.5, 6.5]  # 7 is no multiple of 3
    assert pool_frames(magnitude[:1], 1).shape == (1, 2, 2)


def test_frames_that_do_not_belong_to_the_latent_are_refused():
    with pytest.raises(ValueError, match="8 frames do not belong to 3 latent frames in the auto layout"):
        pool_frames(uniform(8, 2, 2), 3)
    with pytest.raises(ValueError, match="causal layout"):
        pool_frames(uniform(8, 2, 2), 4, "causal")


@pytest.mark.parametrize(("frames", "cells"), [(9, 3), (8, 4), (5, 5), (1, 1), (13, 4)])
def test_pooling_keeps_constants_and_mass_and_never_mixes_cells(frames, cells):
    constant = torch.full((2, 3, frames, 8, 12), 0.7)
    pooled = pool_space(pool_frames(constant, cells), 4, 3)
    assert pooled.shape == (2, 3, cells, 4, 3)
    torch.testing.assert_close(pooled, torch.full_like(pooled, 0.7))
    # Every cell's average times its size adds up to the whole.
    magnitude = uniform(2, 3, frames, 8, 12)
    pooled = pool_space(pool_frames(magnitude, cells), 4, 3)
    back = unpool(pooled, frames, 8, 12, "auto")
    torch.testing.assert_close(back.sum((-3, -2, -1)), magnitude.sum((-3, -2, -1)))
    # Averages of equal pixels are the pixels, so what is pooled from its own unpooling is unchanged.
    torch.testing.assert_close(pool_space(pool_frames(back, cells), 4, 3), pooled)


def test_patches_share_the_credit_of_their_cells():
    pooled = pool_space(uniform(1, 8, 8), 8, 8, patch=4)
    blocks = pooled.unfold(1, 4, 4).unfold(2, 4, 4).reshape(4, 16)
    torch.testing.assert_close(
        blocks, uniform(1, 8, 8).unfold(1, 4, 4).unfold(2, 4, 4).reshape(4, 16).mean(1, True) + 0 * blocks
    )
    with pytest.raises(ValueError, match="patch = 3 does not divide latents of 8 x 8"):
        pool_space(uniform(1, 8, 8), 8, 8, patch=3)


def test_frames_between_those_a_critic_saw_get_its_credit():
    magnitude = torch.zeros(7, 1, 1)
    magnitude[[1, 3, 6]] = torch.tensor([1.0, 5.0, 2.0])[:, None, None]
    linear = spread_frames(magnitude, [1, 3, 6]).flatten().tolist()
    assert linear == pytest.approx([1, 1, 3, 5, 4, 3, 2])
    nearest = spread_frames(magnitude, [1, 3, 6], "nearest").flatten().tolist()
    assert nearest == [1, 1, 1, 5, 5, 2, 2]  # frame 2 is as far from 1 as from 3
    assert spread_frames(magnitude, [3]).flatten().tolist() == [5] * 7
    assert spread_frames(magnitude, range(7)) is magnitude


# ---- credit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"lam": 0.4}, {"c_min": 0.2, "c_max": 1.5}, {"combine": "failed"}])
def test_credit_has_mean_one_and_is_not_negative(settings):
    magnitude = uniform(5, 3, 4, 6, 6) ** 8
    credit = credit_map(magnitude, uniform(5, 3, seed=1), **settings)
    assert credit.shape == (5, 4, 6, 6) and bool((credit >= 0).all())
    torch.testing.assert_close(credit.mean((1, 2, 3)), torch.ones(5))


@pytest.mark.parametrize(("a", "b"), [(3.0, 0.0), (1e-6, 5.0), (-2.0, 1.0)])
def test_credit_does_not_change_with_scale_and_offset_of_the_reward(a, b):
    frames = uniform(2, 3, 4, 4).requires_grad_()  # [B, F, H, W]
    reward = (frames**3 + frames.roll(1, 1) * frames).sum((1, 2, 3))

    def credit(value):
        (gradient,) = torch.autograd.grad(value.sum(), frames, retain_graph=True)
        return credit_map(gradient.abs()[:, None])

    torch.testing.assert_close(credit(a * reward + b), credit(reward))


def test_a_constant_gradient_gives_ones_and_so_does_none():
    torch.testing.assert_close(credit_map(torch.full((2, 3, 4, 4), 0.3)), torch.ones(2, 4, 4))
    assert torch.equal(credit_map(torch.zeros(2, 3, 4, 4)), torch.ones(2, 4, 4))
    assert torch.equal(credit_map(uniform(2, 3, 4, 4), lam=0.0), torch.ones(2, 4, 4))  # to the last bit
    one_silent = torch.stack([uniform(2, 4, 4), torch.zeros(2, 4, 4)], 1)
    expected = (credit_map(one_silent[:, :1]) + 1) / 2
    torch.testing.assert_close(credit_map(one_silent), expected)


def test_checks_are_normalised_before_they_are_combined():
    loud, quiet = 1e4 * uniform(1, 3, 3), 1e-4 * uniform(1, 3, 3, seed=1)
    credit = credit_map(torch.stack([loud, quiet], 1))
    torch.testing.assert_close(credit, (loud / loud.mean() + quiet / quiet.mean()) / 2)


def test_missing_checks_do_not_count_and_failed_ones_count_more():
    magnitude = uniform(1, 3, 2, 2)
    first, second = (credit_map(magnitude[:, i : i + 1]) for i in range(2))
    values = torch.tensor([[0.9, 0.4, math.nan]])
    torch.testing.assert_close(credit_map(magnitude, values), (first + second) / 2)
    torch.testing.assert_close(credit_map(magnitude, values, "failed"), (0.1 * first + 0.6 * second) / 0.7)
    solved = torch.tensor([[1.0, 1.0, math.nan]])
    torch.testing.assert_close(credit_map(magnitude, solved, "failed"), (first + second) / 2)
    with pytest.raises(ValueError, match="needs values that are probabilities"):
        credit_map(magnitude, -values, "failed")


def test_blending_and_bounds_are_as_documented():
    magnitude = uniform(1, 1, 5, 5)
    plain = magnitude[0, 0] / magnitude.mean()
    bounded = (0.3 + 0.7 * plain).clamp(0.6, 1.2)
    found = credit_map(magnitude, lam=0.7, c_min=0.6, c_max=1.2)[0]
    torch.testing.assert_close(found, bounded / bounded.mean())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam": 1.5}, "lam = 1.5"),
        ({"c_min": 2.0, "c_max": 3.0}, "c_min = 2.0"),
        ({"c_max": 0.5}, "c_max = 0.5"),
        ({"combine": "max"}, "combine = 'max'"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        credit_map(uniform(1, 1, 2, 2), **settings)


def test_no_gradient_flows_through_a_map():
    assert not credit_map(uniform(1, 1, 2, 2).requires_grad_()).requires_grad
