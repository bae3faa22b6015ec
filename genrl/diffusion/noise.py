"""Randomness that depends on what is drawn, not on who draws it.

Every random number of a run is a function of (seed, iteration, row, step). So a resumed run, another number of
processes and another roll-out batch all draw the same numbers, and there is no generator state to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

BLOCK = 16  # rows that share a generator: few enough to waste little, many enough that the loop over blocks is short
INITIAL = -1  # the "step" of the start latents


def derive_seed(*key: object) -> int:
    """A 63-bit seed from any printable key; stable across processes, machines and versions."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class RowNoise:
    """Standard noise for rows of a global batch.

    Args:
        key: what the noise belongs to, for instance (seed, "rollout", iteration).
        rows: global row numbers of this batch, one per sample; equal numbers get equal noise.
        device: where to draw. CPU and CUDA draw different numbers.
    """

    key: tuple[object, ...]
    rows: tuple[int, ...]
    device: str = "cpu"

    @staticmethod
    def of(key: tuple[object, ...], rows: Sequence[int] | Tensor, device: str | torch.device = "cpu") -> RowNoise:
        return RowNoise(key, tuple(int(row) for row in rows), str(device))

    def __call__(self, step: int, shape: tuple[int, ...]) -> Tensor:
        """Normal noise of the given shape [len(rows), ...] in float32."""
        return self._draw("normal", step, shape)

    def uniform(self, step: int, shape: tuple[int, ...]) -> Tensor:
        """Uniform numbers in [0, 1) of the given shape [len(rows), ...] in float32."""
        return self._draw("uniform", step, shape)

    def initial(self, shape: tuple[int, ...]) -> Tensor:
        """The noise of the start latents."""
        return self(INITIAL, shape)

    def for_rows(self, rows: Sequence[int] | Tensor) -> RowNoise:
        return replace(self, rows=tuple(int(row) for row in rows))

    def _draw(self, kind: str, step: int, shape: tuple[int, ...]) -> Tensor:
        if shape[0] != len(self.rows):
            raise ValueError(f"noise of {shape[0]} rows was asked of a source with {len(self.rows)} rows")
        blocks, index = self._places
        drawn = []
        for block in blocks:
            generator = torch.Generator(self.device).manual_seed(derive_seed(*self.key, kind, step, block))
            make = torch.randn if kind == "normal" else torch.rand
            drawn.append(make((BLOCK, *shape[1:]), generator=generator, device=self.device))
        return torch.cat(drawn)[index]

    @cached_property
    def _places(self) -> tuple[list[int], Tensor]:
        """The blocks that are drawn, and where each row lies in them; on the device once, not at every step."""
        blocks = sorted({row // BLOCK for row in self.rows})
        place = {block: i for i, block in enumerate(blocks)}
        index = [place[row // BLOCK] * BLOCK + row % BLOCK for row in self.rows]
        return blocks, torch.tensor(index, device=self.device)
