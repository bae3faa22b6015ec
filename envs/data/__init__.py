"""Demonstrations of many formats as one data set of action chunks."""

from genrl.envs.data.actions import ActionRepresentation, convert_actions, convert_rotation
from genrl.envs.data.chunks import ChunkDataset, Window, print_windows
from genrl.envs.data.episodes import DataError, Demonstrations, Episode, Summary
from genrl.envs.data.inspection import Inspection, inspect_demonstrations
from genrl.envs.data.loading import DemonstrationFile, open_demonstrations
from genrl.envs.data.quality import Quality, measure_quality, state_divergence
from genrl.envs.data.robomimic import write_robomimic

__all__ = [
    "ActionRepresentation",
    "ChunkDataset",
    "DataError",
    "DemonstrationFile",
    "Demonstrations",
    "Episode",
    "Inspection",
    "Quality",
    "Summary",
    "Window",
    "convert_actions",
    "convert_rotation",
    "inspect_demonstrations",
    "measure_quality",
    "open_demonstrations",
    "print_windows",
    "state_divergence",
    "write_robomimic",
]
