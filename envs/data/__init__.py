"""Demonstrations of many formats as one data set of action chunks."""

from genrl.envs.data.actions import ActionRepresentation, convert_actions, convert_rotation
from genrl.envs.data.chunks import ChunkDataset, Window, print_windows
from genrl.envs.data.episodes import DataError, Demonstrations, Episode, Summary
from genrl.envs.data.loading import DemonstrationFile, open_demonstrations
from genrl.envs.data.robomimic import write_robomimic

__all__ = [
    "ActionRepresentation",
    "ChunkDataset",
    "DataError",
    "DemonstrationFile",
    "Demonstrations",
    "Episode",
    "Summary",
    "Window",
    "convert_actions",
    "convert_rotation",
    "open_demonstrations",
    "print_windows",
    "write_robomimic",
]
