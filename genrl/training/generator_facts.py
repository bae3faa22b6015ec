"""What a generator's run consists of, and what it would need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from genrl.diffusion import RowNoise, Sampler
from genrl.generators.base import encode_prompts
from genrl.training.memory import backward_peak
from genrl.training.processes import plan
from genrl.training.sharding import repeated_blocks

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


def remaining_noise(sampler: Sampler, seed: int) -> list[str]:
    """A note on stochastic steps after which far more noise is left than the path has there.

    It then stays in the samples that are rewarded. Grids of pipelines end close to 0 before they end at 0.
    """
    steps = [sampler.step(k, True) for k in sampler.steps(0, seed)]
    there = [float(sampler.path.beta(torch.tensor(step.t_next, dtype=torch.float64))) for step in steps]
    worst = max(zip(steps, there, strict=True), key=lambda pair: pair[0].s / pair[1], default=None)
    if worst is None or worst[0].s <= 5 * worst[1]:
        return []
    step, least = worst
    return [
        f"step {step.index} adds noise of {step.s:.2g} and ends at t = {step.t_next:.2g}, where the path has "
        f"{least:.2g}: it stays in the samples of training; leave that step out, for example by a FixedWindow of size "
        f"{step.index}"
    ]


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


def dry_run_table(loop: Loop, processes: int | None = None) -> dict[str, Any]:
    """Everything a run would need: parts, sizes, network evaluations, memory by part.

    Args:
        loop: set up, on one process.
        processes: that the run will have; by default those that there are.
    """
    # An untrained network of the right shape is enough to measure.
    getattr(loop.generator, "build", loop.generator.prepare)(loop.device)
    loop.algorithm.configure(loop.generator)
    loop.updater.parameters = loop.generator.trainable()
    sampler = loop.algorithm.train_sampler()
    processes = processes or loop.accelerator.num_processes
    steps = sampler.steps(0, loop.seed)
    memory = {name: size / 2**20 for name, size in memory_by_part(loop, processes).items()}
    return {
        "name": loop.name,
        "run_dir": str(loop.run_dir),
        "method": _method(loop),
        "device": str(loop.device),
        "processes": processes,
        "sharing": plan(loop.trainer) if processes > 1 else "one process",
        "sampling_steps": sampler.n_steps,
        "trained_steps": str(list(steps)) if steps else "none (no density needed)",
        **sizes(loop),
        "memory": {f"{name}_MiB": round(size, 2) for name, size in memory.items()},
        "memory_total_MiB": round(sum(memory.values()), 2),
    }


def memory_by_part(loop: Loop, processes: int) -> dict[str, float]:
    """Bytes on each process, by what they are for. Rewards are not among them; their docs give their sizes."""
    generator, algorithm, trainer = loop.generator, loop.algorithm, loop.trainer
    sharing = plan(trainer) if processes > 1 else "copies"
    weights = processes if sharing == "fsdp2" else 1  # what each is divided by
    gradients = processes if sharing != "copies" else 1
    parameters = list(generator.module.parameters())
    trained = _bytes(p for p in parameters if p.requires_grad)
    blocks = [_bytes(block.parameters()) for block in repeated_blocks(generator.module)]
    local = loop.layout.total / processes
    micro = min(algorithm.micro_batch or math.inf, local / algorithm.minibatches)
    steps = len(algorithm.train_sampler().steps(0, loop.seed)) * getattr(algorithm, "step_fraction", 1.0)
    latent = 4 * math.prod(generator.latent_shape)
    backward = saved_for_backward(loop, max(1, int(micro)) * getattr(algorithm, "steps_per_forward", 1))
    memory: dict[str, float] = {
        "trained_weights": trained / weights,
        "frozen_weights": _bytes(p for p in parameters if not p.requires_grad) / weights,
        **{f"{name}_weights": size for name, size in _other_parts(generator).items()},
        "gradients": trained / gradients,
        "optimizer": 2 * trained / gradients + (trained / processes if sharing == "zero2" else 0),
        "average": trained / weights * (trainer.ema_decay is not None),
        "starting_copies": 2 * trained / weights,  # the reference, and on the CPU what weight_change is measured from
        "gathered_blocks": 2 * max(blocks, default=_bytes(parameters)) if weights > 1 else 0,  # one ahead
        "rollout_latents": latent * local * (2 * steps + 2),
        "activations_of_one_backward": backward,
    }
    on_cpu = {"rollout_latents": trainer.latents_on_cpu, "activations_of_one_backward": trainer.activation_offload}
    return {f"{name}_on_cpu" if on_cpu.get(name) else name: size for name, size in memory.items() if size}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _other_parts(generator: Any) -> dict[str, int]:
    """Bytes of a generator's networks beside the trained module, such as text encoders: what its `memory` says."""
    if hasattr(generator, "memory"):
        return dict(generator.memory())
    inside = {id(part) for part in generator.module.modules()}
    parts = getattr(getattr(generator, "pipe", None), "components", {})
    return {
        name: _bytes(part.parameters())
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module) and id(part) not in inside
    }


def saved_for_backward(loop: Loop, samples: int) -> int:
    """Bytes that one forward of ``samples`` samples and its backward need at most, beside weights and gradients.

    Found on tensors without memory where the network allows it; else a forward is run and what autograd keeps is added
    up, which takes as long as a forward does.
    """
    prompts = [loop.prompts.train[i % len(loop.prompts.train)] for i in range(samples)]
    cond = encode_prompts(loop.generator, prompts)
    x = loop.generator.initial_latents(cond, RowNoise.of(("dry run",), range(samples), loop.device).initial)
    t = torch.full((samples,), 0.5, device=x.device)
    try:
        return backward_peak(loop.generator, x, t, cond, loop.trainer.mixed_precision != "no")
    except Exception:  # networks fail in many ways on tensors without values
        return _kept_by_autograd(loop.generator, x, t, cond)


def _kept_by_autograd(generator: Any, x: torch.Tensor, t: torch.Tensor, cond: Any) -> int:
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in generator.module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        generator.velocity(x, t, cond)
    return sum(size for pointer, size in kept.items() if pointer not in own)
