"""A small diffusion transformer: patches, adaLN-zero, class, vector or token conditioning, a learned null condition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from genrl.networks.embeddings import TimeEmbedding, grid_positions, interval_input

PADDING = 0


class VelocityDiT(nn.Module):
    """Diffusion transformer v(x, t, cond, r) (Peebles and Xie 2022) with an output layer that starts at zero.

    The condition is one of: `classes` (cond int64 [B]), `cond_dim` (cond float [B, cond_dim]) or `vocabulary` (cond
    int64 [B, L] of token ids, 0 is padding). Tokens are summed into one vector that modulates every block, which is
    blind to their order; with `tokens_in_context=True` they also join the sequence with a position of their own, for
    text whose order matters. Without any of the three the network is unconditional. Every conditional network has a
    learned null condition for classifier-free guidance. There is no dropout: training and evaluation compute the same.

    Args:
        in_channels: channels of x.
        size: (height, width) of x, multiples of `patch`.
        patch: side of a patch.
        dim: width, a multiple of `heads` and of 4.
        depth: blocks.
        heads: attention heads.
        mlp_ratio: hidden units of a block's MLP per unit of `dim`.
        classes, cond_dim, vocabulary: the condition; at most one is given.
        max_tokens: longest token sequence when tokens are in context.
        tokens_in_context: see above.
        interval: build the embedding of an interval's end r, see `forward`.
        max_frequency: see `fourier_features`; the low default is for networks that are differentiated in t.
        guidance: have the learned null condition; without it a vector condition has no weight that plain conditional
            training leaves untouched.

    Raises:
        ValueError: for sizes that do not divide, or two kinds of condition.

    Example:
        >>> net = VelocityDiT(1, (8, 8), patch=2, dim=32, depth=1, heads=2, classes=10)
        >>> net(torch.zeros(3, 1, 8, 8), torch.rand(3), torch.tensor([1, 2, 3])).shape
        torch.Size([3, 1, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        size: tuple[int, int],
        patch: int = 2,
        dim: int = 64,
        depth: int = 3,
        heads: int = 4,
        mlp_ratio: float = 4.0,
        classes: int | None = None,
        cond_dim: int | None = None,
        vocabulary: int | None = None,
        max_tokens: int = 16,
        tokens_in_context: bool = False,
        interval: bool = False,
        max_frequency: float = 5.0,
        guidance: bool = True,
    ):
        super().__init__()
        height, width = size
        if height % patch or width % patch:
            raise ValueError(f"size {height}x{width} is no multiple of patch={patch}; choose a patch that divides both")
        if dim % heads:
            raise ValueError(f"dim={dim} is not a multiple of heads={heads}")
        given = [kind for kind in (classes, cond_dim, vocabulary) if kind is not None]
        if len(given) > 1:
            raise ValueError(
                f"got classes={classes}, cond_dim={cond_dim}, vocabulary={vocabulary}; pass at most one of them"
            )
        if tokens_in_context and vocabulary is None:
            raise ValueError("tokens_in_context=True needs token conditioning; pass vocabulary=<number of tokens>")
        self.in_channels, self.size, self.patch = in_channels, (height, width), patch
        self.grid = (height // patch, width // patch)
        self.max_tokens = max_tokens
        patch_dim = in_channels * patch * patch

        self.time = TimeEmbedding(dim, max_frequency=max_frequency)
        self.interval = TimeEmbedding(dim, max_frequency=max_frequency) if interval else None
        self.condition = _condition(dim, classes, cond_dim, vocabulary, guidance)
        self.context = nn.Parameter(0.02 * torch.randn(max_tokens, dim)) if tokens_in_context else None
        self.input = nn.Linear(patch_dim, dim)
        self.register_buffer("positions", grid_positions(*self.grid, dim), persistent=False)
        # One matmul makes the modulation of all blocks (shift, scale, gate, twice) and of the output (shift, scale).
        self.modulation = nn.Linear(dim, (6 * depth + 2) * dim)
        # The fused CPU attention has no forward-mode derivative, which the targets of interval networks need.
        self.blocks = nn.ModuleList(_Block(dim, heads, int(mlp_ratio * dim), fused=not interval) for _ in range(depth))
        self.output = nn.Linear(dim, patch_dim)
        for layer in (self.modulation, self.output):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        cond: Tensor | None = None,
        r: Tensor | None = None,
        null: Tensor | bool | None = None,
    ) -> Tensor:
        """Velocity of x.

        Args:
            x: [B, C, H, W].
            t: [B] in [0, 1].
            cond: the condition of this network's kind (class docstring); None for an unconditional network.
            r: [B] end of the interval, r <= t; only with interval=True, where None means r = t.
            null: bool [B], rows that use the learned null condition instead of theirs: the condition dropout of
                training, and guidance in sampling. True means all rows; cond may then be None.

        Returns:
            [B, C, H, W].

        Raises:
            ValueError: for another shape of x, a missing or superfluous condition, and r without interval=True.
        """
        return self.features(x, t, cond, r, null)[0]

    def features(
        self,
        x: Tensor,
        t: Tensor,
        cond: Tensor | None = None,
        r: Tensor | None = None,
        null: Tensor | bool | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """`forward` and the tokens [B, N, dim] after every block but the last (of a single block: after it)."""
        if tuple(x.shape[1:]) != (self.in_channels, *self.size):
            expected = ", ".join(map(str, (self.in_channels, *self.size)))
            raise ValueError(f"x has shape {tuple(x.shape)}; this network takes [B, {expected}]")
        c = self.time(t)  # [B, dim]
        span = interval_input(self.interval, r, t)
        c = c if span is None else c + span
        h = self.input(self._patches(x)) + self.positions  # [B, N, dim]
        mask = None
        tokens = h.shape[1]
        if self.condition is None:
            if cond is not None or null is not None:
                raise ValueError(
                    "a condition was given to an unconditional VelocityDiT; "
                    "build it with classes, cond_dim or vocabulary"
                )
        else:
            vector, sequence = self.condition(cond, _null_rows(null, x.shape[0], x.device))
            c = c + vector
            if self.context is not None:
                embedded, real = sequence  # [B, L, dim], bool [B, L]
                if embedded.shape[1] > self.max_tokens:
                    raise ValueError(f"got {embedded.shape[1]} tokens; max_tokens={self.max_tokens} is the limit")
                h = torch.cat([h, embedded + self.context[: embedded.shape[1]]], dim=1)
                mask = F.pad(real, (tokens, 0), value=True)[:, None, None]  # [B, 1, 1, N + L]
        modulation = self.modulation(F.silu(c))[:, None].chunk(6 * len(self.blocks) + 2, dim=-1)  # of [B, 1, dim]
        hidden = []
        for index, block in enumerate(self.blocks):
            h = block(h, modulation[6 * index : 6 * index + 6], mask)
            hidden.append(h[:, :tokens])
        h = _modulate(h[:, :tokens], modulation[-2], modulation[-1])
        return self._pixels(self.output(h)), hidden[:-1] or hidden

    def _patches(self, x: Tensor) -> Tensor:
        (rows, columns), p = self.grid, self.patch
        x = x.reshape(x.shape[0], self.in_channels, rows, p, columns, p)
        return x.permute(0, 2, 4, 1, 3, 5).reshape(x.shape[0], rows * columns, -1)  # [B, N, C p p]

    def _pixels(self, h: Tensor) -> Tensor:
        (rows, columns), p = self.grid, self.patch
        h = h.reshape(h.shape[0], rows, columns, self.in_channels, p, p)
        return h.permute(0, 3, 1, 4, 2, 5).reshape(h.shape[0], self.in_channels, *self.size)  # [B, C, H, W]


class _Block(nn.Module):
    """Attention and MLP, each modulated and gated by the condition (adaLN-zero)."""

    def __init__(self, dim: int, heads: int, hidden: int, fused: bool):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, h: Tensor, modulation: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        h = torch.addcmul(h, gate, self._attention(_modulate(h, shift, scale), mask))
        hidden = F.gelu(self.fc1(_modulate(h, mlp_shift, mlp_scale)), approximate="tanh")
        return torch.addcmul(h, mlp_gate, self.fc2(hidden))

    def _attention(self, h: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, dim = h.shape
        # each [B, heads, N, dim / heads]
        q, k, v = self.qkv(h).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [B, heads, N, N]
            out = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, dim))


class _ClassCondition(nn.Module):
    """Classes and one more row for the null condition."""

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.classes = classes
        self.embedding = nn.Embedding(classes + 1, dim)
        nn.init.normal_(self.embedding.weight, std=1.0)

    def forward(self, cond: Tensor | None, null: Tensor | None) -> tuple[Tensor, None]:
        if cond is None:
            cond = torch.full_like(_all_null(null), self.classes, dtype=torch.long)
        elif null is not None:
            cond = cond.masked_fill(null, self.classes)
        return self.embedding(cond), None


class _VectorCondition(nn.Module):
    """A linear map of the vector, and a learned vector for the null condition."""

    def __init__(self, dim: int, cond_dim: int, guidance: bool):
        super().__init__()
        self.linear = nn.Linear(cond_dim, dim)
        self.null = nn.Parameter(0.02 * torch.randn(dim)) if guidance else None

    def forward(self, cond: Tensor | None, null: Tensor | None) -> tuple[Tensor, None]:
        if self.null is None:
            if cond is None or null is not None:
                raise ValueError("this VelocityDiT has no null condition; pass cond, or build it with guidance=True")
            return self.linear(cond), None
        if cond is None:
            return self.null.expand(len(_all_null(null)), -1), None
        vector = self.linear(cond)  # [B, dim]
        return vector if null is None else torch.where(null[:, None], self.null, vector), None


class _TokenCondition(nn.Module):
    """Token embeddings and their sum; padding contributes nothing, one more row is the null condition's only token."""

    def __init__(self, dim: int, vocabulary: int):
        super().__init__()
        self.null_id = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, dim)
        nn.init.normal_(self.embedding.weight, std=1.0)

    def forward(self, cond: Tensor | None, null: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if cond is None:
            cond = torch.full((len(_all_null(null)), 1), self.null_id, device=self.embedding.weight.device)
        elif null is not None:
            alone = F.pad(cond.new_full((1, 1), self.null_id), (0, cond.shape[1] - 1), value=PADDING)  # [1, L]
            cond = torch.where(null[:, None], alone, cond)
        real = cond != PADDING  # [B, L]
        embedded = self.embedding(cond) * real[..., None]  # [B, L, dim]
        return embedded.sum(1), (embedded, real)


def _condition(
    dim: int, classes: int | None, cond_dim: int | None, vocabulary: int | None, guidance: bool
) -> nn.Module | None:
    if classes is not None:
        return _ClassCondition(dim, classes)
    if cond_dim is not None:
        return _VectorCondition(dim, cond_dim, guidance)
    return None if vocabulary is None else _TokenCondition(dim, vocabulary)


def _null_rows(null: Tensor | bool | None, batch: int, device: torch.device) -> Tensor | None:
    if isinstance(null, bool):
        return torch.ones(batch, dtype=torch.bool, device=device) if null else None
    return null


def _all_null(null: Tensor | None) -> Tensor:
    if null is None or not bool(null.all()):
        raise ValueError("cond is None; pass the condition, or null=True for the learned null condition")
    return null


def _modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(h, h.shape[-1:]), 1 + scale)
