"""Frames of video files, decoded in order by the ffmpeg that imageio brings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.data.episodes import DataError

FPS_TOLERANCE = 0.01  # relative; containers round frame rates


class VideoFrames:
    """A video file as a sequence of frames. Reading forwards is fast; reading backwards starts the decoder anew.

    Args:
        path: the file. fps: the frame rate that the data set declares, None for any.

    Raises:
        DataError: the file is missing, cannot be decoded, or has another frame rate.
    """

    def __init__(self, path: Path, fps: float | None = None):
        self.path, self.fps = path, fps
        self._frames: Iterator[bytes] | None = None
        self._position = 0
        self.size = (0, 0)

    def read(self, start: int, count: int) -> np.ndarray:
        """[count, H, W, 3] uint8 from frame `start` on; DataError if the file ends before."""
        if self._frames is None or start < self._position:
            self._open()
        assert self._frames is not None
        width, height = self.size
        frames = np.empty((count, height, width, 3), np.uint8)
        while self._position < start + count:
            data = next(self._frames, None)
            if data is None:
                raise DataError(
                    f"has {self._position} frames, but frames {start} to {start + count - 1} are needed; the video is "
                    "cut off or belongs to other data",
                    self.path,
                )
            if self._position >= start:
                frames[self._position - start] = np.frombuffer(data, np.uint8).reshape(height, width, 3)
            self._position += 1
        return frames

    def close(self) -> None:
        """Ends the decoder."""
        if self._frames is not None:
            self._frames.close()  # type: ignore[attr-defined]
            self._frames = None

    def _open(self) -> None:
        try:
            import imageio_ffmpeg
        except ImportError as error:
            raise ImportError('videos need a decoder: pip install "genrl[data]"') from error
        self.close()
        if not self.path.is_file():
            raise DataError("the video file is missing", self.path)
        try:
            # Frames exactly as stored: ffmpeg would otherwise repeat or drop some to reach a constant rate.
            decoded: Any = imageio_ffmpeg.read_frames(str(self.path), output_params=["-fps_mode", "passthrough"])
            about = next(decoded)  # the first item describes the video
        except (OSError, RuntimeError, StopIteration, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise DataError(f"cannot be decoded ({reason})", self.path) from error
        self._frames, self.size, self._position = decoded, about["size"], 0
        if self.fps and abs(about["fps"] - self.fps) > FPS_TOLERANCE * self.fps:
            raise DataError(f"has {about['fps']:g} frames a second; the data set declares {self.fps:g}", self.path)
