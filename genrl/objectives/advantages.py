"""From rewards to advantages: who did better than the others of the group, and by how much.

Rewards are [P, G], P prompts with G samples each, or a dict of several. NaN means "not scored": such a sample gets the
advantage 0 and enters no statistic. Rewards that are all equal where the mean is taken (in the group, or in the batch)
give exactly 0. Statistics are float64, so that they do not depend on the order of summation; results are float32.
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
        by_step: [P, G, T] float32 advantages of each denoising step, where they differ; ``values`` then stands for
            them where one number is needed.
    """

    values: Tensor
    metrics: dict[str, float]
    by_step: Tensor | None = None


class AdvantageEstimator(Protocol):
    """What the training loop needs of an estimator.

    A method ``configure(t)`` is optional: it is told the time grid [T + 1] of the sampler, from 1 to 0.
    """

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
    whiten: bool | Literal["batch", "group"] = False,
    weights: Mapping[str, float] | None = None,
    eps: float = EPS,
    clip: float | None = CLIP,
) -> Tensor:
    """Group-relative advantages, [P, G].

    Args:
        rewards: [P, G], or {name: [P, G]} which are summed with their weights.
        mean_scope: what is subtracted: the mean of the group, or of all. A group of equal rewards teaches nothing under
            the first, and does under the second, where it is compared with the other groups.
        std_scope: what is divided by: the standard deviation (population) of the group, of all, or nothing. Where it
            is 0 the advantage is 0.
        leave_one_out: multiply centred rewards by n / (n - 1), which is the mean of the *others* as baseline (RLOO).
        per_reward: normalise every reward by itself and add the results with their weights (GDPO, arXiv 2601.05242);
            otherwise normalise the weighted sum. A sample that some rewards scored and others did not counts with
            those that did; in the sum it is not scored.
        whiten: divide the result by its standard deviation: ``"batch"`` (or True) over the batch, as GDPO does after
            the sum, ``"group"`` over the group, as CM-GRPO does.
        weights: of the rewards by name; 1 where absent, and a reward of weight 0 is ignored, NaN included.
        eps: added to standard deviations.
        clip: largest absolute value, or None.

    Raises:
        ValueError: for a shape other than [P, G], different shapes, infinite rewards, an unknown scope, or the weight
            of a reward that is not there.
    """
    named = _check(rewards)
    for name, value, allowed in [
        ("mean_scope", mean_scope, ("group", "batch")),
        ("std_scope", std_scope, ("group", "batch", "none")),
        ("whiten", whiten, (False, True, "batch", "group")),
    ]:
        if value not in allowed:
            raise ValueError(f"{name} = {value!r} is unknown; allowed are {', '.join(map(str, allowed))}")
    scale = _scale(named, weights)
    if per_reward:
        parts = {n: _normalise(r, mean_scope, std_scope, leave_one_out, eps) for n, r in named.items()}
        result = _weighted_sum(parts, scale)
    else:
        result = _normalise(_weighted_sum(named, scale), mean_scope, std_scope, leave_one_out, eps)
    if whiten:  # the mean is 0 already
        counted = [~torch.isnan(r) for name, r in named.items() if scale[name] != 0]
        scored = torch.stack(counted).any(0).double() if counted else torch.ones_like(result)
        scope = "group" if whiten == "group" else "batch"
        squares, count = (_rows(each, scope).sum(1, keepdim=True) for each in (result.square(), scored))
        result = _divide(result, (squares / count.clamp(min=1)).sqrt(), eps)
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
                f"reward {name!r} holds {infinite[0].item()} ({len(infinite)} infinite values); rewards must be "
                "finite, or NaN for samples that are not scored"
            )
    return {name: value.detach().double() for name, value in named.items()}


def _scale(named: dict[str, Tensor], weights: Mapping[str, float] | None) -> dict[str, float]:
    unknown = sorted(set(weights or {}) - set(named))
    if unknown:
        raise ValueError(
            f"weights are given for {', '.join(unknown)}, but the rewards are {', '.join(named)}; correct the names or "
            "leave those weights out"
        )
    return {name: float((weights or {}).get(name, 1.0)) for name in named}


def _weighted_sum(named: dict[str, Tensor], scale: dict[str, float]) -> Tensor:
    total = torch.zeros_like(next(iter(named.values())))
    for name, value in named.items():
        if scale[name] != 0:  # 0 * NaN would be NaN
            total = total + scale[name] * value
    return total


def _normalise(r: Tensor, mean_scope: str, std_scope: str, leave_one_out: bool, eps: float) -> Tensor:
    centred, count = _centre(_rows(r, mean_scope))
    if leave_one_out:
        centred = centred * count / (count - 1).clamp(min=1)
    centred = centred.reshape(r.shape)
    if std_scope == "none":
        return centred
    about, count = _centre(_rows(r, std_scope))
    return _divide(centred, (about.square().sum(1, keepdim=True) / count.clamp(min=1)).sqrt(), eps)


def _rows(r: Tensor, scope: str) -> Tensor:
    """One row for each set over which a statistic is taken."""
    return r if scope == "group" else r.reshape(1, -1)


def _centre(r: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards less the mean of their row, [P, G], and how many are scored, [P, 1]."""
    scored = ~torch.isnan(r)
    filled = torch.where(scored, r, torch.zeros_like(r))
    count = scored.sum(1, keepdim=True).double()
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    # The mean of equal numbers may differ from them by rounding.
    return torch.where(scored & ~flat_groups(r)[:, None], filled - mean, torch.zeros_like(filled)), count


def _divide(values: Tensor, spread: Tensor, eps: float) -> Tensor:
    """values / (spread + eps), and 0 where there is no spread."""
    return torch.where(spread > 0, values / (spread + eps), torch.zeros_like(values))


def flat_groups(r: Tensor) -> Tensor:
    """bool [P]: groups whose scored rewards are all equal (also those with none), decided exactly."""
    scored = ~torch.isnan(r)
    high = torch.where(scored, r, torch.full_like(r, -torch.inf)).amax(1)
    low = torch.where(scored, r, torch.full_like(r, torch.inf)).amin(1)
    return high <= low


def reward_metrics(
    rewards: Rewards, weights: Mapping[str, float] | None = None, per_reward: bool = False
) -> dict[str, float]:
    """Shares of flat groups and unscored samples, and each reward's share of the variance within groups.

    A group is flat when its weighted sum is, or with ``per_reward`` when each of its rewards is.
    """
    named = _check(rewards)
    scale = _scale(named, weights)
    total = _weighted_sum(named, scale)
    flat = flat_groups(total)
    if per_reward:
        flat = torch.stack([flat_groups(r) for n, r in named.items() if scale[n] != 0] or [flat]).all(0)
    metrics = {
        "advantage/zero_std_groups": float(flat.double().mean()),
        "advantage/nan_share": float(torch.isnan(total).double().mean()),
    }
    if len(named) > 1:
        spread = {name: float(_centre(scale[name] * value)[0].square().sum()) for name, value in named.items()}
        whole = sum(spread.values())
        metrics |= {f"advantage/variance_share_{name}": v / whole if whole else 0.0 for name, v in spread.items()}
    return metrics


class GroupRelative:
    """What :func:`group_relative` does, as a part of a configuration; the classes below are its published settings.

    Args:
        mean_scope, std_scope, leave_one_out, per_reward, whiten, eps, clip: see :func:`group_relative`.
    """

    def __init__(
        self,
        mean_scope: Literal["group", "batch"] = "group",
        std_scope: Literal["group", "batch", "none"] = "group",
        leave_one_out: bool = False,
        per_reward: bool = False,
        whiten: bool | Literal["batch", "group"] = False,
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
        metrics = reward_metrics(rewards, weights, self.settings["per_reward"])
        return Advantages(values, metrics | _value_metrics(values))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept between iterations."""


def GRPO(eps: float = EPS, clip: float | None = CLIP) -> GroupRelative:
    """Group mean and group standard deviation (GRPO, arXiv 2402.03300).

    Args:
        eps, clip: see :func:`group_relative`.
    """
    return GroupRelative("group", "group", eps=eps, clip=clip)


def DrGRPO(clip: float | None = None) -> GroupRelative:
    """Group mean, no division (Dr.GRPO, arXiv 2503.20783).

    Args:
        clip: see :func:`group_relative`.
    """
    return GroupRelative("group", "none", clip=clip)


def RLOO(clip: float | None = None) -> GroupRelative:
    """The mean of the other samples as baseline, no division (RLOO, arXiv 2402.14740).

    Args:
        clip: see :func:`group_relative`.
    """
    return GroupRelative("group", "none", leave_one_out=True, clip=clip)


def FlowGRPO(eps: float = EPS, clip: float | None = CLIP) -> GroupRelative:
    """Group mean, standard deviation of the whole batch (Flow-GRPO's ``global_std``, arXiv 2505.05470).

    Args:
        eps, clip: see :func:`group_relative`.
    """
    return GroupRelative("group", "batch", eps=eps, clip=clip)


def GDPO(eps: float = EPS, clip: float | None = CLIP, whiten: Literal["batch", "group"] = "batch") -> GroupRelative:
    """Every reward normalised in its group, weighted sum, then batch whitening (GDPO, arXiv 2601.05242).

    Args:
        eps, clip: see :func:`group_relative`.
        whiten: ``"group"`` normalises the sum in its group instead (CM-GRPO, arXiv 2605.15190).
    """
    return GroupRelative("group", "group", per_reward=True, whiten=whiten, eps=eps, clip=clip)


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
        total = _weighted_sum(named, _scale(named, weights))  # [P, G]
        if prompt_ids is None or prompt_ids.shape != (len(total),):
            given = "none" if prompt_ids is None else f"shape {tuple(prompt_ids.shape)}"
            raise ValueError(f"running statistics need prompt_ids [{len(total)}], one integer a prompt; got {given}")
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

    Of equal values, the earlier counts as the worse, so that 2 k are kept whenever that many are scored.

    Raises:
        ValueError: when 2 k is more than G.
    """
    size = values.shape[1]
    if not 1 <= k <= size // 2:
        allowed = f"use 1 to {size // 2}" if size > 1 else "sample at least 2 a prompt"
        raise ValueError(f"k = {k} best and {k} worst do not fit groups of {size}; {allowed}")
    scored = ~torch.isnan(values)
    order = torch.where(scored, values, torch.full_like(values, torch.inf)).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)  # [P, G], the unscored last
    return scored & ((rank < k) | (rank >= scored.sum(1, keepdim=True) - k))


def _value_metrics(values: Tensor) -> dict[str, float]:
    return {"advantage/abs_mean": float(values.abs().mean()), "advantage/max": float(values.abs().max())}
