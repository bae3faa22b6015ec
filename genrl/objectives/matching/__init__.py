"""Losses that match a velocity, an average velocity or a flow map on noised samples: tensors in, tensors out."""

from genrl.objectives.matching.velocity import flow_matching_loss, nft_loss, optimality

__all__ = ["flow_matching_loss", "nft_loss", "optimality"]
