"""Velocity networks, small, without dropout and with a zero-initialised output, and encoders of observations."""

from genrl.networks.backbones import Backbone, DiTBackbone, MLPBackbone, UNetBackbone
from genrl.networks.causal_video import CausalVideoDiT
from genrl.networks.dit import VelocityDiT
from genrl.networks.embeddings import TimeEmbedding, fourier_features, grid_positions
from genrl.networks.encoders import EncoderSettings, ObservationEncoder, ObservationError, ObsSpec
from genrl.networks.images import ImageEncoder, crop_images
from genrl.networks.mlp import VelocityMLP
from genrl.networks.pointnet import PointEncoder, crop_points, farthest_point_sampling
from genrl.networks.unet1d import VelocityUNet1d

__all__ = [
    "Backbone",
    "CausalVideoDiT",
    "DiTBackbone",
    "EncoderSettings",
    "ImageEncoder",
    "MLPBackbone",
    "ObsSpec",
    "ObservationEncoder",
    "ObservationError",
    "PointEncoder",
    "TimeEmbedding",
    "UNetBackbone",
    "VelocityDiT",
    "VelocityMLP",
    "VelocityUNet1d",
    "crop_images",
    "crop_points",
    "farthest_point_sampling",
    "fourier_features",
    "grid_positions",
]
