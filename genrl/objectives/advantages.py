"""From rewards to advantages: who did better than the others of the group, and by how much.

Rewards are [P, G], P prompts with G samples each, or a dict of several. NaN means "not scored": such a sample gets the
advantage 0 and enters no statistic. Groups whose scored rewards are all equal get exactly 0. Statistics are float64, so
that they do not depend on the order of summation; results are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Rewards = Tensor | Mapping[str, Tensor]
EPS = 1e-4  # added to standard deviations; Flow-GRPO's and verl's value
CLIP = 5.0  # advantages are clipped to +- this; Flow-GRPO's adv_clip_max


@dataclass(frozen=True)
class Advantages:
    """Advantages and what to log about them.

    Args:
        values: [P, G] float32, detached; 0 where not scored.
        metrics: floats by name.
    """

    values: Tensor
    metrics: dict[str, float]


class AdvantageEstimator(Protocol):
    """What the training loop needs of an estimator."""

    def __call__(
        self, rewards: Rewards, weights: Mapping[str, float] | None = None, prompt_ids: Tensor | None = None
    ) -> Advantages: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def group_relative(
    rewards: Rewards,
    *,
    mean_scope: Literal["group", "batch"] = "group",
    std_scope: Literal["group", "batch", "none"] = "group",
    leave_one_out: bool = False,
    per_reward: bool = False,
    whiten: bool = False,
    weights: Mapping[str, float] | None = None,
    eps: float = EPS,
    clip: float | None = CLIP,
) -> Tensor:
    """Group-relative advantages, [P, G].

    Args:
        rewards: [P, G], or {name: [P, G]} which are summed with their weights.
        mean_scope: what is subtracted: the mean of the group, or of all.
        std_scope: what is divided by: the standard deviation (population) of the group, of all, or nothing.
        leave_one_out: multiply centred rewards by n / (n - 1), which is the mean of the *others* as baseline (RLOO).
        per_reward: normalise every reward by itself and add the results with their weights (GDPO, arXiv 2601.05242);
            otherwise normalise the weighted sum.
        whiten: divide the result by its standard deviation over the batch, as GDPO does after the sum.
        weights: of the rewards by name; 1 where absent.
        eps: added to standard deviations.
        clip: largest absolute value, or None.

    Raises:
        ValueError: for a shape other than [P, G], different shapes, infinite rewards, or an unknown scope.
    """
    named = _check(rewards)
    for name, value, allowed in [
        ("mean_scope", mean_scope, ("group", "batch")),
        ("std_scope", std_scope, ("group", "batch", "none")),
    ]:
        if value not in allowed:
            raise ValueError(f"{name} = {value!r} is unknown; allowed are {', '.join(allowed)}")
    scale = {name: 1.0 if weights is None else float(weights.get(name, 1.0)) for name in named}

    def normalise(r: Tensor) -> Tensor:
        return _normalise(r, mean_scope, std_scope, leave_one_out, eps)

    if per_reward:
        result = sum((scale[name] * normalise(r) for name, r in named.items()), torch.zeros(1, dtype=torch.float64))
    else:
        result = normalise(_weighted_sum(named, scale))
    if whiten:
        spread = result.std(correction=0)
        result = result / (spread + eps) if bool(spread > 0) else result
    if clip is not None:
        result = result.clamp(-clip, clip)
    return result.float()


def _check(rewards: Rewards) -> dict[str, Tensor]:
    named = dict(rewards) if isinstance(rewards, Mapping) else {"reward": rewards}
    if not named:
        raise ValueError("no rewards were given; pass [P, G] or {name: [P, G]}")
    shape = next(iter(named.values())).shape
    for name, value in named.items():
        if value.dim() != 2 or value.shape != shape:
            raise ValueError(
                f"reward {name!r} has shape {tuple(value.shape)}; every reward must be [P, G], prompts by samples"
            )
        infinite = value[torch.isinf(value)]
        if len(infinite):
            raise ValueError(
                f"reward {name!r} holds {infinite[0].item()} ({len(infinite)} infinite values); rewards must be finite, "
                "or NaN for samples that are not scored"
            )
    return {name: value.detach().double() for name, value in named.items()}


def _weighted_sum(named: dict[str, Tensor], scale: dict[str, float]) -> Tensor:
    total = torch.zeros_like(next(iter(named.values())))
    for name, value in named.items():
        total = total + scale[name] * value
    return total


def _normalise(r: Tensor, mean_scope: str, std_scope: str, leave_one_out: bool, eps: float) -> Tensor:
    scored = ~torch.isnan(r)
    filled = torch.where(scored, r, torch.zeros_like(r))
    count = scored.sum(1, keepdim=True).double()  # [P, 1]
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    flat = flat_groups(r)[:, None]
    used = scored & (count >= 2)
    if mean_scope == "batch":
        mean = filled.sum() / scored.sum().clamp(min=1)
        flat, used = torch.zeros_like(flat), scored
    centred = torch.where(used & ~flat, filled - mean, torch.zeros_like(filled))
    if leave_one_out:
        n = count if mean_scope == "group" else scored.sum().double()
        centred = centred * n / (n - 1).clamp(min=1)
    if std_scope == "group":
        std = (centred.square().sum(1, keepdim=True) / count.clamp(min=1)).sqrt()
        return centred / (std + eps)
    if std_scope == "batch":
        overall = filled.sum() / scored.sum().clamp(min=1)
        spread = torch.where(scored, filled - overall, torch.zeros_like(filled)).square().sum()
        return centred / ((spread / scored.sum().clamp(min=1)).sqrt() + eps)
    return centred


def flat_groups(r: Tensor) -> Tensor:
    """bool [P]: groups whose scored rewards are all equal (also those with none), decided exactly."""
    scored = ~torch.isnan(r)
    high = torch.where(scored, r, torch.full_like(r, -torch.inf)).amax(1)
    low = torch.where(scored, r, torch.full_like(r, torch.inf)).amin(1)
    return high <= low


def reward_metrics(rewards: Rewards, weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Shares of flat groups and unscored samples, and each reward's share of the variance within groups."""
    named = _check(rewards)
    scale = {name: 1.0 if weights is None else float(weights.get(name, 1.0)) for name in named}
    total = _weighted_sum(named, scale)
    metrics = {
        "advantage/zero_std_groups": float(flat_groups(total).double().mean()),
        "advantage/nan_share": float(torch.isnan(total).double().mean()),
    }
    if len(named) > 1:
        spread = {
            name: float(_normalise(scale[name] * value, "group", "none", False, 0.0).square().sum())
            for name, value in named.items()
        }
        whole = sum(spread.values())
        metrics |= {f"advantage/variance_share_{name}": v / whole if whole else 0.0 for name, v in spread.items()}
    return metrics


class GroupRelative:
    """:func:`group_relative` as a part of a configuration; the classes below are its published settings.

    Args:
        mean_scope, std_scope, leave_one_out, per_reward, whiten, eps, clip: see :func:`group_relative`.
    """

    def __init__(
        self,
        mean_scope: Literal["group", "batch"] = "group",
        std_scope: Literal["group", "batch", "none"] = "group",
        leave_one_out: bool = False,
        per_reward: bool = False,
        whiten: bool = False,
        eps: float = EPS,
        clip: float | None = CLIP,
    ):
        self.settings: dict[str, Any] = {
            "mean_scope": mean_scope,
            "std_scope": std_scope,
            "leave_one_out": leave_one_out,
            "per_reward": per_reward,
            "whiten": whiten,
            "eps": eps,
            "clip": clip,
        }

    def __call__(
        self, rewards: Rewards, weights: Mapping[str, float] | None = None, prompt_ids: Tensor | None = None
    ) -> Advantages:
        values = group_relative(rewards, weights=weights, **self.settings)
        return Advantages(values, reward_metrics(rewards, weights) | _value_metrics(values))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept between iterations."""


def GRPO(eps: float = EPS, clip: float | None = CLIP) -> GroupRelative:
    """Group mean and group standard deviation (GRPO, arXiv 2402.03300)."""
    return GroupRelative("group", "group", eps=eps, clip=clip)


def DrGRPO(clip: float | None = None) -> GroupRelative:
    """Group mean, no division (Dr.GRPO, arXiv 2503.20783)."""
    return GroupRelative("group", "none", clip=clip)


def RLOO(clip: float | None = None) -> GroupRelative:
    """The mean of the other samples as baseline, no division (RLOO, arXiv 2402.14740)."""
    return GroupRelative("group", "none", leave_one_out=True, clip=clip)


def FlowGRPO(eps: float = EPS, clip: float | None = CLIP) -> GroupRelative:
    """Group mean, standard deviation of the whole batch (Flow-GRPO's ``global_std``, arXiv 2505.05470)."""
    return GroupRelative("group", "batch", eps=eps, clip=clip)


def GDPO(eps: float = EPS, clip: float | None = CLIP) -> GroupRelative:
    """Every reward normalised in its group, weighted sum, then batch whitening (GDPO, arXiv 2601.05242)."""
    return GroupRelative("group", "group", per_reward=True, whiten=True, eps=eps, clip=clip)


class RunningAdvantage:
    """DDPO's per-prompt statistics: mean and standard deviation of a prompt's recent rewards (arXiv 2305.13301).

    Args:
        window: rewards kept per prompt.
        min_count: with fewer kept, the mean and standard deviation of the batch are used.
        eps, clip: see :func:`group_relative`.
    """

    def __init__(self, window: int = 128, min_count: int = 16, eps: float = EPS, clip: float | None = CLIP):
        if not 1 <= min_count <= window:
            raise ValueError(f"min_count = {min_count} must lie between 1 and window = {window}")
        self.window, self.min_count, self.eps, self.clip = window, min_count, eps, clip
        self.history: dict[int, list[float]] = {}

    def __call__(
        self, rewards: Rewards, weights: Mapping[str, float] | None = None, prompt_ids: Tensor | None = None
    ) -> Advantages:
        named = _check(rewards)
        scale = {name: 1.0 if weights is None else float(weights.get(name, 1.0)) for name in named}
        total = _weighted_sum(named, scale)  # [P, G]
        if prompt_ids is None or len(prompt_ids) != len(total):
            raise ValueError(f"running statistics need prompt_ids [P] for {len(total)} prompts, got {prompt_ids}")
        scored = ~torch.isnan(total)
        kept = total[scored]
        values = torch.zeros_like(total)
        for p, key in enumerate(prompt_ids.tolist()):
            history = self.history.setdefault(int(key), [])
            history.extend(total[p][scored[p]].tolist())
            del history[: -self.window]
        for p, key in enumerate(prompt_ids.tolist()):
            seen = torch.tensor(self.history[int(key)], dtype=torch.float64)
            pool = seen if len(seen) >= self.min_count else kept
            if len(pool) < 2 or bool((pool == pool[0]).all()):
                continue
            normal = (total[p] - pool.mean()) / (pool.std(correction=0) + self.eps)
            values[p] = torch.where(scored[p], normal, torch.zeros_like(normal))
        if self.clip is not None:
            values = values.clamp(-self.clip, self.clip)
        return Advantages(values.float(), reward_metrics(rewards, weights) | _value_metrics(values))

    def state_dict(self) -> dict[str, Any]:
        return {"history": {str(k): list(v) for k, v in self.history.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = {int(k): list(v) for k, v in state["history"].items()}


def best_and_worst(values: Tensor, k: int) -> Tensor:
    """bool [P, G]: the k best and the k worst of each group; NaN is never kept.

    Raises:
        ValueError: when 2 k is more than G.
    """
    if not 1 <= k <= values.shape[1] // 2:
        raise ValueError(f"k = {k} best and worst do not fit groups of {values.shape[1]}; use 1 to {values.shape[1] // 2}")
    scored = ~torch.isnan(values)
    best = torch.where(scored, values, torch.full_like(values, -torch.inf)).topk(k, 1).indices
    worst = torch.where(scored, values, torch.full_like(values, torch.inf)).topk(k, 1, largest=False).indices
    keep = torch.zeros_like(scored)
    return keep.scatter(1, best, True).scatter(1, worst, True) & scored


def _value_metrics(values: Tensor) -> dict[str, float]:
    return {"advantage/abs_mean": float(values.abs().mean()), "advantage/max": float(values.abs().max())}
