"""Intervals of measured means and shares."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Z95 = 1.959964  # two-sided 95 % of the normal distribution


def interval(name: str, values: Tensor, bounds: tuple[float, float] | None = None) -> dict[str, float]:
    """Mean and 95 % interval of the scored values: Wilson's for 0/1 values, else the normal one, within ``bounds``."""
    scored = values[~torch.isnan(values)].double()
    n = len(scored)
    if n == 0:
        return {name: math.nan, f"{name}_low": math.nan, f"{name}_high": math.nan}
    mean = float(scored.mean())
    if bool(((scored == 0) | (scored == 1)).all()):
        low, high = wilson_interval(mean, n)
    else:
        half = Z95 * float(scored.std()) / n**0.5 if n > 1 else math.nan
        low, high = mean - half, mean + half
        if bounds is not None:
            low, high = max(low, bounds[0]), min(high, bounds[1])
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def wilson_interval(share: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a binomial share (Wilson 1927)."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)
