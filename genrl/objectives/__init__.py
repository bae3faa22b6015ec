"""Pure functions and small parts: tensors in, tensors out."""

from genrl.objectives.advantages import (
    GDPO,
    GRPO,
    RLOO,
    AdvantageEstimator,
    Advantages,
    DrGRPO,
    FlowGRPO,
    GroupRelative,
    RunningAdvantage,
    best_and_worst,
    flat_groups,
    group_relative,
)
from genrl.objectives.divergences import gaussian_kl, kl_penalty, ratio_ess
from genrl.objectives.matching import flow_matching_loss, nft_loss, optimality
from genrl.objectives.surrogates import (
    SURROGATES,
    ConsistencyRegression,
    FlowDPPO,
    Guard,
    PPOClip,
    Reinforce,
    StepTerms,
    Surrogate,
    auto_clip_range,
)

__all__ = [
    "GDPO",
    "GRPO",
    "RLOO",
    "SURROGATES",
    "AdvantageEstimator",
    "Advantages",
    "ConsistencyRegression",
    "DrGRPO",
    "FlowDPPO",
    "FlowGRPO",
    "GroupRelative",
    "Guard",
    "PPOClip",
    "Reinforce",
    "RunningAdvantage",
    "StepTerms",
    "Surrogate",
    "auto_clip_range",
    "best_and_worst",
    "flat_groups",
    "flow_matching_loss",
    "gaussian_kl",
    "group_relative",
    "kl_penalty",
    "nft_loss",
    "optimality",
    "ratio_ess",
]
