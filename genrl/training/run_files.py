"""The files of a run directory beside metrics and checkpoints, and what a person sees at the end."""

from __future__ import annotations

import importlib.metadata
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from genrl.diffusion import RowNoise
from genrl.report.data import METRICS, read_metrics
from genrl.training.checkpoint import list_checkpoints
from genrl.training.logging import write_json

if TYPE_CHECKING:
    from genrl.training.loop import Loop

PACKAGES = ("genrl", "torch", "torchvision", "numpy", "accelerate", "diffusers", "peft", "scikit-learn")


@dataclass
class Summary:
    """The result of a run.

    Args:
        status: ``finished``, ``interrupted``, ``collapsed`` or ``failed``.
        iteration: completed iterations.
        before, after: first and last evaluation, {metric: value}; after is empty when there was only one.
        resumes_from: iteration of the last complete checkpoint.
        wall_seconds: of this process start, set-up included.
        weight_change: L2 norm of the change of the trained weights.
    """

    name: str
    status: str
    iteration: int
    iterations: int
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0
    weight_change: float = 0.0
    forward_equivalents: float = 0.0
    best_iteration: int = 0
    resumes_from: int = 0
    reference: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @staticmethod
    def of(loop: Loop, status: str, seconds: float) -> Summary:
        from genrl.training.ema import change_norm

        rows = read_metrics(loop.run_dir) if (loop.run_dir / METRICS).is_file() else []
        evaluations = [row for row in rows if row["kind"] == "eval"]
        error = sys.exc_info()[1]
        return Summary(
            name=loop.name,
            status=status,
            iteration=loop.iteration,
            iterations=loop.trainer.iterations,
            before=evaluations[0] if evaluations else {},
            after=evaluations[-1] if len(evaluations) > 1 else {},
            wall_seconds=seconds,
            weight_change=change_norm(loop.updater.parameters, loop.updater.start),
            forward_equivalents=loop.cost,
            best_iteration=loop.monitor.best_iteration,
            resumes_from=max((i for i, _ in list_checkpoints(loop.run_dir)), default=0),
            reference=_reference(loop),
            error="" if error is None else f"{type(error).__name__}: {error}",
        )


def _reference(loop: Loop) -> dict[str, float]:
    """What real data reads on the gauges that know it."""
    found: dict[str, float] = {}
    for name, gauge in loop.evaluation.gauges.items():
        if hasattr(gauge, "reference"):
            value = gauge.reference()
            found |= value if isinstance(value, dict) else {name: float(value)}
    return found


def describe_run(loop: Loop) -> None:
    """Write ``run.json``: how the run was started and what it consists of."""
    sampler = loop.algorithm.train_sampler()
    write_json(
        loop.run_dir / "run.json",
        {
            "name": loop.name,
            "method": _method(loop),
            "command": " ".join(["genrl", *sys.argv[1:]]) if len(sys.argv) > 1 else "",
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "processes": loop.accelerator.num_processes,
            "device": str(loop.device),
            "versions": versions(),
            "times": sampler.schedule.t.tolist(),
            "trained_steps": list(sampler.steps(0, loop.seed)),
            "sizes": sizes(loop),
            "preview_prompts": [p.text for p in loop.prompts.held_out[:10]],
            "reference": _reference(loop),
        },
    )


def _method(loop: Loop) -> str:
    algorithm = loop.algorithm
    surrogate, kernel = getattr(algorithm, "surrogate", None), algorithm.train_sampler().kernel
    parts = [type(algorithm).__name__, type(kernel).__name__, type(surrogate).__name__ if surrogate is not None else ""]
    return " / ".join(p for p in parts if p)


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


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
    cond = loop.generator.encode([p.text for p in prompts])
    x = loop.generator.initial_latents(cond, RowNoise.of(("dry run",), range(samples), loop.device).initial)
    own = {p.untyped_storage().data_ptr() for p in loop.generator.module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loop.generator.velocity(x, torch.full((samples,), 0.5, device=x.device), cond)
    return sum(size for pointer, size in kept.items() if pointer not in own)


def write_summary(loop: Loop, summary: Summary) -> None:
    """``summary.json``, the report, and the table on the screen."""
    values = asdict(summary)
    write_json(loop.run_dir / "summary.json", {k: _plain(v) for k, v in values.items()})
    from genrl.report import write_report
    from genrl.training.progress import print_summary

    try:
        report: Path | None = write_report(loop.run_dir)
    except OSError as error:
        report = None
        print(f"the report could not be written: {error}")
    print_summary(loop, summary, report)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


