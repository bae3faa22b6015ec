"""The same toy episodes written in every format, by the format's own library where it has one.

A raw episode is {"state": [T, 3], "action": [T, 2], "reward": [T], "image": [T, H, W, 3]} in the stored types.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

Raw = dict[str, np.ndarray]
STATE = {"robomimic": "obs/state", "lerobot": "observation.state", "minari": "observations", "ogbench": "observations"}
ACTION = {"robomimic": "actions", "minari": "actions", "ogbench": "actions"}
FPS = 10


def raw_episodes(lengths=(5, 3, 7), images: bool = False, seed: int = 0) -> list[Raw]:
    rng = np.random.default_rng(seed)
    episodes = []
    for number, length in enumerate(lengths):
        state = np.stack([np.full(length, number), np.arange(length), rng.normal(size=length)], 1).astype(np.float32)
        action = rng.uniform(-1, 1, size=(length, 2)).astype(np.float32)
        episode = {"state": state, "action": action, "reward": (np.arange(length) == length - 1).astype(np.float32)}
        if images:
            # Flat colours survive video compression; the first channel tells episode and step.
            shade = np.linspace(0, 200, length).astype(np.uint8)
            episode["image"] = np.broadcast_to(shade[:, None, None, None], (length, 32, 48, 3)).copy()
            episode["image"][..., 1] = 60 * number % 256
        episodes.append(episode)
    return episodes


def write_robomimic_like(path: Path, episodes: list[Raw], next_obs: bool = False, env_args: dict | None = None) -> Path:
    """As robomimic's own scripts lay it out."""
    with h5py.File(path / "demo.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(len(e["state"]) for e in episodes)
        data.attrs["env_args"] = json.dumps(env_args or {"env_name": "Lift", "type": 1, "env_kwargs": {}})
        for i, episode in enumerate(episodes):
            demo = data.create_group(f"demo_{i}")
            demo.attrs["num_samples"] = len(episode["action"])
            for key in ("state", "image"):
                if key in episode:
                    demo[f"obs/{key}"] = episode[key]
                    if next_obs:
                        demo[f"next_obs/{key}"] = np.concatenate([episode[key][1:], episode[key][-1:] + 1])
            demo["actions"] = episode["action"]
            demo["rewards"] = episode["reward"]
            demo["dones"] = np.zeros(len(episode["reward"]), np.int64)
            demo["states"] = np.zeros((len(episode["state"]), 4))
    return path / "demo.hdf5"


def write_minari(
    path: Path, episodes: list[Raw], data_format: str = "hdf5", final: bool = True, name="toy/mix-v0"
) -> Path:
    """By Minari. Its observations have one entry more than actions."""
    import minari
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    def longer(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, array[-1:] + 1]) if final else array

    buffers = []
    for i, episode in enumerate(episodes):
        observations = longer(episode["state"])
        if "image" in episode:
            observations = {"state": observations, "image": longer(episode["image"])}
        ends = np.arange(len(episode["reward"])) == len(episode["reward"]) - 1
        buffers.append(
            EpisodeBuffer(
                id=i,
                seed=10 + i,
                observations=observations,
                actions=episode["action"],
                rewards=list(episode["reward"]),
                terminations=list(ends & (i % 2 == 0)),
                truncations=list(ends & (i % 2 == 1)),
                infos={"success": np.append(False, ends & (i % 2 == 0))},
            )
        )
    space: spaces.Space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    if any("image" in episode for episode in episodes):
        space = spaces.Dict({"state": space, "image": spaces.Box(0, 255, (32, 48, 3), np.uint8)})
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(path)
    try:
        minari.create_dataset_from_buffers(
            name,
            buffers,
            action_space=spaces.Box(-1, 1, (2,), np.float32),
            observation_space=space,
            data_format=data_format,
            author="genrl",
            algorithm_name="toy",
            code_permalink="none",
            author_email="none@example.org",
            description="toy",
        )
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before
    return path / name


def write_zarr(
    path: Path, episodes: list[Raw], zarr_format: int = 2, zipped: bool = False, **extra: np.ndarray
) -> Path:
    """As Diffusion Policy's replay buffer lays it out, in zarr's format 2 or 3."""
    target = path / ("buffer.zarr.zip" if zipped else "buffer.zarr")
    store = zarr.storage.ZipStore(str(target), mode="w") if zipped else str(target)
    root = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    names = {"state": "state", "action": "action", "image": "img", "reward": "reward"}
    data = root.create_group("data")
    for key, stored in names.items():
        if key in episodes[0]:
            joined = np.concatenate([episode[key] for episode in episodes])
            data.create_array(stored, data=joined, chunks=(4, *joined.shape[1:]))
    for key, array in extra.items():
        data.create_array(key, data=array)
    root.create_group("meta").create_array(
        "episode_ends", data=np.cumsum([len(episode["action"]) for episode in episodes]).astype(np.int64)
    )
    if zipped:
        store.close()
    return target


def write_ogbench(path: Path, episodes: list[Raw], **extra: np.ndarray) -> Path:
    arrays = {
        "observations": np.concatenate([episode["state"] for episode in episodes]),
        "actions": np.concatenate([episode["action"] for episode in episodes]),
        "terminals": np.concatenate([np.arange(len(e["action"])) == len(e["action"]) - 1 for e in episodes]),
    }
    np.savez_compressed(path / "cube-single-play-v0.npz", **(arrays | extra))
    return path / "cube-single-play-v0.npz"


def write_video(file: Path, frames: np.ndarray, fps: float = FPS, codec: str = "libx264") -> None:
    import imageio_ffmpeg

    file.parent.mkdir(parents=True, exist_ok=True)
    size = (frames.shape[2], frames.shape[1])
    options = ["-crf", "5", "-g", "4"] if codec == "libx264" else ["-crf", "20", "-g", "4"]
    writer = imageio_ffmpeg.write_frames(
        str(file), size, fps=fps, codec=codec, output_params=options, macro_block_size=2, quality=None
    )
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()


def write_lerobot(
    path: Path,
    episodes: list[Raw],
    version: str = "v3.0",
    pictures: str = "video",
    per_file: int = 2,
    codec: str = "libx264",
    info: dict | None = None,
) -> Path:
    """To the published layout of versions 2.0 to 3.0; in 3.0 a file holds `per_file` episodes."""
    (path / "meta").mkdir(parents=True, exist_ok=True)
    three, key = version == "v3.0", "observation.images.top"
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": ["a", "b", "c"]},
        "action": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **{k: {"dtype": "int64", "shape": [1], "names": None} for k in ("frame_index", "episode_index", "index")},
    }
    images = "image" in episodes[0]
    if images:
        features[key] = {"dtype": pictures, "shape": [32, 48, 3], "names": ["height", "width", "channel"]}
    rows, tables, frames, start = [], {}, {}, 0
    for i, episode in enumerate(episodes):
        length = len(episode["action"])
        place = i // per_file if three else i
        columns = {
            "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(episode["state"].reshape(-1)), 3),
            "action": pa.array(list(episode["action"])),
            "next.reward": pa.array(episode["reward"]),
            "next.success": pa.array(np.arange(length) == length - 1),
            "timestamp": pa.array((np.arange(length) / FPS).astype(np.float32)),
            "frame_index": pa.array(np.arange(length)),
            "episode_index": pa.array(np.full(length, i)),
            "index": pa.array(start + np.arange(length)),
        }
        if images and pictures == "image":
            columns[key] = pa.array([{"bytes": png(frame), "path": None} for frame in episode["image"]])
        row = {"episode_index": i, "tasks": ["push"], "length": length}
        if three:
            before = sum(len(e["action"]) for e in episodes[place * per_file : i])
            row |= {"data/chunk_index": 0, "data/file_index": place}
            row |= {"dataset_from_index": start, "dataset_to_index": start + length, "stats/action/min": [0.0]}
            if images and pictures == "video":
                row |= {f"videos/{key}/chunk_index": 0, f"videos/{key}/file_index": place}
                row |= {
                    f"videos/{key}/from_timestamp": before / FPS,
                    f"videos/{key}/to_timestamp": (before + length) / FPS,
                }
        rows.append(row)
        tables.setdefault(place, []).append(pa.table(columns))
        if images and pictures == "video":
            frames.setdefault(place, []).append(episode["image"])
        start += length
    data_file = "data/chunk-000/file-{:03d}.parquet" if three else "data/chunk-000/episode_{:06d}.parquet"
    video_file = (
        f"videos/{key}/chunk-000/file-{{:03d}}.mp4" if three else f"videos/chunk-000/{key}/episode_{{:06d}}.mp4"
    )
    for place, parts in tables.items():
        file = path / data_file.format(place)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.concat_tables(parts), file)
    for place, parts in frames.items():
        write_video(path / video_file.format(place), np.concatenate(parts), codec=codec)
    if three:
        (path / "meta/episodes/chunk-000").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path / "meta/episodes/chunk-000/file-000.parquet")
    else:
        (path / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    content = {"codebase_version": version, "fps": FPS, "robot_type": "toy", "features": features, "chunks_size": 1000}
    content |= {"total_episodes": len(episodes), "total_frames": start, "splits": {"train": f"0:{len(episodes)}"}}
    (path / "meta/info.json").write_text(json.dumps(content | (info or {})))
    return path


def png(frame: np.ndarray) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG")
    return buffer.getvalue()


WRITERS = {
    "robomimic": write_robomimic_like,
    "lerobot": write_lerobot,
    "minari": write_minari,
    "zarr": write_zarr,
    "ogbench": write_ogbench,
}
