"""The training loop and what surrounds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genrl.training.loop import Loop, TrainingError
    from genrl.training.settings import EvaluationSettings, TrainerSettings

__all__ = ["EvaluationSettings", "Loop", "TrainerSettings", "TrainingError"]


def __getattr__(name: str) -> Any:
    """Import on first use: generators need the prompts of this package and must not pull in the loop."""
    if name in ("Loop", "TrainingError"):
        from genrl.training import loop as module
    elif name in ("EvaluationSettings", "TrainerSettings"):
        from genrl.training import settings as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
