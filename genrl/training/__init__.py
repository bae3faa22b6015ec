"""The training loop and what surrounds it."""

from genrl.training.errors import SetupError, TrainingError
from genrl.training.loop import Loop
from genrl.training.settings import EvaluationSettings, TrainerSettings

__all__ = ["EvaluationSettings", "Loop", "SetupError", "TrainerSettings", "TrainingError"]
