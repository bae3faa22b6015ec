"""Policies that act in chunks: one-step flow, mean-flow, drifting and consistency policies, and their baselines."""

from genrl.policies.base import Chunking, ChunkPolicy, Draw, EncoderSettings, Noise, Normalization, Teacher
from genrl.policies.checkpoint import load_policy
from genrl.policies.flow import FlowPolicy
from genrl.policies.normalizer import Normalizer

__all__ = [
    "ChunkPolicy",
    "Chunking",
    "Draw",
    "EncoderSettings",
    "FlowPolicy",
    "Noise",
    "Normalization",
    "Normalizer",
    "Teacher",
    "load_policy",
]
