"""StepRS: advantages of a risk-seeking objective whose risk coefficient depends on the denoising step.

The risk-sensitive objective of a group of G samples (RS-GRPO, arXiv 2509.24261) and its advantage are

    J_beta = (1/beta) log E exp(beta r) ,   A_beta(i) = (1/beta) ( exp(beta r_i) / mean_j exp(beta r_j) - 1 )       (1)

with r_i - mean for beta -> 0, the largest reward alone for beta -> inf, and mean 0 over the group for every beta. There
is no division by a standard deviation. StepRS (arXiv 2610.00661) takes another beta at every denoising state k.

For rewards of 0 and 1 with success rate p in the group, (1) is a factor of the centred reward,

    A_beta = c_beta(p) (r - p) ,    c_beta(p) = (e^beta - 1) / ( beta (1 + p (e^beta - 1)) ) ,

which is 1 at p*(beta) = 1/beta - 1/(e^beta - 1): a positive beta amplifies groups below p* and damps those above it.

What the paper does about the following is not known to us and our choice: beta goes from 2 at the noisiest state to 0
at the data; the range of real-valued rewards is mapped to [0, 1]; calibration asks for p*(beta) = mean success.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.objectives.advantages import (
    Advantages,
    Rewards,
    _check,
    _scale,
    _value_metrics,
    _weighted_sum,
    flat_groups,
    group_relative,
    reward_metrics,
)

Form = Literal["linear", "cosine", "power"]
Match = Literal["none", "rms", "mass"]
_ZERO = 1e-6  # |beta| below which (1) is r - mean: the difference is below 1e-6 and float64 would lose more


def risk_advantage(rewards: Tensor, beta: float | Tensor) -> Tensor:
    """Equation (1) of this module, float64 [P, G], or [P, G, T] for beta [T].

    Args:
        rewards: [P, G], NaN where not scored (advantage 0). The transform depends on their scale: see `StepRisk`.
        beta: risk coefficient; negative is risk-averse. No size overflows.
    """
    r = rewards.detach().double()
    scored = ~torch.isnan(r)
    betas = torch.as_tensor(beta, dtype=torch.float64, device=r.device)
    scored_t, filled = scored[..., None], torch.where(scored, r, torch.zeros_like(r))[..., None]  # [P, G, 1]
    b = betas.reshape(1, 1, -1)
    count = scored.sum(1).clamp(min=1).double()[:, None, None]  # [P, 1, 1]
    mean = filled.sum(1, keepdim=True) / count
    exponent = torch.where(scored_t, b * (filled - mean), -torch.inf)  # (1) does not change when r is shifted
    lse = exponent.logsumexp(1, keepdim=True)
    small = b.abs() < _ZERO
    risky = torch.expm1(exponent - lse + count.log()) / torch.where(small, torch.ones_like(b), b)
    result = torch.where(small, filled - mean, risky)
    result = torch.where(scored_t & ~flat_groups(r)[:, None, None], result, torch.zeros_like(result))
    return result if betas.dim() else result[..., 0]


def binary_factor(rate: float | Tensor, beta: float) -> Tensor:
    """c_beta(p), by which the centred reward of a group with success rate p is multiplied."""
    p = torch.as_tensor(rate, dtype=torch.float64)
    if abs(beta) < _ZERO:
        return torch.ones_like(p)
    if beta > 0:  # divided by e^beta, so that nothing overflows
        return -math.expm1(-beta) / (beta * (math.exp(-beta) - p * math.expm1(-beta)))
    return math.expm1(beta) / (beta * (1 + p * math.expm1(beta)))


def neutral_rate(beta: float) -> float:
    """p*(beta), the success rate at which c_beta is 1: 0.5 at beta = 0, falling to 0 for large beta."""
    if abs(beta) < 1e-3:  # series: the difference of the two terms loses all digits
        return 0.5 - beta / 12
    if beta < 0:  # c_beta(p) = c_-beta(1 - p)
        return 1 - neutral_rate(-beta)
    return 1 / beta - math.exp(-beta) / -math.expm1(-beta)


def risk_for_rate(rate: float, limit: float = 10.0) -> float:
    """The beta in [-limit, limit] whose neutral rate is nearest to `rate`, by bisection."""
    low, high = -limit, limit
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if neutral_rate(middle) > rate else (low, middle)
    return (low + high) / 2


def matched(values: Tensor, reference: Tensor, norm: Match) -> Tensor:
    """`values` times one number, so that their norm over everything equals that of `reference`.

    Args:
        values: [P, G, T]. reference: [P, G, 1] or [P, G, T].
        norm: ``"rms"``, root mean square; ``"mass"``, mean absolute value; ``"none"`` changes nothing.

    The number is global on purpose: for rewards of 0 and 1, matching group by group and state by state would cancel
    c_beta, and what is left would be the centred reward.
    """
    if norm == "none":
        return values
    if norm not in ("rms", "mass"):
        raise ValueError(f"match = {norm!r} is unknown; allowed are 'none', 'rms' and 'mass'")
    size = (lambda x: x.square().mean().sqrt()) if norm == "rms" else (lambda x: x.abs().mean())
    own = size(values)
    return torch.where(own > 0, values * (size(reference) / own.clamp(min=1e-300)), values)


def risk_schedule(t: Tensor, early: float, late: float, form: Form = "linear", power: float = 2.0) -> Tensor:
    """beta at noise levels t in [0, 1], float64 like t: `early` at t = 1, `late` at t = 0."""
    t = t.double()
    if form == "linear":
        share = t
    elif form == "cosine":
        share = (1 - (math.pi * t).cos()) / 2
    elif form == "power":
        share = t**power
    else:
        raise ValueError(f"form = {form!r} is unknown; allowed are 'linear', 'cosine' and 'power'")
    return late + (early - late) * share


class StepRisk:
    """StepRS as an advantage estimator: [P, G, T] advantages, one column a denoising step.

    Args:
        beta_early: risk coefficient at t = 1; RS-GRPO recommends 2.
        beta_late: at t = 0. Equal to `beta_early` it is RS-GRPO, and 0 for both is GRPO without division.
        form: of the way between them in the noise level t.
        power: exponent of ``"power"``.
        unit: how rewards come to [0, 1]: ``"minmax"`` by the least and greatest of the last `window` iterations,
            ``"rank"`` by their place in the group (ties share one), ``"none"`` for rewards that are there already.
        window: iterations that ``"minmax"`` remembers.
        match: multiply all advantages of an iteration by one number so that their root mean square (``"rms"``) or
            their mean size (``"mass"``) equals that of the centred rewards: a control that shows what is owed to the
            schedule and not to larger steps. See `matched`.
        calibrate: scale the schedule in every iteration so that its larger end has its neutral success rate at the mean
            of the rewards in [0, 1]; both ends keep their proportion, and the sign may turn.
        scale: factor of all advantages, for surrogates whose step depends on it.
        clip: largest absolute value, or None.
    """

    def __init__(
        self,
        beta_early: float = 2.0,
        beta_late: float = 0.0,
        form: Form = "linear",
        power: float = 2.0,
        unit: Literal["minmax", "rank", "none"] = "minmax",
        window: int = 8,
        match: Match = "none",
        calibrate: bool = False,
        scale: float = 1.0,
        clip: float | None = None,
    ):
        if unit not in ("minmax", "rank", "none"):
            raise ValueError(f"unit = {unit!r} is unknown; allowed are 'minmax', 'rank' and 'none'")
        if window < 1:
            raise ValueError(f"StepRisk.window = {window} must be at least 1")
        if calibrate and beta_early == beta_late == 0:
            raise ValueError("calibrate = true scales the risk schedule, but both its ends are 0; set beta_early")
        risk_schedule(torch.zeros(1), beta_early, beta_late, form, power)
        matched(torch.zeros(1), torch.zeros(1), match)
        self.beta_early, self.beta_late, self.form, self.power = beta_early, beta_late, form, power
        self.unit, self.window, self.match, self.calibrate = unit, window, match, calibrate
        self.scale, self.clip = scale, clip
        self.ranges: list[tuple[float, float]] = []  # least and greatest reward of the last iterations
        self.t: Tensor | None = None

    def configure(self, t: Tensor) -> None:
        """Learn the grid t [T + 1] of the sampler."""
        self.t = t.detach().cpu().double()[:-1]  # step k begins at t[k]

    def __call__(
        self, rewards: Rewards, weights: Mapping[str, float] | None = None, prompt_ids: Tensor | None = None
    ) -> Advantages:
        if self.t is None:
            raise RuntimeError("StepRisk needs the time grid of the sampler: call configure(t) first")
        named = _check(rewards)
        unit = self._to_unit(_weighted_sum(named, _scale(named, weights)))  # [P, G]
        betas = risk_schedule(self.t, self.beta_early, self.beta_late, self.form, self.power)  # [T]
        if self.calibrate and bool((~torch.isnan(unit)).any()):
            largest = max(self.beta_early, self.beta_late, key=abs)
            betas = betas * (risk_for_rate(float(unit.nanmean())) / largest)
        centred = group_relative(unit, std_scope="none", clip=None)[..., None].double()
        values = matched(risk_advantage(unit, betas), centred, self.match) * self.scale  # [P, G, T]
        if self.clip is not None:
            values = values.clamp(-self.clip, self.clip)
        values = values.float()
        metrics = reward_metrics(rewards, weights) | _value_metrics(values)
        metrics |= {"advantage/risk_first": float(betas[0]), "advantage/risk_last": float(betas[-1])}
        return Advantages(values.mean(2), metrics, values)

    def _to_unit(self, total: Tensor) -> Tensor:
        if self.unit == "none":
            return total
        if self.unit == "rank":
            return group_ranks(total)
        seen = total[~torch.isnan(total)]
        if len(seen):
            self.ranges.append((float(seen.min()), float(seen.max())))
            del self.ranges[: -self.window]
        if not self.ranges:
            return total
        low, high = min(low for low, _ in self.ranges), max(high for _, high in self.ranges)
        return (total - low) / (high - low) if high > low else total - low

    def state_dict(self) -> dict[str, Any]:
        return {"ranges": [list(pair) for pair in self.ranges]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ranges = [(float(low), float(high)) for low, high in state["ranges"]]


def group_ranks(rewards: Tensor) -> Tensor:
    """Place of each reward in its group as a number in [0, 1], [P, G]; ties share their mean place, NaN stays."""
    scored = ~torch.isnan(rewards)
    both = scored[:, :, None] & scored[:, None, :]
    below = ((rewards[:, :, None] > rewards[:, None, :]) & both).sum(2)
    equal = ((rewards[:, :, None] == rewards[:, None, :]) & both).sum(2) - 1  # not counting itself
    others = (scored.sum(1, keepdim=True) - 1).clamp(min=1)
    rank = (below + 0.5 * equal).double() / others
    return torch.where(scored, rank, torch.full_like(rank, torch.nan))
