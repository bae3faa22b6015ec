"""Who draws what: noise by row, prompts by (seed, iteration), samples by process."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from genrl.diffusion import RowNoise
from genrl.training.seeding import Layout, draw_prompts, seed_everything

KEY = (0, "rollout", 3)
SHAPE = (3, 5)


def noise(rows, key=KEY, step=0):
    return RowNoise.of(key, rows)(step, (len(rows), *SHAPE))


# ---------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("size", [1, 3, 16, 17])
def test_noise_of_a_row_does_not_depend_on_the_batch_it_is_drawn_in(size):
    rows = list(range(50))
    whole = noise(rows)
    parts = [noise(rows[i : i + size]) for i in range(0, 50, size)]
    assert torch.equal(torch.cat(parts), whole)


def test_noise_follows_its_row_through_any_order():
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(noise(order.tolist()), noise(range(50))[order])


def test_equal_rows_get_equal_noise_and_different_rows_different_noise():
    drawn = noise([7, 8, 7])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert len(noise(range(200)).flatten(1).unique(dim=0)) == 200


def test_seed_iteration_purpose_and_step_each_change_the_noise():
    rows = [0, 1]
    drawn = [
        noise(rows),
        noise(rows, step=1),
        noise(rows, key=(1, "rollout", 3)),
        noise(rows, key=(0, "rollout", 4)),
        noise(rows, key=(0, "evaluation", 3)),
        RowNoise.of(KEY, rows).initial((2, *SHAPE)),
        RowNoise.of(KEY, rows).uniform(0, (2, *SHAPE)),
    ]
    assert len(torch.stack(drawn).flatten(1).unique(dim=0)) == len(drawn)


def test_noise_is_standard_normal_and_uniform_noise_is_uniform():
    rows = range(4000)
    drawn = noise(rows).double()
    n = drawn.numel()
    assert abs(drawn.mean()) < 4 / n**0.5
    assert abs(drawn.var() - 1) < 4 * (2 / n) ** 0.5
    # Neighbouring rows and elements are uncorrelated.
    flat = drawn.flatten(1)
    assert abs((flat[1:] * flat[:-1]).mean()) < 4 / n**0.5
    uniform = RowNoise.of(KEY, rows).uniform(0, (4000, *SHAPE)).double()
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5


def test_noise_neither_reads_nor_moves_the_global_generators():
    torch.manual_seed(1)
    first = noise([0, 1])
    state = torch.get_rng_state()
    torch.manual_seed(2)
    random.seed(3)
    python = random.getstate()
    assert torch.equal(noise([0, 1]), first)
    draw_prompts(10, 4, 0, 0)
    assert random.getstate() == python
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_for_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"3 rows .* 2 rows"):
        RowNoise.of(KEY, [0, 1])(0, (3, *SHAPE))


def test_rows_may_be_given_as_any_integers():
    first = noise([0, 17])
    assert torch.equal(noise(torch.tensor([17])), first[1:])
    assert torch.equal(RowNoise.of(KEY, [3]).for_rows([17])(0, (1, *SHAPE)), first[1:])


# -------------------------------------------------------------------------------------------------- prompts


def test_prompts_are_a_function_of_seed_and_iteration_and_differ_within_an_iteration():
    assert draw_prompts(100, 8, 0, 5) == draw_prompts(100, 8, 0, 5)
    assert draw_prompts(100, 8, 0, 5) != draw_prompts(100, 8, 0, 6)
    assert draw_prompts(100, 8, 0, 5) != draw_prompts(100, 8, 1, 5)
    for iteration in range(20):
        chosen = draw_prompts(10, 10, 0, iteration)
        assert sorted(chosen) == list(range(10))


def test_prompts_are_drawn_equally_often():
    counts = np.zeros(10)
    for iteration in range(2000):
        counts[draw_prompts(10, 3, 0, iteration)] += 1
    assert abs(counts - 600).max() < 5 * (2000 * 0.3 * 0.7) ** 0.5


def test_more_prompts_than_there_are_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match=r"prompts_per_iteration = 11.*only 10"):
        draw_prompts(10, 11, 0, 0)


# --------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_a_minibatch_holds_the_same_samples_for_any_number_of_processes(minibatches, processes):
    prompts, group = 6, 8
    alone = Layout(prompts, group, minibatches)
    ranks = [Layout(prompts, group, minibatches, processes, rank) for rank in range(processes)]
    size, whole = ranks[0].local_minibatch, alone.local()
    for m in range(minibatches):
        union = torch.cat([r.local()[m * size : (m + 1) * size] for r in ranks])
        expected = whole[m * alone.local_minibatch : (m + 1) * alone.local_minibatch]
        assert sorted(union.tolist()) == sorted(expected.tolist())
        # Every prompt equally often in every update.
        assert torch.equal((union // group).bincount(), torch.full((prompts,), group // minibatches))


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_over_all_processes_every_sample_occurs_once(processes):
    parts = [Layout(6, 8, 2, processes, rank).local() for rank in range(processes)]
    assert sorted(torch.cat(parts).tolist()) == list(range(48))
    assert len({len(p) for p in parts}) == 1


def test_sizes_that_do_not_divide_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match=r"group_size = 5 .*minibatches = 2"):
        Layout(4, 5, 2)
    with pytest.raises(ValueError, match=r"9 samples .*3 x group_size 6 / minibatches 2.* 2 processes"):
        Layout(3, 6, 2, processes=2)
    assert replace(Layout(4, 6, 2, 2), rank=1).local_minibatch == 6


def test_seed_everything_fixes_the_global_generators_by_seed_and_rank():
    def draw(seed, rank):
        seed_everything(seed, rank)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        assert draw(0, 0) == draw(0, 0)
        assert len(set(draw(0, 0) + draw(0, 1) + draw(1, 0))) == 9
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])
