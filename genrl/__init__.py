"""Reinforcement learning of diffusion and flow models: fine-tune generators, train one-step robot policies.

Importing `genrl` itself loads nothing; import what you need from `genrl.diffusion` (paths, kernels, the sampler),
`genrl.objectives`, `genrl.networks`, `genrl.generators`, `genrl.rewards`, `genrl.algorithms`, `genrl.policies`,
`genrl.envs` (environments, demonstrations, evaluation), `genrl.training`.
"""

__version__ = "0.1.0"
