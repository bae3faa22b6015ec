"""Point clouds from depth pictures: cropped to the workspace and thinned to a fixed number of points."""

from __future__ import annotations

import numpy as np

from genrl.envs.settings import Box3

CANDIDATES = 4  # farthest-point sampling looks at this many times the points wanted, drawn at random


def crop_mask(points: np.ndarray, crop: Box3 | None) -> np.ndarray:
    """Which of the points [..., 3] lie in the crop (lowest and highest corner); infinite points never do."""
    inside = np.isfinite(points).all(-1)
    if crop is not None:
        low, high = np.asarray(crop, points.dtype)
        inside &= ((points >= low) & (points <= high)).all(-1)
    return inside


def farthest_points(points: np.ndarray, count: int, start: int = 0) -> np.ndarray:
    """Indices [count] of points that are spread evenly: each is the farthest from those taken before.

    Args:
        points: [M, 3], M >= count.
        count: how many to take.
        start: index of the first.
    """
    points = np.ascontiguousarray(points, np.float32)
    taken = np.empty(count, np.int64)
    distances = np.full(len(points), np.inf, np.float32)
    current = start
    for number in range(count):
        taken[number] = current
        offsets = points - points[current]
        np.minimum(distances, np.einsum("ij,ij->i", offsets, offsets), out=distances)
        distances[current] = -1.0  # also among points that coincide, none is taken twice
        current = int(distances.argmax())
    return taken


def sample_points(points: np.ndarray, count: int, rng: np.random.Generator, method: str = "fps") -> np.ndarray:
    """A cloud of exactly `count` points [count, 3 or more].

    Args:
        points: [M, 3 or more], M >= 1; the first three columns are the position. With M < count all are taken and some
            of them again.
        count: how many to take.
        rng: decides which points are looked at, and the first.
        method: ``"fps"`` spreads them evenly (among 4 x count drawn at random), ``"random"`` draws them.
    """
    total = len(points)
    if total <= count:
        again = rng.integers(total, size=count - total)
        return np.concatenate([points, points[again]])
    if method == "random":
        return points[rng.choice(total, count, replace=False)]
    if total > CANDIDATES * count:
        points = points[rng.choice(total, CANDIDATES * count, replace=False)]
    return points[farthest_points(points[:, :3], count, int(rng.integers(len(points))))]
