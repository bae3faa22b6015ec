"""Stopping a run from outside without losing anything."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Remembers a SIGINT or SIGTERM, which ends the run after the iteration; a second one ends it at once.

    Args:
        announce: print what happens; False on all but the main process.

    Attributes:
        reason: ``""``, or ``"interrupted"`` once a signal has come.
    """

    def __init__(self, announce: bool = True):
        self.announce, self.reason = announce, ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; outside the main thread, which cannot, they keep their meaning."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.reason:
            raise KeyboardInterrupt
        self.reason = "interrupted"
        if self.announce:
            print(f"\n{signal.Signals(number).name}: finishing what is under way and saving; repeat to stop at once")
