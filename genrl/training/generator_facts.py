"""What a generator's run consists of, and what it would need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from genrl.diffusion import RowNoise
from genrl.generators.base import encode_prompts

if TYPE_CHECKING:
    from genrl.training.loop import Loop


def describe(loop: Loop) -> dict[str, Any]:
    """The part of ``run.json`` that is about the generator and the algorithm."""
    sampler = loop.algorithm.train_sampler()
    return {
        "kind": "generator",
        "method": _method(loop),
        "times": sampler.schedule.t.tolist(),
        "trained_steps": list(sampler.steps(0, loop.seed)),
        "sizes": sizes(loop),
        "preview_prompts": [p.text for p in loop.prompts.held_out[:10]],
    }


def gauge_references(gauges: dict[str, Any]) -> dict[str, float]:
    """What real data reads on the gauges that know it."""
    found: dict[str, float] = {}
    for name, gauge in gauges.items():
        if hasattr(gauge, "reference"):
            value = gauge.reference()
            found |= value if isinstance(value, dict) else {name: float(value)}
    return found


def _method(loop: Loop) -> str:
    algorithm = loop.algorithm
    surrogate, kernel = getattr(algorithm, "surrogate", None), algorithm.train_sampler().kernel
    parts = [type(algorithm).__name__, type(kernel).__name__, type(surrogate).__name__ if surrogate is not None else ""]
    return " / ".join(p for p in parts if p)


def sizes(loop: Loop) -> dict[str, float]:
    """Sizes and costs that follow from the settings."""
    forwards = loop.algorithm.forwards_per_sample(loop.layout.group_size)
    samples = loop.layout.total
    trainable = sum(p.numel() for p in loop.updater.parameters)
    return {
        "parameters": sum(p.numel() for p in loop.generator.module.parameters()),
        "trainable_parameters": trainable,
        "samples_per_iteration": samples,
        "updates_per_iteration": loop.algorithm.minibatches * loop.algorithm.inner_epochs,
        "forwards_per_iteration": samples * (forwards["sample"] + forwards["no_grad"]),
        "forward_backwards_per_iteration": samples * forwards["train"],
    }


def dry_run_table(loop: Loop) -> dict[str, Any]:
    """Everything a run would need: parts, sizes, network evaluations, memory by part."""
    # An untrained network of the right shape is enough to measure.
    getattr(loop.generator, "build", loop.generator.prepare)(loop.device)
    loop.algorithm.configure(loop.generator)
    loop.updater.parameters = loop.generator.trainable()
    sampler = loop.algorithm.train_sampler()
    local = len(loop.layout.local())
    micro = loop.algorithm.micro_batch or loop.layout.local_minibatch
    group = getattr(loop.algorithm, "steps_per_forward", 1)
    trainable = sum(p.numel() * p.element_size() for p in loop.updater.parameters)
    steps = sampler.steps(0, loop.seed)
    latent = 4 * math.prod(loop.generator.latent_shape)
    mib = 1 / 2**20
    memory = {
        "weights_MiB": sum(p.numel() * p.element_size() for p in loop.generator.module.parameters()) * mib,
        "gradients_and_optimizer_MiB": 3 * trainable * mib,
        "average_MiB": trainable * mib * (loop.trainer.ema_decay is not None),
        "starting_copies_MiB": 2 * trainable * mib,  # the reference, and what weight_change is measured from
        "rollout_latents_MiB": latent * local * (2 * len(steps) + 2) * mib,
        "activations_of_one_backward_MiB": saved_for_backward(loop, micro * group) * mib,
    }
    return {
        "name": loop.name,
        "run_dir": str(loop.run_dir),
        "method": _method(loop),
        "device": str(loop.device),
        "processes": loop.accelerator.num_processes,
        "sampling_steps": sampler.n_steps,
        "trained_steps": str(list(steps)) if steps else "none (no density needed)",
        **sizes(loop),
        "memory": {k: round(v, 2) for k, v in memory.items()},
        "memory_total_MiB": round(sum(memory.values()), 2),
    }


def saved_for_backward(loop: Loop, samples: int) -> int:
    """Bytes that autograd keeps between one forward of ``samples`` samples and its backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    prompts = [loop.prompts.train[i % len(loop.prompts.train)] for i in range(samples)]
    cond = encode_prompts(loop.generator, prompts)
    x = loop.generator.initial_latents(cond, RowNoise.of(("dry run",), range(samples), loop.device).initial)
    own = {p.untyped_storage().data_ptr() for p in loop.generator.module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loop.generator.velocity(x, torch.full((samples,), 0.5, device=x.device), cond)
    return sum(size for pointer, size in kept.items() if pointer not in own)
