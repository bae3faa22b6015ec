"""What is in a data set, key by key: the answer to "what do these arrays mean, and which does training use?"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from genrl.envs.data.episodes import DataError, Demonstrations, Summary
from genrl.envs.data.formats import FormatName, open_reader
from genrl.envs.data.loading import choose_episodes, open_demonstrations
from genrl.envs.data.quality import Quality, measure_quality
from genrl.envs.data.reading import Key, Reader, select_keys

LOOKED_AT = 50  # episodes whose values give the ranges
PICTURES = 2  # of them, those whose pictures are decoded


@dataclass(frozen=True)
class KeyReport:
    """One array of a file.

    Attributes:
        name: in the file. meaning: what it is. shape: of one step, as stored. dtype: as stored. low, high: least and
            greatest value seen, None for text. used: whether training reads it, and as what.
    """

    name: str
    meaning: str
    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    used: str

    @property
    def range(self) -> str:
        return "" if self.low is None else f"{self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True)
class Inspection:
    """What `genrl inspect` prints.

    Attributes:
        path, format, version: of the data. keys: its arrays. summary: lengths, rewards, successes and notes. quality:
            metrics of section "how good to imitate"; None without a state observation, with the reason in `problems`.
        masks: {filter key: number of episodes}. problems: what keeps the data from being used, or parts of this report
            from being made. looked_at: episodes that the ranges come from.
    """

    path: str
    format: str
    version: str
    keys: tuple[KeyReport, ...]
    summary: Summary | None
    quality: Quality | None
    masks: dict[str, int]
    problems: tuple[str, ...]
    looked_at: int

    def rows(self) -> list[tuple[str, ...]]:
        """Lines of text cells: the keys (name, meaning, shape, dtype, range, used), then pairs."""
        lines: list[tuple[str, ...]] = [("key", "meaning", "shape", "dtype", "range", "used in training")]
        lines += [(k.name, k.meaning, _shape(k.shape), k.dtype, k.range, k.used) for k in self.keys]
        lines.append(("format", f"{self.format} {self.version}".strip()))
        lines += self.summary.rows() if self.summary else []
        if self.masks:
            lines.append(("filter keys", ", ".join(f"{name} ({count})" for name, count in self.masks.items())))
        lines += self.quality.rows() if self.quality else []
        lines += [("problem", problem) for problem in self.problems]
        lines.append(("ranges", f"of the first {self.looked_at} episodes, pictures of the first {PICTURES}"))
        return lines

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        table = [row for row in self.rows() if len(row) > 2]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([*lines, "", *(f"{row[0]}: {row[1]}" for row in self.rows() if len(row) == 2)])


def inspect_demonstrations(
    path: str | Path, format: FormatName = "auto", obs: Sequence[str] | None = None, seed: int = 0
) -> Inspection:
    """Meaning, shape, type and range of every array, what training uses, a summary and quality metrics.

    Faults of the data are reported as problems instead of raised where that is possible, so that a file that cannot be
    trained on can still be looked at.

    Args:
        path: file or folder. format: see `open_demonstrations`.
        obs: observations that training would use; None stands for all.
        seed: of the subsets that quality metrics are computed on.

    Raises:
        FileNotFoundError: nothing is there.
        DataError: the file cannot be opened, or has no episodes.
    """
    problems: list[str] = []
    with open_reader(path, format) as (format_name, reader):
        names = choose_episodes(reader, None)
        try:
            chosen = {key.name: new for new, key in select_keys(reader, obs, {}).items()}
        except DataError as error:
            problems.append(error.problem)
            chosen = {}
        keys = tuple(_report(reader, key, names[:LOOKED_AT], chosen, problems) for key in reader.contents())
        masks = {name: len(members) for name, members in reader.masks().items()}
        version = reader.version
        pictures = {key.name for key, report in zip(reader.contents(), keys, strict=True) if _is_picture(report)}
    data, more = _load(path, format, chosen, pictures)
    problems += more
    quality = None
    if data is not None:
        try:
            quality = measure_quality(data, seed=seed)
        except DataError as error:
            problems.append(f"no quality metrics: {error.problem}")
    return Inspection(
        path=str(path),
        format=format_name,
        version=version,
        keys=keys,
        summary=data.summary() if data else None,
        quality=quality,
        masks=masks,
        problems=tuple(dict.fromkeys(problems)),
        looked_at=min(len(names), LOOKED_AT),
    )


def _load(
    path: str | Path, format: FormatName, chosen: dict[str, str], pictures: set[str]
) -> tuple[Demonstrations | None, list[str]]:
    """Everything but pictures, which would fill the memory and say nothing in a table."""
    wanted = [name for key, name in chosen.items() if key not in pictures]
    if not wanted:
        return None, ["no summary: there is no observation besides pictures"]
    problems: list[str] = []
    for bad in ("stop", "skip"):
        try:
            data = open_demonstrations(path, format, wanted, bad_episodes=bad)  # type: ignore[arg-type]
            return data, problems
        except DataError as error:
            problems.append(str(error))
    try:
        return open_demonstrations(path, format, wanted, bad_episodes="skip", out_of_bounds="clip"), problems
    except DataError as error:
        return None, [*problems, str(error)]


def _report(reader: Reader, key: Key, names: Sequence[str], chosen: dict[str, str], problems: list[str]) -> KeyReport:
    shape: tuple[int, ...] = ()
    dtype, low, high = "", np.inf, -np.inf
    for i, name in enumerate(names):
        try:
            array = reader.array(name, key.name)
        except (DataError, OSError, KeyError) as error:
            problems.append(f"episode {name}, key {key.name!r}: {getattr(error, 'problem', error)}")
            continue
        shape, dtype = (array.shape[1:], str(array.dtype)) if not dtype else (shape, dtype)
        if array.dtype.kind in "fiub" and array.size:
            low, high = min(low, float(np.nanmin(array))), max(high, float(np.nanmax(array)))
        if array.ndim >= 4 and i + 1 >= PICTURES:
            break
    used = {"observation": f"yes, as {chosen.get(key.name)!r}", "action": "yes, as the target"}.get(key.role, "no")
    if key.role == "observation" and key.name not in chosen:
        used = "no (not selected)"
    if key.role in ("reward", "end"):
        used = "not by imitation; in the summary"
    least, greatest = (low, high) if np.isfinite(low) and np.isfinite(high) else (None, None)
    return KeyReport(key.name, key.describe, tuple(map(int, shape)), dtype, least, greatest, used)


def _is_picture(report: KeyReport) -> bool:
    return len(report.shape) == 3 or (len(report.shape) == 2 and report.dtype == "uint8")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1 number"
