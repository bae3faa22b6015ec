"""The files of a run directory beside metrics and checkpoints, and what a person sees at the end."""

from __future__ import annotations

import importlib.metadata
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genrl.report.data import METRICS, read_metrics
from genrl.training.checkpoint import list_checkpoints
from genrl.training.logging import write_json

if TYPE_CHECKING:
    from genrl.training.run import Run

PACKAGES = ("genrl", "torch", "torchvision", "numpy", "accelerate", "diffusers", "peft", "scikit-learn")


@dataclass
class Summary:
    """The result of a run.

    Args:
        status: ``finished``, ``interrupted``, ``collapsed``, ``unscored`` (rewards were NaN throughout) or ``failed``.
        iteration: completed iterations.
        before, after: first and last evaluation, {metric: value}; after is empty when there was only one.
        resumes_from: iteration of the last complete checkpoint.
        wall_seconds: of this process start, set-up included.
        weight_change: L2 norm of the change of the trained weights.
    """

    name: str
    status: str
    iteration: int
    iterations: int
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0
    weight_change: float = 0.0
    forward_equivalents: float = 0.0
    best_iteration: int = 0
    resumes_from: int = 0
    reference: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @staticmethod
    def of(run: Run, status: str, seconds: float) -> Summary:
        rows = read_metrics(run.run_dir) if (run.run_dir / METRICS).is_file() else []
        evaluations = [row for row in rows if row["kind"] == "eval"]
        error = sys.exc_info()[1]
        return Summary(
            name=run.name,
            status=status,
            iteration=run.iteration,
            iterations=run.trainer.iterations,
            before=evaluations[0] if evaluations else {},
            after=evaluations[-1] if len(evaluations) > 1 else {},
            wall_seconds=seconds,
            weight_change=run.optimization.weight_change(together=status not in ("failed", "interrupted")),
            forward_equivalents=run.cost,
            best_iteration=run.best_iteration(),
            resumes_from=max((i for i, _ in list_checkpoints(run.run_dir)), default=0),
            reference=run.reference(),
            error="" if error is None else f"{type(error).__name__}: {error}",
        )


def run_facts(run: Run) -> dict[str, Any]:
    """The part of ``run.json`` that every run has: how it was started, where, with which versions."""
    return {
        "name": run.name,
        "command": " ".join(["genrl", *sys.argv[1:]]) if len(sys.argv) > 1 else "",
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "processes": run.accelerator.num_processes,
        "device": str(run.device),
        "versions": versions(),
        "reference": run.reference(),
    }


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def write_summary(run: Run, summary: Summary) -> None:
    """``summary.json``, the report, and the table on the screen."""
    values = asdict(summary)
    write_json(run.run_dir / "summary.json", {k: _plain(v) for k, v in values.items()})
    from genrl.report import write_report
    from genrl.training.progress import print_summary

    try:
        report: Path | None = write_report(run.run_dir)
    except OSError as error:
        report = None
        print(f"the report could not be written: {error}")
    print_summary(run, summary, report)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


