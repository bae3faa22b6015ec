"""Losses that match a velocity, an average velocity or a flow map on noised samples: tensors in, tensors out."""

from genrl.objectives.matching.forward_mode import directional_derivative
from genrl.objectives.matching.mean_flow import (
    AverageVelocity,
    adaptive_loss,
    dispersive_loss,
    flow_map_sample,
    guided_velocity,
    mean_flow_target,
    total_derivative,
)
from genrl.objectives.matching.self_consistency import (
    contracted_time,
    contraction,
    self_consistency_target,
    self_distillation_target,
    self_guidance,
    trigonometric_step,
)
from genrl.objectives.matching.times import (
    BetaTimes,
    LogitNormalTimes,
    TimeDistribution,
    UniformTimes,
    interval_below,
    random_rows,
    time_pair,
)
from genrl.objectives.matching.velocity import flow_matching_loss, nft_loss, optimality

__all__ = [
    "AverageVelocity",
    "BetaTimes",
    "LogitNormalTimes",
    "TimeDistribution",
    "UniformTimes",
    "adaptive_loss",
    "contracted_time",
    "contraction",
    "directional_derivative",
    "dispersive_loss",
    "flow_map_sample",
    "flow_matching_loss",
    "guided_velocity",
    "interval_below",
    "mean_flow_target",
    "nft_loss",
    "optimality",
    "random_rows",
    "self_consistency_target",
    "self_distillation_target",
    "self_guidance",
    "time_pair",
    "total_derivative",
    "trigonometric_step",
]
