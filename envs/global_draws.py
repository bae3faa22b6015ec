"""Simulators that draw from numpy's global generator, kept from disturbing and from being disturbed."""

from __future__ import annotations

from typing import Any

import numpy as np


class GlobalDraws:
    """Within ``with draws:``, numpy's global generator is one of our own; outside it is untouched.

    Args:
        seed: of our generator.

    Example:
        >>> draws = GlobalDraws(3)
        >>> with draws:
        ...     first = np.random.uniform()
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start our generator anew."""
        self._state: Any = np.random.RandomState(seed % 2**32).get_state()

    def __enter__(self) -> GlobalDraws:
        self._outside = np.random.get_state()
        np.random.set_state(self._state)
        return self

    def __exit__(self, *error: object) -> None:
        self._state = np.random.get_state()
        np.random.set_state(self._outside)
