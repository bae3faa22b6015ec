"""Policies for tests of evaluation: small, real, and of known behaviour."""

from __future__ import annotations

import numpy as np
import torch

from genrl.envs.data import ChunkDataset, Demonstrations
from genrl.envs.demonstrate import Demonstrating, demonstrate
from genrl.envs.experts import expert
from genrl.networks import MLPBackbone
from genrl.policies import Chunking, Normalizer
from genrl.policies.flow import FlowPolicy


def proportional(obs):
    """Solves `toy_envs.Line` in as few steps as possible."""
    state = obs["state"]
    return np.clip(10 * (state[:, 1:] - state[:, :1]), -1, 1)


def slow_for_negative_goals(obs):
    """Succeeds late or, for goals far on the left, never within 30 steps."""
    state = obs["state"]
    return np.where(state[:, 1:] < 0, 0.15, 1.0) * proportional(obs)


def flow_policy(settings, chunking=None, seed=0, steps=2, width=48, scale=0.3, **policy_settings):
    """A flow policy with random weights."""
    policy = FlowPolicy(
        steps=steps,
        network=MLPBackbone(width=width),
        chunking=chunking or Chunking(horizon=8, n_obs_steps=2, n_action_steps=4),
        **policy_settings,
    )
    return with_random_weights(policy, settings, seed, scale)


def with_random_weights(policy, settings, seed=0, scale=0.3):
    """Configured for a task, with chunks that depend on everything that the policy sees and on its noise."""
    env = settings.make()
    obs = [env.reset(seed=s)[0]["state"] for s in range(4)]
    size = env.action_space.shape[0]
    actions = np.random.default_rng(0).uniform(-1, 1, (64, size)).astype(np.float32)
    normalizer = Normalizer.fit({"state": np.stack(obs), "action": actions}, {"state": "meanstd", "action": "minmax"})
    policy.configure(env.specs, size, normalizer, seed=seed, task={"env": settings.to_dict()})
    env.close()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            if not parameter.any():  # the output layer starts at zero
                parameter.normal_(std=scale, generator=generator)
    return policy


def trained_policy(settings, episodes=5, updates=250, noise=0.1, seed=0):
    """A flow policy that has learned a little from the task's expert: it succeeds in some episodes."""
    acting, env = expert(settings), settings.make()
    demonstrating = Demonstrating(settings, noise=noise)
    data = Demonstrations.of([demonstrate(env, acting, demonstrating, s) for s in range(episodes)])
    policy = FlowPolicy(steps=2, network=MLPBackbone(width=64), chunking=Chunking(8, 1, 4))
    arrays = data.arrays()
    normalizer = Normalizer.fit(arrays, {"state": "meanstd", "action": "minmax"})
    policy.configure(env.specs, data.action_dim, normalizer, seed=seed, task={"env": settings.to_dict()})
    env.close()
    dataset, generator = ChunkDataset(data, policy.chunking), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.trained_parameters(), 2e-3)
    for _ in range(updates):
        batch = dataset.batch(torch.randint(len(dataset), (64,), generator=generator))
        loss, _ = policy.loss(batch, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.eval()
