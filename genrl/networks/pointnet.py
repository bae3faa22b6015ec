"""Point clouds: a set encoder, farthest-point sampling and crops, all batched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PointEncoder(nn.Module):
    """One vector for a set of points: an MLP that all points share, a maximum over them, a projection.

    Blind to the order of the points and to repeated ones. LayerNorm after every layer, as in DP3 (Ze et al. 2024,
    section III-B), whose defaults these are.

    Args:
        channels: 3 (xyz) or 6 (xyz and rgb).
        widths: layers of the shared MLP.
        features: size of the vector.
    """

    def __init__(self, channels: int = 3, widths: Sequence[int] = (64, 128, 256), features: int = 64):
        super().__init__()
        self.channels, self.out_dim = channels, features
        layers: list[nn.Module] = []
        for size, width in zip([channels, *widths[:-1]], widths, strict=True):
            layers += [nn.Linear(size, width), nn.LayerNorm(width), nn.ReLU()]
        self.shared = nn.Sequential(*layers)
        self.project = nn.Sequential(nn.Linear(widths[-1], features), nn.LayerNorm(features))

    def forward(self, points: Tensor) -> Tensor:
        """[B, N, channels] -> [B, features]."""
        if points.ndim != 3 or points.shape[2] != self.channels:
            raise ValueError(
                f"points have shape {list(points.shape)}; expected [B, N, {self.channels}] "
                "(3 channels: xyz, 6: xyz and rgb)"
            )
        return self.project(self.shared(points).amax(1))


def farthest_point_sampling(points: Tensor, k: int, start: int = 0) -> Tensor:
    """Indices of k points that are spread out: each is the farthest from those before it.

    Args:
        points: [B, N, C]; distances are Euclidean in the first three channels.
        k: number of points, at most N.
        start: index of the first point.

    Returns:
        int64 [B, k]. On ties the lower index is taken; when fewer than k different points exist, indices repeat
        among equal points.

    Raises:
        ValueError: for k outside [1, N] or a start outside [0, N).

    Example:
        >>> farthest_point_sampling(torch.tensor([[[0.0, 0, 0], [1, 0, 0], [5, 0, 0]]]), 2)
        tensor([[0, 2]])
    """
    batch, n = points.shape[:2]
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} points cannot be taken of {n}; allowed are 1 to {n}")
    if not 0 <= start < n:
        raise ValueError(f"start = {start} is no index of {n} points")
    xyz = points[..., :3]
    chosen = torch.empty(batch, k, dtype=torch.long, device=points.device)
    distance = torch.full((batch, n), torch.inf, device=points.device, dtype=points.dtype)  # to the chosen ones
    last = torch.full((batch, 1, 1), start, dtype=torch.long, device=points.device)
    for i in range(k):
        chosen[:, i] = last[:, 0, 0]
        newest = xyz.gather(1, last.expand(batch, 1, xyz.shape[2]))  # [B, 1, 3]
        distance = torch.minimum(distance, (xyz - newest).square().sum(2))
        last = distance.argmax(1)[:, None, None]
    return chosen


def gather_points(points: Tensor, index: Tensor) -> Tensor:
    """points [B, N, C] at index [B, k] -> [B, k, C]."""
    return points.gather(1, index[..., None].expand(*index.shape, points.shape[2]))


def crop_points(points: Tensor, low: Sequence[float], high: Sequence[float], k: int) -> Tensor:
    """k spread-out points inside a box, for batches whose rows have different numbers of points inside.

    Args:
        points: [B, N, C], xyz first, any unit.
        low, high: corners of the box in that unit, three numbers each; the borders belong to it.
        k: number of points returned; rows with fewer points inside repeat them, and a row with none repeats the
            point that is nearest to the box's centre.

    Returns:
        [B, k, C].

    Raises:
        ValueError: for a box whose low corner is not below the high one, or k < 1.
    """
    lower, upper = points.new_tensor(list(low)), points.new_tensor(list(high))
    if lower.shape != (3,) or upper.shape != (3,) or not bool((lower < upper).all()):
        raise ValueError(f"a crop goes from low {list(low)} to high {list(high)}; both have 3 numbers, low below high")
    if k < 1:
        raise ValueError(f"k = {k} points; at least 1 is needed")
    xyz = points[..., :3]
    inside = ((xyz >= lower) & (xyz <= upper)).all(2)  # [B, N]
    to_centre = (xyz - (lower + upper) / 2).square().sum(2)
    nearest = to_centre.masked_fill(~inside & inside.any(1, keepdim=True), torch.inf).argmin(1)  # [B]
    # Outside points move onto the anchor, where farthest-point sampling takes them only when nothing else is left.
    anchor = gather_points(points, nearest[:, None])  # [B, 1, C]
    kept = torch.where(inside[..., None], points, anchor)
    kept = torch.cat([anchor, kept], 1)
    if kept.shape[1] < k:
        kept = torch.cat([kept, anchor.expand(-1, k - kept.shape[1], -1)], 1)
    return gather_points(kept, farthest_point_sampling(kept, k))
