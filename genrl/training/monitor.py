"""Reads the metrics of a run while it runs: ratio gauges by timestep, alarms, the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from genrl.diffusion import Sampler

_REDUCED = {
    "ratio_mean": ("ratio/mean", "mean"),
    "ratio_min": ("ratio/min", "min"),
    "ratio_max": ("ratio/max", "max"),
    "clip_fraction": ("ratio/clip_fraction", "mean"),
    "kl_old": ("kl/old", "mean"),
    "kl_reference": ("kl/reference", "mean"),
}
_DRIFTING = ("stats/dark_share", "stats/saturated_share", "stats/edge_energy", "stats/entropy")
_DRIFT_LIMIT = 0.5  # relative change of an image statistic from its first evaluation that is worth an alarm
_DRIFT_FLOOR = 0.1  # changes are relative to no less than this: a share of .01 that doubles is no drift


class Monitor:
    """Alarms and the best evaluation so far; its state is part of a checkpoint.

    Args:
        margin: fall of a gauge that counts while the reward rises.
        collapse_fraction: share of the best reward below which the run stops, or None.
    """

    def __init__(self, margin: float, collapse_fraction: float | None = None):
        self.margin, self.collapse_fraction = margin, collapse_fraction
        self.first: dict[str, float] = {}
        self.previous: dict[str, float] = {}
        self.best_reward = -math.inf
        self.best_iteration = 0
        self.peaks: dict[str, float] = {}
        self.raised: list[str] = []

    @staticmethod
    def by_step(first: Mapping[str, float], later: Mapping[str, float], sampler: Sampler) -> dict[str, float]:
        """Step metrics for the log.

        Args:
            first: of the first update of the iteration, where weights are those of the roll-out.
            later: of the updates after it (or of the first, when there is no other): what a ratio says once weights
                have moved.
        """
        values = {k: v for k, v in later.items() if not k.endswith(("/gap_max", "/clip_width_min"))}
        gaps = {k.split("/")[0]: v for k, v in first.items() if k.endswith("/gap_max")}
        for step, gap in gaps.items():
            values[f"{step}/first_step_gap"] = gap
        if gaps:
            values["ratio/first_step_gap"] = max(gaps.values())
        for step in {k.split("/")[0] for k in values if k.startswith("step_")}:
            values[f"{step}/t"] = sampler.step(int(step.removeprefix("step_")), True).t
        for inner, (name, how) in _REDUCED.items():
            found = [v for k, v in values.items() if k.startswith("step_") and k.split("/")[1] == inner]
            if found:
                values[name] = {"mean": sum(found) / len(found), "min": min(found), "max": max(found)}[how]
        return values

    def after_iteration(self, metrics: Mapping[str, float]) -> list[str]:
        """Messages about one training iteration; each kind is said once a run."""
        messages = []
        if metrics.get("advantage/nan_share", 0) > 0.5:
            share = f"{metrics['advantage/nan_share']:.0%}"
            messages.append(self._once("nan", f"{share} of the rewards are not scored (NaN)"))
        if metrics.get("advantage/zero_std_groups", 0) > 0.9:
            messages.append(
                self._once("flat", "over 90 % of the groups have equal rewards: there is almost nothing to learn from")
            )
        return [m for m in messages if m]

    def after_evaluation(self, iteration: int, values: Mapping[str, float]) -> tuple[bool, list[str], str]:
        """(is this the best so far, messages, reason to stop or '')."""
        reward = values.get("eval/reward", math.nan)
        gauges = _gauges(values)
        messages: list[str] = []
        if math.isnan(reward):
            unscored = "alarm: no held-out sample was scored (NaN), so there is no best checkpoint and no other alarm"
            messages.append(self._once("unscored", unscored))
        if not self.first:
            self.first = {**gauges, **{k: v for k, v in values.items() if k.startswith("eval/stats/")}}
            self.first["eval/reward"] = reward
        for name, value in gauges.items():
            self.peaks[name] = max(self.peaks.get(name, -math.inf), value)
            if reward > self.first["eval/reward"] + self.margin and value < self.peaks[name] - self.margin:
                label = name.removeprefix("eval/")
                messages.append(
                    self._once(
                        f"hacking {name}",
                        f"alarm: the reward rose from {self.first['eval/reward']:.3f} to {reward:.3f} while {label} "
                        f"fell from {self.peaks[name]:.3f} to {value:.3f}; it may be hacked (best checkpoint kept)",
                    )
                )
        for stat in _DRIFTING:
            now, then = values.get(f"eval/{stat}"), self.first.get(f"eval/{stat}")
            if now is not None and then is not None and abs(now - then) > _DRIFT_LIMIT * max(abs(then), _DRIFT_FLOOR):
                messages.append(
                    self._once(f"drift {stat}", f"alarm: {stat} moved from {then:.3f} to {now:.3f} since the start")
                )
        best = reward > self.best_reward
        if best:
            self.best_reward, self.best_iteration = reward, iteration
        stop = ""
        # For a positive best this is "below the share of the best"; a negative one has a size to fall by, too.
        allowed = math.inf if self.collapse_fraction is None else (1 - self.collapse_fraction) * abs(self.best_reward)
        if reward < self.best_reward - allowed:
            stop = "collapsed"
            messages.append(
                f"alarm: the evaluated reward fell to {reward:.3f}, below {self.collapse_fraction:g} of its best "
                f"{self.best_reward:.3f} at iteration {self.best_iteration}; stopping"
            )
        self.previous = dict(values)
        return best, [m for m in messages if m], stop

    def _once(self, key: str, message: str) -> str:
        if key in self.raised:
            return ""
        self.raised.append(key)
        return message

    def state_dict(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("first", "best_reward", "best_iteration", "peaks", "raised")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _gauges(values: Mapping[str, float]) -> dict[str, float]:
    """Held-out quantities of which less is worse: judges, and the spread within a prompt."""
    skipped = ("eval/reward", "eval/weight_change", "eval/uses_ema")
    return {
        k: v
        for k, v in values.items()
        if k.startswith("eval/")
        and not k.startswith("eval/stats/")
        and not k.endswith(("_low", "_high", "_nn", "_rec"))
        and k not in skipped
        and isinstance(v, float)
        and not math.isnan(v)
    }
