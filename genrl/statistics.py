"""Intervals of measured means and shares, and paired tests of two measurements on the same cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class PairedDifference:
    """Difference b - a of two measurements of the same cases: its 95 % interval and a two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float
    n: int


def mcnemar_p_value(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value of McNemar's test (McNemar 1947): are a and b equally often alone in succeeding?

    Only the cases on which a and b differ say anything about that; under the null hypothesis each of them is a fair
    coin. 1.0 when there is none.

    Args:
        only_a: cases on which a succeeded and b did not.
        only_b: cases on which b succeeded and a did not.

    Raises:
        ValueError: for a negative count.
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"counts of cases must not be negative, but are {only_a} and {only_b}")
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)  # integers: exact for any n


def paired_shares(a: Sequence[bool], b: Sequence[bool]) -> PairedDifference:
    """Difference of two success rates on the same cases.

    The interval is Newcombe's hybrid score interval for paired proportions (Newcombe 1998, method 10), which combines
    the two Wilson intervals and keeps its width when no case differs; the p-value is McNemar's exact one.

    Raises:
        ValueError: for different numbers of cases, or none.
    """
    n = _cases(a, b)
    both = sum(bool(x) and bool(y) for x, y in zip(a, b, strict=True))
    total_a, total_b = sum(map(bool, a)), sum(map(bool, b))
    neither = n - total_a - total_b + both
    share_a, share_b = total_a / n, total_b / n
    (low_a, high_a), (low_b, high_b) = wilson_interval(share_a, n), wilson_interval(share_b, n)
    phi = _phi(both, total_a - both, total_b - both, neither)
    below = (share_b - low_b) ** 2 - 2 * phi * (share_b - low_b) * (high_a - share_a) + (high_a - share_a) ** 2
    above = (high_b - share_b) ** 2 - 2 * phi * (high_b - share_b) * (share_a - low_a) + (share_a - low_a) ** 2
    return PairedDifference(
        difference=share_b - share_a,
        low=share_b - share_a - max(0.0, below) ** 0.5,
        high=share_b - share_a + max(0.0, above) ** 0.5,
        p_value=mcnemar_p_value(total_a - both, total_b - both),
        n=n,
    )


def paired_means(a: Sequence[float], b: Sequence[float]) -> PairedDifference:
    """Difference of two means on the same cases: Student's paired t interval and test.

    With one case, interval and p-value are NaN. When all differences are equal the interval is that number.

    Raises:
        ValueError: for different numbers of cases, none, or a value that is not finite.
    """
    n = _cases(a, b)
    gaps = [float(y) - float(x) for x, y in zip(a, b, strict=True)]
    if not all(map(math.isfinite, gaps)):
        raise ValueError("a value is NaN or infinite; leave such cases out of both measurements")
    mean = math.fsum(gaps) / n
    if n == 1:
        return PairedDifference(mean, math.nan, math.nan, math.nan, n)
    error = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (n - 1) / n)
    if error == 0:
        return PairedDifference(mean, mean, mean, float(mean == 0), n)
    from scipy.stats import t  # comes with scikit-learn

    half = float(t.ppf(0.975, n - 1)) * error
    return PairedDifference(mean, mean - half, mean + half, 2 * float(t.sf(abs(mean) / error, n - 1)), n)


def _cases(a: Sequence[object], b: Sequence[object]) -> int:
    if len(a) != len(b) or not len(a):
        raise ValueError(f"{len(a)} and {len(b)} cases cannot be paired; both measurements need the same, at least one")
    return len(a)


def _phi(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Correlation of the two outcomes, with Newcombe's continuity correction towards 0; 0 where it does not exist."""
    scale = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    product = both * neither - only_a * only_b
    if scale == 0 or product == 0:
        return 0.0
    if product > 0:
        product = max(0.0, product - (both + only_a + only_b + neither) / 2)  # type: ignore[assignment]
    return product / math.sqrt(scale)
