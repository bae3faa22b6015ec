"""Steps with known noise: what a surrogate sees when mu_old + s z was drawn and the mean is mu_old + shift."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from genrl.diffusion import GaussianTransition
from genrl.objectives import SURROGATES, Guard, PPOClip, StepTerms, Surrogate

NUMBERS = {"a": 0.5, "dt": 0.1, "kappa": 0.125}
MEMBERS: dict[str, Surrogate] = {name: member() for name, member in SURROGATES.items()} | {
    "ppo_clip_wide": PPOClip(0.2),
    "guard_inv_kappa": Guard(delta_form="inv_kappa"),
    "guard_beta_over_dt": Guard([1e-4, 2e-4], delta_form="beta_over_dt", reference=0.1),
}
WITH_RATIO = [name for name, member in MEMBERS.items() if not member.on_policy_only]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def step_terms(
    shift: Tensor,
    z: Tensor,
    advantage: Tensor | float = 1.0,
    std: Any = 0.3,
    reduction: Any = "mean",
    start: float = 0.0,
    **numbers: Any,
) -> StepTerms:
    """shift = mu - mu_old and z, both [B, ...]; a gradient that reaches shift reaches the mean."""
    old = torch.full_like(z, start)
    mean = old + shift
    now, behaviour = GaussianTransition(mean, std), GaussianTransition(old, std)
    sample = behaviour.at(z)
    return StepTerms(
        log_ratio=now.log_ratio(behaviour, sample, reduction),
        kl_old=now.kl(behaviour, reduction),
        advantage=torch.as_tensor(advantage, dtype=z.dtype).expand(len(z)),
        mean=mean,
        sample=sample,
        std=std,
        dim=z[0].numel(),
        reduction=reduction,
        **(NUMBERS | numbers),
    )


def plain_terms(log_ratio: Tensor, kl: Tensor, advantage: Tensor, std: Any = 0.3, **others: Any) -> StepTerms:
    """Given log-ratios [B] and KLs [B], over a mean that is at its old place."""
    zeros = torch.zeros(len(log_ratio), 4, dtype=log_ratio.dtype)
    values = {"dim": 4, "reduction": "mean", "mean": zeros, "sample": zeros + 0.1} | NUMBERS | others
    return StepTerms(log_ratio=log_ratio, kl_old=kl, advantage=advantage, std=std, **values)
