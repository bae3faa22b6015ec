"""Runs and what surrounds them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genrl.training.errors import SetupError, TrainingError
    from genrl.training.imitation import Imitation
    from genrl.training.loop import Loop
    from genrl.training.policy_settings import PolicyEvaluationSettings, PolicyTrainerSettings
    from genrl.training.settings import EvaluationSettings, TrainerSettings

__all__ = [
    "EvaluationSettings",
    "Imitation",
    "Loop",
    "PolicyEvaluationSettings",
    "PolicyTrainerSettings",
    "SetupError",
    "TrainerSettings",
    "TrainingError",
]

# Loaded when asked for: a policy's run needs no generator, and its evaluation no optimizer.
_WHERE = {
    "EvaluationSettings": "settings",
    "Imitation": "imitation",
    "Loop": "loop",
    "PolicyEvaluationSettings": "policy_settings",
    "PolicyTrainerSettings": "policy_settings",
    "SetupError": "errors",
    "TrainerSettings": "settings",
    "TrainingError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'genrl.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"genrl.training.{_WHERE[name]}"), name)
