"""What a run directory holds, read so that a killed, empty or older run is still readable.

`read_metrics` is the public reader of `metrics.jsonl`; `load_run` gathers everything else that the report shows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
PROMPT_REWARDS = "prompt_rewards.jsonl"
NAN = float("nan")


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """All complete records of `run_dir/metrics.jsonl`, in file order; `[]` where the file is missing or empty.

    A last line that was cut (the process was killed while it wrote) is left out. Values are floats that may be NaN or
    inf; strings occur in records of kind `"event"`.

    Raises:
        FileNotFoundError: `run_dir` is not a folder.
        ValueError: a line before the last one is not a JSON object, which means that records were lost.
    """
    rows, broken, n_lines = scan_metrics(check_run_dir(run_dir) / METRICS)
    lost = [line for line in broken if line < n_lines]
    if lost:
        raise ValueError(
            f"{Path(run_dir) / METRICS}: line {lost[0]} is not a JSON object. Only the last line may be incomplete "
            f"(a killed run). Remove the damaged lines ({', '.join(map(str, lost))}) or restore the file."
        )
    return rows


def scan_metrics(file: Path) -> tuple[list[dict[str, Any]], list[int], int]:
    """Records of a metrics file, the numbers (from 1) of the lines that do not parse, and the number of lines."""
    if not file.is_file():
        return [], [], 0
    rows, broken = [], []
    # errors="replace": a kill can cut a character of several bytes in two.
    lines = file.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken.append(number)
    return rows, broken, len(lines)


def check_run_dir(run_dir: str | Path) -> Path:
    """`run_dir` as a path.

    Raises:
        FileNotFoundError: it is not a folder.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"run directory {str(folder)!r} does not exist. A run directory is the folder that `genrl train` writes "
            "(`run_dir` of its config). Give the path of an existing run, or start one with `genrl train CONFIG`."
        )
    return folder


@dataclass(frozen=True)
class RunData:
    """Everything that a report needs of one run. Missing parts are empty and named in `problems`."""

    folder: Path
    rows: list[dict[str, Any]]
    run: dict[str, Any] = field(default_factory=dict)  # run.json
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    samples: list[tuple[int, Path]] = field(default_factory=list)  # (iteration, grid), ascending
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.run.get("name") or self.config.get("name") or self.folder.resolve().name)

    @property
    def method(self) -> str:
        return str(self.run.get("method") or "")

    @property
    def last_iteration(self) -> int | None:
        numbers = [number for row in self.rows if (number := as_iteration(row)) is not None]
        return max(numbers, default=None)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("kind") == "event"]

    def table(self, kind: str) -> dict[int, dict[str, float]]:
        """Iteration -> metrics of the records of one kind, ascending.

        Records of the same iteration are merged and the later one wins: a resumed run repeats the iterations after its
        checkpoint.
        """
        merged: dict[int, dict[str, float]] = {}
        for row in self.rows:
            number = as_iteration(row)
            if row.get("kind") != kind or number is None:
                continue
            values = {key: as_float(value) for key, value in row.items() if is_number(value) and key != "iteration"}
            merged.setdefault(number, {}).update(values)
        return dict(sorted(merged.items()))

    def planned_iterations(self) -> int | None:
        trainer = self.config.get("trainer")
        planned = trainer.get("iterations") if isinstance(trainer, dict) else None
        return planned if isinstance(planned, int) else None

    def status(self) -> tuple[str, str]:
        """(`"finished"`, `"interrupted"`, `"failed"` or `"unfinished"`, a sentence for the reader)."""
        number = self.summary.get("iteration", self.last_iteration)
        word = str(self.summary.get("status", "finished" if self.summary else "")).lower()
        message = str(self.summary.get("error") or "")
        if not word:
            for event in reversed(self.events):
                label = event_name(event).lower()
                if label.startswith(("fail", "error", "interrupt")):
                    word = "interrupted" if label.startswith("interrupt") else "failed"
                    message, number = str(event.get("message") or ""), event.get("iteration", number)
                    break
        planned = self.planned_iterations()
        of = f" of {planned}" if planned is not None and word != "finished" else ""
        if not word and number is None:
            return "unfinished", "nothing recorded yet (just started, or killed early)"
        where = f"iteration {number}{of}" if number is not None else "before the first record"
        if word == "finished":
            return word, f"finished, {where}" if number is not None else "finished"
        if word in ("interrupted", "failed"):
            return word, f"{word} at {where}" + (f": {message}" if message else "")
        if word:
            return "unfinished", f"{word}, {where}"
        return "unfinished", f"not finished: {where} is the last record (still running, or killed)"


def load_run(run_dir: str | Path) -> RunData:
    """Reads a run directory; parts that are missing or damaged are listed in `.problems`.

    Raises:
        FileNotFoundError: `run_dir` is not a folder.
    """
    folder = check_run_dir(run_dir)
    problems: list[str] = []
    rows, broken, n_lines = scan_metrics(folder / METRICS)
    if not rows:
        problems.append(f"{METRICS} is missing or holds no record: no curve can be drawn.")
    for line in broken:
        cut = "cut, as a killed run leaves it" if line == n_lines else "damaged"
        problems.append(f"{METRICS}: line {line} is {cut}; it is left out.")
    run = _read_json(folder / "run.json", "command, versions and sizes", problems)
    summary = _read_json(folder / "summary.json", "final summary; the run may not have ended", problems)
    config, text = _read_config(folder / "config.yaml", problems)
    samples = find_samples(folder / "samples")
    if not samples and run.get("kind") != "policy":
        problems.append("samples/ holds no grid (iteration-000000.png, ...): no images to show.")
    return RunData(folder, rows, run, summary, config, text, samples, problems)


def find_samples(folder: Path, kind: str = "iteration") -> list[tuple[int, Path]]:
    """(iteration, file) of the grids `iteration-000030.png` in a folder, or those of another kind, ascending."""
    found = [(re.fullmatch(rf"{kind}-(\d+)\.png", file.name), file) for file in folder.glob(f"{kind}-*.png")]
    return sorted((int(match.group(1)), file) for match, file in found if match)


def film_of(grid: Path) -> Path | None:
    """The moving grid beside the grid of a video generator, if it was written."""
    return next((film for end in (".webp", ".gif") if (film := grid.with_suffix(end)).is_file()), None)


def event_name(event: Mapping[str, Any]) -> str:
    return str(event.get("event") or event.get("name") or "event")


def is_number(value: Any) -> bool:
    """None counts: it is how strict JSON writes NaN."""
    return value is None or isinstance(value, (int, float))


def as_float(value: Any) -> float:
    """A logged number as a float; what exceeds float32 by far counts as infinite, so that axes stay computable."""
    if not isinstance(value, (int, float)):
        return NAN
    return math.copysign(math.inf, value) if abs(value) > 1e99 else float(value)


def as_iteration(row: Mapping[str, Any]) -> int | None:
    value = row.get("iteration")
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def mean(values: Iterable[float]) -> float:
    """Mean of the finite values; NaN where there is none."""
    kept = [value for value in values if math.isfinite(value)]
    return math.fsum(kept) / len(kept) if kept else NAN


def _read_json(file: Path, holds: str, problems: list[str]) -> dict[str, Any]:
    if not file.is_file():
        problems.append(f"{file.name} is missing ({holds}).")
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        problems.append(f"{file.name} is damaged ({holds}): {error}.")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{file.name} is not a JSON object ({holds}).")
        return {}
    return value


def _read_config(file: Path, problems: list[str]) -> tuple[dict[str, Any], str]:
    import yaml

    if not file.is_file():
        problems.append("config.yaml is missing: the settings of this run are unknown.")
        return {}, ""
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problems.append(f"config.yaml does not parse ({str(error).splitlines()[0]}); it is shown as it is.")
        value = None
    return (value if isinstance(value, dict) else {}), text
