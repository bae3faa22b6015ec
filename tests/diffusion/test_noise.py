"""Noise is a function of (key, row, step), whoever draws it and in whatever batch."""

from __future__ import annotations

import pytest
import torch
from diffusion_members import elementwise, sampler_of, start

from genrl.diffusion import Trajectory
from genrl.diffusion.noise import RowNoise, derive_seed

KEY = (7, "rollout", 3)


@pytest.mark.parametrize("kind", ["__call__", "uniform"])
def test_noise_of_a_row_does_not_depend_on_its_batch(kind) -> None:
    rows = list(range(40))
    whole = getattr(RowNoise.of(KEY, rows), kind)(2, (40, 3, 5))
    for size in (1, 3, 7, 40):
        parts = [getattr(RowNoise.of(KEY, part), kind)(2, (len(part), 3, 5)) for part in torch.arange(40).split(size)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        getattr(RowNoise.of(KEY, shuffled), kind)(2, (40, 3, 5)), whole[shuffled], rtol=0, atol=0
    )


def test_equal_rows_share_noise_and_everything_else_changes_it() -> None:
    noise = RowNoise.of(KEY, [4, 4, 5])
    drawn = noise(0, (3, 8))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    others = [
        noise(1, (3, 8)),
        noise.initial((3, 8)),
        noise.uniform(0, (3, 8)),
        RowNoise.of((8,), [4, 4, 5])(0, (3, 8)),
    ]
    others.append(noise.for_rows([20, 21, 22])(0, (3, 8)))
    for i, left in enumerate([drawn, *others]):
        for right in others[i:]:
            assert left is right or not torch.equal(left, right)


def test_noise_is_standard() -> None:
    drawn = RowNoise.of(KEY, range(64))(0, (64, 2000))
    assert drawn.dtype == torch.float32
    assert float(drawn.mean()) == pytest.approx(0, abs=0.012) and float(drawn.var()) == pytest.approx(1, abs=0.016)
    correlation = torch.corrcoef(drawn) - torch.eye(64)
    assert float(correlation.abs().max()) < 5 / 2000**0.5  # no two rows repeat each other
    uniform = RowNoise.of(KEY, range(64)).uniform(0, (64, 2000))
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.004)


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    assert derive_seed(7, "rollout", 3) == int.from_bytes(bytes.fromhex(DIGEST), "little") >> 1
    assert 0 <= derive_seed("x") < 2**63 and len({derive_seed(k) for k in range(1000)}) == 1000


DIGEST = "a02590b3ac4a5883"  # b2sum -l 64 of the text (7, 'rollout', 3)


def test_a_roll_out_does_not_depend_on_its_batches() -> None:
    sampler = sampler_of("flow_sde")
    x1, cond = start()
    whole = sampler.rollout(elementwise, x1, cond, RowNoise.of(KEY, range(8)))
    parts = [
        sampler.rollout(elementwise, x1[index], cond[index], RowNoise.of(KEY, index))
        for index in torch.arange(8).split(3)
    ]
    torch.testing.assert_close(Trajectory.concatenate(parts).x0, whole.x0, rtol=0, atol=1e-6)


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="noise of 3 rows was asked of a source with 2 rows"):
        RowNoise.of(KEY, [0, 1])(0, (3, 4))
