"""Several rewards as one: names, weights and caps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .base import UNBOUNDED, Reward, nearest_name, reward_name, score_one


class Compose:
    """Named rewards with weights and caps; a call returns the raw value of every one of them.

    Raw values are what is logged. The advantage step asks `for_advantage(raw)` for the capped values and the weights
    of those that count. Most estimators add them up as they are, so that the reward with the largest variance decides;
    `genrl.objectives.GDPO` normalises each one first.

    Args:
        rewards: name -> reward. A reward that returns a dict gives the names `outer/inner`.
        weights: name -> weight, 1 where not given. 0 means: computed and logged, never part of the advantage.
            `outer/inner` sets one entry, `outer` all of them.
        caps: name -> level above which more reward is no gain, r -> min(r, cap). Slows over-optimisation of a proxy.
        allow_log_only: accept a weight for rewards that declare `log_only` (a judge that is meant to stay unseen).

    Raises:
        ValueError: an unknown name in weights or caps (with the nearest known one), a weight that is not finite, no
            reward at all, or a weight on a `log_only` reward.
    """

    def __init__(
        self,
        rewards: dict[str, Reward],
        weights: dict[str, float] | None = None,
        caps: dict[str, float] | None = None,
        allow_log_only: bool = False,
    ) -> None:
        if not rewards:
            raise ValueError("Compose got no rewards; give at least one, as name -> reward.")
        for name in rewards:
            if not name or "/" in name:
                raise ValueError(f"reward name {name!r} is empty or has a '/', which joins outer and inner names.")
        self.rewards = dict(rewards)
        self.weights = {name: 0.0 if getattr(reward, "log_only", False) else 1.0 for name, reward in rewards.items()}
        self.weights |= {name: float(weight) for name, weight in (weights or {}).items()}
        self.caps = {name: float(cap) for name, cap in (caps or {}).items()}
        for kind, table in (("weights", self.weights), ("caps", self.caps)):
            for name, value in table.items():
                if name.split("/")[0] not in rewards:
                    raise ValueError(f"{kind} names {name!r}, which is not a reward; {nearest_name(name, rewards)}")
                if not math.isfinite(value):
                    raise ValueError(f"{kind}[{name!r}] is {value}; give a finite number, or leave the entry out.")
        for name, weight in self.weights.items():
            if weight != 0 and getattr(rewards[name.split("/")[0]], "log_only", False) and not allow_log_only:
                raise ValueError(
                    f"{name!r} is a judge that is only logged (log_only), but has weight {weight:g}; optimising it "
                    "leaves no independent measure. Set its weight to 0, or allow_log_only=True."
                )

    @property
    def differentiable(self) -> bool:
        """True if every reward that counts is differentiable."""
        return all(
            getattr(reward, "differentiable", False)
            for name, reward in self.rewards.items()
            if any(weight != 0 for key, weight in self.weights.items() if key.split("/")[0] == name)
        )

    @property
    def range(self) -> tuple[float, float]:
        """The smallest interval that holds the ranges of all members."""
        ranges = [getattr(reward, "range", UNBOUNDED) for reward in self.rewards.values()]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    def prepare(self, device: Any, progress: bool = True) -> None:
        """Prepare every member that can be prepared."""
        for reward in self.rewards.values():
            if hasattr(reward, "prepare"):
                reward.prepare(device, progress=progress)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        """name -> [B] raw values, neither weighted nor capped."""
        raw: dict[str, Tensor] = {}
        for name, reward in self.rewards.items():
            raw |= score_one(reward, name, media, prompts, metadata)
        self._check_inner_names(raw)
        return raw

    def weight(self, name: str) -> float:
        """The weight of one returned name; an inner name without its own entry has its outer reward's."""
        if name in self.weights:
            return self.weights[name]
        outer, _, inner = name.partition("/")
        nested = self.rewards[outer]
        return self.weights[outer] * (nested.weight(inner) if isinstance(nested, Compose) else 1.0)

    def cap(self, name: str) -> float | None:
        """The cap of one returned name, or None."""
        if name in self.caps:
            return self.caps[name]
        outer, _, inner = name.partition("/")
        nested = self.rewards[outer]
        return (
            nested.cap(inner)
            if inner and isinstance(nested, Compose) and outer not in self.caps
            else self.caps.get(outer)
        )

    def for_advantage(self, raw: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """What enters the advantage: (name -> capped values, name -> weight), only names of weight other than 0.

        Values keep their shape ([B], [P, G], ...). NaN stays NaN; the gradient above a cap is 0.
        """
        weights = {name: weight for name in raw if (weight := self.weight(name)) != 0}
        if not weights:
            raise ValueError(f"every reward has weight 0 ({', '.join(raw)}); give one of them a weight to optimise it.")
        caps = {name: self.cap(name) for name in weights}
        return {name: raw[name] if cap is None else raw[name].clamp(max=cap) for name, cap in caps.items()}, weights

    def _check_inner_names(self, raw: dict[str, Tensor]) -> None:
        """Inner names are known only after the first call."""
        for kind, table in (("weights", self.weights), ("caps", self.caps)):
            for name in table:
                if "/" in name and name not in raw:
                    raise ValueError(f"{kind} names {name!r}, which was not returned; {nearest_name(name, raw)}")


def as_compose(reward: Any, name: str | None = None) -> Compose:
    """A `Compose` of this one reward (under `name`, its own name, or its class name), or the `Compose` itself."""
    return reward if isinstance(reward, Compose) else Compose({name or reward_name(reward): reward})
