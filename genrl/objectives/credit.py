"""Weights of chunks and tokens of a video, as pure functions: tensors in, tensors out.

Credit (TVRL, arXiv 2610.01973): a reward R = mean_q R_q of checks q on a video V speaks about some parts of it more
than about others. With G_q[f, h, w] = |d R_q / d V[f, :, h, w]|, averaged over the pixels and frames of a latent
token k::

    c_qk = G_qk / mean_k G_qk,     c_k = sum_q w_q c_qk,     c_k <- clip((1 - lam) + lam c_k, c_min, c_max) / mean_k

The normalised gradient is the paper's; averaging, blending, bounds and the combination over checks are ours, as no
publication gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

Combination = Literal["mean", "failed"]


def chunk_weights(tokens: Sequence[float], a: float = -1.0) -> Tensor:
    """Weights [J] of chunks that were generated one after another, of mean 1 over tokens (arXiv 2605.15190).

    With p_j the share of the tokens from chunk j on and pi_a(p) = a p / (1 + (a - 1) p)::

        a < 0:  w_j ~ pi_|a|(p_J / p_j)     rises; w_J / w_1 = J for J equal chunks at a = -1, where pi is the identity
        a = 0:  w_j ~ 1
        a > 0:  w_j ~ pi_a(p_j)             falls; the mirror image, which is ours: no publication uses it

    Args:
        tokens: number of tokens of each chunk, or anything proportional to it.
        a: -1 is the published value.

    Raises:
        ValueError: no chunk, or one without tokens.

    Example:
        >>> chunk_weights([1, 1, 1, 1])
        tensor([0.4800, 0.6400, 0.9600, 1.9200])
    """
    m = torch.tensor([float(n) for n in tokens], dtype=torch.float64)
    if not len(m) or not bool((m > 0).all()):
        raise ValueError(f"chunks of {list(tokens)} tokens have no weights; give at least one chunk, each above 0")
    if a == 0:
        return torch.ones(len(m))
    left = m.flip(0).cumsum(0).flip(0) / m.sum()  # [J] p_j
    p = left[-1] / left if a < 0 else left
    raw = abs(a) * p / (1 + (abs(a) - 1) * p)
    return (raw / ((raw * m).sum() / m.sum())).float()


def spread_frames(
    magnitude: Tensor, shown: Sequence[int], interpolation: Literal["nearest", "linear"] = "linear"
) -> Tensor:
    """Values of the frames that a critic was shown, for all frames.

    Args:
        magnitude: [..., F, H, W], of which only the frames ``shown`` count.
        shown: frames in ascending order. Before the first and after the last their values go on.
        interpolation: between two of them ``"linear"``, or that of the ``"nearest"``, the earlier one at a tie.

    Returns:
        [..., F, H, W]; the input where every frame was shown.
    """
    frames = magnitude.shape[-3]
    if list(shown) == list(range(frames)):
        return magnitude
    at = torch.tensor(shown, dtype=torch.float32)  # [S]
    place = torch.arange(frames, dtype=torch.float32).clamp(at[0].item(), at[-1].item())  # [F]
    after = torch.searchsorted(at, place).clamp(1 if len(at) > 1 else 0, len(at) - 1)  # shown[after - 1] < f <= ...
    before = (after - 1).clamp(min=0)
    share = (place - at[before]) / (at[after] - at[before]).clamp(min=1)  # [F], of the later one
    share = (share > 0.5).float() if interpolation == "nearest" else share
    picked = magnitude[..., list(shown), :, :]
    share = share.to(picked)[:, None, None]
    device = picked.device
    return (1 - share) * picked[..., before.to(device), :, :] + share * picked[..., after.to(device), :, :]


def pool_frames(magnitude: Tensor, frames: int, layout: Literal["auto", "causal", "plain"] = "auto") -> Tensor:
    """Averages over the frames that a latent frame stands for: [..., F, H, W] -> [..., frames, H, W].

    Args:
        magnitude: of every frame.
        frames: latent frames f.
        layout: ``"causal"`` for F = s (f - 1) + 1 frames, as in video autoencoders whose latent frame 0 is frame 0 and
            whose latent frame j >= 1 is frames s (j - 1) + 1 to s j; ``"plain"`` for F = s f; ``"auto"`` takes causal
            where it fits and plain otherwise.

    Raises:
        ValueError: the numbers of frames do not fit the layout.
    """
    have = magnitude.shape[-3]
    causal = frames > 1 and (have - 1) % (frames - 1) == 0
    if have == frames:
        return magnitude
    if layout != "plain" and causal:
        rest = magnitude[..., 1:, :, :].unflatten(-3, (frames - 1, (have - 1) // (frames - 1))).mean(-3)
        return torch.cat([magnitude[..., :1, :, :], rest], -3)
    if layout != "causal" and have % frames == 0:
        return magnitude.unflatten(-3, (frames, have // frames)).mean(-3)
    raise ValueError(
        f"{have} frames do not belong to {frames} latent frames in the {layout} layout; causal is F = s (f - 1) + 1, "
        "plain is F = s f"
    )


def pool_space(magnitude: Tensor, height: int, width: int, patch: int = 1) -> Tensor:
    """Averages over the pixels of a latent cell: [..., H, W] -> [..., height, width].

    Args:
        magnitude: of every pixel; H and W are multiples of height and width, else cells overlap.
        height, width: of the latent.
        patch: cells a side of the patches that the network takes as one token; their cells get their common mean.
    """
    shape = magnitude.shape[:-2]
    pooled = adaptive_avg_pool2d(magnitude.reshape(-1, 1, *magnitude.shape[-2:]), (height, width))
    if patch > 1:
        if height % patch or width % patch:
            raise ValueError(f"patch = {patch} does not divide latents of {height} x {width}; give that of the network")
        pooled = adaptive_avg_pool2d(pooled, (height // patch, width // patch))
        pooled = pooled.repeat_interleave(patch, -2).repeat_interleave(patch, -1)
    return pooled.reshape(*shape, height, width)


def unpool(credit: Tensor, frames: int, height: int, width: int, layout: Literal["auto", "causal", "plain"]) -> Tensor:
    """Every pixel's credit [..., frames, height, width] from that of its latent cell [..., f, h, w]."""
    cells = credit.shape[-3]
    causal = layout != "plain" and cells > 1 and (frames - 1) % (cells - 1) == 0
    of_frame = [-(-k * (cells - 1) // (frames - 1)) if causal else k * cells // frames for k in range(frames)]
    rows = [y * credit.shape[-2] // height for y in range(height)]
    columns = [x * credit.shape[-1] // width for x in range(width)]
    return credit[..., of_frame, :, :][..., rows, :][..., columns]


def credit_map(
    magnitude: Tensor,
    values: Tensor | None = None,
    combine: Combination = "mean",
    lam: float = 1.0,
    c_min: float = 0.0,
    c_max: float = math.inf,
) -> Tensor:
    """Credit [B, ...] of mean 1 for each sample from the gradient magnitudes of its checks.

    Args:
        magnitude: [B, Q, ...] pooled to tokens, not negative. A check whose gradient is zero everywhere speaks of no
            token more than of another and counts as ones; so does a sample all of whose checks are such.
        values: [B, Q], NaN where a sample has no such check; None for checks that all exist.
        combine: ``"mean"`` over checks; ``"failed"`` weighs a check by 1 - value, with values that are probabilities.
        lam: 0 gives ones, exactly; 1 the credit alone.
        c_min, c_max: bounds, before the last division by the mean.

    Raises:
        ValueError: values are needed, or are no probabilities, or a setting is out of range.
    """
    check_settings(combine, lam, c_min, c_max)
    dims = list(range(2, magnitude.dim()))
    magnitude = magnitude.detach().double()  # float32 sums over a large map would show in the mean
    scale = magnitude.mean(dims, keepdim=True)
    each = torch.where(scale > 0, magnitude / scale.clamp(min=torch.finfo(torch.float64).tiny), 1.0)  # [B, Q, ...]
    share = _shares(magnitude, values, combine).reshape(*magnitude.shape[:2], *(1,) * len(dims))
    credit = (share * each).sum(1)
    credit = ((1 - lam) + lam * credit).clamp(c_min, c_max)
    return (credit / credit.mean([d - 1 for d in dims], keepdim=True)).float()


def _shares(magnitude: Tensor, values: Tensor | None, combine: Combination) -> Tensor:
    """Weights [B, Q] of the checks of each sample, which add up to 1."""
    there = magnitude.new_ones(magnitude.shape[:2]) if values is None else (~values.isnan()).to(magnitude)
    weights = there
    if combine == "failed":
        if values is None or bool(((values < 0) | (values > 1)).any()):
            raise ValueError(
                "combine = 'failed' weighs checks by 1 - value, which needs values that are probabilities in [0, 1]; "
                "use a critic with such values (value: two_way), or combine: mean"
            )
        failed = there * (1 - values.detach().to(magnitude).nan_to_num())
        weights = torch.where(failed.sum(1, keepdim=True) > 0, failed, there)
    return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def check_settings(combine: str, lam: float, c_min: float, c_max: float) -> None:
    """Refuse settings of :func:`credit_map` that have no meaning.

    Raises:
        ValueError: naming the setting.
    """
    if combine not in ("mean", "failed"):
        raise ValueError(f"combine = {combine!r} is unknown; allowed are 'mean' and 'failed'")
    if not 0 <= lam <= 1:
        raise ValueError(f"lam = {lam} must lie in [0, 1]; 0 is uniform and 1 the credit alone")
    if not 0 <= c_min <= 1 <= c_max:
        raise ValueError(f"c_min = {c_min} and c_max = {c_max} must be 0 <= c_min <= 1 <= c_max, as the mean is 1")
