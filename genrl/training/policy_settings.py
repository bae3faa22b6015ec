"""The settings of a run that trains a policy from demonstrations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from genrl.training.settings import RunSettings


@dataclass
class PolicyTrainerSettings(RunSettings):
    """The training loop of policies: an iteration is one optimizer update on a batch of action chunks.

    Args:
        iterations: optimizer updates.
        batch_size: chunks per update, over all processes.
        log_every: updates that one line of metrics averages over.
        schedule: of the learning rate after the warm-up: ``"cosine"`` falls to 0 at the last iteration.
        learning_rate: AdamW step size at its highest.
        warmup_updates: optimizer updates over which the learning rate rises linearly from 0.
        ema_decay: decay of an exponential moving average of the weights, which evaluation then uses; None for none.
        checkpoint_every: iterations between two checkpoints, a multiple of `log_every`; 0 saves only at the end and
            when stopped.
    """

    iterations: int = 2000
    batch_size: int = 128
    log_every: int = 50
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = 1e-6
    warmup_updates: int = 100
    ema_decay: float | None = 0.995
    checkpoint_every: int = 500
    preview_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} = {getattr(self, name)} is too small; the least is 1")
        if self.checkpoint_every % self.log_every:
            raise ValueError(
                f"trainer.checkpoint_every = {self.checkpoint_every} is no multiple of trainer.log_every = "
                f"{self.log_every}; checkpoints are written between two lines of metrics"
            )

    def learning_rate_factor(self, updates: int) -> float:
        factor = super().learning_rate_factor(updates)
        if self.schedule == "constant" or updates < self.warmup_updates:
            return factor
        done = (updates - self.warmup_updates) / max(1, self.iterations - self.warmup_updates)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass
class PolicyEvaluationSettings:
    """Evaluation of a policy in its environment while it is trained, and after.

    The start states are those of seeds `seed`, `seed` + 1, ...; `genrl evaluate` uses others, so that a checkpoint that
    was chosen here is not judged on the states that it was chosen with.

    Args:
        every: iterations between two evaluations, a multiple of `trainer.log_every`; 0 evaluates only after training.
        episodes: start states, one episode each; 0 leaves episodes to `genrl evaluate`.
        seed: of the first start state.
        n_envs: environments that run at once; None takes as many as pay off. The result does not depend on it.
        backend: ``"sync"`` steps them in one process, ``"async"`` in several.
        background: evaluate in a process of its own while training goes on; None does so when there is a core for it.
        videos: episodes to film, the first and the worst ones; 0 for none.
        consistency_samples: chunks that are drawn at every prediction to log its temporal consistency (STAC); 0 for
            none.
    """

    every: int = 0
    episodes: int = 20
    seed: int = 50_000
    n_envs: int | None = None
    backend: Literal["sync", "async"] = "sync"
    background: bool | None = None
    videos: int = 2
    consistency_samples: int = 0

    def __post_init__(self) -> None:
        for name, low in [("every", 0), ("episodes", 0), ("seed", 0), ("videos", 0), ("consistency_samples", 0)]:
            if getattr(self, name) < low:
                raise ValueError(f"evaluation.{name} = {getattr(self, name)} is too small; the least is {low}")
        if self.n_envs is not None and self.n_envs < 1:
            raise ValueError(f"evaluation.n_envs = {self.n_envs} is too small; the least is 1, and null leaves it open")
