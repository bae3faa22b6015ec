"""Methods: objects that the training loop drives."""

from genrl.algorithms.base import Algorithm, Batch, Rollout
from genrl.algorithms.distillation import Distillation
from genrl.algorithms.feynman_kac import FeynmanKac, LateSteps, NestedSteps
from genrl.algorithms.forward_process import AdvantageWeightedMatching, ForwardProcess, PositivesOnly
from genrl.algorithms.homing import Homing
from genrl.algorithms.policy_gradient import PolicyGradient
from genrl.algorithms.preference import OnlineDPO
from genrl.algorithms.steering import ParticleSteering, Steered
from genrl.algorithms.token_weights import ChunkWeights, RewardGradient, TokenWeights, VideoCredit

__all__ = [
    "AdvantageWeightedMatching",
    "Algorithm",
    "Batch",
    "ChunkWeights",
    "Distillation",
    "FeynmanKac",
    "ForwardProcess",
    "Homing",
    "LateSteps",
    "NestedSteps",
    "OnlineDPO",
    "ParticleSteering",
    "PolicyGradient",
    "PositivesOnly",
    "RewardGradient",
    "Rollout",
    "Steered",
    "TokenWeights",
    "VideoCredit",
]
