"""Errors of a run."""


class TrainingError(RuntimeError):
    """A run cannot go on; the message says where it stopped, why, and what to do."""


class SetupError(TrainingError, ValueError):
    """A run cannot begin as it is configured; nothing was computed."""
