"""Thresholds for a failure score, and how good the alarms are that they raise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np


def conformal_threshold(
    successful: Sequence[float], alpha: float = 0.05, rule: Literal["order", "quantile"] = "order"
) -> float:
    """Threshold gamma of the alarm "score > gamma" from the scores of M successful episodes.

    ``"order"``: the ceil((M + 1)(1 - alpha))-th smallest score, infinity if that is more than M (M < 1/alpha - 1). A
    further successful episode, exchangeable with these, exceeds it with probability at most alpha, for every M and
    every distribution (split conformal prediction). ``"quantile"``: the (1 - alpha) quantile, as Sentinel's code takes
    it; a little lower, without that guarantee.

    Args:
        successful: one score per successful episode: the largest S_t within it.
        alpha: wanted false-alarm rate, in (0, 1).
        rule: see above.

    Raises:
        ValueError: for NaN scores, alpha outside (0, 1) or an unknown rule.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha = {alpha} must lie in (0, 1)")
    if rule not in ("order", "quantile"):
        raise ValueError(f"rule = {rule!r} is unknown; allowed are 'order' and 'quantile'")
    scores = np.sort(np.asarray(successful, dtype=float))
    if np.isnan(scores).any():
        raise ValueError("a calibration score is NaN; leave episodes without a score out")
    if rule == "quantile":
        return float(np.quantile(scores, 1 - alpha)) if len(scores) else math.inf
    place = math.ceil((len(scores) + 1) * (1 - alpha) - 1e-9)  # 1e-9: (19 + 1) * 0.95 is 19, not 19.000000000000004
    return float(scores[place - 1]) if place <= len(scores) else math.inf


def leave_one_out_thresholds(
    scores: Sequence[float], success: Sequence[bool], alpha: float = 0.05, rule: Literal["order", "quantile"] = "order"
) -> list[float]:
    """Each episode's threshold from the successful ones among the others, so that no episode judges itself."""
    return [
        conformal_threshold([s for j, s in enumerate(scores) if j != i and success[j]], alpha, rule)
        for i in range(len(scores))
    ]


def first_alarm(scores: Sequence[float], threshold: float) -> int | None:
    """Index of the first score above the threshold, None if there is none.

    Strictly above: with "at or above" a policy whose scores tie (all 0 for a deterministic one) would always be
    reported.
    """
    return next((t for t, score in enumerate(scores) if score > threshold), None)


@dataclass(frozen=True)
class DetectionMetrics:
    """How alarms and failures go together; a quantity without episodes to measure it on is NaN.

    tpr: share of failures with an alarm; tnr: share of successes without one; balanced_accuracy their mean; auroc:
    probability that a failure's score exceeds a success's, ties half; detection_time: mean time of the first alarm of
    the detected failures, in the unit of the given times.
    """

    failures: int
    successes: int
    tpr: float
    tnr: float
    accuracy: float
    balanced_accuracy: float
    f1: float
    auroc: float
    detection_time: float

    def to_dict(self) -> dict[str, float | None]:
        """Plain values for JSON, NaN as None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


def detection_metrics(
    scores: Sequence[float], alarm_times: Sequence[float | None], failed: Sequence[bool]
) -> DetectionMetrics:
    """Judge alarms against what happened.

    Args:
        scores: one score per episode (its largest S_t).
        alarm_times: time of the first alarm of each episode, None without one.
        failed: whether the episode failed.

    Raises:
        ValueError: for lengths that differ or no episode.
    """
    if not len(scores) == len(alarm_times) == len(failed) or not len(scores):
        raise ValueError(
            f"{len(scores)} scores, {len(alarm_times)} alarm times and {len(failed)} outcomes were given; each episode "
            "needs one of each"
        )
    values, bad = np.asarray(scores, dtype=float), np.asarray(failed, dtype=bool)
    alarm = np.array([time is not None for time in alarm_times])
    tp, fp = int((alarm & bad).sum()), int((alarm & ~bad).sum())
    n_bad, n_good = int(bad.sum()), int((~bad).sum())
    tpr, tnr = _ratio(tp, n_bad), _ratio(n_good - fp, n_good)
    times = [time for time, b in zip(alarm_times, bad, strict=True) if b and time is not None]
    return DetectionMetrics(
        failures=n_bad,
        successes=n_good,
        tpr=tpr,
        tnr=tnr,
        accuracy=(tp + n_good - fp) / len(values),
        balanced_accuracy=(tpr + tnr) / 2,
        f1=_ratio(2 * tp, tp + fp + n_bad),
        auroc=_auroc(values[bad], values[~bad]),
        detection_time=sum(times) / len(times) if times else math.nan,
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _auroc(positive: np.ndarray, negative: np.ndarray) -> float:
    if not len(positive) or not len(negative):
        return math.nan
    gaps = positive[:, None] - negative[None, :]
    return float((gaps > 0).mean() + 0.5 * (gaps == 0).mean())
