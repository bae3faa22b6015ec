import pytest
import torch

from genrl.networks.causal_video import CausalVideoDiT, interleaved_mask

SMALL = {"size": 8, "chunks": 3, "dim": 16, "depth": 2, "heads": 2, "vocabulary": 9}


def network(**settings):
    """A network whose outputs are not zero."""
    torch.manual_seed(0)
    net = CausalVideoDiT(**{**SMALL, **settings})
    for p in net.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return net


@pytest.fixture
def batch():
    """x, t, cond, history."""
    draw = torch.Generator().manual_seed(1)
    x, history = (torch.randn(2, 6, 1, 8, 8, generator=draw) for _ in range(2))
    return x, torch.rand(2, 3, generator=draw), torch.tensor([[1, 2, 0], [3, 4, 5]]), history


def test_one_forward_equals_the_chunks_one_by_one(batch):
    x, t, cond, history = batch
    net, cache = network(), None
    whole = net(x, t, cond, history=history)
    for j in range(3):
        part = slice(2 * j, 2 * j + 2)
        torch.testing.assert_close(net.chunk(x[:, part], t[:, j], cond, cache), whole[:, part], atol=1e-5, rtol=1e-5)
        cache = net.extend(cache, history[:, part], cond)
    assert cache.chunks == 3 and cache.keys[0].shape == (2, 2, 12, 8)


def test_the_mask_is_that_of_the_paper():
    see = [
        [1, 0, 0, 0, 0],  # z_1
        [0, 1, 0, 0, 0],  # h_1
        [0, 1, 1, 0, 0],  # z_2
        [0, 1, 0, 1, 0],  # h_2
        [0, 1, 0, 1, 1],  # z_3
    ]
    assert torch.equal(interleaved_mask(3, 1), torch.tensor(see).bool())
    assert torch.equal(interleaved_mask(3, 4), torch.tensor(see).bool().repeat_interleave(4, 0).repeat_interleave(4, 1))


@pytest.mark.parametrize("j", range(3))
def test_a_noisy_chunk_is_seen_by_itself_alone_and_a_finished_one_by_later_chunks(j, batch):
    x, t, cond, history = batch
    net, part = network(), slice(2 * j, 2 * j + 2)
    base = net(x, t, cond, history=history)
    moved = x.clone()
    moved[:, part] += 1
    changed = (net(moved, t, cond, history=history) != base).unflatten(1, (3, 2)).flatten(2).any(2).any(0)
    assert changed.tolist() == [i == j for i in range(3)]
    moved = history.clone()
    moved[:, part] += 1
    changed = (net(x, t, cond, history=moved) != base).unflatten(1, (3, 2)).flatten(2).any(2).any(0)
    assert changed.tolist() == [i > j for i in range(3)]


def test_history_carries_gradient_to_weights_and_none_when_detached(batch):
    x, t, cond, history = batch
    net = network(depth=1)

    def gradients(detach):
        """Of the last chunk's output, with respect to the pixels of the history and to what makes keys and values."""
        leaf = history.clone().requires_grad_()
        out = net(x, t, cond, history=leaf, detach_history=detach)[:, 4:]
        return torch.autograd.grad(out.square().sum(), [leaf, net.blocks[0].qkv.weight], allow_unused=True)

    pixels, weights = gradients(False)
    assert pixels[:, :4].abs().sum() > 0 and (pixels[:, 4:] == 0).all()
    detached, own = gradients(True)
    assert (detached == 0).all() and not torch.allclose(own, weights)
    assert torch.equal(net(x, t, cond, history=history), net(x, t, cond, history=history, detach_history=True))


def test_times_of_the_history_matter_and_are_zero_by_default(batch):
    x, t, cond, history = batch
    net = network()
    base = net(x, t, cond, history=history)
    assert torch.equal(net(x, t, cond, history=history, history_t=torch.zeros(2, 3)), base)
    other = net(x, t, cond, history=history, history_t=torch.full((2, 3), 0.5))
    assert torch.equal(other[:, :2], base[:, :2]) and not torch.allclose(other[:, 2:], base[:, 2:])


def test_one_time_for_all_chunks_is_the_same_time_for_each(batch):
    x, _, cond, history = batch
    net, t = network(), torch.tensor([0.3, 0.8])
    assert torch.equal(net(x, t, cond, history=history), net(x, t[:, None].expand(2, 3), cond, history=history))


def test_without_causality_every_chunk_sees_all(batch):
    x, t, cond, history = batch
    net = network(causal=False)
    moved = x.clone()
    moved[:, :2] += 1
    assert ((net(moved, t, cond) != net(x, t, cond)).unflatten(1, (3, 2)).flatten(2).any(2)).all()
    assert torch.equal(net(x, t, cond, null=True), net(x, t, cond.flip(0), null=torch.ones(2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="causal=True"):
        net(x, t, cond, history=history)


def test_impossible_inputs_are_named(batch):
    x, t, cond, history = batch
    with pytest.raises(ValueError, match="history="):
        network()(x, t, cond)
    with pytest.raises(ValueError, match=r"history has shape \(2, 4, 1, 8, 8\)"):
        network()(x, t, cond, history=history[:, :4])
    with pytest.raises(ValueError, match="patch=3"):
        network(patch=3)
    with pytest.raises(ValueError, match="heads=3"):
        network(heads=3)
