"""Progress with the time left, for everything that takes more than two seconds."""

from __future__ import annotations

import contextlib
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
