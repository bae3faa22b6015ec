"""Settings that trade memory for time change no number, and a dry run foretells what they cost."""

import itertools

import pytest
import torch
import toy
from torch import nn
from toy_blocks import BlockGenerator

from genrl.algorithms import ForwardProcess, PolicyGradient
from genrl.training.generator_facts import memory_by_part
from genrl.training.memory import backward_peak
from genrl.training.off_load import SMALLEST, moved, saved_on_cpu


def trained(folder, algorithm, **settings):
    loop = toy.make_loop(folder, algorithm, trainer={"iterations": 2, **settings})
    loop.run()
    return toy.weights(loop), [row["loss/total"] for row in toy.rows(folder, "train")]


def test_roll_out_batch_micro_batch_and_step_batch_are_separate_and_give_equal_losses(tmp_path):
    found = {}
    for rollout, micro, steps in itertools.product((None, 3), (None, 3), (1, 2)):
        algorithm = PolicyGradient(steps=4, kl_weight=0.1, micro_batch=micro, steps_per_forward=steps)
        found[rollout, micro, steps] = trained(tmp_path / f"{rollout}{micro}{steps}", algorithm, rollout_batch=rollout)
    weights, losses = found[None, None, 1]
    for other_weights, other_losses in found.values():
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-6)
        assert other_losses == pytest.approx(losses, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("make", [lambda: PolicyGradient(steps=4, kl_weight=0.1), lambda: ForwardProcess(steps=3)])
def test_waiting_in_cpu_memory_changes_no_bit(tmp_path, make):
    plain = trained(tmp_path / "plain", make(), rollout_batch=5)
    cpu = trained(tmp_path / "cpu", make(), rollout_batch=5, latents_on_cpu=True, activation_offload=True)
    assert torch.equal(plain[0], cpu[0]) and plain[1] == cpu[1]


def test_a_moved_roll_out_has_everything_on_the_other_device():
    algorithm = PolicyGradient(steps=3)
    generator = toy.ToyGenerator()
    loop = toy.make_loop("unused", algorithm, generator=generator)
    loop.setup()
    algorithm.configure(generator)
    batch, _ = loop.collector.batch(loop.layout.local(), [0, 1, 2, 3], 0)
    there = moved(algorithm.rollout(generator.velocity, generator, batch), "meta")
    tensors = [there.x0, there.cond["words"], *there.trajectory.states.values(), *there.trajectory.means.values()]
    assert all(tensor.is_meta for tensor in tensors)
    assert not there.rows.is_meta and not there.trajectory.t.is_meta  # read on the host


def test_activations_are_copied_and_weights_are_not():
    layer = nn.Linear(64, 64)
    x = torch.randn(100, 64, requires_grad=True)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x.tanh()).square().sum()
    with saved_on_cpu():
        loss = layer(x.tanh()).square().sum()
    own = {layer.weight.untyped_storage().data_ptr()}
    large = [t for t in kept if t.nbytes >= SMALLEST and t.untyped_storage().data_ptr() not in own]
    assert len(large) == 3 and any(t.untyped_storage().data_ptr() in own for t in kept)
    (gradient,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(layer(x.tanh()).square().sum(), x)
    assert torch.equal(gradient, expected)


class Stack(nn.Module):
    """8 blocks of known size; with `again`, their activations are computed again in the backward."""

    def __init__(self, again: bool):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
        )
        self.again = again

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


class Stacked:
    def __init__(self, again):
        self.module = Stack(again)

    def velocity(self, x, t, cond):
        return self.module(x)


@pytest.mark.parametrize("again", [False, True])
def test_the_foretold_peak_is_that_of_a_known_network(again):
    generator, rows = Stacked(again), 1000
    x = torch.randn(rows, 64)
    small, large = rows * 64 * 4, rows * 256 * 4
    one = small + 2 * large  # a block keeps its input, and two hidden layers
    expected = 8 * small + one if again else 8 * one
    found = backward_peak(generator, x, torch.zeros(rows), None)
    assert expected - small <= found <= expected + large + 3 * small  # and the gradients of one layer
    assert type(generator.module) is Stack and all(p.grad is None for p in generator.module.parameters())
    half = backward_peak(generator, x, torch.zeros(rows), None, half=True)
    assert half < 0.75 * found


def test_memory_by_part_follows_from_sizes_and_settings():
    generator = BlockGenerator(experts=2)
    algorithm = PolicyGradient(steps=5, step_fraction=0.5, micro_batch=2)
    loop = toy.make_loop("unused", algorithm, generator=generator, trainer={"ema_decay": 0.9, "processes": 2})
    table = loop.dry_run()
    assert table["processes"] == 2 and table["sharing"] == "copies"
    total = 4 * sum(p.numel() for p in generator.module.parameters())
    copies = memory_by_part(loop, 2)
    assert copies["trained_weights"] == copies["gradients"] == copies["average"] == total
    assert copies["optimizer"] == copies["starting_copies"] == 2 * total and "gathered_blocks" not in copies
    assert copies["rollout_latents"] == 4 * 16 * 8 * (2 * 4 * 0.5 + 2)  # bytes, elements, samples, states
    loop.trainer.sharding = "fsdp2"
    shards = memory_by_part(loop, 2)
    for part in ("trained_weights", "gradients", "optimizer", "average"):
        assert shards[part] == copies[part] / 2
    assert 0 < shards["gathered_blocks"] < total
    loop.trainer.sharding, loop.trainer.latents_on_cpu = "zero2", True
    zero = memory_by_part(loop, 2)
    assert zero["trained_weights"] == total and zero["gradients"] == total / 2 and zero["optimizer"] == 1.5 * total
    assert zero["rollout_latents_on_cpu"] == copies["rollout_latents"] and "rollout_latents" not in zero
    # A network beside the trained one, as a generator tells.
    generator.memory = lambda: {"vae": 1000}
    assert memory_by_part(loop, 1)["vae_weights"] == 1000


def test_a_network_whose_course_depends_on_values_is_measured_by_running_it():
    generator = toy.ToyGenerator()
    forward = generator.module.forward
    generator.module.forward = lambda x, t, words: forward(x, t, words) * (1 if float(x.sum()) > 0 else 2)
    loop = toy.make_loop("unused", PolicyGradient(steps=3), generator=generator)
    loop.dry_run()
    kept = memory_by_part(loop, 1)["activations_of_one_backward"]
    assert kept == 8 * (28 + 16) * 4  # inputs and hidden layer of 8 samples
