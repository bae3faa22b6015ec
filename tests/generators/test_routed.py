"""The networks of a pipeline inside the wrappers of training."""

import pytest
import torch
from pipelines import PROMPTS, change, encode, make

from genrl.algorithms import PolicyGradient
from genrl.training import TrainerSettings
from genrl.training.errors import TrainingError


@pytest.mark.parametrize("wrapped", ["checkpointing", "autocast", "ddp", "fsdp2"])
@pytest.mark.parametrize("family", ["sd3", "wan22"])
def test_wrapped_networks_give_the_same_and_pass_the_same_gradients(family, wrapped, tmp_path):
    plain, generator = make(family), make(family, gradient_checkpointing=wrapped == "checkpointing")
    if wrapped in ("ddp", "fsdp2"):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        results = []
        for made in (plain, generator):
            change(made)
            if made is generator and wrapped == "autocast":
                from accelerate import Accelerator, state

                state.AcceleratorState._reset_state(reset_partial_state=True)
                made.module = Accelerator(mixed_precision="bf16", cpu=True).prepare(made.module)
            elif made is generator and wrapped == "ddp":
                made.module = torch.nn.parallel.DistributedDataParallel(made.module)
            elif made is generator and wrapped == "fsdp2":
                from torch.distributed.fsdp import fully_shard

                for block in [m for m in made.module.modules() if type(m).__name__.endswith("TransformerBlock")]:
                    fully_shard(block)
                fully_shard(made.module)
            cond = encode(made, family)
            x = made.initial_latents(cond, torch.Generator().manual_seed(0))
            v = made.velocity(x, torch.tensor([0.9, 0.9]), cond)
            v.square().sum().backward()
            named = {n: p for n, p in made.module.named_parameters() if p.requires_grad}
            grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in named.values() if p.grad is not None]
            results.append((v.detach(), torch.cat([g.flatten() for g in grads if g.any()])))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    tolerance = 0.1 if wrapped == "autocast" else 1e-5
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= tolerance * a.norm() and (wrapped != "autocast" or not torch.equal(a, b))


def test_weights_of_a_network_that_is_called_have_a_gradient_between_processes_and_others_none(tmp_path):
    from torch.nn.parallel import DistributedDataParallel

    from genrl.networks.routed import Routed

    parts = {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2), "frozen": torch.nn.Linear(2, 2)}
    parts["a"].idle = torch.nn.Parameter(torch.ones(3))  # no call uses it
    parts["frozen"].requires_grad_(False)
    routed = Routed(parts, lambda: routed)
    parts["a"](torch.ones(1, 2)).sum().backward()
    assert parts["a"].weight.grad.any() and parts["b"].weight.grad is None
    parts["frozen"](torch.ones(1, 2)).sum().backward()  # a loss that no trained weight has a part in is no error
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        routed.zero_grad()
        wrapped = DistributedDataParallel(routed, find_unused_parameters=True)
        for _ in range(2):  # data parallelism complains in the second forward
            wrapped("a", torch.ones(1, 2)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(parts["a"].idle.grad, torch.zeros(3)) and parts["a"].weight.grad.any()
    assert parts["b"].weight.grad is None  # an optimizer leaves it alone, weight decay included
    half = torch.ones(1, 2, dtype=torch.bfloat16)
    assert parts["a"](half).dtype == torch.float32 and type(parts["a"]).__name__ == "Linear"


def test_active_dropout_is_refused():
    from accelerate import Accelerator

    from genrl.training.updater import Updater

    generator = make("sd3")
    next(m for m in generator.module.modules() if isinstance(m, torch.nn.Dropout)).p = 0.1
    generator.module.train()
    with pytest.raises(TrainingError, match="dropout"):
        Updater(generator, PolicyGradient(), TrainerSettings()).prepare(Accelerator(cpu=True), None)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_half_precision_keeps_trained_weights_and_results_in_float32(lora):
    generator = make("sd3", dtype="bfloat16", lora=lora)
    assert {p.dtype for p in generator.trainable()} == {torch.float32} and generator.pipe.vae.dtype == torch.bfloat16
    cond = generator.encode(PROMPTS)
    x = generator.initial_latents(cond, torch.Generator().manual_seed(0))
    v = generator.velocity(x, torch.tensor([0.5, 0.5]), cond)
    v.sum().backward()
    full = make("sd3", lora=lora)
    exact = full.velocity(x, torch.tensor([0.5, 0.5]), full.encode(PROMPTS))
    assert x.dtype == v.dtype == generator.decode(x).dtype == torch.float32
    assert 0 < (v - exact).norm() < 0.05 * exact.norm()
