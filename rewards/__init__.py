"""Rewards: what a generator is fine-tuned for, and what is only watched."""

from __future__ import annotations

from .aesthetic import AestheticScore
from .base import Reward, RewardError, SetMetric, check_media, reward_name, score
from .check import check_reward
from .classifier import DigitJudge, DigitProxy
from .clip import CLIPFrames, CLIPScore, OpenCLIPScore
from .colors import CLIPColors, ColorPrototypes
from .compose import Compose, as_compose
from .compressibility import Incompressibility, JPEGCompressibility
from .detection import Detection, ZeroShotDetector
from .diversity import DigitSpread, PairwiseDiversity
from .embedding import EmbeddingDiversity, ImageEmbedding
from .function import FunctionReward
from .gates import Conjunction, Gate
from .geneval import CompositionReward
from .geometry import (
    Chamfer,
    Components,
    DepthAgreement,
    FScore,
    NormalSmoothness,
    ShapeDiversity,
    SilhouetteAgreement,
    ViewConsistency,
    VolumeIoU,
    Watertight,
)
from .image_reward import ImageReward
from .motion import DynamicDegree, MotionSmoothness, displacement
from .moving_digits import MotionMatch, MovingDigitJudge, MovingDigitProxy
from .ocr import OCRReward
from .preference import HPSv2, PickScore
from .prompt_questions import LanguageModelQuestions, TemplateQuestions, TransformersText
from .remote import RemoteReward, RemoteRewardError
from .resized import Resized
from .statistics import image_statistics
from .video_distance import VideoDistance
from .video_questions import MovingDigitQuestions
from .vlm import VLMLikelihood, VLMRegressionHead, VLMScore
from .vlm_model import VLMOptions

__all__ = [
    "AestheticScore",
    "CLIPColors",
    "CLIPFrames",
    "CLIPScore",
    "Chamfer",
    "ColorPrototypes",
    "Components",
    "Compose",
    "CompositionReward",
    "Conjunction",
    "DepthAgreement",
    "Detection",
    "DigitJudge",
    "DigitProxy",
    "DigitSpread",
    "DynamicDegree",
    "EmbeddingDiversity",
    "FScore",
    "FunctionReward",
    "Gate",
    "HPSv2",
    "ImageEmbedding",
    "ImageReward",
    "Incompressibility",
    "JPEGCompressibility",
    "LanguageModelQuestions",
    "MotionMatch",
    "MotionSmoothness",
    "MovingDigitJudge",
    "MovingDigitProxy",
    "MovingDigitQuestions",
    "NormalSmoothness",
    "OCRReward",
    "OpenCLIPScore",
    "PairwiseDiversity",
    "PickScore",
    "RemoteReward",
    "RemoteRewardError",
    "Resized",
    "Reward",
    "RewardError",
    "SetMetric",
    "ShapeDiversity",
    "SilhouetteAgreement",
    "TemplateQuestions",
    "TransformersText",
    "VLMLikelihood",
    "VLMOptions",
    "VLMRegressionHead",
    "VLMScore",
    "VideoDistance",
    "ViewConsistency",
    "VolumeIoU",
    "Watertight",
    "ZeroShotDetector",
    "as_compose",
    "check_media",
    "check_reward",
    "displacement",
    "image_statistics",
    "reward_name",
    "score",
]
