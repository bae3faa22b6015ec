"""Fixtures of the reward tests: a cache of their own, the digits, and rewards that misbehave."""

from __future__ import annotations

import pytest
import torch

from genrl.generators.digits_data import load_digits_split
from genrl.rewards import DigitProxy


@pytest.fixture(scope="session", autouse=True)
def reward_cache(tmp_path_factory):
    """Nothing that a test trains or loads is shared with the user's cache."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("reward_cache")
    patch.setenv("GENRL_CACHE", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="session")
def split():
    return load_digits_split()


@pytest.fixture(scope="session")
def proxy(reward_cache) -> DigitProxy:
    reward = DigitProxy()
    reward.prepare("cpu", progress=False)
    return reward


@pytest.fixture
def batch():
    """media [4, 1, 8, 8], prompts, metadata."""
    media = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return media, [f"digit {i}" for i in range(4)], [{"label": i} for i in range(4)]
