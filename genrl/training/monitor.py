"""Reads the metrics of a run while it runs: ratio gauges by timestep, alarms, the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
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
# Statistics whose drift from the base model is worth an alarm, and the size below which a change counts as relative to
# that size instead of to the value: a share of .01 that doubles is no drift.
_DRIFTING = {
    "stats/dark_share": 0.25,
    "stats/saturated_share": 0.25,
    "stats/edge_energy": 2e-3,
    "stats/entropy": 1.0,
    "stats/color_saturation": 0.05,
    "stats/color_entropy": 1.0,
}


UNSCORED_ITERATIONS = 3  # in a row without any scored sample, after which a run has nothing to wait for


class Monitor:
    """Alarms and the best evaluation so far; its state is part of a checkpoint.

    The first evaluation is the base model on the same prompts and the same noise as every later one. While the
    reward lies above it by more than the noise, an alarm is given for

    * a judge (a gauge with a value per sample) that fell from its best by more than `margin` of it and its noise;
    * the diversity within a prompt, or another set metric, that fell from the base model's by `drift_margin` of it;

    and, whatever the reward does, for an image statistic that moved by `drift_margin` of the base model's. Noise is
    half the 95 % interval of both evaluations together.

    Args:
        margin: share of a judge's best value.
        collapse_fraction: share of the best reward below which the run stops, or None.
        drift_margin: share of the base model's value. 0.3: healthy fine-tuning of digits moves statistics by up to
            .15, and OCR training that turned pictures black moved them by .54 to 1.05 (UniRL#407).
    """

    def __init__(self, margin: float, collapse_fraction: float | None = None, drift_margin: float = 0.3):
        self.margin, self.collapse_fraction, self.drift_margin = margin, collapse_fraction, drift_margin
        self.first: dict[str, float] = {}
        self.best_reward = -math.inf
        self.best_iteration = 0
        self.peaks: dict[str, float] = {}
        self.raised: list[str] = []
        self.unscored = 0  # iterations in a row in which no sample was scored

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
        for step in {k.split("/")[0] for k in values if k.startswith("step_")} - {"step_own"}:  # which has no one time
            values[f"{step}/t"] = sampler.step(int(step.removeprefix("step_")), True).t
        for inner, (name, how) in _REDUCED.items():
            found = [v for k, v in values.items() if k.startswith("step_") and k.split("/")[1] == inner]
            if found:
                values[name] = {"mean": sum(found) / len(found), "min": min(found), "max": max(found)}[how]
        return values

    def after_iteration(self, metrics: Mapping[str, float]) -> list[str]:
        """Messages about one training iteration; each kind is said once a run."""
        messages = []
        self.unscored = self.unscored + 1 if metrics.get("advantage/nan_share", 0) == 1 else 0
        if metrics.get("advantage/nan_share", 0) > 0.5:
            share = f"{metrics['advantage/nan_share']:.0%}"
            messages.append(self._once("nan", f"{share} of the rewards are not scored (NaN)"))
        if metrics.get("advantage/zero_std_groups", 0) > 0.9:
            messages.append(
                self._once("flat", "over 90 % of the groups have equal rewards: there is almost nothing to learn from")
            )
        return [m for m in messages if m]

    def hopeless(self) -> str:
        """Why going on is of no use, or ''."""
        if self.unscored < UNSCORED_ITERATIONS:
            return ""
        return (
            f"alarm: no reward was scored in {self.unscored} iterations: every sample has a reward that is NaN; check "
            "the reward (genrl.rewards.check_reward) and run the same command again; stopping"
        )

    def after_evaluation(
        self, iteration: int, values: Mapping[str, float], lowered: Collection[str] = ()
    ) -> tuple[bool, list[str], str]:
        """(is this the best so far, messages, reason to stop or '').

        Args:
            iteration: completed iterations. values: of the evaluation.
            lowered: names of rewards that are trained with a negative weight, whose fall is no alarm.
        """
        reward = values.get("eval/reward", math.nan)
        messages: list[str] = []
        if math.isnan(reward):
            unscored = "alarm: no held-out sample was scored (NaN), so there is no best checkpoint and no other alarm"
            messages.append(self._once("unscored", unscored))
        elif share := values.get("eval/stats/unscored_share", 0.0):
            means = f"{share:.0%} of the held-out samples were not scored (NaN); eval/reward is the mean of the others"
            messages.append(self._once("partly unscored", means))
        # A number that was not there, or not scored, at first starts where it is first seen: a gauge that a resumed run
        # has added.
        self.first.setdefault("eval/reward", reward)
        for name, value in values.items():
            if name.startswith("eval/") and isinstance(value, float) and math.isnan(self.first.get(name, math.nan)):
                self.first[name] = value
        start = self.first["eval/reward"]
        rose = reward - start > (self._noise(values, "eval/reward") if _scored(values, "eval/reward") else self.margin)
        while_rising = f"the reward rose from {start:.3f} to {reward:.3f} while" if rose else ""
        messages += self._falls({k: v for k, v in values.items() if k not in lowered}, while_rising)
        messages += self._drifts(values, while_rising)
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
        return best, [m for m in messages if m], stop

    def start_again(self) -> None:
        """Compare with the next evaluation instead of the first: this run measures on other noise."""
        self.first, self.peaks = {}, {}

    def _falls(self, values: Mapping[str, float], while_rising: str) -> list[str]:
        """Judges and diversity that fall while the reward rises."""
        messages = []
        for name, value in _gauges(values).items():
            self.peaks[name] = max(self.peaks.get(name, -math.inf), value)
            label = name.removeprefix("eval/")
            if _scored(values, name):
                before, allowed = self.peaks[name], max(self.margin * abs(self.peaks[name]), self._noise(values, name))
                meaning = "it may be hacked (best checkpoint kept)"
            else:
                before = self.first.get(name, value)
                allowed = self.drift_margin * abs(before)
                meaning = "the samples become alike, and the reward may be hacked (best checkpoint kept)"
            if while_rising and before - value > allowed:
                fell = f"alarm: {while_rising} {label} fell from {before:.3f} to {value:.3f}; {meaning}"
                messages.append(self._once(f"hacking {name}", fell))
        return messages

    def _drifts(self, values: Mapping[str, float], while_rising: str) -> list[str]:
        """Image statistics that leave the base model's."""
        messages = []
        for stat, floor in _DRIFTING.items():
            now, then = values.get(f"eval/{stat}"), self.first.get(f"eval/{stat}")
            if now is None or then is None or math.isnan(now) or math.isnan(then):
                continue
            share = abs(now - then) / max(abs(then), floor)
            if share > self.drift_margin:
                moved = f"{stat} moved from {then:.3g} to {now:.3g}"
                end = "; the reward may be hacked (best checkpoint kept)" if while_rising else " since the start"
                messages.append(self._once(f"drift {stat}", f"alarm: {while_rising} {moved}{end}".replace("  ", " ")))
        return messages

    def _noise(self, values: Mapping[str, float], name: str) -> float:
        """Half the 95 % interval of the difference of this evaluation from the first."""
        return math.hypot(_half_width(values, name), _half_width(self.first, name))

    def _once(self, key: str, message: str) -> str:
        if key in self.raised:
            return ""
        self.raised.append(key)
        return message

    def state_dict(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("first", "best_reward", "best_iteration", "peaks", "raised", "unscored")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _scored(values: Mapping[str, float], name: str) -> bool:
    """Whether a number is a mean over samples, which has an interval; set metrics have none."""
    return f"{name}_low" in values


def _half_width(values: Mapping[str, float], name: str) -> float:
    width = (values.get(f"{name}_high", math.nan) - values.get(f"{name}_low", math.nan)) / 2
    return 0.0 if math.isnan(width) else width


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
