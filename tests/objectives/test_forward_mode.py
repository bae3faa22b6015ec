"""Directional derivatives of networks: right for every layer, in full precision, and where networks are wrapped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from genrl.networks import DiTBackbone, MLPBackbone, UNetBackbone
from genrl.objectives import directional_derivative

BACKBONES = [MLPBackbone(16, 2), UNetBackbone((8, 16), groups=4, time_dim=8), DiTBackbone(16, 2, 2)]


def network(backbone=BACKBONES[0], seed: int = 0) -> nn.Module:
    """A network over chunks [B, 8, 2] whose weights are all away from their initial zeros, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = backbone.build(8, 2, 3, interval=True, max_frequency=5.0).double()
        for p in net.parameters():
            p.data.add_(0.2 * torch.randn_like(p))
    return net


def inputs(rows: int = 4, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    """x, t, r, cond and the direction of x."""
    g = torch.Generator().manual_seed(1)
    x, v, cond = (torch.randn(rows, *s, generator=g, dtype=dtype) for s in ((8, 2), (8, 2), (3,)))
    t = 0.5 + 0.5 * torch.rand(rows, generator=g, dtype=dtype)
    return x, t, t * torch.rand(rows, generator=g, dtype=dtype), cond, v


@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda b: type(b).__name__)
def test_the_derivative_of_every_backbone_is_that_of_reverse_mode(backbone):
    net = network(backbone)
    x, t, r, cond, v = inputs()
    value, tangent = directional_derivative(lambda x, t: net(x, t, cond, r), [x, t], [v, torch.ones_like(t)])
    assert torch.equal(value, net(x, t, cond, r).detach())
    # d/dh f(x + h v) row by row, with h as the only input: independent of forward mode.
    for row in range(len(x)):
        h = torch.zeros((), dtype=torch.float64)

        def f(h, row=row):
            i = slice(row, row + 1)
            return net(x[i] + h * v[i], t[i] + h, cond[i], r[i])[0]

        torch.testing.assert_close(tangent[row], torch.autograd.functional.jacobian(f, h), rtol=1e-10, atol=1e-11)
    assert tangent.abs().min() > 0


LAYERS = {
    "linear": lambda x, w: F.linear(x, w["matrix"], w["bias"]),
    "linear_by_name": lambda x, w: F.linear(x, bias=w["bias"], weight=w["matrix"]),
    "conv1d": lambda x, w: F.conv1d(x, w["kernel"], w["bias"], stride=2, padding=1),
    "conv2d": lambda x, w: F.conv2d(x[..., None], w["kernel"][..., None], w["bias"], padding=(1, 0)),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x, w["kernel"], w["bias"], stride=2),
    "layer_norm": lambda x, w: F.layer_norm(x, (6,), w["bias"], w["bias"] ** 2, 1e-3),
    "layer_norm_bare": lambda x, w: F.layer_norm(x, (6,)),
    "group_norm": lambda x, w: F.group_norm(x, 3, w["bias"], w["bias"] ** 2, 1e-3),
    "group_norm_transposed": lambda x, w: F.group_norm(x.transpose(1, 2), 2),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_rule_of_a_layer_is_its_derivative(layer):
    g = torch.Generator().manual_seed(0)
    x, v = (torch.randn(2, 6, 6, generator=g, dtype=torch.float64) for _ in range(2))
    shapes = {"matrix": (6, 6), "kernel": (6, 6, 3), "bias": (6,)}
    w = {k: torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for k, s in shapes.items()}
    value, tangent = directional_derivative(lambda x: LAYERS[layer](x, w), [x], [v])
    torch.testing.assert_close(value, LAYERS[layer](x, w).detach(), rtol=0, atol=0)
    expected = torch.func.jvp(lambda x: LAYERS[layer](x, w), (x,), (v,))[1]
    torch.testing.assert_close(tangent, expected.detach(), rtol=1e-10, atol=1e-11)


def test_weights_that_vary_with_the_input_keep_their_own_rule():
    """A layer whose weight also has a tangent must not be treated as linear in x."""
    x, v = torch.tensor([[2.0, 3.0]]), torch.tensor([[1.0, -1.0]])
    _, tangent = directional_derivative(lambda x: F.linear(x, x), [x], [v])
    torch.testing.assert_close(tangent, torch.tensor([[2 * (2.0 * 1 + 3.0 * -1)]]))


def test_results_are_float32_under_autocast_and_carry_no_graph():
    net, (x, t, r, cond, v) = network().float(), inputs(dtype=torch.float32)

    def u(x, t):
        return net(x, t, cond, r)

    plain = directional_derivative(u, [x, t], [v, torch.ones_like(t)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert u(x, t).dtype == torch.bfloat16  # autocast is at work here
        cast = directional_derivative(u, [x.bfloat16().requires_grad_(), t], [v, torch.ones_like(t)])
    assert cast[0].dtype == cast[1].dtype == torch.float32
    assert not any(value.requires_grad for value in (*plain, *cast))
    rounded = directional_derivative(u, [x.bfloat16().float(), t], [v, torch.ones_like(t)])
    assert torch.equal(cast[1], rounded[1])


def test_a_derivative_that_got_lost_is_an_error_and_not_zero():
    with pytest.raises(ValueError, match=r"does not depend on its inputs.*derivative='difference'"):
        directional_derivative(lambda x: x.detach() ** 2, [torch.zeros(3)], [torch.ones(3)])


def test_weights_keep_their_gradients_and_the_live_call_its_graph():
    net, (x, t, r, cond, v) = network(), inputs()
    directional_derivative(lambda x, t: net(x, t, cond, r), [x, t], [v, torch.ones_like(t)])
    net(x, t, cond, r).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_compiled_network_is_differentiated_uncompiled():
    net, (x, t, r, cond, v) = network(), inputs()
    compiled = torch.compile(net, backend="aot_eager")
    compiled(x, t, cond, r)  # its graph exists by now
    directions = [v, torch.ones_like(t)]
    _, plain = directional_derivative(lambda x, t: net(x, t, cond, r), [x, t], directions)
    _, wrapped = directional_derivative(lambda x, t: compiled(x, t, cond, r), [x, t], directions)
    assert torch.equal(plain, wrapped)


def test_an_operation_without_forward_mode_names_the_remedy():
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, grad):
            return grad

    with pytest.raises(ValueError, match=r"no forward-mode derivative.*derivative='difference'"):
        directional_derivative(Rounded.apply, [torch.zeros(2)], [torch.ones(2)])
