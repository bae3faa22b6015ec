"""Progress with the time left, for everything that takes more than two seconds."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def progress_columns() -> tuple[Any, ...]:
    """Description, bar, count, time so far, time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )


@contextlib.contextmanager
def progress_bar(title: str, total: int, enabled: bool) -> Iterator[Callable[[], None]]:
    """A progress bar with the remaining time on stderr; yields the function that advances it by one."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*progress_columns(), console=Console(file=sys.stderr), disable=not enabled) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def loading(title: str, enabled: bool, *libraries: str) -> Iterator[None]:
    """A line with the time so far while a model is loaded, in place of the bars of diffusers and transformers.

    Args:
        title: what is loaded.
        enabled: False shows nothing.
        libraries: "diffusers", "transformers"; one that is not installed is left to what needs it.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with contextlib.ExitStack() as stack:
        for name in libraries:
            with contextlib.suppress(ImportError):
                stack.enter_context(_silent(importlib.import_module(f"{name}.utils.logging")))
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(file=sys.stderr)
        bar = Progress(*columns, console=console, disable=not (enabled and console.is_terminal), transient=True)
        stack.enter_context(bar)
        bar.add_task(title, total=None)
        yield


@contextlib.contextmanager
def _silent(logging: Any) -> Iterator[None]:
    on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if on:
            logging.enable_progress_bar()
