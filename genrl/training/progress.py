"""What a person sees: a progress line with the time left, and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genrl.progress import progress_columns

if TYPE_CHECKING:
    from genrl.training.run import Run
    from genrl.training.run_files import Summary

_HIDDEN = ("_low", "_high")


@contextmanager
def training_progress(run: Run) -> Iterator[Callable[[Any], None]]:
    """A bar on a terminal, a line now and then elsewhere; only on the main process."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(stderr=True)
    main, total = run.accelerator.is_main_process, run.trainer.iterations
    live = main and console.is_terminal
    columns = (*progress_columns(), TextColumn("{task.fields[note]}"))
    every = max(1, total // 20)
    with Progress(*columns, console=console, disable=not live) as bar:
        task = bar.add_task(run.name, total=total, completed=run.iteration, note="")

        def show(current: Run) -> None:
            note = _note(current.last)
            bar.update(task, completed=current.iteration, note=note)
            due = current.iteration // every > (current.iteration - current.stride) // every
            if main and not live and (due or current.iteration == total):
                console.print(f"{current.name} {current.iteration}/{total} {note}", highlight=False, soft_wrap=True)

        yield show


def announce_resume(run: Run) -> None:
    """Say that a run goes on, or that there is nothing left to do."""
    print(f"{run.run_dir}: going on from iteration {run.iteration} of {run.trainer.iterations}")
    if run.iteration >= run.trainer.iterations:
        print("it is finished, so nothing is changed; raise trainer.iterations, or begin anew with --resume never")


def _note(metrics: Mapping[str, float]) -> str:
    names = [("reward", "reward/total"), ("clipped", "ratio/clip_fraction"), ("grad", "grad/norm")]
    if "reward/total" not in metrics:
        names = [("loss", "loss/total"), ("grad", "grad/norm")]
    return "  ".join(f"{label} {_number(metrics[name])}" for label, name in names if name in metrics)


def _number(value: float) -> str:
    """Three decimals, or two digits of what they would show as nothing."""
    return f"{value:.2g}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"


def print_summary(run: Run, summary: Summary, report: Path | None) -> None:
    """Before and after with 95 % intervals, for the deterministic and the training sampler."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)  # a log file has room for the intervals
    table = Table(title=f"{summary.name}: {summary.status} after {summary.iteration} iterations", title_justify="left")
    last = f"iteration {summary.after['iteration']}" if summary.after else "not evaluated again"
    real = ["real data"] if summary.reference else []
    for heading in (run.measured_on, "before", last, *real):
        table.add_column(heading, justify="left" if heading == run.measured_on else "right")
    for prefix, title, hidden in run.summary_sections():
        keys = dict.fromkeys([*summary.before, *summary.after])
        rows = [k for k in keys if k.startswith(prefix) and not k.endswith(_HIDDEN) and _shown(k, prefix)]
        rows = [k for k in rows if k.removeprefix(prefix) not in hidden]
        if not rows:
            continue
        table.add_row(f"[bold]{title}[/bold]")
        for key in rows:
            name = key.removeprefix(prefix)
            reference = summary.reference.get(name)
            table.add_row(
                f"  {name}",
                _cell(summary.before, key),
                _cell(summary.after, key),
                *(["" if reference is None else f"{reference:.3f}"] if real else []),
            )
    if table.row_count:
        console.print(table)
    else:
        console.print(f"{table.title}; nothing was measured")
    console.print(
        f"{summary.wall_seconds:.0f} s wall time, {summary.forward_equivalents / 1000:.1f} thousand "
        f"{run.cost_unit}, weights moved by {summary.weight_change:.3g}"
    )
    if summary.status == "finished" and summary.weight_change == 0:
        console.print(
            f"[red]The weights did not change: {run.hint_unchanged}.[/red]"
        )
    if summary.status in ("interrupted", "failed", "collapsed", "unscored"):
        start = f"go on from iteration {summary.resumes_from}" if summary.resumes_from else "begin anew (no checkpoint)"
        console.print(f"Run the same command again to {start}.")
    if report is not None:
        console.print(f"Report: {report}", style="bold")


def _shown(key: str, prefix: str) -> bool:
    name = key.removeprefix(prefix)
    return not name.startswith("stats/") and name not in ("weight_change", "uses_ema")


def _cell(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if value is None:
        return "-"
    low, high = values.get(f"{key}_low"), values.get(f"{key}_high")
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"
