"""A small video transformer that sees everything, or makes a video chunk by chunk.

The causal form has two evaluations that agree: all chunks in one forward, in which noisy and finished chunks take turns
(RAVEN, arXiv 2605.15190), and one chunk at a time with the keys and values of the finished ones in a cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from genrl.networks.dit import _modulate, _null_rows, _TokenCondition
from genrl.networks.embeddings import TimeEmbedding, fourier_features, grid_positions

Attention = Literal["auto", "dense", "flex"]
_LONG = 1024  # tokens from which "auto" takes flex attention: below, the mask is small and nothing has to be compiled


@dataclass(frozen=True)
class ChunkCache:
    """Keys and values of finished chunks.

    Args:
        keys, values: for each block [B, heads, n N, dim / heads], of n chunks of N tokens.
        chunks: n.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    chunks: int


class CausalVideoDiT(nn.Module):
    """Diffusion transformer v(x, t, tokens) on videos [B, F, C, H, W], whose frames are made in chunks.

    A chunk's frames are one tubelet: a token is a patch of all of them. Segments are the chunks in a sequence. A noisy
    chunk z_j sees itself and the finished chunks h_i, i < j; a finished chunk sees itself and those before; nothing
    else sees a noisy chunk. z_j and h_j have the same positions; h_j is at time 0 unless told otherwise. With
    ``causal=False`` all chunks see all, and there is no history.

    Args:
        channels: C.
        size: H = W, a multiple of `patch`.
        frames_per_chunk, chunks: F is their product.
        patch: side of a patch.
        dim, depth, heads: width (a multiple of `heads` and of 4), blocks, attention heads.
        vocabulary: number of token ids; 0 is padding. Tokens are summed into one vector that modulates every block.
        causal: see above.
        attention: how the interleaved forward applies its mask: "dense" as a matrix of booleans; "flex" by
            `torch.nn.attention.flex_attention`, which skips the blocks that nobody sees (compiled on a GPU; on a CPU
            it is slow and has no gradient); "auto" is flex on a GPU from 1,024 tokens on.

    Raises:
        ValueError: for sizes that do not divide, or an unknown attention.

    Example:
        >>> net = CausalVideoDiT(dim=16, depth=1, heads=2, vocabulary=9)
        >>> x = torch.zeros(2, 10, 1, 16, 16)
        >>> net(x, torch.rand(2), torch.ones(2, 3, dtype=torch.long), history=x).shape
        torch.Size([2, 10, 1, 16, 16])
    """

    positions: Tensor

    def __init__(
        self,
        channels: int = 1,
        size: int = 16,
        frames_per_chunk: int = 2,
        chunks: int = 5,
        patch: int = 4,
        dim: int = 64,
        depth: int = 3,
        heads: int = 4,
        vocabulary: int = 64,
        causal: bool = True,
        attention: Attention = "auto",
    ):
        super().__init__()
        if attention not in get_args(Attention):
            raise ValueError(f"attention = {attention!r} is unknown; allowed are {', '.join(get_args(Attention))}")
        if size % patch:
            raise ValueError(f"size {size} is no multiple of patch={patch}; choose a patch that divides it")
        if dim % heads or dim % 4:
            raise ValueError(f"dim={dim} is not a multiple of heads={heads} and of 4")
        self.channels, self.size, self.patch, self.heads, self.depth = channels, size, patch, heads, depth
        self.frames_per_chunk, self.chunks, self.causal, self.attention = frames_per_chunk, chunks, causal, attention
        self.grid = size // patch
        patch_dim = frames_per_chunk * channels * patch * patch
        self.time = TimeEmbedding(dim, max_frequency=100.0)
        self.condition = _TokenCondition(dim, vocabulary)
        self.input = nn.Linear(patch_dim, dim)
        space = grid_positions(self.grid, self.grid, dim)[None]  # [1, N, dim]
        when = fourier_features(torch.arange(chunks) / max(1, chunks - 1), dim, 10.0)[:, None]  # [J, 1, dim]
        self.register_buffer("positions", space + when, persistent=False)  # [J, N, dim]
        self.modulation = nn.Linear(dim, (6 * depth + 2) * dim)
        self.blocks = nn.ModuleList(_Block(dim, heads) for _ in range(depth))
        self.output = nn.Linear(dim, patch_dim)
        for layer in (self.modulation, self.output):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        cond: Tensor,
        history: Tensor | None = None,
        history_t: Tensor | None = None,
        detach_history: bool = False,
        null: Tensor | bool | None = None,
        one: Literal["chunk", "extend"] | None = None,
        cache: ChunkCache | None = None,
    ) -> Any:
        """Velocity of all chunks, [B, F, C, H, W].

        Args:
            x: [B, F, C, H, W].
            t: [B], or [B, J] for each chunk.
            cond: int64 [B, L] token ids.
            history: [B, F, C, H, W] finished chunks of a causal network; the last is not looked at.
            history_t: [B, J] their times, for histories that are noised; 0 by default.
            detach_history: keys and values of the history carry no gradient (Self-Forcing).
            null: bool [B], rows with the learned null condition instead of theirs; True means all.
            one: `chunk` or `extend` with this x and ``cache`` instead. Wrappers of a network act on calls of itself.
            cache: see ``one``.

        Raises:
            ValueError: for another shape, a causal network without a history, or a history of one that is not causal.
        """
        if one is not None:
            return self.chunk(x, t, cond, cache, null) if one == "chunk" else self.extend(cache, x, cond, null)
        expected = (self.chunks * self.frames_per_chunk, self.channels, self.size, self.size)
        for name, video in (("x", x), ("history", history)):
            if video is not None and tuple(video.shape[1:]) != expected:
                raise ValueError(f"{name} has shape {tuple(video.shape)}; this network takes [B, {expected}]")
        if self.causal != (history is not None):
            raise ValueError(
                "a causal network needs history=, the finished chunks, or use chunk() and extend()"
                if self.causal
                else "history was given to a network that sees all chunks; build it with causal=True"
            )
        rows, chunks = len(x), self.chunks
        vector = self._vector(cond, null, rows)
        t = t[:, None].expand(-1, chunks) if t.dim() == 1 else t
        tokens = self._embed(x, 0)  # [B, J, N, dim]
        if history is None:
            return self._pixels(self._run(tokens, self._modulation(t, vector), None, None)[0])
        past_t = torch.zeros_like(t) if history_t is None else history_t
        # z_1, h_1, z_2, h_2, ..., z_J: the last finished chunk is nobody's history
        both = torch.stack([tokens, self._embed(history, 0)], 2).flatten(1, 2)[:, :-1]  # [B, 2 J - 1, N, dim]
        times = torch.stack([t, past_t.to(t)], 2).flatten(1, 2)[:, :-1]
        mask = self._mask(x.device)
        out, _ = self._run(both, self._modulation(times, vector), mask, None, detach_history)
        return self._pixels(out[:, ::2])

    def chunk(self, x: Tensor, t: Tensor, cond: Tensor, cache: ChunkCache | None, null: Any = None) -> Tensor:
        """Velocity of the next chunk x [B, f, C, H, W] at t [B], given the finished ones in the cache."""
        tokens = self._embed(x, 0 if cache is None else cache.chunks)
        out, _ = self._run(tokens, self._modulation(t[:, None], self._vector(cond, null, len(x))), None, cache)
        return self._pixels(out)

    def extend(self, cache: ChunkCache | None, chunk: Tensor, cond: Tensor, null: Any = None) -> ChunkCache:
        """The cache with one more finished chunk [B, f, C, H, W]; None is the empty cache."""
        zero = torch.zeros(len(chunk), 1, device=chunk.device)
        tokens = self._embed(chunk, 0 if cache is None else cache.chunks)
        modulation = self._modulation(zero, self._vector(cond, null, len(chunk)))
        return self._run(tokens, modulation, None, cache)[1]

    # ------------------------------------------------------------------------------------------------------ parts

    def _mask(self, device: torch.device) -> Any:
        """The mask of the interleaved forward, for `_attend`."""
        flex = device.type == "cuda" and (2 * self.chunks - 1) * self.grid**2 >= _LONG
        if self.attention == "flex" or (self.attention == "auto" and flex):
            return _block_mask(self.chunks, self.grid**2, device)
        return interleaved_mask(self.chunks, self.grid**2).to(device)

    def _vector(self, cond: Tensor, null: Any, rows: int) -> Tensor:
        return self.condition(cond, _null_rows(null, rows, cond.device))[0]  # [B, dim]

    def _modulation(self, t: Tensor, vector: Tensor) -> list[Tensor]:
        """6 depth + 2 tensors [B, S, 1, dim], of times t [B, S]."""
        c = self.time(t.reshape(-1)).unflatten(0, t.shape) + vector[:, None]  # [B, S, dim]
        return list(self.modulation(F.silu(c))[:, :, None].chunk(6 * self.depth + 2, dim=-1))

    def _embed(self, video: Tensor, first: int) -> Tensor:
        """Tokens [B, S, N, dim] of S chunks, of which the first is at place `first` in the video."""
        f, p, g = self.frames_per_chunk, self.patch, self.grid
        x = video.reshape(len(video), -1, f, self.channels, g, p, g, p)
        x = x.permute(0, 1, 4, 6, 2, 3, 5, 7).flatten(4).flatten(2, 3)  # [B, S, N, f C p p]
        return self.input(x) + self.positions[first : first + x.shape[1]]

    def _pixels(self, h: Tensor) -> Tensor:
        f, p, g = self.frames_per_chunk, self.patch, self.grid
        x = h.reshape(*h.shape[:2], g, g, f, self.channels, p, p).permute(0, 1, 4, 5, 2, 6, 3, 7)
        return x.reshape(len(h), -1, self.channels, self.size, self.size)

    def _run(
        self,
        h: Tensor,
        modulation: list[Tensor],
        mask: Any,
        cache: ChunkCache | None,
        detach_history: bool = False,
    ) -> tuple[Tensor, ChunkCache]:
        """Outputs [B, S, N, patch_dim] and the cache with these segments."""
        keys, values = [], []
        for i, block in enumerate(self.blocks):
            past = None if cache is None else (cache.keys[i], cache.values[i])
            h, key, value = block(h, modulation[6 * i : 6 * i + 6], mask, past, detach_history)
            keys.append(key)
            values.append(value)
        shift, scale = modulation[-2:]
        count = h.shape[1] + (0 if cache is None else cache.chunks)
        return self.output(_modulate(h, shift, scale)), ChunkCache(tuple(keys), tuple(values), count)


def interleaved_mask(chunks: int, tokens: int) -> Tensor:
    """bool [(2 J - 1) N, (2 J - 1) N]: which tokens (rows) see which (columns) in z_1, h_1, z_2, ..., h_{J-1}, z_J."""
    segment = torch.arange(2 * chunks - 1)
    return _sees(segment[:, None], segment[None, :]).repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def _sees(query: Tensor, key: Tensor) -> Tensor:
    """Whether a segment sees another, for their places in z_1, h_1, z_2, ...: itself, and what is finished before."""
    return (query == key) | (key % 2 == 1) & (key // 2 < query // 2)


@functools.lru_cache(maxsize=8)
def _block_mask(chunks: int, tokens: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    length = (2 * chunks - 1) * tokens

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _sees(query // tokens, key // tokens)

    with torch.inference_mode(False):  # the mask is kept, and a later forward may need a gradient
        return create_block_mask(sees, None, None, length, length, device=str(device))


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention of [B, heads, n, d] with a mask of booleans, a `BlockMask` or none."""
    if mask is None or isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return _flex_attention(q.is_cuda)(q, k, v, block_mask=mask)


class _Block(nn.Module):
    """Attention and MLP, each modulated and gated by the condition of the segment (adaLN-zero)."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(
        self,
        h: Tensor,
        modulation: list[Tensor],
        mask: Any,
        past: tuple[Tensor, Tensor] | None,
        detach_history: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, S, N, dim] -> the same, and keys and values [B, heads, n, dim / heads] with those of the past."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        rows, segments, tokens, dim = h.shape
        x = _modulate(h, shift, scale).flatten(1, 2)
        q, k, v = self.qkv(x).reshape(rows, segments * tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if detach_history:
            finished = (torch.arange(segments, device=h.device) % 2 == 1).repeat_interleave(tokens)[:, None]
            k, v = (torch.where(finished, part.detach(), part) for part in (k, v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out = _attend(q, k, v, mask)
        out = self.proj(out.transpose(1, 2).reshape(rows, segments, tokens, dim))
        h = torch.addcmul(h, gate, out)
        hidden = F.gelu(self.fc1(_modulate(h, mlp_shift, mlp_scale)), approximate="tanh")
        return torch.addcmul(h, mlp_gate, self.fc2(hidden)), k, v
