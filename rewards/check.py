"""`check_reward`: find out before a run whether a reward of your own can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import UNBOUNDED, score


def check_reward(
    reward: Any,
    media: Tensor | None = None,
    prompts: Sequence[str] | None = None,
    metadata: Sequence[dict] | None = None,
    tolerance: float = 1e-4,
    strict: bool = False,
) -> list[str]:
    """Run a reward on a small batch and list what is wrong with it.

    Checked: it runs and returns [B] floats (a `RewardError` otherwise, as in a run); declares `differentiable` and
    `range`; values lie in the range; a second call gives the same values; a sample scored alone scores as in the
    batch; neither `media` nor the global random state is changed; values are float32 on the device of the media; some
    sample is scored; gradients, if promised, are finite and not all zero.

    Args:
        media: [B, C, H, W] in [0, 1] with B >= 2; by default 4 random images [3, 32, 32].
        prompts, metadata: one a sample; give them if the reward reads them.
        tolerance: largest difference that counts as the same value.
        strict: raise ValueError with all findings instead of returning them.

    Returns:
        One sentence a finding; empty if nothing was found.
    """
    if media is None:
        media = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    prompts = [f"sample {i}" for i in range(len(media))] if prompts is None else prompts
    metadata = [{} for _ in range(len(media))] if metadata is None else metadata
    if hasattr(reward, "prepare"):
        reward.prepare(media.device, progress=False)

    findings = [
        f"declares no `{name}`; it is taken as {default}."
        for name, default in (("differentiable", False), ("range", UNBOUNDED))
        if not hasattr(reward, name)
    ]
    original, state = media.clone(), torch.get_rng_state()
    reward(media, prompts, metadata)
    if not torch.equal(media, original):  # scoring refuses such a reward, so nothing more can be said about it
        return _report(reward, [*findings, "changes its input in place; copy media before editing them."], strict)
    torch.set_rng_state(state)
    first = score(reward, media, prompts, metadata)
    if not torch.equal(torch.get_rng_state(), state):
        findings.append("draws from torch's global random state; use a torch.Generator of its own.")
    media = original
    findings += _repeatability(reward, media, prompts, metadata, first, tolerance)
    findings += _values(reward, media, prompts, metadata, first, tolerance)
    if getattr(reward, "differentiable", False):
        findings += _gradients(reward, media, prompts, metadata)
    return _report(reward, findings, strict)


def _report(reward: Any, findings: list[str], strict: bool) -> list[str]:
    if strict and findings:
        raise ValueError(f"{type(reward).__name__}: " + " ".join(findings))
    return findings


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest difference; inf where one is NaN and the other is not."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(torch.inf)).max().item()


def _repeatability(reward, media, prompts, metadata, first, tolerance) -> list[str]:
    findings = []
    again = score(reward, media, prompts, metadata)
    alone = [score(reward, media[i : i + 1], prompts[i : i + 1], metadata[i : i + 1]) for i in range(len(media))]
    for name, values in first.items():
        if (gap := _gap(values, again[name])) > tolerance:
            findings.append(f"{name}: two calls on the same batch differ by {gap:.3g}; groups would be ranked by luck.")
        if (gap := _gap(values, torch.cat([one[name] for one in alone]))) > tolerance:
            findings.append(
                f"{name}: scores depend on the rest of the batch (alone and in the batch: {gap:.3g} apart)."
            )
    return findings


def _values(reward, media, prompts, metadata, first, tolerance) -> list[str]:
    findings = []
    low, high = getattr(reward, "range", UNBOUNDED)
    for name, values in first.items():
        scored = values[~values.isnan()]
        if len(scored) == 0:
            findings.append(f"{name}: no sample was scored (all NaN); pass the prompts and metadata that it reads.")
        elif scored.min() < low - tolerance or scored.max() > high + tolerance:
            seen = f"[{scored.min():.4g}, {scored.max():.4g}]"
            findings.append(f"{name}: values {seen} leave the declared range [{low:.4g}, {high:.4g}].")
    with torch.no_grad():
        result = reward(media, prompts, metadata)
    for name, values in (result if isinstance(result, dict) else {"value": result}).items():
        if values.dtype != torch.float32:
            findings.append(f"{name}: dtype {values.dtype} is converted to float32; return float32.")
        if values.device != media.device:
            findings.append(f"{name}: returned on {values.device} for media on {media.device}.")
    return findings


def _gradients(reward, media, prompts, metadata) -> list[str]:
    leaf = media.detach().clone().requires_grad_()
    total = sum(
        values.nan_to_num(0.0).sum() for values in score(reward, leaf, prompts, metadata, gradients=True).values()
    )
    if not isinstance(total, Tensor) or not total.requires_grad:
        return ["says `differentiable`, but its result has no graph back to the media."]
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    if gradient is None or not gradient.abs().sum() > 0:
        return ["says `differentiable`, but the gradient to the media is zero or NaN everywhere."]
    return [] if gradient.isfinite().all() else ["its gradient to the media is not finite."]
