"""Load a trained LoRA into the plain diffusers pipeline and show that the gain is there as well.

    python examples/sd3_digits/compare.py runs/sd3_digits/guard

`StableDiffusion3Pipeline` samples the held-out prompts by itself, before and after `load_lora_weights`, from the noise
that genrl evaluates with. Both sets are scored with the run's reward and judge, beside what genrl's own sampler gives.
Beyond that noise, nothing of genrl takes part in the pipeline's pictures.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genrl.diffusion import RowNoise
from genrl.prompts import Prompt
from genrl.statistics import paired_means
from genrl.training.evaluation import (
    ROWS_PER_PROMPT,
    SampleSet,
    deterministic_sampler,
    load_run,
    sample_set,
    score_samples,
)


def start_noise(prompts: int, per_prompt: int, seed: int, shape: tuple[int, ...]) -> Tensor:
    """The latents that genrl's evaluation starts from, [prompts * per_prompt, *shape]."""
    rows = [p * ROWS_PER_PROMPT + j for p in range(prompts) for j in range(per_prompt)]
    return RowNoise.of((seed, "evaluation"), rows).initial((len(rows), *shape))


@torch.no_grad()
def draw(
    pipe: Any, prompts: Sequence[Prompt], per_prompt: int, noise: Tensor, batch: int = 250, **call: Any
) -> SampleSet:
    """What the pipeline itself makes of the prompts and the noise; `call` are arguments of its call."""
    owners = [p for p in prompts for _ in range(per_prompt)]
    media = []
    for i in range(0, len(owners), batch):
        texts = [p.text for p in owners[i : i + batch]]
        media.append(pipe(texts, latents=noise[i : i + batch].clone(), output_type="pt", **call).images.float())
    return SampleSet(torch.cat(media), owners, per_prompt)


@torch.no_grad()
def compare(run_dir: Path, checkpoint: str = "last", per_prompt: int | None = None) -> dict[str, Any]:
    """Sample base and adapter with plain diffusers and with genrl, from the same noise.

    Returns:
        `scores[sampler][model][name]` with a value [N] a sample, for the samplers "diffusers" and "genrl", the models
        "base" and "LoRA" and the names "reward" and "judge"; `apart[model]`, the largest difference of a pixel in
        [0, 1] between the two samplers.
    """
    from diffusers import DiffusionPipeline

    run = load_run(run_dir, checkpoint)
    generator, settings, prompts = run["generator"], run["evaluation"], run["prompts"].held_out
    count = per_prompt or settings.samples_per_prompt
    sampler = deterministic_sampler(generator, settings.steps, run["algorithm"].shift)
    pipe = DiffusionPipeline.from_pretrained(generator.model)
    pipe.set_progress_bar_config(disable=True)
    noise = start_noise(len(prompts), count, settings.seed, generator.latent_shape)
    call = {**generator.call, "num_inference_steps": settings.steps}
    measured = {"reward": run["reward"], "judge": settings.gauges["judge"]}
    scores: dict[str, Any] = {"diffusers": {}, "genrl": {}}
    apart = {}
    for model in ("base", "LoRA"):
        if model == "LoRA":
            pipe.load_lora_weights(str(run["checkpoint"] / "model"))
        sets = {"diffusers": draw(pipe, prompts, count, noise, **call)}
        with generator.reference() if model == "base" else contextlib.nullcontext():
            options = {"seed": settings.seed, "batch": settings.batch, "device": run["device"]}
            sets["genrl"] = sample_set(generator, sampler, prompts, count, **options)
        apart[model] = (sets["diffusers"].media - sets["genrl"].media).abs().max().item()
        for where, samples in sets.items():
            found = {name: score_samples(part, samples) for name, part in measured.items()}
            scores[where][model] = {name: next(iter(values.values())) for name, values in found.items()}
    return {"scores": scores, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", default="last", help="last, best or step-000010")
    parser.add_argument("--samples-per-prompt", type=int)
    options = parser.parse_args()
    found = compare(options.run, options.checkpoint, options.samples_per_prompt)
    print(f"{'':<8}{'sampled by':<13}{'base':<8}{'LoRA':<8}gain with its 95 % interval")
    for name in ("reward", "judge"):
        for where, models in found["scores"].items():
            base, lora = models["base"][name], models["LoRA"][name]
            gain = paired_means(base.tolist(), lora.tolist())
            means = f"{base.mean():<8.3f}{lora.mean():<8.3f}"
            print(f"{name:<8}{where:<13}{means}{gain.difference:.3f} ({gain.low:.3f} to {gain.high:.3f})")
    apart = ", ".join(f"{model} {value:.1e}" for model, value in found["apart"].items())
    print(f"largest difference of a pixel between the two: {apart}")


if __name__ == "__main__":
    main()
