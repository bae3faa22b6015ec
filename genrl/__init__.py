"""Reinforcement learning of diffusion and flow models: fine-tune a generator against a reward.

Importing `genrl` itself loads nothing; import what you need from `genrl.diffusion` (paths, kernels, the sampler),
`genrl.objectives`, `genrl.networks`, `genrl.generators`, `genrl.rewards`, `genrl.algorithms`, `genrl.training`.
"""

__version__ = "0.1.0"
