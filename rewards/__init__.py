"""Rewards: what a generator is fine-tuned for, and what is only watched."""

from __future__ import annotations

from .base import Reward, RewardError, SetMetric, check_media, reward_name, score
from .check import check_reward
from .classifier import DigitJudge, DigitProxy
from .compose import Compose, as_compose
from .compressibility import Incompressibility, JPEGCompressibility
from .diversity import DigitSpread, PairwiseDiversity, image_statistics
from .function import FunctionReward
from .gates import Conjunction, Gate
from .ocr import OCRReward

__all__ = [
    "Compose",
    "Conjunction",
    "DigitJudge",
    "DigitProxy",
    "DigitSpread",
    "FunctionReward",
    "Gate",
    "Incompressibility",
    "JPEGCompressibility",
    "OCRReward",
    "PairwiseDiversity",
    "Reward",
    "RewardError",
    "SetMetric",
    "as_compose",
    "check_media",
    "check_reward",
    "image_statistics",
    "reward_name",
    "score",
]
