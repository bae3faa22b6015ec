"""Properties that every velocity network has."""

import pytest
import torch

from genrl.networks import DiTBackbone, VelocityDiT, VelocityMLP, VelocityUNet1d


def dit(**kwargs):
    return VelocityDiT(2, (4, 6), patch=2, dim=16, depth=2, heads=2, **kwargs)


def unet(**kwargs):
    return VelocityUNet1d(8, 3, widths=(8, 12, 16), kernel=3, groups=2, time_dim=16, **kwargs)


def chunk_dit(interval=False):
    return DiTBackbone(dim=16, depth=2, heads=2).build(5, 3, 4, interval=interval, max_frequency=5.0)


NETWORKS = {
    "unet": (unet, (8, 3), None),
    "unet-vector": (lambda **kw: unet(cond_dim=4, **kw), (8, 3), torch.randn(4, 4)),
    "chunk-dit": (chunk_dit, (5, 3), torch.randn(4, 4)),
    "mlp": (lambda **kw: VelocityMLP(5, width=16, depth=2, **kw), (5,), None),
    "mlp-shaped": (lambda **kw: VelocityMLP(6, cond_dim=3, width=16, depth=1, **kw), (2, 3), torch.randn(4, 3)),
    "dit": (dit, (2, 4, 6), None),
    "dit-classes": (lambda **kw: dit(classes=10, **kw), (2, 4, 6), torch.tensor([0, 3, 9, 9])),
    "dit-vector": (lambda **kw: dit(cond_dim=3, **kw), (2, 4, 6), torch.randn(4, 3)),
    "dit-tokens": (lambda **kw: dit(vocabulary=7, **kw), (2, 4, 6), torch.tensor([[1, 2], [3, 0], [6, 6], [5, 1]])),
    "dit-context": (
        lambda **kw: dit(vocabulary=7, tokens_in_context=True, max_tokens=3, **kw),
        (2, 4, 6),
        torch.tensor([[1, 2], [3, 0], [6, 6], [5, 1]]),
    ),
}
GUIDED = [name for name in NETWORKS if name.startswith("dit-")]


def build(name, **kwargs):
    make, shape, cond = NETWORKS[name]
    torch.manual_seed(0)
    network = make(**kwargs)
    return network, torch.randn(4, *shape), torch.tensor([0.0, 0.2, 0.7, 1.0]), cond


def awaken(network):
    """Give the zero-initialised layers values, so that outputs depend on everything."""
    with torch.no_grad():
        for p in network.parameters():
            if not p.any():
                p.normal_(std=0.2)
    return network


@pytest.mark.parametrize("interval", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_output_has_the_shape_of_x_and_starts_at_zero(name, interval):
    network, x, t, cond = build(name, interval=interval)
    out = network(x, t, cond)
    assert out.shape == x.shape and not out.any()


@pytest.mark.parametrize("interval", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_and_the_input_get_a_gradient(name, interval):
    network, x, t, cond = build(name, interval=interval)
    awaken(network)
    x.requires_grad_()
    r = t / 2 if interval else None
    loss = network(x, t, cond, r=r).square().sum()
    if name in GUIDED:
        loss = loss + network(x, t, cond, r=r, null=torch.tensor([True, False, False, True])).square().sum()
    loss.backward()
    assert x.grad.abs().min() > 0
    missing = [key for key, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert not missing


@pytest.mark.parametrize("name", NETWORKS)
def test_r_is_used_by_interval_networks_and_refused_by_others(name):
    network, x, t, cond = build(name, interval=True)
    awaken(network)
    whole = network(x, t, cond, r=torch.zeros(4))
    none = network(x, t, cond)
    torch.testing.assert_close(none, network(x, t, cond, r=t))
    assert (whole - none)[1:].abs().amax() > 1e-3
    network, x, t, cond = build(name)
    with pytest.raises(ValueError, match="interval=True"):
        network(x, t, cond, r=t)


@pytest.mark.parametrize("name", NETWORKS)
def test_interval_networks_have_forward_derivatives_that_match_differences(name):
    network, x, t, cond = build(name, interval=True)
    awaken(network).double()
    x, t, r = x.double(), torch.full((4,), 0.6, dtype=torch.float64), torch.full((4,), 0.1, dtype=torch.float64)
    cond = cond.double() if cond is not None and cond.is_floating_point() else cond
    direction = torch.randn_like(x)

    def velocity(x, t, r):
        return network(x, t, cond, r=r)

    # (dx, dt, dr): each input alone, and the tangents of MeanFlow and of a flow map
    nothing, one, h = torch.zeros_like(t), torch.ones_like(t), 1e-5
    for dx, dt, dr in (
        (direction, nothing, nothing),
        (0 * x, one, nothing),
        (0 * x, nothing, one),
        (direction, one, one),
    ):
        _, derivative = torch.func.jvp(velocity, (x, t, r), (dx, dt, dr))
        ahead, behind = (velocity(x + e * dx, t + e * dt, r + e * dr) for e in (h, -h))
        torch.testing.assert_close(derivative, (ahead - behind) / (2 * h), atol=1e-6, rtol=1e-5)
        assert derivative.abs().max() > 1e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_features_come_with_the_output_of_the_network_and_depend_on_the_input(name):
    network, x, t, cond = build(name)
    awaken(network)
    out, maps = network.features(x, t, cond)
    assert torch.equal(out, network(x, t, cond)) and maps
    _, other = network.features(x + 1, t, cond)
    for one, two in zip(maps, other, strict=True):
        assert one.shape[0] == 4 and one.requires_grad and (one - two).flatten(1).norm(dim=1).min() > 1e-3


@pytest.mark.parametrize("interval", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_time_for_all_rows_gives_what_equal_times_give(name, interval):
    network, x, _, cond = build(name, interval=interval)
    awaken(network)
    with torch.inference_mode():
        once = [torch.full((1,), value).expand(4) for value in (0.7, 0.2)]
        rows = [torch.full((4,), value) for value in (0.7, 0.2)]
        expanded, full = (network(x, t, cond, r=r if interval else None) for t, r in (once, rows))
        torch.testing.assert_close(expanded, full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(name):
    network, x, t, cond = build(name)
    awaken(network)
    rows = [slice(i, i + 1) for i in range(4)]
    alone = torch.cat([network(x[i], t[i], None if cond is None else cond[i]) for i in rows])
    torch.testing.assert_close(network(x, t, cond), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_training_mode_changes_nothing(name):
    network, x, t, cond = build(name)
    awaken(network)
    assert torch.equal(network.train()(x, t, cond), network.eval()(x, t, cond))


@pytest.mark.parametrize("name", GUIDED)
def test_null_rows_use_the_null_condition_and_the_others_theirs(name):
    network, x, t, cond = build(name)
    awaken(network)
    own, null = network(x, t, cond), network(x, t, cond, null=True)
    torch.testing.assert_close(network(x, t, null=True), null, atol=1e-5, rtol=1e-5)
    mixed = network(x, t, cond, null=torch.tensor([True, False, True, False]))
    torch.testing.assert_close(mixed[[1, 3]], own[[1, 3]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[[0, 2]], null[[0, 2]], atol=1e-5, rtol=1e-5)
    assert (own - null).abs().max() > 1e-3
    with pytest.raises(ValueError, match="null=True"):
        network(x, t)


def test_padding_contributes_nothing_and_context_sees_the_order():
    for context in (False, True):
        torch.manual_seed(0)
        network = awaken(dit(vocabulary=7, tokens_in_context=context))
        x, t = torch.randn(1, 2, 4, 6), torch.tensor([0.5])
        short = network(x, t, torch.tensor([[1, 2]]))
        torch.testing.assert_close(network(x, t, torch.tensor([[1, 2, 0, 0]])), short, atol=1e-5, rtol=1e-5)
        swapped = network(x, t, torch.tensor([[2, 1]]))
        assert torch.allclose(swapped, short, atol=1e-5) == (not context)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patch": 3}, "patch=3"),
        ({"heads": 5}, "heads=5"),
        ({"classes": 3, "vocabulary": 3}, "at most one"),
        ({"tokens_in_context": True}, "vocabulary"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VelocityDiT(**{"in_channels": 1, "size": (4, 4), "dim": 16, "heads": 2, **arguments})


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\[B, 2, 4, 6\]"):
        dit()(torch.zeros(1, 1, 4, 6), torch.zeros(1))
    with pytest.raises(ValueError, match="unconditional"):
        dit()(torch.zeros(1, 2, 4, 6), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="max_tokens=2"):
        network = dit(vocabulary=7, tokens_in_context=True, max_tokens=2)
        network(torch.zeros(1, 2, 4, 6), torch.zeros(1), torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="cond_dim=3"):
        VelocityMLP(2, cond_dim=3)(torch.zeros(1, 2), torch.zeros(1))
    with pytest.raises(ValueError, match="x_dim is 2"):
        VelocityMLP(2)(torch.zeros(1, 3), torch.zeros(1))
    with pytest.raises(ValueError, match="no null condition"):
        dit(cond_dim=3, guidance=False)(torch.zeros(1, 2, 4, 6), torch.zeros(1), null=True)
