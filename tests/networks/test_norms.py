"""Normalisation layers without a gain."""

from __future__ import annotations

import torch
from torch import nn

from genrl.networks.norms import fix_norm_gains


def test_gains_are_one_and_not_trained_while_shifts_are():
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.LayerNorm(6, elementwise_affine=False))
    with torch.no_grad():
        net[1].weight.fill_(3.0)
    assert fix_norm_gains(net) == 2
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert trained == {"0.weight", "0.bias", "1.bias", "2.bias"}
    assert torch.equal(net[1].weight, torch.ones(6)) and torch.equal(net[2].weight, torch.ones(6))


def test_output_does_not_depend_on_scale_and_offset_of_the_input():
    norm = nn.LayerNorm(6, eps=0.0)
    fix_norm_gains(norm)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm(7 * x - 3), norm(x))
