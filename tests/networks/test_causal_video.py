import pytest
import torch

from genrl.networks.causal_video import CausalVideoDiT, ChunkCache, interleaved_mask

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
    with pytest.raises(ValueError, match=r"sparse.*flex"):
        network(attention="sparse")


def test_a_wrapper_of_the_network_can_call_it_chunk_by_chunk(batch):
    x, t, cond, history = batch
    net = network()
    cache = net(history[:, :2], t[:, 0], cond, one="extend")
    expected = net.extend(None, history[:, :2], cond)
    assert all(map(torch.equal, cache.keys + cache.values, expected.keys + expected.values)) and cache.chunks == 1
    args = (x[:, 2:4], t[:, 1], cond)
    assert torch.equal(net(*args, one="chunk", cache=cache), net.chunk(*args, cache))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same(batch):
    pytest.importorskip("torch.nn.attention.flex_attention")
    x, t, cond, history = batch
    with torch.no_grad():  # flex attention has no gradient on a CPU
        dense = network(attention="dense")(x, t, cond, history=history)
        flex = network(attention="flex")(x, t, cond, history=history)
        assert torch.equal(network()(x, t, cond, history=history), dense)
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


def test_a_chunk_and_its_finished_form_are_at_the_same_place(batch):
    x, _, cond, _ = batch
    net = network()
    seen = []
    net.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        net(x, torch.zeros(2), cond, history=x)
    (tokens,) = seen  # before the first block, where a token is its pixels and its position
    assert tokens.shape == (2, 2 * 3 - 1, 4, 16)
    assert torch.equal(tokens[:, [0, 2]], tokens[:, [1, 3]])
    assert len({row.numpy().tobytes() for row in net.positions.flatten(0, 1)}) == 3 * 4


def test_gradient_through_the_history_is_that_of_a_cache_built_with_gradient(batch):
    x, t, cond, history = batch
    net = network()
    names = [name for name, _ in net.named_parameters() if "qkv" in name]
    weights = [net.get_parameter(name) for name in names]

    def last_chunk(detach):
        """The loss of the last chunk, by the sequential form."""
        cache = None
        for j in range(2):
            cache = net.extend(cache, history[:, 2 * j : 2 * j + 2], cond)
        if detach:
            cache = ChunkCache(*(tuple(part.detach() for part in parts) for parts in (cache.keys, cache.values)), 2)
        return net.chunk(x[:, 4:], t[:, 2], cond, cache).square().sum()

    through = {}
    for detach in (False, True):
        loss = net(x, t, cond, history=history, detach_history=detach)[:, 4:].square().sum()
        through[detach] = torch.autograd.grad(loss, weights)
        for found, expected in zip(through[detach], torch.autograd.grad(last_chunk(detach), weights), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    for with_history, without in zip(through[False], through[True], strict=True):
        part = (with_history - without)[16:]  # of keys and values: what comes through the history
        assert part.norm() > 0.01 * with_history[16:].norm()
