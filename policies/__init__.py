"""Policies that act in chunks: one-step flow, mean-flow, drifting and consistency policies, and their baselines."""

from genrl.policies.base import Chunking, ChunkPolicy, Draw, EncoderSettings, Noise, Normalization, Teacher
from genrl.policies.check import check_policy
from genrl.policies.checkpoint import load_policy
from genrl.policies.chunking import ChunkExecutor, EpisodeNoise
from genrl.policies.compiled import CompiledPolicy
from genrl.policies.consistency import ConsistencyPolicy
from genrl.policies.consistency_recipes import RECIPES, ConsistencyRecipe, NoiseLevels
from genrl.policies.diffusion import DiffusionPolicy
from genrl.policies.drifting import DriftGuidance, DriftingPolicy
from genrl.policies.export import OnnxPolicy, export_onnx
from genrl.policies.flow import FlowPolicy
from genrl.policies.meanflow import MeanFlowGuidance, MeanFlowPolicy
from genrl.policies.normalizer import Normalizer
from genrl.policies.onestep import FlowIntervals, OneStepFlowPolicy
from genrl.policies.regression import RegressionPolicy
from genrl.policies.robomimic import RobomimicRollout

__all__ = [
    "RECIPES",
    "ChunkExecutor",
    "ChunkPolicy",
    "Chunking",
    "CompiledPolicy",
    "ConsistencyPolicy",
    "ConsistencyRecipe",
    "DiffusionPolicy",
    "Draw",
    "DriftGuidance",
    "DriftingPolicy",
    "EncoderSettings",
    "EpisodeNoise",
    "FlowIntervals",
    "FlowPolicy",
    "MeanFlowGuidance",
    "MeanFlowPolicy",
    "Noise",
    "NoiseLevels",
    "Normalization",
    "Normalizer",
    "OneStepFlowPolicy",
    "OnnxPolicy",
    "RegressionPolicy",
    "RobomimicRollout",
    "Teacher",
    "check_policy",
    "export_onnx",
    "load_policy",
]
