"""The settings of a run that are not parts: how long, how large, how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class RunSettings:
    """What every run can set, whatever it trains.

    Args:
        iterations: length of the run.
        learning_rate: AdamW step size.
        weight_decay: AdamW decoupled weight decay.
        betas: AdamW moment decays.
        max_grad_norm: gradient norm above which gradients are scaled down.
        warmup_updates: optimizer updates over which the learning rate rises linearly from 0.
        mixed_precision: network arithmetic.
        ema_decay: decay of an exponential moving average of the weights, which evaluation then uses; None for none.
        checkpoint_every: iterations between two checkpoints; 0 saves only at the end and when stopped.
        keep_checkpoints: number of most recent checkpoints to keep.
        preview_every: iterations between two previews; 0 draws only the first and the last.
        reward_timeout: seconds that processes wait for each other at the least.
        processes: number of processes that this run must have; a launcher that started fewer is then an error.
        device: ``"auto"`` (CUDA when there is one), ``"cpu"`` or ``"cuda"``.
        cpu_threads: torch threads; 1 is fastest for small networks when other programs run.
        tensorboard: also write TensorBoard events.
    """

    iterations: int = 30
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    warmup_updates: int = 0
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    ema_decay: float | None = None
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    preview_every: int = 10
    reward_timeout: float = 600.0
    processes: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_threads: int | None = None
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name, low in [
            ("iterations", 1),
            ("checkpoint_every", 0),
            ("keep_checkpoints", 1),
            ("preview_every", 0),
            ("warmup_updates", 0),
        ]:
            if getattr(self, name) < low:
                raise ValueError(f"trainer.{name} = {getattr(self, name)} is too small; the least is {low}")
        for name in ("cpu_threads", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"trainer.{name} = {value} is too small; the least is 1, and null leaves it open")
        if not self.weight_decay >= 0:
            raise ValueError(f"trainer.weight_decay = {self.weight_decay} must not be negative")
        if not all(0 <= float(beta) < 1 for beta in self.betas) or len(self.betas) != 2:
            raise ValueError(f"trainer.betas = {list(self.betas)} must be two numbers in [0, 1)")
        for name in ("learning_rate", "max_grad_norm", "reward_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"trainer.{name} = {getattr(self, name)} must be positive")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"trainer.ema_decay = {self.ema_decay} must lie in [0, 1); null switches the average off")
        self.betas = (float(self.betas[0]), float(self.betas[1]))

    def learning_rate_factor(self, updates: int) -> float:
        """The share of `learning_rate` that the update after `updates` updates uses."""
        return min(1.0, (updates + 1) / self.warmup_updates) if self.warmup_updates else 1.0


@dataclass
class AsynchronousSettings:
    """Roll-outs in other processes, with weights that lag behind.

    Args:
        workers: processes that sample and score.
        queue: iterations of samples that may wait; then workers wait.
        max_lag: updates of the weights since a sample was drawn above which it is dropped.
        publish_every: iterations between two publications of the weights.
        devices: of the workers in turn, such as ``[cuda:1, cuda:2]``; empty takes the updater's.
    """

    workers: int = 1
    queue: int = 2
    max_lag: int = 4
    publish_every: int = 1
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, low in [("workers", 1), ("queue", 1), ("max_lag", 0), ("publish_every", 1)]:
            if getattr(self, name) < low:
                raise ValueError(
                    f"trainer.asynchronous.{name} = {getattr(self, name)} is too small; the least is {low}"
                )
        if self.publish_every > self.max_lag + 1:
            raise ValueError(
                f"trainer.asynchronous.publish_every = {self.publish_every} lets all samples become older than "
                f"max_lag = {self.max_lag}; use at most max_lag + 1"
            )


@dataclass
class TrainerSettings(RunSettings):
    """The training loop of generators; log-ratios, means and losses stay in float32 under mixed precision.

    Args:
        iterations: roll-out + update rounds.
        prompts_per_iteration: P, different prompts in a round, over all processes.
        group_size: G, samples per prompt.
        rollout_batch: samples drawn in one network call per process; None draws all at once. With several batches the
            rewards of one are computed while the next is drawn.
        preview_every: iterations between two image grids; 0 draws only the first and the last.
        reward_timeout: seconds that the rewards of one batch may take before the run stops.
        sharding: how several processes share the network. ``"none"`` keeps a copy on each, ``"fsdp2"`` divides weights,
            gradients and optimizer over them, ``"zero2"`` (DeepSpeed) gradients and optimizer; ``"auto"`` does what the
            file of `accelerate launch` says.
        shard_classes: class names of the blocks that fsdp2 gathers one at a time; empty finds them.
        offload_weights: fsdp2 keeps its shards in CPU memory.
        find_unused_parameters: with copies, search every forward for weights that took no part; None does so where the
            generator says that it uses a part of its weights at a time.
        latents_on_cpu: keep sampled trajectories in CPU memory; micro-batches are moved when they are trained on.
        activation_offload: keep what a backward needs in CPU memory until it does.
        allow_small_clip: go on although the clip range is below the measured first-step log-ratio gap.
        collapse_fraction: stop when the evaluated reward falls below this share of its best value; None never stops.
        asynchronous: sample in other processes while this one updates; None takes turns. For methods that train on
            final samples only; such a run cannot be repeated bit for bit.
    """

    prompts_per_iteration: int = 8
    group_size: int = 12
    rollout_batch: int | None = None
    sharding: Literal["auto", "none", "fsdp2", "zero2"] = "auto"
    shard_classes: tuple[str, ...] = ()
    offload_weights: bool = False
    find_unused_parameters: bool | None = None
    latents_on_cpu: bool = False
    activation_offload: bool = False
    allow_small_clip: bool = False
    collapse_fraction: float | None = None
    asynchronous: AsynchronousSettings | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts_per_iteration", "group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} = {getattr(self, name)} is too small; the least is 1")
        if self.prompts_per_iteration * self.group_size > 10_000_000:
            raise ValueError(
                f"trainer.prompts_per_iteration x group_size is {self.prompts_per_iteration} x {self.group_size} "
                "samples an iteration; at most 10 million are allowed"
            )
        if self.rollout_batch is not None and self.rollout_batch < 1:
            raise ValueError(
                f"trainer.rollout_batch = {self.rollout_batch} is too small; the least is 1, and null leaves it open"
            )
        if self.collapse_fraction is not None and not 0 < self.collapse_fraction < 1:
            raise ValueError(
                f"trainer.collapse_fraction = {self.collapse_fraction} must lie in (0, 1); null never stops"
            )


@dataclass
class EvaluationSettings:
    """Evaluation on held-out prompts, under the same noise every time.

    Args:
        every: iterations between two evaluations; 0 evaluates only before and after training.
        samples_per_prompt: samples of each held-out prompt.
        steps: steps of the deterministic (Euler) sampler.
        batch: samples per network call.
        seed: seed of the evaluation noise, the same before, during and after.
        train_sampler: also evaluate the sampler that training uses: ``"ends"`` before and after training,
            ``"always"`` or ``"never"``.
        gauges: named rewards or set metrics that are measured but never optimised. Without a set metric among them,
            `PairwiseDiversity` is measured as `diversity`.
        alarm_margin: an alarm is logged when the reward rose since the first evaluation while a judge (a gauge with a
            value per sample) fell from its best by more than this share of it, and by more than the noise.
        drift_margin: the same for the diversity within a prompt and for image statistics, as a share of what the base
            model reads on the same noise.
    """

    every: int = 5
    samples_per_prompt: int = 50
    steps: int = 20
    batch: int = 250
    seed: int = 1234
    train_sampler: Literal["ends", "always", "never"] = "ends"
    gauges: dict[str, Any] = field(default_factory=dict)
    alarm_margin: float = 0.05
    drift_margin: float = 0.3

    def __post_init__(self) -> None:
        for name, low in [("every", 0), ("samples_per_prompt", 1), ("steps", 1), ("batch", 1)]:
            if getattr(self, name) < low:
                raise ValueError(f"evaluation.{name} = {getattr(self, name)} is too small; the least is {low}")
        for name in ("alarm_margin", "drift_margin"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"evaluation.{name} = {getattr(self, name)} must not be negative")
        for name, gauge in self.gauges.items():
            if not callable(gauge) and not hasattr(gauge, "measure"):
                raise ValueError(
                    f"evaluation.gauges.{name} is {gauge!r}; a gauge is a reward (callable) or a set metric (measure)"
                )
