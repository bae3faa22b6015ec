"""What a pipeline's own code costs around its denoiser: `velocity` against calling the denoiser by hand.

    python benchmarks/probe_overhead.py [family ...] [--repeats 40]

For every family the denoiser's arguments of one velocity are recorded; then both are timed in turn in one process, on
tiny twins, where everything but the denoiser weighs most. Memory is what autograd keeps for one backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from genrl import tiny
from genrl.generators import DiffusersGenerator
from genrl.tiny.families import REGISTRY


def timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - began)


def kept(function: Callable[[], Any]) -> int:
    """Bytes that autograd keeps, each storage once."""
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function()
    del result
    return sum(storages.values())


def measure(family: str, repeats: int) -> dict[str, float]:
    generator = DiffusersGenerator(
        str(tiny.saved_pipeline(family)), {"rank": 2, "alpha": 2}, call=tiny.call_arguments(family)
    )
    generator.prepare("cpu", progress=False)
    metadata = None
    if REGISTRY[family].takes_image:
        from PIL import Image

        metadata = [{"image": Image.new("RGB", (64, 64), "red")}] * 2
    cond = generator.encode(["a red cat", "a red dog"], metadata)
    x = generator.initial_latents(cond, torch.Generator().manual_seed(0))
    t = torch.full((2,), float(generator.schedule(4).t[1]))
    t.host = float(t[0])  # type: ignore[attr-defined]  # as the sampler does
    calls: list[tuple[Any, Any, Any]] = []
    hooks = [
        part.register_forward_pre_hook(lambda m, args, kwargs: calls.append((m, args, kwargs)), with_kwargs=True)
        for part in generator.module.children()
    ]
    with torch.no_grad():
        generator.velocity(x, t, cond)
    for hook in hooks:
        hook.remove()

    def velocity() -> Any:
        return generator.velocity(x, t, cond)

    def by_hand() -> Any:
        return [nn.Module.__call__(module, *args, **kwargs) for module, args, kwargs in calls]

    with torch.no_grad():
        for _ in range(3):
            velocity(), by_hand()
        pairs = [(timed(velocity), timed(by_hand)) for _ in range(repeats)]
    ours, bare = zip(*pairs, strict=True)
    return {
        "calls": len(calls),
        "min": min(bare),
        "median": statistics.median(bare),
        "more_min": min(ours) - min(bare),
        "more_median": statistics.median(a - b for a, b in pairs),
        "kept": kept(by_hand) / 2**20,
        "more_kept": (kept(velocity) - kept(by_hand)) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| family | calls | denoiser ms, min / median | more ms, min / median | kept MiB | more MiB |")
    print("|---|---|---|---|---|---|")
    for family in options.families or tiny.FAMILIES:
        row = measure(family, options.repeats)
        print(
            f"| {family} | {row['calls']} | {row['min']:.2f} / {row['median']:.2f} | {row['more_min']:.2f} / "
            f"{row['more_median']:.2f} | {row['kept']:.2f} | {row['more_kept']:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
