"""Optimizer updates: micro-batches, accumulation, clipping, the moving average."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from genrl.algorithms.base import Algorithm, Batch, Rollout, Unit, chunked
from genrl.diffusion import NonFiniteError
from genrl.generators.base import Generator
from genrl.training.ema import EMA
from genrl.training.errors import TrainingError
from genrl.training.logging import Meter
from genrl.training.monitor import Monitor
from genrl.training.seeding import Layout
from genrl.training.settings import TrainerSettings

MAX_SKIPPED = 25  # halvings of the initial scale of 65,536, with room to spare


class Updater:
    """Turns the roll-outs of an iteration into optimizer updates.

    Args:
        generator: its trainable weights are updated in place.
        algorithm: gives the losses.
        settings: of the trainer.
    """

    parameters: list[nn.Parameter]
    optimizer: Any
    ema: EMA | None

    def __init__(self, generator: Generator, algorithm: Algorithm, settings: TrainerSettings):
        self.generator, self.algorithm, self.settings = generator, algorithm, settings
        self.updates = 0
        self.skipped = 0  # steps in a row that a gradient scaler skipped

    def prepare(self, accelerator: Any, layout: Layout) -> None:
        """Make the optimizer and hand the network to the accelerator.

        Raises:
            TrainingError: when trainable weights are not float32, or a dropout layer is active.
        """
        self.accelerator, self.layout = accelerator, layout
        _refuse_dropout(self.generator.module)
        self.parameters = self.generator.trainable()
        wrong = [p.dtype for p in self.parameters if p.dtype != torch.float32]
        if wrong:
            raise TrainingError(f"trainable weights must be float32 (mixed precision is a setting), found {wrong[0]}")
        self.start = [p.detach().cpu().clone() for p in self.parameters]
        settings = self.settings
        optimizer = torch.optim.AdamW(
            self.parameters, settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self.generator.module, self.optimizer = accelerator.prepare(self.generator.module, optimizer)
        self.generator.module.eval()
        self.ema = None if settings.ema_decay is None else EMA(self.parameters, settings.ema_decay)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside it, the network has the weights that are evaluated and exported: the average when there is one."""
        return nullcontext() if self.ema is None else self.ema.active()

    def run(self, rollout: Rollout, batch: Batch, weights: Tensor) -> tuple[dict[str, float], float]:
        """All updates of an iteration.

        Args:
            rollout: samples of this process, minibatch after minibatch, with advantages.
            batch: how they were drawn.
            weights: [P G] 1 for samples that are trained on, over all processes.

        Returns:
            Metrics over all processes, and the forward-equivalents spent (a backward counts two).
        """
        sampled, size = rollout.evaluations, self.layout.local_minibatch
        minibatches = []
        for m in range(self.algorithm.minibatches):
            minibatch = self._without_left_out(rollout.select(slice(m * size, (m + 1) * size)))
            if len(minibatch):
                minibatch = self.algorithm.before_update(self.generator.velocity, self.generator, minibatch, batch)
            minibatches.append(minibatch)
        evaluations = sampled + sum(minibatch.evaluations - sampled for minibatch in minibatches)
        units = self.algorithm.units(rollout, batch)
        first, later, common = Meter(), Meter(), Meter()
        trained, gap = 0, {}
        for epoch in range(self.algorithm.inner_epochs):
            for m, minibatch in enumerate(minibatches):
                kept = weights[self.layout.minibatch(m)].sum().clamp(min=1).item()
                meter = first if epoch == m == 0 else later
                trained += self.accumulate(minibatch, kept, units, meter, common)
                if epoch == m == 0:
                    gap = first.result(self.accelerator)
                    if self.updates == 0:
                        self._check_gap(gap)
                try:
                    norm = self.step()
                except NonFiniteError as error:
                    raise NonFiniteError(f"{error}.{_first_bad(meter)}") from error
                common.add({"grad/norm": norm, "grad/norm_max": norm})
        self.algorithm.after_update()
        values = common.result(self.accelerator) | Monitor.by_step(
            gap, later.result(self.accelerator) if later else gap, self.algorithm.train_sampler()
        )
        values["lr"] = self.optimizer.param_groups[0]["lr"]
        cost = torch.tensor(evaluations + 3.0 * trained, dtype=torch.float64, device=self.accelerator.device)
        return values, float(self.accelerator.reduce(cost, "sum"))

    def _without_left_out(self, minibatch: Rollout) -> Rollout:
        """Left-out samples cost nothing.

        Over several processes one stays where all would go, since every process must take part in the last backward;
        its weight is 0.
        """
        if minibatch.weight is None or bool(minibatch.weight.all()):
            return minibatch
        kept = minibatch.weight.nonzero()[:, 0]
        if len(kept) == 0 and self.layout.processes > 1:
            kept = torch.zeros(1, dtype=torch.long, device=minibatch.weight.device)
        return minibatch.select(kept)

    def accumulate(self, minibatch: Rollout, kept: float, units: list[Unit], meter: Meter, common: Meter) -> int:
        """Gradients of one minibatch, one backward a unit.

        Args:
            minibatch: samples of this process.
            kept: samples that the mean is over, on all processes; gradients are averaged over processes.
            units: of work, see :class:`genrl.algorithms.Algorithm`.
            meter, common: take the metrics of the units and the loss.

        Returns:
            Forwards spent.
        """
        kept = kept / self.layout.processes
        work = [(part, unit) for part in chunked(len(minibatch), self.algorithm.micro_batch) for unit in units]
        placeholder = len(minibatch) == 1 and minibatch.weight is not None and not bool(minibatch.weight)
        total = torch.zeros((), device=self.accelerator.device)
        for i, (part, unit) in enumerate(work):
            micro = minibatch.select(part)
            last = i == len(work) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.generator.module):
                loss, metrics = self.algorithm.loss(self.generator.velocity, micro, unit, units)
                weighted = (loss if micro.weight is None else loss * micro.weight).sum() / kept
                self.accelerator.backward(weighted)
            meter.add(metrics, 0.0 if placeholder else len(micro))
            total = total + weighted.detach()
        common.add({"loss/total": total})
        return sum(len(range(*part.indices(len(minibatch)))) * len(unit) for part, unit in work)

    def step(self) -> Tensor:
        """Clip, check, step, average; returns the gradient norm before clipping.

        Raises:
            NonFiniteError: when the norm is inf or NaN; the weights are as before this update.
        """
        norm = torch.as_tensor(self.accelerator.clip_grad_norm_(self.parameters, self.settings.max_grad_norm))
        # A gradient scaler skips such a step by itself and lowers its scale.
        if self.accelerator.scaler is None and not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad()
            raise NonFiniteError(
                f"the gradient norm is {float(norm)} in update {self.updates + 1}; the weights were not changed by it. "
                "Lower trainer.learning_rate, or use mixed_precision no or bf16"
            )
        if not bool(norm):
            # Nothing was learnt (no reward, or no spread in any group), so neither momentum nor weight decay may move
            # the weights.
            self.optimizer.zero_grad()
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.update()  # it was told of the gradients when they were clipped
            return norm.detach()
        warmup = self.settings.warmup_updates
        factor = min(1.0, (self.updates + 1) / warmup) if warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.optimizer.step_was_skipped:
            self._count_skipped()
            return norm.detach()
        self.skipped = 0
        self.updates += 1
        if self.ema is not None:
            self.ema.step()
        return norm.detach()

    def _count_skipped(self) -> None:
        """A scaler skips a few steps while it finds its scale; more in a row means that gradients are never finite."""
        self.skipped += 1
        if self.skipped >= MAX_SKIPPED:
            raise NonFiniteError(
                f"the gradient scaler skipped {self.skipped} updates in a row: gradients are not finite at any scale; "
                "use mixed_precision bf16 or no, or lower trainer.learning_rate"
            )

    def _check_gap(self, first: dict[str, float]) -> None:
        """Refuse a clip range that numerical noise alone would reach."""
        gap = max((v for k, v in first.items() if k.endswith("/gap_max")), default=0.0)
        width = min((v for k, v in first.items() if k.endswith("/clip_width_min")), default=math.inf)
        if gap <= width or self.settings.allow_small_clip:
            return
        self.optimizer.zero_grad()
        raise TrainingError(
            f"the clip range is +-{width:.3g}, but with unchanged weights the log-ratio already differs from 0 by "
            f"up to {gap:.3g}; numerical noise would be clipped as if it were learning. Widen the clip range, use "
            "anchor: recompute, less reduced precision, or set trainer.allow_small_clip=true"
        )

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, average and counters."""
        scaler = self.accelerator.scaler
        return {
            "updates": self.updates,
            "weights": {k: v.detach().cpu() for k, v in self.generator.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            KeyError, ValueError: when it does not fit.
        """
        self.generator.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # settings of this run, not of the one that saved
            group["betas"], group["weight_decay"] = self.settings.betas, self.settings.weight_decay
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            if state["ema"] is None:
                raise ValueError("it has no moving average, but trainer.ema_decay is set")
            self.ema.load_state_dict(state["ema"])
        self.updates = state["updates"]


def _first_bad(meter: Meter) -> str:
    """The first quantity of a step that is not finite, for an error message."""
    bad = [name for name, value in meter.result().items() if not math.isfinite(value)]
    return f" The first quantity that is not finite: {bad[0]}" if bad else ""


def _refuse_dropout(module: nn.Module) -> None:
    """Roll-out and update must compute the same function."""
    for name, part in module.named_modules():
        if part.training and isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise TrainingError(
                f"{name} is a dropout layer in training mode, so the update would score another function than the one "
                "that sampled; call eval() on the model before training"
            )
