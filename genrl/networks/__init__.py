"""Velocity networks: small, shared by generators and policies, without dropout and with a zero-initialised output."""

from genrl.networks.dit import VelocityDiT
from genrl.networks.embeddings import TimeEmbedding, fourier_features, grid_positions
from genrl.networks.mlp import VelocityMLP

__all__ = ["TimeEmbedding", "VelocityDiT", "VelocityMLP", "fourier_features", "grid_positions"]
