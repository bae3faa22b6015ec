"""Rewards: what a generator is fine-tuned for, and what is only watched."""

from __future__ import annotations

from .base import Reward, RewardError, SetMetric, check_media, reward_name, score
from .check import check_reward
from .classifier import DigitJudge, DigitProxy
from .compose import Compose, as_compose
from .compressibility import Incompressibility, JPEGCompressibility
from .function import FunctionReward

__all__ = [
    "Compose",
    "DigitJudge",
    "DigitProxy",
    "FunctionReward",
    "Incompressibility",
    "JPEGCompressibility",
    "Reward",
    "RewardError",
    "SetMetric",
    "as_compose",
    "check_media",
    "check_reward",
    "reward_name",
    "score",
]
