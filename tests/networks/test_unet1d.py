"""The 1-d U-Net: its arithmetic against a plain rewrite of the published architecture, and its refusals."""

import pytest
import torch
import torch.nn.functional as F

from genrl.networks import UNetBackbone, VelocityUNet1d


def small(horizon=8, widths=(8, 16), **kwargs):
    torch.manual_seed(0)
    net = VelocityUNet1d(horizon, 3, **{"cond_dim": 2, "widths": widths, "kernel": 5, "groups": 4, **kwargs})
    with torch.no_grad():
        for p in net.output.parameters():
            p.normal_()
    return net


def written_out(net, x, t, cond):
    """The same network as a list of steps on its weights, for two levels."""
    w = dict(net.named_parameters())

    def convolution(name, h, **kwargs):
        return F.conv1d(h, w[f"{name}.weight"], w[f"{name}.bias"], **kwargs)

    def normed(name, h):
        h = convolution(f"{name}.0", h, padding=2)
        return F.mish(F.group_norm(h, 4, w[f"{name}.1.weight"], w[f"{name}.1.bias"]))

    def block(name, h):
        film = F.linear(F.mish(c), w[f"{name}.film.weight"], w[f"{name}.film.bias"])[:, :, None]
        scale, bias = film.chunk(2, dim=1)
        out = normed(f"{name}.second", normed(f"{name}.first", h) * (1 + scale) + bias)
        return out + (convolution(f"{name}.short", h) if f"{name}.short.weight" in w else h)

    c = torch.cat([net.time(t), cond], dim=1)
    h = x.transpose(1, 2)
    skip = block("down.0.1", block("down.0.0", h))
    h = convolution("shrink.0", skip, stride=2, padding=1)
    h = block("down.1.1", block("down.1.0", h))
    h = block("middle.1", block("middle.0", h))
    h = F.conv_transpose1d(h, w["grow.0.weight"], w["grow.0.bias"], stride=2, padding=1)
    h = block("up.0.1", block("up.0.0", torch.cat([h, skip], dim=1)))
    return convolution("output", normed("head", h)).transpose(1, 2), skip


def test_arithmetic_is_that_of_the_published_architecture():
    net = small()
    x, t, cond = torch.randn(4, 8, 3), torch.rand(4), torch.randn(4, 2)
    expected, skip = written_out(net, x, t, cond)
    out, maps = net.features(x, t, cond)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert len(maps) == 1
    torch.testing.assert_close(maps[0], skip, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("horizon", "widths"), [(1, (8,)), (2, (8, 16)), (4, (8, 16, 16)), (12, (8, 16, 16))])
def test_feature_maps_are_those_of_all_levels_but_the_last(horizon, widths):
    net = small(horizon, widths)
    out, maps = net.features(torch.randn(2, horizon, 3), torch.rand(2), torch.randn(2, 2))
    levels = max(len(widths) - 1, 1)
    assert out.shape == (2, horizon, 3)
    assert [m.shape for m in maps] == [(2, widths[k], horizon // 2**k) for k in range(levels)]


def test_every_action_sees_every_other():
    net = small(8, (8, 16, 16))
    x = torch.randn(1, 8, 3, requires_grad=True)
    net(x, torch.rand(1), torch.randn(1, 2))[0, 0].sum().backward()
    assert x.grad.abs().amax(2).min() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizon": 6, "widths": (8, 16, 16)}, r"horizon of 6 .* multiple of 4 such as 8, .* at most 2 widths"),
        ({"horizon": 1, "widths": (8, 16, 16)}, r"multiple of 4 such as 4, .* at most 1 widths"),
        ({"widths": (8, 18)}, "groups = 4 does not divide the width 18"),
        ({"kernel": 4}, "kernel = 4 must be odd"),
        ({"widths": ()}, "at least one positive width"),
        ({"horizon": 1, "widths": (4,)}, "one number a group"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_setting_to_change(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(**arguments)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\[B, 8, 3\]"):
        small()(torch.zeros(1, 3, 8), torch.zeros(1), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="cond_dim=2"):
        small()(torch.zeros(1, 8, 3), torch.zeros(1))


def test_default_sizes_are_those_of_diffusion_policy():
    net = UNetBackbone().build(horizon=16, action_dim=7, cond_dim=10)
    assert [pair[0].film.out_features // 2 for pair in net.down] == [256, 512, 1024]
    assert net.head[0].kernel_size == (5,) and net.head[1].num_groups == 8
