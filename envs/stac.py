"""Sentinel's statistical temporal action consistency (STAC): does a policy still plan what it planned a moment ago?

At every replanning step the policy is asked for many chunks. Those of the previous step and those of this one overlap
in time; a policy that knows what it does predicts the overlap with the same distribution twice. The distance D between
the two sample sets is summed over an episode, and an episode whose sum exceeds what successful episodes reach raises an
alarm (arXiv 2410.04640, "Unpacking Failure Modes of Generative Policies", and its official code).

Symbols: B chunk samples per replanning step, H horizon, k executed steps between two replannings, A action size,
D_t the score of one replanning step, S_t its running sum, gamma the threshold of the alarm, alpha its false-alarm rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Measure = Literal["mmd", "kde_kl", "kde_kl_reverse", "mse", "ssd", "ate"]
Rule = Literal["dimension", "median", "eigenvalue"]
MEASURES = get_args(Measure)
RULES = get_args(Rule)
DISTANCES = {"mmd", "mse", "ssd", "ate"}  # never negative, so that their running sum never falls
AGGREGATES = ("mean", "min", "max", "std")


@dataclass(frozen=True)
class StacSettings:
    """How temporal consistency is measured and when an alarm is raised.

    Args:
        samples: B, chunks drawn at every replanning step (Sentinel: 256). The cost is one prediction of a batch of B.
        measure: ``"mmd"`` (Sentinel's default), ``"kde_kl"`` or ``"kde_kl_reverse"`` compare the two sample sets;
            ``"mse"``, ``"ssd"`` and ``"ate"`` compare the i-th sample with the i-th, for deterministic policies.
        bandwidth: of the Gaussian kernel: a number, or one of the rules of `mmd` and `kde_kl`; None is each measure's
            default (1/dimension for mmd, 1 for kde_kl).
        aggregate: how the paired measures are reduced over the B pairs: mean, min, max or std.
        cumulative: an episode's score is the running sum of D_t (Sentinel's default), else D_t itself.
        alpha: share of successful episodes that may raise a false alarm.
        action_dims: indices of the action elements that take part, for instance without the gripper; None for all.
        calibration: evaluation file (JSON) whose successful episodes set the threshold; None calibrates every episode
            on the successful episodes of the same evaluation, itself left out.
    """

    samples: int = 64
    measure: Measure = "mmd"
    bandwidth: float | Rule | None = None
    aggregate: str = "mean"
    cumulative: bool = True
    alpha: float = 0.05
    action_dims: tuple[int, ...] | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ValueError(f"stac.measure = {self.measure!r} is unknown; allowed are {', '.join(MEASURES)}")
        if self.samples < 1 or (self.samples < 2 and not self.paired):
            raise ValueError(
                f"stac.samples = {self.samples} is too small; {self.measure!r} needs at least {1 if self.paired else 2}"
            )
        if self.aggregate not in AGGREGATES:
            raise ValueError(f"stac.aggregate = {self.aggregate!r} is unknown; allowed are {', '.join(AGGREGATES)}")
        check_bandwidth("stac.bandwidth", self.bandwidth)
        if not 0 < self.alpha < 1:
            raise ValueError(f"stac.alpha = {self.alpha} must lie in (0, 1)")
        if self.action_dims is not None:
            object.__setattr__(self, "action_dims", tuple(int(i) for i in self.action_dims))
            if not self.action_dims or min(self.action_dims) < 0:
                raise ValueError(
                    f"stac.action_dims = {list(self.action_dims)} must be one or more indices from 0; null takes all"
                )

    @property
    def paired(self) -> bool:
        """Whether the i-th sample is compared with the i-th, so that one sample is enough."""
        return self.measure in ("mse", "ssd", "ate")

    def score(self, previous: Tensor, current: Tensor, executed: int, skip: int = 0) -> float:
        """D_t of two sets of chunks [B, H, A], see `overlap`."""
        first, second = overlap(previous, current, executed, skip, self.action_dims)
        if self.paired:
            return paired_error(first, second, self.measure, self.aggregate)  # type: ignore[arg-type]
        if self.measure == "mmd":
            return mmd(first.flatten(1), second.flatten(1), "dimension" if self.bandwidth is None else self.bandwidth)
        width = 1.0 if self.bandwidth is None else self.bandwidth
        return kde_kl(first.flatten(1), second.flatten(1), width, forward=self.measure == "kde_kl")

    def episode_scores(self, steps: Sequence[float]) -> list[float]:
        """S_t of an episode from its D_t."""
        if not self.cumulative:
            return [float(step) for step in steps]
        total, scores = 0.0, []
        for step in steps:
            total += float(step)
            scores.append(total)
        return scores

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        values = asdict(self)
        return {**values, "action_dims": None if self.action_dims is None else list(self.action_dims)}


def check_bandwidth(name: str, bandwidth: float | str | None) -> None:
    """Raise ValueError unless this is None, a positive number or the name of a rule."""
    if bandwidth is None or (isinstance(bandwidth, str) and bandwidth in RULES):
        return
    if isinstance(bandwidth, str) or not bandwidth > 0 or not math.isfinite(bandwidth):
        raise ValueError(f"{name} = {bandwidth!r} must be a positive number or one of {', '.join(RULES)}")


def overlap(
    previous: Tensor, current: Tensor, executed: int, skip: int = 0, action_dims: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The actions that two consecutive predictions make for the same time steps, in float64.

    Args:
        previous, current: [B, H, A] chunks of two replannings, the second `executed` steps after the first.
        executed: k, steps between the two replannings.
        skip: leading actions of a chunk that lie in the past (n_obs_steps - 1); they are not decided any more.
        action_dims: action elements to keep; None keeps all.

    Returns:
        Two tensors [B, H - k - skip, A']: previous[:, k + skip:] and current[:, skip:H - k].

    Raises:
        ValueError: for different shapes, no overlap, or an action element that does not exist.
    """
    if previous.dim() != 3 or previous.shape[1:] != current.shape[1:]:
        raise ValueError(
            f"chunks of shapes {tuple(previous.shape)} and {tuple(current.shape)} cannot be compared; both must be "
            "[B, H, A] with the same H and A"
        )
    horizon, size = previous.shape[1:]
    if not executed > 0 or horizon - executed - skip < 1:
        raise ValueError(
            f"two chunks of horizon {horizon} that are {executed} steps apart share no future action ({skip} lie in "
            "the past); STAC needs chunking.n_action_steps + n_obs_steps - 1 < chunking.horizon"
        )
    if action_dims is not None and max(action_dims) >= size:
        raise ValueError(f"stac.action_dims = {list(action_dims)} names an element that an action of {size} lacks")
    keep = slice(None) if action_dims is None else list(action_dims)
    first, second = previous[:, executed + skip :, keep], current[:, skip : horizon - executed, keep]
    return first.double(), second.double()


def mmd(x: Tensor, y: Tensor, bandwidth: float | Rule = "dimension") -> float:
    """Squared maximum mean discrepancy of two samples, the biased estimate: >= 0, and 0 for equal samples.

    mean k(x, x) + mean k(y, y) - 2 mean k(x, y) with k(a, b) = exp(-g ||a - b||^2).

    Args:
        x: [N, D].
        y: [M, D].
        bandwidth: g itself, or a rule: ``"dimension"`` 1/D (default of the library that Sentinel calls), ``"median"``
            1/(2 median of the positive pooled squared distances), ``"eigenvalue"`` 1/(largest eigenvalue of the pooled
            covariance). A comment in Sentinel's code writes exp(-g ||.||^2 / 2); its library call has no 1/2.

    Raises:
        ValueError: for a bandwidth that is neither a positive number nor a rule, or samples that do not fit.
    """
    x, y = _samples(x, y)
    check_bandwidth("bandwidth", bandwidth)
    xx, yy, xy = _squared(x, x), _squared(y, y), _squared(x, y)
    if bandwidth == "dimension":
        g = 1.0 / x.shape[1]
    elif bandwidth == "median":
        pooled = torch.cat([xx.flatten(), yy.flatten(), xy.flatten(), xy.flatten()])
        g = _inverse(2 * _median(pooled[pooled > 0]))
    elif bandwidth == "eigenvalue":
        g = _inverse(_largest_eigenvalue(torch.cat([x, y])))
    else:
        g = float(bandwidth)
    value = torch.exp(-g * xx).mean() + torch.exp(-g * yy).mean() - 2 * torch.exp(-g * xy).mean()
    return max(0.0, float(value))  # rounding may leave -1e-17


def kde_kl(x: Tensor, y: Tensor, bandwidth: float | Rule = 1.0, forward: bool = True) -> float:
    """Kullback-Leibler divergence between Gaussian kernel density estimates of two samples; it can be negative.

    Args:
        x: [N, D], the previous prediction P.
        y: [M, D], the current one C.
        bandwidth: standard deviation of the kernel, or a rule: ``"eigenvalue"`` the root of the largest eigenvalue of
            the pooled covariance (Sentinel), ``"median"`` the root of the median positive pooled squared distance,
            ``"dimension"`` the root of half the dimension, which is `mmd`'s kernel.
        forward: estimate mean over C of (log p_C - log p_P); else mean over P of (log p_P - log p_C).

    Raises:
        ValueError: like `mmd`.
    """
    x, y = _samples(x, y)
    check_bandwidth("bandwidth", bandwidth)
    if bandwidth == "eigenvalue":
        width = _largest_eigenvalue(torch.cat([x, y])) ** 0.5
    elif bandwidth == "median":
        pooled = _squared(torch.cat([x, y]), torch.cat([x, y]))
        width = _median(pooled[pooled > 0]) ** 0.5
    elif bandwidth == "dimension":
        width = (x.shape[1] / 2) ** 0.5
    else:
        width = float(bandwidth)
    if width == 0:  # all samples are equal: so are the densities
        return 0.0
    at, other = (y, x) if forward else (x, y)
    return float((_log_density(at, at, width) - _log_density(at, other, width)).mean())


def paired_error(x: Tensor, y: Tensor, measure: Literal["mse", "ssd", "ate"] = "mse", aggregate: str = "mean") -> float:
    """Distance between the i-th sample of one set and the i-th of the other, reduced over the pairs.

    Args:
        x, y: [B, T, A] overlapping actions.
        measure: ``"mse"`` mean of squared differences, ``"ssd"`` their sum, ``"ate"`` mean over time of the distance
            between the paths that the actions make when each is a displacement (running sums).
        aggregate: mean, min, max or std (without Bessel's correction) over the pairs.

    Raises:
        ValueError: for shapes that differ.
    """
    if x.shape != y.shape or x.dim() != 3:
        raise ValueError(
            f"paired measures need two tensors [B, T, A] of the same shape, not {tuple(x.shape)} and {tuple(y.shape)}"
        )
    gap = x.double() - y.double()
    if measure == "ate":
        errors = gap.cumsum(1).norm(dim=2).mean(1)  # [B]
    else:
        squares = gap.square().flatten(1)
        errors = squares.mean(1) if measure == "mse" else squares.sum(1)
    if aggregate == "std":
        return float(errors.std(correction=0))
    return float({"mean": errors.mean, "min": errors.min, "max": errors.max}[aggregate]())


def _samples(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1] or not len(x) or not len(y):
        raise ValueError(f"samples of shapes {tuple(x.shape)} and {tuple(y.shape)} must be [N, D] and [M, D]")
    return x.double(), y.double()


def _squared(x: Tensor, y: Tensor) -> Tensor:
    """Squared distances [N, M]; from differences, not from products, so that equal rows give exactly 0."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()


def _median(values: Tensor) -> float:
    """The usual median (mean of the two middle values); 0 of nothing."""
    return float(values.quantile(0.5)) if 0 < len(values) < 2**24 else float(values.median()) if len(values) else 0.0


def _inverse(value: float) -> float:
    return 1.0 / value if value > 0 else 1.0  # 0: all samples are equal, and every g gives 0


def _largest_eigenvalue(pooled: Tensor) -> float:
    """Of the covariance [D, D] of rows (N - 1 in the denominator); computed on the smaller Gram matrix."""
    centred = pooled - pooled.mean(0)
    small = centred.T @ centred if centred.shape[1] <= len(centred) else centred @ centred.T
    return max(0.0, float(torch.linalg.eigvalsh(small)[-1])) / (len(pooled) - 1)


def _log_density(at: Tensor, samples: Tensor, width: float) -> Tensor:
    """log of the Gaussian kernel density estimate at points [N, D]."""
    exponents = -_squared(at, samples) / (2 * width**2)
    constant = math.log(len(samples)) + samples.shape[1] / 2 * math.log(2 * math.pi * width**2)
    return torch.logsumexp(exponents, dim=1) - constant
