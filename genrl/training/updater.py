"""Optimizer updates: micro-batches, accumulation, clipping, the moving average."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from genrl.algorithms.base import Algorithm, Batch, Rollout, Unit, chunked
from genrl.diffusion import NonFiniteError
from genrl.generators.base import Generator
from genrl.networks.weights import current
from genrl.training.errors import TrainingError
from genrl.training.logging import Meter
from genrl.training.monitor import Monitor
from genrl.training.off_load import moved, saved_on_cpu
from genrl.training.optimization import Optimization
from genrl.training.processes import make_sharing
from genrl.training.seeding import Layout
from genrl.training.settings import TrainerSettings


class Updater(Optimization):
    """Turns the roll-outs of an iteration into optimizer updates.

    Args:
        generator: its trainable weights are updated in place.
        algorithm: gives the losses.
        settings: of the trainer.
    """

    settings: TrainerSettings

    def __init__(self, generator: Generator, algorithm: Algorithm, settings: TrainerSettings):
        super().__init__(settings, lambda: generator.state_dict(), lambda state: generator.load_state_dict(state))
        self.generator, self.algorithm = generator, algorithm
        self.allow_small_clip = settings.allow_small_clip

    def prepare(self, accelerator: Any, layout: Layout) -> None:
        """Make the optimizer and hand the network to the accelerator.

        Raises:
            TrainingError: when trainable weights are not float32, or a dropout layer is active.
        """
        self.layout = layout
        for part in [self.generator.module, *getattr(self.generator, "parts", {}).values()]:  # frozen ones as well
            _refuse_dropout(part)
        sharing = make_sharing(accelerator, self.settings)
        self._most = lambda n: int(accelerator.gather(torch.tensor([n], device=accelerator.device)).max())
        if sharing.gathers:
            self._keep_in_step()
        self.names = list(self.generator.state_dict())  # in the order of trainable()
        sharing.distribute(self.generator)
        if getattr(self.algorithm, "kl_weight", 0) > 0 or getattr(self.algorithm, "needs_reference", False):
            with self.generator.reference():  # what the start is can be told for sure before anything is written only
                pass
        parameters = [current(p) for p in self.generator.trainable()]
        optimizer = self.start_from(accelerator, parameters, sharing)
        self.generator.module, self.optimizer = sharing.prepare(self.generator.module, optimizer)
        self.generator.module.eval()

    def _keep_in_step(self) -> None:
        """Every process must evaluate the same networks in the same order.

        Raises:
            TrainingError: when the algorithm and the generator cannot promise that.
        """
        one_time = getattr(self.algorithm, "steps_per_forward", 0) == 1
        one_time = one_time and getattr(self.algorithm, "transitions_per_sample", None) is None
        if getattr(self.generator, "uses_part_of_weights", False) and not one_time:
            raise TrainingError(
                f"with {type(self.algorithm).__name__} processes would evaluate different networks of "
                f"{type(self.generator).__name__} at the same moment, because times differ within a batch; use a "
                "policy gradient with steps_per_forward: 1 and transitions_per_sample: null, or trainer.sharding: none"
            )
        self.generator.most = self._most  # type: ignore[attr-defined]

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
            minibatch, real = self._without_left_out(rollout.select(slice(m * size, (m + 1) * size)))
            if len(minibatch):
                minibatch = self._here(minibatch)
                minibatch = self.algorithm.before_update(self.generator.velocity, self.generator, minibatch, batch)
            minibatches.append((moved(minibatch, "cpu") if self.settings.latents_on_cpu else minibatch, real))
        evaluations = sampled + sum(minibatch.evaluations - sampled for minibatch, _ in minibatches)
        units = self.algorithm.units(rollout, batch)
        first, later, common = Meter(), Meter(), Meter()
        trained, gap = 0, {}
        for epoch in range(self.algorithm.inner_epochs):
            for m, (minibatch, real) in enumerate(minibatches):
                kept = weights[self.layout.minibatch(m)].sum().clamp(min=1).item()
                meter = first if epoch == m == 0 else later
                trained += self.accumulate(minibatch, kept, units, meter, common, real)
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

    def _here(self, rollout: Rollout) -> Rollout:
        return moved(rollout, self.accelerator.device) if self.settings.latents_on_cpu else rollout

    def _without_left_out(self, minibatch: Rollout) -> tuple[Rollout, int]:
        """Left-out samples cost nothing.

        Over several processes some rows of weight 0 are put behind the others: one where all would go, since every
        process must take part in the last backward; and where processes work in lockstep, enough to make as many
        micro-batches as the process that has most.

        Returns:
            The samples, and the number of those before the rows of weight 0.
        """
        weight, several = minibatch.weight, self.layout.processes > 1
        whole = weight is None or bool(weight.all())
        kept = torch.arange(len(minibatch)) if whole or weight is None else weight.nonzero()[:, 0].cpu()
        size = self.algorithm.micro_batch or max(len(minibatch), 1)
        parts = -(-len(kept) // size)
        if self.sharing.lockstep:
            parts = self._most(parts)
        elif several:
            parts = max(parts, 1)
        padding = max((parts - 1) * size + 1 - len(kept), 0) if parts else 0
        if whole and not padding:
            return minibatch, len(kept)
        filler = kept[:1] if len(kept) else torch.zeros(1, dtype=torch.long)
        chosen = minibatch.select(torch.cat([kept, filler.expand(padding)]))
        counts = torch.cat([torch.ones(len(kept)), torch.zeros(padding)])
        return replace(chosen, weight=counts.to(chosen.x0.device)), len(kept)

    def accumulate(
        self,
        minibatch: Rollout,
        kept: float,
        units: list[Unit],
        meter: Meter,
        common: Meter,
        real: int | None = None,
    ) -> int:
        """Gradients of one minibatch, one backward a unit.

        Args:
            minibatch: samples of this process.
            kept: samples that the mean is over, on all processes; gradients are averaged over processes.
            units: of work, see :class:`genrl.algorithms.Algorithm`.
            meter, common: take the metrics of the units and the loss.
            real: number of rows before those that only keep processes in step; None for all.

        Returns:
            Forwards spent.
        """
        kept = kept / self.layout.processes
        real = len(minibatch) if real is None else real
        parts = chunked(real, self.algorithm.micro_batch)
        # Where rows without weight make more micro-batches, one row each does.
        missing = len(chunked(len(minibatch), self.algorithm.micro_batch)) - len(parts)
        work = [(part, unit) for part in [*parts, *[slice(real, real + 1)] * missing] for unit in units]
        total = torch.zeros((), device=self.accelerator.device)
        for i, (part, unit) in enumerate(work):
            micro = self._here(minibatch.select(part))
            with self.sharing.together(self.generator.module, last=i == len(work) - 1):
                with self._kept_on_cpu():
                    loss, metrics = self.algorithm.loss(self.generator.velocity, micro, unit, units)
                weighted = (loss if micro.weight is None else loss * micro.weight).sum() / kept
                self.sharing.backward(weighted)
            meter.add(metrics, len(micro) if part.start < real else 0.0)
            total = total + weighted.detach()
        common.add({"loss/total": total})
        return sum(len(range(*part.indices(len(minibatch)))) * len(unit) for part, unit in work)

    def _kept_on_cpu(self) -> AbstractContextManager[Any]:
        """Where a backward's tensors wait for it."""
        return saved_on_cpu() if self.settings.activation_offload else nullcontext()

    def _check_gap(self, first: dict[str, float]) -> None:
        """Refuse a clip range that numerical noise alone would reach."""
        gap = max((v for k, v in first.items() if k.endswith("/gap_max")), default=0.0)
        width = min((v for k, v in first.items() if k.endswith("/clip_width_min")), default=math.inf)
        if gap <= width or self.allow_small_clip:
            return
        self.optimizer.zero_grad()
        raise TrainingError(
            f"the clip range is +-{width:.3g}, but with unchanged weights the log-ratio already differs from 0 by "
            f"up to {gap:.3g}; numerical noise would be clipped as if it were learning. Widen the clip range, use "
            "anchor: recompute, less reduced precision, or set trainer.allow_small_clip=true"
        )


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
