"""Videos: pixels survive, memory stays flat, and a stopped run keeps what it has recorded."""

import builtins
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from genrl.envs.videos import VideoError, VideoWriter

imageio = pytest.importorskip("imageio.v3")


def frames(n, height=32, width=48):
    """Grey levels that rise with time, with a bright left half."""
    for i in range(n):
        frame = np.full((height, width, 3), 40 + 10 * i, np.uint8)
        frame[:, : width // 2] = 230
        yield frame


def test_a_video_holds_the_frames_in_order_at_the_given_rate(tmp_path):
    path = tmp_path / "deep" / "a.mp4"
    with VideoWriter(path, fps=10) as video:
        for frame in frames(12):
            video.add(frame)
        assert video.frames == 12 and not path.exists()  # complete, or not there
    found = imageio.imread(path, plugin="FFMPEG")
    assert found.shape == (12, 32, 48, 3)
    assert np.allclose(found[:, :, -8:].mean((1, 2, 3)), [40 + 10 * i for i in range(12)], atol=4)
    assert found[:, :, :8].mean() > 220
    assert imageio.immeta(path, plugin="FFMPEG")["fps"] == 10
    assert list(path.parent.iterdir()) == [path]


def test_odd_sizes_are_padded_not_refused(tmp_path):
    with VideoWriter(tmp_path / "a.mp4") as video:
        video.add(np.zeros((33, 47, 3), np.uint8))
    assert imageio.imread(tmp_path / "a.mp4", plugin="FFMPEG").shape == (1, 34, 48, 3)


def test_an_exception_keeps_the_frames_so_far(tmp_path):
    with pytest.raises(ZeroDivisionError), VideoWriter(tmp_path / "a.mp4") as video:
        for i, frame in enumerate(frames(9)):
            video.add(frame)
            1 / (5 - i)
    assert len(imageio.imread(tmp_path / "a.mp4", plugin="FFMPEG")) == 6


PROGRAM = """
import sys, time, numpy as np
from genrl.envs.videos import VideoWriter
with VideoWriter(sys.argv[1]) as video:
    for i in range(7):
        video.add(np.full((16, 16, 3), 30 * i, np.uint8))
    print("ready", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_keeps_the_frames_so_far(tmp_path):
    path = tmp_path / "a.mp4"
    # as at a terminal, the signal goes to the whole process group
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    subprocess.run(["kill", "-INT", "--", f"-{process.pid}"], check=True)
    _, errors = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors and process.returncode in (1, 130, -signal.SIGINT)
    assert len(imageio.imread(path, plugin="FFMPEG")) == 7


def test_memory_stays_flat_over_many_recorded_episodes(tmp_path):
    frame = np.zeros((128, 128, 3), np.uint8)

    def record(episode):
        with VideoWriter(tmp_path / f"{episode % 2}.mp4") as video:
            for i in range(5):
                video.add(frame + np.uint8(i))

    record(0)
    tracemalloc.start()
    try:
        for episode in range(60):
            record(episode)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2e6  # the frames of all episodes are 15 MB


@pytest.mark.parametrize(
    "frame, message",
    [(None, "render=True"), (np.zeros((4, 4, 3)), "float64"), (np.zeros((3, 4, 4), np.uint8), r"\[H, W, 3\]"),
     (np.zeros((4, 4), np.uint8), r"\(4, 4\)")],
)  # fmt: skip
def test_what_is_not_a_picture_is_refused_at_once(tmp_path, frame, message):
    with VideoWriter(tmp_path / "a.mp4") as video, pytest.raises(VideoError, match=message):
        video.add(frame)
    assert not (tmp_path / "a.mp4").exists()


def test_frames_of_two_sizes_are_refused(tmp_path):
    with VideoWriter(tmp_path / "a.mp4") as video:
        video.add(np.zeros((16, 16, 3), np.uint8))
        with pytest.raises(VideoError, match=r"frame 1 .*\(16, 18, 3\).*\(16, 16, 3\)"):
            video.add(np.zeros((16, 18, 3), np.uint8))


def test_a_missing_encoder_is_named_before_the_first_frame(tmp_path, monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name == "imageio_ffmpeg":
            raise ImportError("No module named 'imageio_ffmpeg'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(VideoError, match=r"imageio\[ffmpeg\].*videos=0"):
        VideoWriter(tmp_path / "a.mp4")


def test_an_encoder_that_fails_is_reported_and_leaves_no_file(tmp_path):
    folder = tmp_path / "gone"
    video = VideoWriter(folder / "a.mp4")
    folder.rmdir()
    with pytest.raises(VideoError, match=r"a\.mp4.*No such file"):
        for frame in frames(2000, 64, 64):
            video.add(frame)
        video.close()
    with pytest.raises(VideoError, match="must end in"):
        VideoWriter(tmp_path / "a.avi")
    with pytest.raises(VideoError, match="fps"):
        VideoWriter(tmp_path / "a.mp4", fps=0)
