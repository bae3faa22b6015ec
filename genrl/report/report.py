"""The report of one run: a single HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from genrl.report import diagnostics, policy, prompts, sections
from genrl.report.data import RunData, load_run
from genrl.report.page import page, write_page

Part = Callable[[RunData], str]


def write_report(run_dir: str | Path) -> Path:
    """Writes `run_dir/report.html` from what the run directory holds, and returns its path.

    The file is self-contained (images embedded, no script, no request) and can be written at any time: during the run,
    after a kill, or for a method that lacks some metrics. What is absent is named in the page. See `docs/metrics.md`
    for the meaning of every metric.

    Raises:
        FileNotFoundError: `run_dir` is not a folder.
        OSError: `report.html` cannot be written there.
    """
    run = load_run(run_dir)
    parts = _policy_parts(run) if run.run.get("kind") == "policy" else _generator_parts(run)
    return write_page(run.folder / "report.html", page(f"{run.name}: report", "".join(part(run) for part in parts)))


def _generator_parts(run: RunData) -> tuple[Part, ...]:
    return (
        sections.header,
        diagnostics.problems if not run.rows else _nothing,
        sections.results,
        sections.alarms,
        sections.samples,
        prompts.prompts,
        sections.curves,
        diagnostics.ratios,
        diagnostics.training,
        diagnostics.time_and_cost,
        diagnostics.setup,
        diagnostics.problems if run.rows else _nothing,
    )


def _policy_parts(run: RunData) -> tuple[Part, ...]:
    return (
        lambda run: sections.header(run, policy.policy_tiles),
        diagnostics.problems if not run.rows else _nothing,
        policy.evaluations,
        policy.videos,
        sections.alarms,
        policy.episodes,
        diagnostics.training,
        diagnostics.setup,
        diagnostics.problems if run.rows else _nothing,
    )


def _nothing(_: object) -> str:
    return ""
