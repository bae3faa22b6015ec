"""Videos of evaluated episodes, played again from their actions."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.evaluation import EpisodeResult
from genrl.envs.settings import EnvSettings
from genrl.envs.videos import VideoWriter


def film_episodes(
    settings: EnvSettings,
    episodes: Sequence[EpisodeResult],
    actions: Mapping[int, np.ndarray],
    count: int,
    folder: str | os.PathLike[str] | None,
) -> tuple[str, ...]:
    """Film the first episode and the worst ones.

    Args:
        settings: of the environment.
        episodes: all of the evaluation.
        actions: [T, A] that each executed.
        count: at most this many videos.
        folder: where they go.

    Returns:
        Names of the files, ``episode-0003-failure.mp4``; one that does not reproduce its episode (a simulator that is
        not deterministic) ends in ``-not-reproduced``.

    Raises:
        VideoError: without an encoder, or if the environment gives no pictures.
    """
    if folder is None or count < 1 or not episodes:
        return ()
    names = []
    with contextlib.closing(settings.make(render=True)) as env:
        for episode in chosen(episodes, count):
            outcome = {None: "", True: "-success", False: "-failure"}[episode.success]
            name = f"episode-{episode.episode:04d}{outcome}.mp4"
            path = Path(folder) / name
            total = 0.0
            with VideoWriter(path, frame_rate(env)) as video:
                env.reset(seed=episode.seed)
                video.add(env.render())
                for action in actions[episode.episode]:
                    total += float(env.step(action)[1])
                    video.add(env.render())
            if not math.isclose(total, episode.total_reward, rel_tol=1e-6, abs_tol=1e-6):
                path = path.rename(path.with_stem(f"{path.stem}-not-reproduced"))
            names.append(path.name)
    return tuple(names)


def frame_rate(env: Any) -> float:
    """Frames per second: the simulator's own where it says so, at most 30, so that fast control can be followed."""
    inner = getattr(env.simulator, "env", None)
    own = getattr(getattr(inner, "unwrapped", inner), "metadata", None) or {}
    return min(30.0, float(own.get("render_fps") or env.metadata["render_fps"]))


def chosen(episodes: Sequence[EpisodeResult], count: int) -> list[EpisodeResult]:
    """The first episode, then the worst: failures with the lowest return, then the longest successes."""

    def badness(episode: EpisodeResult) -> tuple[bool, float, int]:
        return bool(episode.success), -episode.length if episode.success else episode.total_reward, episode.episode

    first = episodes[0]
    return [first, *sorted((e for e in episodes if e is not first), key=badness)][:count]
