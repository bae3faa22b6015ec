"""Evaluation on held-out prompts under fixed noise, of a live model or of a finished run."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genrl.algorithms.base import chunked
from genrl.diffusion import Euler, RowNoise, Sampler
from genrl.generators.base import Generator, encode_prompts, schedule_for
from genrl.prompts import Prompt
from genrl.rewards import PairwiseDiversity, as_compose, image_statistics, score
from genrl.statistics import interval

ROWS_PER_PROMPT = 4096  # noise rows kept for a prompt: a sample's noise does not depend on how many are drawn


@dataclass(frozen=True)
class SampleSet:
    """Evaluation samples, all of a prompt one after another.

    Args:
        media: [N, C, H, W] in [0, 1] on the CPU.
        prompts: N prompts.
    """

    media: Tensor
    prompts: list[Prompt]
    per_prompt: int

    @property
    def texts(self) -> list[str]:
        return [p.text for p in self.prompts]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        return [p.metadata for p in self.prompts]

    def grid(self, columns: int = 8, rows: int = 10) -> Tensor:
        """One picture [C, H, W]: a row for each of the first prompts."""
        shown = self.media.reshape(-1, self.per_prompt, *self.media.shape[1:])[:rows, :columns]
        return image_grid(shown)


def deterministic_sampler(generator: Generator, steps: int, shift: float | None = None) -> Sampler:
    """The Euler sampler that evaluation and export use; ``shift`` is that of the grid that was trained on."""
    return Sampler(Euler(), schedule_for(generator, steps, shift), path=generator.path)


@torch.no_grad()
def sample_set(
    generator: Generator,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    per_prompt: int,
    *,
    seed: int,
    batch: int,
    device: torch.device | str,
    accelerator: Any = None,
) -> SampleSet:
    """Draw ``per_prompt`` samples of each prompt; processes share the work and all get the result.

    The noise of a sample depends on the seed, its prompt's place and its number alone: the same before and after
    training, for any batch size and any number of processes.
    """
    if per_prompt > ROWS_PER_PROMPT:
        raise ValueError(f"samples_per_prompt = {per_prompt} is more than the {ROWS_PER_PROMPT} that noise is kept for")
    rows = [p * ROWS_PER_PROMPT + j for p in range(len(prompts)) for j in range(per_prompt)]
    owners = [p for p in range(len(prompts)) for _ in range(per_prompt)]
    world, rank = (1, 0) if accelerator is None else (accelerator.num_processes, accelerator.process_index)
    share = math.ceil(len(rows) / world)
    mine = [min(i, len(rows) - 1) for i in range(rank * share, (rank + 1) * share)]  # the last share is padded
    parts = []
    steps = sampler.steps(0, seed)
    for part in chunked(len(mine), batch):
        chosen = mine[part]
        cond = encode_prompts(generator, [prompts[owners[i]] for i in chosen])
        noise = RowNoise.of((seed, "evaluation"), [rows[i] for i in chosen], device)
        x1 = generator.initial_latents(cond, noise.initial)
        x0 = sampler.rollout(generator.velocity, x1, cond, noise, steps).x0
        parts.append(generator.decode(x0).float().cpu())
    media = torch.cat(parts)
    if accelerator is not None and world > 1:
        media = accelerator.gather(media.to(device))[: len(rows)].cpu()
    return SampleSet(media, [prompts[i] for i in owners], per_prompt)


def measure(
    samples: SampleSet,
    reward: Any,
    gauges: dict[str, Any],
    batch: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Rewards, gauges and image statistics of a sample set, with 95 % intervals where a value exists per sample.

    Args:
        samples: what is measured.
        reward: the trained reward. gauges: named rewards and set metrics.
        batch: samples that a reward is given at once; None gives all. Set metrics always get all, on the CPU.
        device: where rewards get their media.

    Returns:
        ``reward`` (weighted sum of the rewards, gated and uncapped), ``<reward name>``, ``<gauge>``, ``stats/<name>``.
    """
    compose = as_compose(reward)
    raw = _score_in_batches(compose, samples, batch, device)
    result: dict[str, float] = {}
    counted = {name: value for name, value in compose.gated(raw).items() if compose.weight(name) != 0}
    total = sum(compose.weight(name) * value.double() for name, value in counted.items())
    if isinstance(total, Tensor):
        only = next(iter(counted))
        plain = len(counted) == 1 and compose.weight(only) == 1
        result |= interval("reward", total, compose.range_of(only) if plain else None)
    for name, value in raw.items():
        result |= interval(name, value, compose.range_of(name))
    if not any(hasattr(gauge, "measure") for gauge in gauges.values()):  # diversity is always watched
        gauges = {**gauges, "diversity": PairwiseDiversity()}
    for name, gauge in gauges.items():
        if hasattr(gauge, "measure"):
            found = gauge.measure(samples.media, samples.texts, samples.metadata)
            result |= {_key(name, inner): value for inner, value in found.items()}
        else:
            for inner, value in _score_in_batches(gauge, samples, batch, device).items():
                label = name if inner.startswith(name) or "/" not in inner else f"{name}/{inner}"
                result |= interval(label, value, getattr(gauge, "range", None))
    return result | {f"stats/{name}": value for name, value in image_statistics(samples.media).items()}


def _score_in_batches(
    reward: Any, samples: SampleSet, batch: int | None, device: torch.device | str
) -> dict[str, Tensor]:
    texts, metadata = samples.texts, samples.metadata
    parts = [
        score(reward, samples.media[part].to(device), texts[part], metadata[part])
        for part in chunked(len(texts), batch)
    ]
    return {name: torch.cat([p[name] for p in parts]) for name in parts[0]}


def _key(gauge: str, name: str) -> str:
    """A gauge named ``spread`` that returns ``spread_std`` stays ``spread_std``."""
    return name if name.startswith(gauge) else f"{gauge}_{name}"


def image_grid(images: Tensor, gap: int = 1, least: int = 32) -> Tensor:
    """Tile media [R, K, C, H, W] into one picture [C, H', W'], enlarged until tiles have ``least`` pixels or more."""
    images = images.clamp(0, 1)
    factor = max(1, -(-least // min(images.shape[-2:])))
    images = images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    rows, columns, channels, height, width = images.shape
    pad = gap * max(1, factor // 2)
    canvas = torch.full((channels, rows * (height + pad) + pad, columns * (width + pad) + pad), 0.5)
    for r in range(rows):
        for c in range(columns):
            top, left = pad + r * (height + pad), pad + c * (width + pad)
            canvas[:, top : top + height, left : left + width] = images[r, c]
    return canvas


def save_image(picture: Tensor, path: Path) -> None:
    """Write a picture [C, H, W] in [0, 1] as PNG, atomically."""
    from PIL import Image

    pixels = (picture * 255).round().byte()
    image = Image.fromarray(pixels[0].numpy()) if len(pixels) == 1 else Image.fromarray(pixels.permute(1, 2, 0).numpy())
    buffer = io.BytesIO()  # Pillow hides the reason when it cannot write to a file itself
    image.save(buffer, format="PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("." + path.name)
    temporary.write_bytes(buffer.getvalue())
    temporary.replace(path)


# ------------------------------------------------------------------------------------------- finished runs


def load_run(run_dir: str | Path, checkpoint: str = "last", weights: str = "auto") -> dict[str, Any]:
    """Rebuild the parts of a run and load a checkpoint's weights into its generator.

    Args:
        run_dir: a run directory.
        checkpoint: ``"last"``, ``"best"`` or ``"step-000010"``.
        weights: ``"ema"``, ``"raw"`` or ``"auto"``, which is the average when the run kept one.

    Returns:
        The parts of ``genrl.config.build`` with ``device``, ``checkpoint`` (its folder) and ``weights`` (which were
        loaded).
    """
    from genrl.config import build, load_config
    from genrl.report.data import check_run_dir
    from genrl.training.checkpoint import find_checkpoint, load_state

    folder = check_run_dir(run_dir)
    path = find_checkpoint(folder, checkpoint)
    parts = build(load_config(folder / "config.yaml"))
    device = torch.device("cuda" if torch.cuda.is_available() and parts["trainer"].device != "cpu" else "cpu")
    if parts["trainer"].cpu_threads is not None:  # the same sums as in training, to the last bit
        torch.set_num_threads(parts["trainer"].cpu_threads)
    generator: Generator = parts["generator"]
    generator.prepare(device)
    state = load_state(path)
    if weights == "ema" and state["ema"] is None:
        raise ValueError(f"{path} has no moving average; set trainer.ema_decay in training, or ask for raw weights")
    generator.load_state_dict(state["weights"])
    used = "raw"
    if state["ema"] is not None and weights != "raw":
        used = "ema"
        for parameter, value in zip(generator.trainable(), state["ema"]["values"], strict=True):
            parameter.data.copy_(value)
    parts["algorithm"].configure(generator)
    precision = parts["trainer"].mixed_precision
    if precision != "no":  # the arithmetic that the run was evaluated with
        from accelerate import Accelerator

        generator.module = Accelerator(mixed_precision=precision, cpu=device.type == "cpu").prepare(generator.module)
    return {**parts, "device": device, "checkpoint": path, "weights": used, "iteration": int(state["iteration"])}


def evaluate_run(
    run_dir: str | Path,
    checkpoint: str = "last",
    samples_per_prompt: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    sampler: str = "ode",
    weights: str = "auto",
) -> dict[str, Any]:
    """Evaluate a checkpoint on the held-out prompts.

    Args:
        run_dir, checkpoint, weights: see :func:`load_run`.
        samples_per_prompt, steps, seed: instead of the run's own evaluation settings.
        sampler: ``"ode"`` (deterministic, what is meant for use) or ``"train"`` (the sampler of training).

    Returns:
        The measured values and what they were measured with.
    """
    run = load_run(run_dir, checkpoint, weights)
    settings = run["evaluation"]
    steps, seed = steps or settings.steps, settings.seed if seed is None else seed
    if sampler not in ("ode", "train"):
        raise ValueError(f"sampler {sampler!r} is unknown; allowed are 'ode' (deterministic) and 'train'")
    ode = deterministic_sampler(run["generator"], steps, run["algorithm"].shift)
    chosen = ode if sampler == "ode" else run["algorithm"].train_sampler()
    compose = as_compose(run["reward"])
    for part in [compose, *settings.gauges.values()]:
        if hasattr(part, "prepare"):
            part.prepare(run["device"])
    samples = sample_set(
        run["generator"],
        chosen,
        run["prompts"].held_out,
        samples_per_prompt or settings.samples_per_prompt,
        seed=seed,
        batch=settings.batch,
        device=run["device"],
    )
    return {
        "checkpoint": str(run["checkpoint"]),
        "iteration": run["iteration"],
        "weights": run["weights"],
        "sampler": f"{chosen.kernel} with {chosen.n_steps} steps",
        "seed": seed,
        "samples": len(samples.media),
        "precision": run["trainer"].mixed_precision,
        **measure(samples, compose, settings.gauges, settings.batch, run["device"]),
    }


def sample_run(
    run_dir: str | Path,
    prompts: Sequence[str] | None = None,
    n: int = 8,
    out: str | Path | None = None,
    checkpoint: str = "last",
    steps: int | None = None,
    seed: int = 0,
    weights: str = "auto",
) -> Path:
    """Draw samples of a checkpoint with the deterministic sampler and write them as one picture and single files.

    Args:
        run_dir, checkpoint, weights: see :func:`load_run`.
        prompts: texts; by default the run's held-out prompts.
        n: samples per prompt.
        out: folder for the pictures, by default ``RUN/generated``.
        steps, seed: of the sampler and its noise.

    Returns:
        The path of the grid picture.
    """
    if n < 1:
        raise ValueError(f"the number of samples must be at least 1, got {n}")
    run = load_run(run_dir, checkpoint, weights)
    chosen = [Prompt(text, {}) for text in prompts] if prompts else list(run["prompts"].held_out)
    sampler = deterministic_sampler(
        run["generator"], steps or run["evaluation"].steps, run["algorithm"].shift
    )
    samples = sample_set(
        run["generator"], sampler, chosen, n, seed=seed, batch=run["evaluation"].batch, device=run["device"]
    )
    folder = Path(out) if out is not None else Path(run_dir) / "generated"
    for i, media in enumerate(samples.media):
        save_image(image_grid(media[None, None], gap=0), folder / f"prompt{i // n:03d}-{i % n:03d}.png")
    grid = folder / "grid.png"
    save_image(image_grid(samples.media.reshape(len(chosen), n, *samples.media.shape[1:])), grid)
    return grid

