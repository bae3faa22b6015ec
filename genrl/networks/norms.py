"""Normalisation layers without a gain."""

from __future__ import annotations

import torch
from torch import nn


def fix_norm_gains(module: nn.Module) -> int:
    """Turn every LayerNorm and GroupNorm of a module into its non-scaling form, in place; returns how many there were.

    The gain stays 1 and is no longer trained; centring, standardisation and the shift remain. In consistency training a
    gain lets rare channels amplify outliers (arXiv 2502.01441). The following layer can still scale.
    """
    count = 0
    for layer in module.modules():
        if isinstance(layer, (nn.LayerNorm, nn.GroupNorm)) and isinstance(layer.weight, nn.Parameter):
            with torch.no_grad():
                layer.weight.fill_(1.0)
            layer.weight.requires_grad_(False)
            count += 1
    return count
