"""Simulators without their banners."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Import or build a simulator without its banners; errors still come through."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    output = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
