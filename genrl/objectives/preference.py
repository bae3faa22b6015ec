"""Diffusion-DPO on noised samples (Wallace et al. 2023, arXiv 2311.12908, equation 14, in velocity form)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from genrl.diffusion.paths import Path, RectifiedFlow


def matching_error(v: Tensor, x0: Tensor, eps: Tensor, t: Tensor, path: Path | None = None) -> Tensor:
    """e = mean over elements of (v - v*)^2, [B], v* the path's velocity of (x0, eps)."""
    path = RectifiedFlow() if path is None else path
    return (v.float() - path.velocity(x0, eps, t).float()).square().flatten(1).mean(1)


def dpo_margin(better: Tensor, better_ref: Tensor, worse: Tensor, worse_ref: Tensor, beta: float) -> Tensor:
    """-(beta / 2) [(e_w - e_w_ref) - (e_l - e_l_ref)]: by how much more the model than the reference prefers w."""
    return -0.5 * beta * ((better - better_ref) - (worse - worse_ref))


def dpo_loss(better: Tensor, better_ref: Tensor, worse: Tensor, worse_ref: Tensor, beta: float) -> Tensor:
    """-log sigmoid(margin), one value a pair; log 2 where model and reference agree.

    Args:
        better, worse: matching errors of the better and the worse sample under the model, at the same (t, eps).
        better_ref, worse_ref: under the reference.
        beta: strength; published values of 2000 to 5000 are for errors whose differences are of the order 1e-3.
    """
    return -logsigmoid(dpo_margin(better, better_ref, worse, worse_ref, beta))


def pairs_of(rows: Tensor, groups: Tensor, advantage: Tensor, best_worst: bool) -> tuple[Tensor, Tensor]:
    """(better, worse), two int64 [N] of places, for samples of the same group whose advantages differ.

    Args:
        rows: int64 [B] sample numbers; of equal ones only the first takes part.
        groups: int64 [B]. advantage: [B].
        best_worst: only the best and the worst of each group; of equal ones the earlier.
    """
    first = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    seen: set[int] = set()
    for place, row in enumerate(rows.tolist()):
        first[place] = row not in seen
        seen.add(row)
    better: list[Tensor] = []
    worse: list[Tensor] = []
    for group in groups[first].unique():
        members = ((groups == group) & first).nonzero()[:, 0]
        values = advantage[members]
        if best_worst:
            high, low = members[values.argmax()], members[values.argmin()]
            if values.max() > values.min():
                better.append(high[None])
                worse.append(low[None])
            continue
        i, j = (values[:, None] > values[None, :]).nonzero(as_tuple=True)
        better.append(members[i])
        worse.append(members[j])
    empty = torch.zeros(0, dtype=torch.long, device=rows.device)
    return torch.cat([empty, *better]), torch.cat([empty, *worse])
