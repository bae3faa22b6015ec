"""Methods: objects that the training loop drives."""

from genrl.algorithms.base import Algorithm, Batch, Rollout
from genrl.algorithms.forward_process import ForwardProcess
from genrl.algorithms.policy_gradient import PolicyGradient
from genrl.algorithms.token_weights import ChunkWeights, TokenWeights

__all__ = ["Algorithm", "Batch", "ChunkWeights", "ForwardProcess", "PolicyGradient", "Rollout", "TokenWeights"]
