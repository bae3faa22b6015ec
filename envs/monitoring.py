"""Temporal consistency of the episodes of an evaluation: thresholds, alarms, and how well they find failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from genrl.envs.alarms import conformal_threshold, detection_metrics, first_alarm, leave_one_out_thresholds
from genrl.envs.evaluation import Consistency, EpisodeResult, Evaluation
from genrl.envs.settings import EnvError
from genrl.envs.stac import StacSettings


def with_consistency(
    episodes: Sequence[EpisodeResult],
    steps: Mapping[int, Sequence[float]],
    settings: StacSettings,
    stride: int,
    threshold: float | None = None,
) -> tuple[list[EpisodeResult], dict[str, Any]]:
    """Add scores, thresholds and alarms to episodes.

    Args:
        episodes: without consistency.
        steps: D_t of each episode by number; the first belongs to the second replanning.
        settings: of the score.
        stride: environment steps between two replannings.
        threshold: of the alarm; None calibrates each episode on the other successful ones.

    Returns:
        The episodes, and what an evaluation file says about the alarm.
    """
    scores = {e.episode: tuple(settings.episode_scores(steps.get(e.episode, ()))) for e in episodes}
    # An episode that ended before its second replanning has no score: it calibrates nothing and cannot raise an alarm.
    scored = [e for e in episodes if scores[e.episode]]
    highest = [max(scores[e.episode]) for e in scored]
    if threshold is not None:
        thresholds = [threshold] * len(scored)
    else:
        thresholds = leave_one_out_thresholds(highest, [bool(e.success) for e in scored], settings.alpha)
    of = {e.episode: limit for e, limit in zip(scored, thresholds, strict=True)}
    found = []
    for episode in episodes:
        limit = of.get(episode.episode, math.inf)
        index = first_alarm(scores[episode.episode], limit)
        consistency = Consistency(
            scores=scores[episode.episode],
            threshold=limit if math.isfinite(limit) else None,
            alarm_step=None if index is None else stride * (index + 1),
        )
        found.append(replace(episode, stac=consistency))
    metrics = None
    if scored:
        judged = [e for e in found if e.stac is not None and e.stac.scores]
        times = [None if e.stac is None or e.stac.alarm_step is None else float(e.stac.alarm_step) for e in judged]
        metrics = detection_metrics(highest, times, [not e.success for e in judged]).to_dict()
    calibrated = sum(math.isfinite(limit) for limit in thresholds)
    return found, {
        "settings": settings.to_dict(),
        "calibration": "leave one out" if settings.calibration is None else "file",
        "calibrated_episodes": calibrated,
        "metrics": metrics,
    }


def calibrated_threshold(settings: StacSettings) -> float:
    """The alarm's threshold from the successful episodes of the calibration file.

    Raises:
        FileNotFoundError: there is no such file.
        EnvError: it holds no scores, or scores of other settings.
    """
    assert settings.calibration is not None
    source = Evaluation.load(settings.calibration)
    if source.stac is None:
        raise EnvError(
            f"{settings.calibration} holds no consistency scores to calibrate on; evaluate with stac settings first"
        )
    ours, theirs = settings.to_dict(), dict(source.stac["settings"])
    differing = [
        f"{name} ({theirs.get(name)}, here {ours[name]})"
        for name in ours
        if name not in ("alpha", "calibration") and ours[name] != theirs.get(name)
    ]
    if differing:
        raise EnvError(
            f"{settings.calibration} was scored with other settings: {', '.join(differing)}; scores of different "
            "settings have no common scale"
        )
    scores = [e.stac.score for e in source.episodes if e.success and e.stac is not None and e.stac.score is not None]
    return conformal_threshold([score for score in scores if score is not None], settings.alpha)
