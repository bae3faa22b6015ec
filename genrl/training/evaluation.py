"""Evaluation on held-out prompts under fixed noise, of a live model or of a finished run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genrl.algorithms.base import chunked
from genrl.diffusion import Euler, RowNoise, Sampler
from genrl.generators.base import Generator, encode_prompts, sampler_for, schedule_for
from genrl.prompts import Prompt
from genrl.rewards import Compose, PairwiseDiversity, as_compose, image_statistics, score
from genrl.rewards.base import joined
from genrl.statistics import interval
from genrl.training.pictures import heat, image_grid, moving_grid, picture_counts, save_animation, save_image
from genrl.training.sample_files import save_samples

if TYPE_CHECKING:
    from genrl.algorithms.steering import ParticleSteering

ROWS_PER_PROMPT = 4096  # noise rows kept for a prompt: a sample's noise does not depend on how many are drawn


@dataclass(frozen=True)
class SampleSet:
    """Evaluation samples, all of a prompt one after another.

    Args:
        media: [N, C, H, W] or [N, F, C, H, W] in [0, 1] on the CPU.
        prompts: N prompts.
        generator: what drew them, which may have a way of its own to show media that are no pictures.
    """

    media: Tensor
    prompts: list[Prompt]
    per_prompt: int
    generator: Any = None

    @property
    def texts(self) -> list[str]:
        return [p.text for p in self.prompts]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        return [p.metadata for p in self.prompts]

    def shown(self) -> Tensor:
        """The first samples of the first prompts, [R, K, ...], as many as fit into a preview."""
        preview = getattr(self.generator, "preview", None)
        probe = self.media if preview is None else preview(self.media[:1])
        columns, rows = picture_counts(probe)
        shown = self.media.reshape(-1, self.per_prompt, *self.media.shape[1:])[:rows, :columns]
        if preview is None:
            return shown
        return preview(shown.flatten(0, 1)).unflatten(0, shown.shape[:2])

    def save(self, path: Path) -> None:
        """Write a preview: a PNG with a row for each of the first prompts, beside it the same as a film for videos."""
        shown = self.shown()
        save_image(image_grid(shown), path)
        if shown.dim() == 6:
            save_animation(moving_grid(shown), path)
        if hasattr(self.generator, "export_media"):  # the first sample of each prompt
            first = slice(None, None, self.per_prompt)
            self.generator.export_media(self.media[first], path.with_suffix(""), self.texts[first])


def save_credit(samples: SampleSet, show: Any, path: Path, device: torch.device | str = "cpu") -> None:
    """Write what an algorithm sees in samples: a row for the first sample of each of the first prompts, plain and with
    its values as a glow, as a PNG and for videos also as a film.

    Args:
        samples: an evaluation's.
        show: (media, prompts) -> values [N, (F,) H, W] of every pixel, or None for nothing to show.
        path: of the PNG.
    """
    _, rows = picture_counts(samples.media)
    first = slice(0, rows * samples.per_prompt, samples.per_prompt)
    media = samples.media[first]
    values = show(media.to(device), samples.prompts[first])
    if values is None:
        return
    plain = media.expand(*media.shape[:-3], 3, -1, -1)
    shown = torch.stack([plain, heat(media, values.cpu())], 1)  # [R, 2, (F,) 3, H, W]
    save_image(image_grid(shown), path)
    if shown.dim() == 6:
        save_animation(moving_grid(shown), path)


def deterministic_sampler(generator: Generator, steps: int, shift: float | None = None) -> Sampler:
    """The sampler that evaluation and export use; ``shift`` is that of the grid that was trained on.

    It is the ODE (Euler), unless the generator is made for another kernel, such as a few-step consistency student.
    """
    kernel = getattr(generator, "sampling_kernel", None) or Euler()
    return sampler_for(generator, kernel, schedule_for(generator, steps, shift))


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
    return SampleSet(media, [prompts[i] for i in owners], per_prompt, generator)


def measure(
    samples: SampleSet,
    reward: Any,
    gauges: dict[str, Any],
    batch: int | None = None,
    device: torch.device | str = "cpu",
    raw: dict[str, Tensor] | None = None,
) -> dict[str, float]:
    """Rewards, gauges and image statistics of a sample set, with 95 % intervals where a value exists per sample.

    Args:
        samples: what is measured.
        reward: the trained reward. gauges: named rewards and set metrics.
        batch: samples that a reward is given at once; None gives all. Set metrics always get all, on the CPU.
        device: where rewards get their media.
        raw: what `score_samples` gave, if that has been called.

    Returns:
        ``reward`` (weighted sum of the rewards, gated and uncapped), ``<reward name>``, ``<gauge>``, ``stats/<name>``.
    """
    compose = as_compose(reward)
    raw = score_samples(compose, samples, batch, device) if raw is None else raw
    result: dict[str, float] = {}
    counted = [name for name in raw if compose.weight(name) != 0]
    if counted:
        plain = len(counted) == 1 and compose.weight(counted[0]) == 1
        total = total_reward(compose, raw)
        result |= interval("reward", total, compose.range_of(counted[0]) if plain else None)
        if share := float(torch.isnan(total).double().mean()):
            result["stats/unscored_share"] = share
    for name, value in raw.items():
        result |= interval(name, value, compose.range_of(name))
    if not any(hasattr(gauge, "measure") for gauge in gauges.values()):  # diversity is always watched
        gauges = {"diversity": PairwiseDiversity(), **gauges}
    for name, gauge in gauges.items():
        if hasattr(gauge, "measure"):
            found = gauge.measure(samples.media, samples.texts, samples.metadata)
            result |= {_key(name, inner): value for inner, value in found.items()}
        else:
            judge = Compose({name: gauge})  # a gauge that returns several numbers has each under its own name
            for label, value in score_samples(judge, samples, batch, device).items():
                result |= interval(label, value, judge.range_of(label))
    return result | {f"stats/{name}": value for name, value in image_statistics(samples.media).items()}


def score_samples(
    reward: Any, samples: SampleSet, batch: int | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """name -> [N] raw rewards, no more than ``batch`` samples at once."""
    texts, metadata = samples.texts, samples.metadata
    parts = [
        score(reward, samples.media[part].to(device), texts[part], metadata[part])
        for part in chunked(len(texts), batch)
    ]
    return joined(parts, texts)


def total_reward(compose: Compose, raw: dict[str, Tensor]) -> Tensor:
    """Weighted sum [N] of the gated and uncapped rewards, of those that have a weight."""
    counted = {name: value.double() for name, value in compose.gated(raw).items() if compose.weight(name) != 0}
    return torch.stack([compose.weight(name) * value for name, value in counted.items()]).sum(0)


def prompt_means(samples: SampleSet, reward: Any, raw: dict[str, Tensor]) -> list[float]:
    """Mean reward of each prompt's scored samples, NaN where none is."""
    return total_reward(as_compose(reward), raw).reshape(-1, samples.per_prompt).nanmean(1).tolist()


def check_names(compose: Compose, gauges: Mapping[str, Any]) -> None:
    """Refuse names under which two numbers of a run would hide each other.

    Raises:
        ValueError: naming the reward or gauge.
    """
    several = len(compose.rewards) > 1
    for name in compose.rewards:
        if name == "stats" or (several and name in ("reward", "total")):
            raise ValueError(f"a reward is named {name!r}, which stands for another number in the log; rename it")
    for name in gauges:
        if name in ("reward", "stats", "weight_change", "uses_ema", *compose.rewards) or "/" in name or not name:
            taken = "is the name of a reward" if name in compose.rewards else "is taken, or has a '/'"
            raise ValueError(f"evaluation.gauges.{name}: {name!r} {taken}; rename the gauge")


def _key(gauge: str, name: str) -> str:
    """A gauge named ``spread`` that returns ``spread_std`` stays ``spread_std``."""
    return name if name.startswith(gauge) else f"{gauge}_{name}"


# ------------------------------------------------------------------------------------------- finished runs


def load_run(run_dir: str | Path, checkpoint: str = "last", weights: str = "auto") -> dict[str, Any]:
    """Rebuild the parts of a run and load a checkpoint's weights into its generator.

    Args:
        run_dir: a run directory.
        checkpoint: ``"last"``, ``"best"`` or ``"step-000010"``; ``"start"`` is the generator before training.
        weights: ``"ema"``, ``"raw"`` or ``"auto"``, which is the average when the run kept one.

    Returns:
        The parts of ``genrl.config.build`` with ``device``, ``checkpoint`` (its folder) and ``weights`` (which were
        loaded).
    """
    from genrl.config import build, load_config
    from genrl.report.data import check_run_dir
    from genrl.training.checkpoint import find_checkpoint, load_state

    folder = check_run_dir(run_dir)
    path = folder / "start" if checkpoint == "start" else find_checkpoint(folder, checkpoint)
    parts = build(load_config(folder / "config.yaml"))
    device = torch.device("cuda" if torch.cuda.is_available() and parts["trainer"].device != "cpu" else "cpu")
    if parts["trainer"].cpu_threads is not None:  # the same sums as in training, to the last bit
        torch.set_num_threads(parts["trainer"].cpu_threads)
    generator: Generator = parts["generator"]
    generator.prepare(device)
    untrained: dict[str, Any] = {"weights": generator.state_dict(), "ema": None, "iteration": 0}
    state = untrained if checkpoint == "start" else load_state(path)
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


def save_evaluation(
    values: Mapping[str, Any], run_dir: str | Path, sampler: str = "ode", out: str | Path | None = None
) -> Path:
    """Write what `evaluate_run` gave as JSON, with the versions of what computed it; NaN becomes null.

    Args:
        values: the evaluation. run_dir: where it goes. sampler: as `evaluate_run` was given it.
        out: another file; by default ``RUN/evaluation-CHECKPOINT-SAMPLER.json``. An older one is replaced.

    Returns:
        The path of the file.
    """
    from genrl.training.logging import write_json
    from genrl.training.run_files import versions

    name = f"evaluation-{Path(values['checkpoint']).name}-{sampler}.json"
    path = Path(run_dir) / name if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    write_json(path, {**plain, "versions": {k: v for k, v in versions().items() if v != "absent"}})
    return path


def sample_run(
    run_dir: str | Path,
    prompts: Sequence[str] | None = None,
    n: int = 8,
    out: str | Path | None = None,
    checkpoint: str = "last",
    steps: int | None = None,
    seed: int = 0,
    weights: str = "auto",
    steering: ParticleSteering | None = None,
) -> Path:
    """Draw samples of a checkpoint with the deterministic sampler and write them, see `save_samples`.

    Args:
        run_dir, checkpoint, weights: see :func:`load_run`.
        prompts: texts; by default the run's held-out prompts.
        n: samples per prompt.
        out: folder for the pictures, by default ``RUN/generated``.
        steps, seed: of the sampler and its noise.
        steering: steer by the run's reward with a stochastic sampler instead, see
            :func:`genrl.training.steered.steered_samples`; its numbers go to ``steering.json`` in the folder.

    Returns:
        The path of the grid picture.
    """
    if n < 1:
        raise ValueError(f"the number of samples must be at least 1, got {n}")
    run = load_run(run_dir, checkpoint, weights)
    known = {p.text: p for p in (*run["prompts"].train, *run["prompts"].held_out)}  # with their image conditions
    chosen = [known.get(text, Prompt(text)) for text in prompts] if prompts else list(run["prompts"].held_out)
    folder = Path(out) if out is not None else Path(run_dir) / "generated"
    if steering is None:
        sampler = deterministic_sampler(run["generator"], steps or run["evaluation"].steps, run["algorithm"].shift)
        samples = sample_set(
            run["generator"], sampler, chosen, n, seed=seed, batch=run["evaluation"].batch, device=run["device"]
        )
    else:
        from genrl.training.logging import write_json
        from genrl.training.steered import steered_samples

        steered = steered_samples(run, chosen, n, steering, steps=steps, seed=seed)
        samples = steered.after
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "steering.json", steered.values)
    return save_samples(samples.media, samples.texts, n, folder, run["generator"])
