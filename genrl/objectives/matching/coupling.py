"""Which noise goes with which sample, and which samples share a condition.

Pairing noises with data by optimal transport shortens the paths that a network has to learn (arXiv 2502.01441). In a
conditional model it may not do so freely: noise paired across conditions depends on the condition, since the condition
says where the data lie, while acting starts from noise that does not. The network would then be trained on starts that
it never gets. Exchanging the noises of rows that share a condition keeps them standard normal given the condition,
because the rows are exchangeable. So noises are exchanged within equal conditions (radius 0), or within a radius in
which the action's distribution hardly changes; a condition that occurs once keeps its noise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def relative_distances(states: Tensor) -> Tensor:
    """Distances between rows of states [B, C] over the mean of those between different rows, [B, B], detached."""
    states = states.detach().flatten(1).float()
    distance = torch.cdist(states, states, compute_mode="donot_use_mm_for_euclid_dist")
    pairs = len(states) * (len(states) - 1)
    mean = distance.sum() / max(pairs, 1)
    return torch.where(mean > 0, distance / mean.clamp(min=torch.finfo(mean.dtype).tiny), torch.zeros_like(distance))


def nearness(states: Tensor, bandwidth: float) -> Tensor:
    """exp(-D^2 / (2 bandwidth^2)) of :func:`relative_distances` D, [B, B]; 1 on the diagonal.

    Raises:
        ValueError: a bandwidth that is not positive.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth = {bandwidth} must be positive; 0.1 of the mean distance of states is a start")
    return (-relative_distances(states).square() / (2 * bandwidth**2)).exp()


def optimal_coupling(noise: Tensor, data: Tensor, states: Tensor | None = None, radius: float = 0.0) -> Tensor:
    """The permutation p of least cost sum_i |data_i - noise_p(i)|^2, [B] (mini-batch optimal transport).

    Pair ``data`` with ``noise[p]``. The matching is solved on the CPU in about B^3 operations.

    Args:
        noise, data: [B, ...].
        states: conditions [B, C]; None for an unconditional model.
        radius: rows whose states are further apart than this share of the mean distance keep their noises to
            themselves; 0 exchanges within equal states only, which is exact.

    Raises:
        ValueError: different numbers of rows, or a negative radius.
    """
    from scipy.optimize import linear_sum_assignment

    if len(noise) != len(data) or (states is not None and len(states) != len(data)):
        raise ValueError(
            f"a coupling needs equally many rows; got {len(noise)} noises, {len(data)} samples and "
            f"{'no' if states is None else len(states)} states"
        )
    if radius < 0:
        raise ValueError(f"radius = {radius} must not be negative; 0 exchanges noise within equal states only")
    # |x|^2 and |z|^2 sum to the same in every matching.
    cost = -(data.detach().flatten(1).double() @ noise.detach().flatten(1).double().T)  # [B, B]
    if states is not None:
        apart = relative_distances(states) > radius
        if int((~apart).sum()) == len(data):  # every row is alone
            return torch.arange(len(data), device=noise.device)
        cost = cost.masked_fill(apart, torch.inf)
    _, columns = linear_sum_assignment(np.asarray(cost.cpu()))
    return torch.as_tensor(columns, device=noise.device)
