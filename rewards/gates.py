"""Conditions between rewards: one that counts only where another passes, and groups that have to pass together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .base import UNBOUNDED, Reward, nearest_name, score_one


@dataclass(frozen=True)
class Gate:
    """A condition on another reward, as in `gates: {pickscore: {reward: ocr, at_least: 0.5}}` of a `Compose`.

    A sample that fails counts as `otherwise` in the advantage, as GDPO sets an easy reward to 0 where a hard one is
    missed (arXiv 2601.05242). It does not become "not scored": a NaN has the advantage 0, so a sample that
    scores badly would gain by failing its gate, and in a sum of rewards it would also lose what it is to learn from the
    gate itself. A sample whose gate was not scored is not scored either, since nobody knows whether it counts.

    Args:
        reward: the name of the reward that decides. Its raw value is compared: neither capped, nor gated itself.
        at_least, at_most: what it has to reach, what it must not exceed; one of them or both.
        otherwise: the value of a sample that fails, about the worst that samples get: 18 for PickScore, 0.2 for HPSv2.
            Far below that the gate decides the advantage alone, and above it failing pays. None: 0, for rewards whose
            range starts there.
    """

    reward: str
    at_least: float | None = None
    at_most: float | None = None
    otherwise: float | None = None

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"the gate on {self.reward!r} has no condition; give at_least, at_most or both")
        for name in ("at_least", "at_most", "otherwise"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} = {value} of the gate on {self.reward!r} must be a finite number")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(
                f"the gate on {self.reward!r} asks for at least {self.at_least} and at most {self.at_most}, which no "
                "value meets"
            )

    def passed(self, values: Tensor) -> Tensor:
        """bool like `values`; False for NaN."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return (values >= low) & (values <= high)

    def apply(self, values: Tensor, condition: Tensor, otherwise: float) -> Tensor:
        """Gated values: `otherwise` where the condition fails, NaN where it was not scored."""
        gated = torch.where(self.passed(condition), values, torch.full_like(values, otherwise))
        gated = torch.where(torch.isnan(values), values, gated)  # not scored stays not scored
        return torch.where(torch.isnan(condition), torch.full_like(values, math.nan), gated)


class Conjunction:
    """Criteria that count as a group: good values of one cannot make up for a bad one of another.

    Groups with weights in a `Compose` are ProRubric's sum over groups of a product over criteria. A call returns the
    group's `score` and every criterion under its own name, which is logged and has no weight.

    Args:
        rewards: name -> criterion.
        thresholds: name -> lowest value that passes. Where one fails, the score is 0. `mode="all"` needs one for each.
        mode: `"all"`, 1 where every criterion passes and 0 elsewhere; `"product"` of the values; `"min"`, the worst
            value, for criteria on one scale. Product and minimum take values of 0 and above.

    A criterion that was not scored (NaN) leaves the group unscored.
    """

    name = "conjunction"

    def __init__(
        self,
        rewards: dict[str, Reward],
        thresholds: dict[str, float] | None = None,
        mode: Literal["all", "product", "min"] = "all",
    ) -> None:
        if not rewards:
            raise ValueError("Conjunction got no rewards; give at least one, as name -> reward.")
        if mode not in ("all", "product", "min"):
            raise ValueError(f"mode = {mode!r} is unknown; allowed are 'all', 'product', 'min'")
        if "score" in rewards or any(not name or "/" in name for name in rewards):
            raise ValueError(f"criteria are named {', '.join(map(repr, rewards))}; 'score', '' and '/' are taken")
        self.rewards, self.mode = dict(rewards), mode
        self.thresholds = {name: float(value) for name, value in (thresholds or {}).items()}
        for name, value in self.thresholds.items():
            if name not in rewards:
                raise ValueError(f"thresholds names {name!r}, which is no criterion; {nearest_name(name, rewards)}")
            if not math.isfinite(value):
                raise ValueError(f"thresholds[{name!r}] is {value}; give a finite number, or leave the entry out")
        missing = [name for name in rewards if name not in self.thresholds]
        if mode == "all" and missing:
            raise ValueError(f"mode 'all' needs a threshold for every criterion; {', '.join(missing)} have none")
        for name, reward in rewards.items():
            low = getattr(reward, "range", UNBOUNDED)[0]
            if mode != "all" and math.isfinite(low) and low < 0:
                raise ValueError(
                    f"criterion {name!r} reaches down to {low:g}; mode {mode!r} takes values of 0 and above, because a "
                    "failed group scores 0. Use mode 'all' with a threshold."
                )

    @property
    def differentiable(self) -> bool:
        """True if every criterion is and the mode lets gradients pass."""
        return self.mode != "all" and all(getattr(r, "differentiable", False) for r in self.rewards.values())

    @property
    def range(self) -> tuple[float, float]:
        """Of the score."""
        highs = [getattr(reward, "range", UNBOUNDED)[1] for reward in self.rewards.values()]
        return 0.0, 1.0 if self.mode == "all" else min(highs) if self.mode == "min" else math.prod(highs)

    def range_of(self, inner: str) -> tuple[float, float]:
        """(lowest, highest) value of one returned name."""
        return self.range if inner == "score" else getattr(self.rewards[inner.split("/")[0]], "range", UNBOUNDED)

    def entry_weight(self, inner: str) -> float:
        """1 for the score, 0 for the criteria."""
        return float(inner == "score")

    def prepare(self, device: Any, progress: bool = True) -> None:
        """Prepare every criterion that can be prepared."""
        for reward in self.rewards.values():
            if hasattr(reward, "prepare"):
                reward.prepare(device, progress=progress)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        """`score` [B] and each criterion [B]."""
        raw: dict[str, Tensor] = {}
        for name, reward in self.rewards.items():
            found = score_one(reward, name, media, prompts, metadata)
            if list(found) != [name]:
                raise ValueError(f"criterion {name!r} returns {', '.join(found)}; it must return one value a sample")
            raw |= found
        return {"score": self.combine(raw), **raw}

    def combine(self, raw: Mapping[str, Tensor]) -> Tensor:
        """Score of criteria of any one shape.

        Raises:
            ValueError: a negative value, except with mode `"all"`.
        """
        values = torch.stack([raw[name] for name in self.rewards])  # [criteria, ...]
        lows = [self.thresholds.get(name, -math.inf) for name in self.rewards]
        limits = values.new_tensor(lows).reshape(-1, *[1] * (values.dim() - 1))
        passed = (values >= limits).all(0).to(values)
        if self.mode != "all" and bool((values < 0).any()):
            worst = min(self.rewards, key=lambda name: raw[name].nan_to_num(math.inf).min().item())
            raise ValueError(
                f"criterion {worst!r} is {raw[worst].nan_to_num(math.inf).min().item():.4g}; mode {self.mode!r} takes "
                "values of 0 and above. Use mode 'all' with a threshold."
            )
        combined = {"all": torch.ones_like(passed), "product": values.prod(0), "min": values.amin(0)}[self.mode]
        return torch.where(torch.isnan(values).any(0), torch.full_like(passed, math.nan), passed * combined)
