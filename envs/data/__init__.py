"""Demonstrations of many formats as one data set of action chunks."""

from genrl.envs.data.chunks import ChunkDataset, Window, print_windows
from genrl.envs.data.episodes import DataError, Demonstrations, Episode, Summary

__all__ = ["ChunkDataset", "DataError", "Demonstrations", "Episode", "Summary", "Window", "print_windows"]
