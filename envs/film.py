"""Videos of evaluated episodes, played again from their actions."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.evaluation import EpisodeResult
from genrl.envs.settings import EnvSettings
from genrl.envs.videos import VideoError, VideoWriter, find_encoder


class Camera:
    """Plays evaluated episodes again and films them.

    The environment is made, reset and drawn once at the start, so that one without pictures is found before the first
    episode and not after the last.

    Args:
        settings: of the environment. seed: of the reset that is drawn.

    Raises:
        VideoError: without an encoder, or if the environment gives no picture.
        EnvError: the environment cannot draw.
    """

    def __init__(self, settings: EnvSettings, seed: int) -> None:
        find_encoder()
        self.env = settings.make(render=True)
        self.env.reset(seed=seed)
        if self.env.render() is None:
            raise VideoError(f"{settings.id} gave no picture; evaluate with videos=0, or see its render()")

    def film(
        self,
        episodes: Sequence[EpisodeResult],
        actions: Mapping[int, np.ndarray],
        count: int,
        folder: str | os.PathLike[str],
    ) -> tuple[str, ...]:
        """Film the first episode and the worst ones.

        Args:
            episodes: all of the evaluation.
            actions: [T, A] that each executed.
            count: at most this many videos.
            folder: where they go.

        Returns:
            Names of the files, ``episode-0003-failure.mp4``; one that does not reproduce its episode (a simulator that
            is not deterministic) ends in ``-not-reproduced``.
        """
        names = []
        for episode in chosen(episodes, count):
            outcome = {None: "", True: "-success", False: "-failure"}[episode.success]
            path = Path(folder) / f"episode-{episode.episode:04d}{outcome}.mp4"
            total = 0.0
            with VideoWriter(path, frame_rate(self.env)) as video:
                self.env.reset(seed=episode.seed)
                video.add(self.env.render())
                for action in actions[episode.episode]:
                    total += float(self.env.step(action)[1])
                    video.add(self.env.render())
            if not math.isclose(total, episode.total_reward, rel_tol=1e-6, abs_tol=1e-6):
                path = path.rename(path.with_stem(f"{path.stem}-not-reproduced"))
            names.append(path.name)
        return tuple(names)

    def close(self) -> None:
        """Free the environment."""
        self.env.close()


def frame_rate(env: Any) -> float:
    """Frames per second: the simulator's own where it says so, at most 30, so that fast control can be followed."""
    inner = getattr(env.simulator, "env", None)
    own = getattr(getattr(inner, "unwrapped", inner), "metadata", None) or {}
    return min(30.0, float(own.get("render_fps") or env.metadata["render_fps"]))


def chosen(episodes: Sequence[EpisodeResult], count: int) -> list[EpisodeResult]:
    """The first episode, then the worst: failures with the lowest return, then the longest successes."""

    def badness(episode: EpisodeResult) -> tuple[bool, float, int]:
        return bool(episode.success), -episode.length if episode.success else episode.total_reward, episode.episode

    if not episodes:
        return []
    first = episodes[0]
    return [first, *sorted((e for e in episodes if e is not first), key=badness)][:count]
