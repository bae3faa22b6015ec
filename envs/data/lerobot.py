"""LeRobot data sets, versions 2.0, 2.1 and 3.0: tables of steps in parquet files, pictures in them or in videos.

meta/info.json                    codebase_version, fps, features, paths, totals
meta/episodes/*/*.parquet         3.0: one row an episode: length, where its steps and frames are
meta/episodes.jsonl               2.x: the same, one line an episode
data/..., videos/...              3.0: many episodes a file; 2.x: one
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.data.convert import Layout
from genrl.envs.data.episodes import DataError
from genrl.envs.data.reading import Extras, Key, Reader
from genrl.envs.data.video import VideoFrames

name = "lerobot"
description = "LeRobot 2.0, 2.1 and 3.0 (folder): meta/info.json, data/, videos/"
VERSIONS = ("v2.0", "v2.1", "v3.0")
TOLERANCE = 1e-4  # seconds by which a time stamp may be off, as in LeRobot; float32 stamps get their rounding on top
BOOKKEEPING = {
    "timestamp": "seconds since the episode began; checked against the frame rate",
    "frame_index": "number of the step; checked",
    "episode_index": "number of the episode",
    "index": "number of the step in the whole data set",
    "task_index": "which of the tasks",
}
DATA_PATH = {
    2: "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    3: "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
VIDEO_PATH = {
    2: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    3: "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


def detect(path: Path) -> bool:
    return (path / "meta" / "info.json").is_file()


@contextlib.contextmanager
def open(path: Path) -> Iterator[Reader]:
    reader = LeRobotReader(path)
    try:
        yield reader
    finally:
        reader.close()


class LeRobotReader:
    """See `genrl.envs.data.reading.Reader`."""

    action_key = "action"

    def __init__(self, path: Path):
        self.path = path
        self.info = self._json("meta/info.json")
        self.version = str(self.info.get("codebase_version", "none"))
        if self.version not in VERSIONS:
            raise DataError(
                f"is a LeRobot data set of version {self.version}; this reader knows {', '.join(VERSIONS)}. "
                "Convert older ones with LeRobot's own converter; newer ones need a newer genrl",
                path / "meta" / "info.json",
            )
        self.major = int(self.version[1])
        for key in ("fps", "features"):
            if not self.info.get(key):
                raise DataError("is missing", path / "meta" / "info.json", key=key)
        self.fps, self.features = float(self.info["fps"]), dict(self.info["features"])
        self.episodes = {str(int(row["episode_index"])): row for row in self._episode_rows()}
        self._check_totals()
        self._table: tuple[Path, Any] | None = None
        self._episode: tuple[str, Any] | None = None
        self._videos: dict[str, VideoFrames] = {}

    def names(self) -> list[str]:
        return sorted(self.episodes, key=int)

    def masks(self) -> dict[str, list[str]]:
        """The splits of info.json, written as first:last."""
        masks = {}
        for split, text in (self.info.get("splits") or {}).items():
            first, _, last = str(text).partition(":")
            if first.isdigit() and last.isdigit():
                masks[split] = [n for n in self.names() if int(first) <= int(n) < int(last)]
        return masks

    def contents(self) -> list[Key]:
        found = []
        for key, feature in self.features.items():
            if key in BOOKKEEPING:
                found.append(Key(key, "other", meaning=BOOKKEEPING[key]))
            elif key.startswith("observation") and feature.get("dtype") != "string":
                short = key.removeprefix("observation.").removeprefix("images.")
                if (feature.get("info") or {}).get("video.is_depth_map"):
                    found.append(Key(key, "other", meaning="depth video, not read"))
                else:
                    found.append(Key(key, "observation", short, self._layout(feature)))
            elif key == "action":
                found.append(Key(key, "action"))
            elif key in ("next.reward", "reward"):
                found.append(Key(key, "reward"))
            elif key in ("next.success", "next.done", "done", "success"):
                found.append(Key(key, "end"))
            else:
                found.append(Key(key, "other"))
        return found

    def check(self, name: str) -> None:
        """Number of steps, their numbering, and time stamps that follow the frame rate."""
        row, table = self.episodes[name], self._steps(name)
        length = int(row["length"])
        if table.num_rows != length:
            raise DataError(f"meta declares {length} steps, the data have {table.num_rows}", key="length")
        if "frame_index" in table.column_names:
            frames = table["frame_index"].to_numpy()
            if not np.array_equal(frames, np.arange(length)):
                raise DataError("steps are not numbered 0, 1, 2, ...", key="frame_index")
        if "dataset_from_index" in row and int(row["dataset_to_index"]) - int(row["dataset_from_index"]) != length:
            span = f"{row['dataset_from_index']} to {row['dataset_to_index']}"
            raise DataError(f"meta declares steps {span}, but {length} of them", key="dataset_to_index")
        if "timestamp" in table.column_names and length > 1:
            stamps = table["timestamp"].to_numpy().astype(np.float64)
            gaps = np.diff(stamps)
            rounding = 2 * float(np.finfo(np.float32).eps) * np.abs(stamps[1:])
            bad = ~(np.abs(gaps - 1 / self.fps) <= TOLERANCE + rounding)
            if bad.any():
                step = int(np.argmax(bad)) + 1
                raise DataError(
                    f"time stamps do not follow the declared {self.fps:g} frames a second: step {step} comes "
                    f"{gaps[step - 1]:.6g} s after the one before, expected {1 / self.fps:.6g} s",
                    key="timestamp",
                )

    def array(self, name: str, key: str) -> np.ndarray:
        if key not in self.features:
            raise DataError(f"is missing; info.json declares {', '.join(self.features)}", key=key)
        feature = self.features[key]
        if feature.get("dtype") == "video":
            return self._frames(name, key)
        table = self._steps(name)
        if key not in table.column_names:
            raise DataError(f"is declared in info.json, but no column of {self._data_file(name)}", key=key)
        column = table[key].combine_chunks()
        if feature.get("dtype") == "image":
            return self._pictures(column, key)
        return _numbers(column, tuple(feature.get("shape") or ()), key)

    def final(self, name: str, key: str) -> np.ndarray | None:
        return None

    def extras(self, name: str) -> Extras:
        rewards = next((self.array(name, key) for key in ("next.reward", "reward") if key in self.features), None)
        success = next((self.array(name, key) for key in ("next.success", "success") if key in self.features), None)
        return Extras(rewards=rewards, success=None if success is None else bool(np.any(success)))

    def states(self, name: str) -> np.ndarray | None:
        return None

    def meta(self, action_key: str) -> dict[str, Any]:
        action = self.features.get(action_key) or {}
        meta = {"fps": self.fps, "robot_type": self.info.get("robot_type"), "action_names": action.get("names")}
        tasks = sorted({str(task) for row in self.episodes.values() for task in _listed(row.get("tasks"))})
        return {**meta, "tasks": tasks}

    def close(self) -> None:
        for video in self._videos.values():
            video.close()
        self._videos.clear()

    def _json(self, relative: str) -> dict[str, Any]:
        file = self.path / relative
        try:
            return dict(json.loads(file.read_text()))
        except FileNotFoundError as error:
            raise DataError("is missing", file) from error
        except (ValueError, TypeError) as error:
            raise DataError(f"is no JSON object ({error})", file) from error

    def _episode_rows(self) -> list[dict[str, Any]]:
        if self.major == 2:
            file = self.path / "meta" / "episodes.jsonl"
            if not file.is_file():
                raise DataError("is missing", file)
            try:
                return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
            except ValueError as error:
                raise DataError(f"has a line that is no JSON ({error})", file) from error
        files = sorted((self.path / "meta" / "episodes").glob("*/*.parquet"))
        if not files:
            raise DataError("has no parquet file", self.path / "meta" / "episodes")
        rows: list[dict[str, Any]] = []
        for file in files:
            table = _read_table(file)
            rows += table.select([c for c in table.column_names if not c.startswith("stats/")]).to_pylist()
        return rows

    def _check_totals(self) -> None:
        for row in self.episodes.values():
            if "length" not in row:
                raise DataError("is missing in the table of episodes", self.path, str(row["episode_index"]), "length")
        found = {
            "total_episodes": len(self.episodes),
            "total_frames": sum(int(row["length"]) for row in self.episodes.values()),
        }
        for key, number in found.items():
            declared = self.info.get(key)
            if declared is not None and int(declared) != number:
                raise DataError(
                    f"declares {key} = {declared}, the table of episodes has {number}; the data set is incomplete or "
                    "was merged wrongly",
                    self.path / "meta" / "info.json",
                    key=key,
                )

    def _place(self, name: str, prefix: str) -> dict[str, int]:
        row = self.episodes[name]
        if self.major == 2:
            number = int(name)
            return {"episode_index": number, "episode_chunk": number // int(self.info.get("chunks_size", 1000))}
        try:
            return {part: int(row[f"{prefix}/{part}"]) for part in ("chunk_index", "file_index")}
        except KeyError as error:
            raise DataError("is missing in the table of episodes", key=str(error.args[0])) from error

    def _data_file(self, name: str) -> Path:
        return self.path / (self.info.get("data_path") or DATA_PATH[self.major]).format(**self._place(name, "data"))

    def _steps(self, name: str) -> Any:
        """The rows of one episode; the file is kept, since the next episode usually lies in it."""
        if self._episode is None or self._episode[0] != name:
            file = self._data_file(name)
            if self._table is None or self._table[0] != file:
                self._table = (file, _read_table(file))
            table = self._table[1]
            if "episode_index" not in table.column_names:
                raise DataError("has no column episode_index", file, key="episode_index")
            mine = np.flatnonzero(table["episode_index"].to_numpy() == int(name))
            self._episode = (name, table.take(mine))
        return self._episode[1]

    def _frames(self, name: str, key: str) -> np.ndarray:
        row, feature = self.episodes[name], self.features[key]
        template = self.info.get("video_path") or VIDEO_PATH[self.major]
        file = self.path / template.format(video_key=key, **self._place(name, f"videos/{key}"))
        if key not in self._videos or self._videos[key].path != file:
            if key in self._videos:
                self._videos[key].close()
            self._videos[key] = VideoFrames(file, self.fps)
        start = 0 if self.major == 2 else round(float(row[f"videos/{key}/from_timestamp"]) * self.fps)
        frames = self._videos[key].read(start, int(row["length"]))
        declared = sorted(int(size) for size in feature.get("shape") or frames.shape[1:])
        if declared != sorted(frames.shape[1:]):
            raise DataError(
                f"frames have shape {frames.shape[1:]}; info.json declares {feature['shape']}", file, key=key
            )
        return frames

    def _pictures(self, column: Any, key: str) -> np.ndarray:
        from PIL import Image, UnidentifiedImageError

        pictures = []
        for step, entry in enumerate(column.to_pylist()):
            try:
                data = entry["bytes"] if entry.get("bytes") else (self.path / entry["path"]).read_bytes()
                pictures.append(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
            except (UnidentifiedImageError, OSError, TypeError, AttributeError) as error:
                raise DataError(f"the picture of step {step} cannot be read ({error})", key=key) from error
        if len({picture.shape for picture in pictures}) > 1:
            raise DataError("pictures have different sizes", key=key)
        return np.stack(pictures) if pictures else np.zeros((0, 1, 1, 3), np.uint8)

    def _layout(self, feature: dict[str, Any]) -> Layout:
        """Decoded pictures are height x width x channels; arrays are what their axis names say."""
        if feature.get("dtype") in ("video", "image"):
            return "HWC"
        names = feature.get("names")
        first = str(names[0])[:1].lower() if isinstance(names, list) and len(names) == 3 else ""
        return "CHW" if first == "c" else "HWC" if first == "h" else "auto"


def _read_table(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError('LeRobot data sets need pyarrow: pip install "genrl[data]"') from error
    if not file.is_file():
        raise DataError("is missing", file)
    try:
        with parquet.ParquetFile(file) as opened:
            return opened.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"is no readable parquet file ({error}); copy it again if it was cut off", file) from error


def _numbers(column: Any, shape: tuple[int, ...], key: str) -> np.ndarray:
    """[T, *shape] of a column of numbers or of nested lists of them."""
    rows, column = len(column), getattr(column, "storage", column)
    if column.null_count:
        raise DataError("has empty entries", key=key)
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        column = column.flatten()
    values = column.to_numpy(zero_copy_only=False)
    size = int(np.prod(shape)) if shape else 1
    if values.dtype.kind not in "fiub":
        raise DataError(f"has dtype {values.dtype}; expected numbers", key=key)
    if len(values) != rows * size:
        raise DataError(f"has {len(values)} numbers in {rows} steps; info.json declares shape {shape} a step", key=key)
    return values.reshape(rows, *shape) if shape != (1,) else values.reshape(rows)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
