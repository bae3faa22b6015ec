"""Errors of a run."""


class TrainingError(RuntimeError):
    """A run cannot go on; the message says where it stopped, why, and what to do."""
