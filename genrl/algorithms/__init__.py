"""Methods: objects that the training loop drives."""

from genrl.algorithms.base import Algorithm, Batch, Rollout
from genrl.algorithms.forward_process import ForwardProcess
from genrl.algorithms.policy_gradient import PolicyGradient

__all__ = ["Algorithm", "Batch", "ForwardProcess", "PolicyGradient", "Rollout"]
