"""MP4 files that are written frame by frame, so that memory does not grow and nothing is lost when a run stops."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np


class VideoError(ValueError):
    """A video that cannot be written; the message says what is missing or wrong."""


class VideoWriter:
    """Streams frames into an MP4 file (H.264); a context manager.

    The encoder is looked for and the folder is made when the writer is made, not when the first file is finished. The
    file appears under its name when it is complete: at the end of the ``with`` block, and also when the block is left
    by an exception or Ctrl-C, with the frames so far.

    Args:
        path: the file, ``.mp4``; its folder is made.
        fps: frames per second.

    Raises:
        VideoError: without the encoder, for another suffix, or a frame rate that is not positive.

    Example:
        >>> with VideoWriter("episode.mp4", fps=20) as video:  # doctest: +SKIP
        ...     video.add(env.render())
    """

    def __init__(self, path: str | os.PathLike[str], fps: float = 20.0) -> None:
        self.path = Path(path)
        if self.path.suffix != ".mp4":
            raise VideoError(f"video file {self.path} must end in .mp4")
        if not fps > 0:
            raise VideoError(f"fps = {fps} must be positive")
        self.fps = float(fps)
        self.frames = 0
        self._encoder = find_encoder()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._shape: tuple[int, ...] = ()
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, frame: np.ndarray | None) -> None:
        """Append a frame [H, W, 3] uint8; every frame of a file has the size of the first.

        Raises:
            VideoError: for None, another shape or dtype, or when the encoder stops.
        """
        if frame is None:
            raise VideoError(
                f"the environment's render() gave no picture for {self.path}; make it with render=True "
                "(gymnasium: render_mode='rgb_array')"
            )
        frame = np.ascontiguousarray(frame)
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise VideoError(
                f"a frame for {self.path} has shape {frame.shape} and dtype {frame.dtype}; it must be [H, W, 3] uint8"
            )
        if self._process is None:
            self._start(frame.shape)
        elif frame.shape != self._shape:
            raise VideoError(
                f"frame {self.frames} of {self.path} has shape {frame.shape}, the first had {self._shape}; all frames "
                "of a file must be of one size"
            )
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(frame.data)
        except BrokenPipeError:
            raise VideoError(f"the encoder of {self.path} stopped: {self._message()}") from None
        self.frames += 1

    def close(self) -> None:
        """Finish the file; without a frame there is none. Safe to call twice.

        Raises:
            VideoError: when the encoder reports an error.
        """
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.communicate()  # closes its input and waits
        message = self._message()
        if process.returncode != 0:
            self._partial.unlink(missing_ok=True)
            raise VideoError(f"the encoder could not write {self.path}: {message}")
        os.replace(self._partial, self.path)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except VideoError:
            if error is None:  # the first error is the one to report
                raise

    @property
    def _partial(self) -> Path:
        return self.path.with_name(f".{self.path.stem}-{os.getpid()}.part.mp4")

    def _start(self, shape: tuple[int, ...]) -> None:
        height, width = shape[:2]
        self._shape = shape
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"  # the usual pixel format needs an even size
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:g}", "-i", "-"]
        target = ["-an", "-c:v", "libx264", "-preset", "veryfast", "-threads", "1", "-pix_fmt", "yuv420p", "-vf", even]
        self._process = subprocess.Popen(
            [self._encoder, "-y", "-loglevel", "error", *source, *target, str(self._partial)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is ours to handle: the encoder still gets the end of the file
        )

    def _message(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "no message"


def find_encoder() -> str:
    """Path of the ffmpeg that comes with imageio-ffmpeg, or the system's.

    Raises:
        VideoError: when there is none.
    """
    try:
        from imageio_ffmpeg import get_ffmpeg_exe  # type: ignore[import-untyped]

        return get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise VideoError(
            f'videos need ffmpeg, which was not found ({error}); pip install "imageio[ffmpeg]" (part of the extras of '
            "all simulators), or write no videos (videos=0)"
        ) from error
