"""The optimizer of a run, whatever is trained: learning rate, clipping, the moving average, half precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from genrl.diffusion import NonFiniteError
from genrl.training.ema import EMA
from genrl.training.errors import TrainingError
from genrl.training.settings import RunSettings

MAX_SKIPPED = 25  # halvings of the initial scale of 65,536, with room to spare


class Optimization:
    """AdamW with what belongs around it.

    Args:
        settings: of the trainer.
        weights: gives the state dict of what is trained; load_weights: takes one.
    """

    parameters: list[nn.Parameter]
    optimizer: Any
    ema: EMA | None

    def __init__(
        self,
        settings: RunSettings,
        weights: Callable[[], Mapping[str, Tensor]],
        load_weights: Callable[[dict[str, Tensor]], Any],
    ):
        self.settings, self.weights, self.load_weights = settings, weights, load_weights
        self.updates = 0
        self.skipped = 0  # steps in a row that a gradient scaler skipped

    def start_from(self, accelerator: Any, parameters: Sequence[nn.Parameter]) -> Any:
        """Make the optimizer; returns it for the accelerator to prepare.

        Raises:
            TrainingError: when trainable weights are not float32.
        """
        self.accelerator, self.parameters = accelerator, list(parameters)
        wrong = [p.dtype for p in self.parameters if p.dtype != torch.float32]
        if wrong:
            raise TrainingError(f"trainable weights must be float32 (mixed precision is a setting), found {wrong[0]}")
        self.start = [p.detach().cpu().clone() for p in self.parameters]
        settings = self.settings
        self.ema = None if settings.ema_decay is None else EMA(self.parameters, settings.ema_decay)
        return torch.optim.AdamW(
            self.parameters, settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside it, the network has the weights that are evaluated and exported: the average when there is one."""
        return nullcontext() if self.ema is None else self.ema.active()

    def step(self) -> Tensor:
        """Clip, check, step, average; returns the gradient norm before clipping.

        Raises:
            NonFiniteError: when the norm is inf or NaN; the weights are as before this update.
        """
        norm = torch.as_tensor(self.accelerator.clip_grad_norm_(self.parameters, self.settings.max_grad_norm))
        # A gradient scaler skips such a step by itself and lowers its scale.
        size = float(norm)  # the one moment at which the device is waited for
        if self.accelerator.scaler is None and not math.isfinite(size):
            self.optimizer.zero_grad()
            raise NonFiniteError(
                f"the gradient norm is {size} in update {self.updates + 1}; the weights were not changed by it. "
                "Lower trainer.learning_rate, or use mixed_precision no or bf16"
            )
        if size == 0:
            # Nothing was learnt (no reward, or no spread in any group), so neither momentum nor weight decay may move
            # the weights.
            self.optimizer.zero_grad()
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.update()  # it was told of the gradients when they were clipped
            return norm.detach()
        factor = self.settings.learning_rate_factor(self.updates)
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

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, average and counters."""
        scaler = self.accelerator.scaler
        return {
            "updates": self.updates,
            "weights": {k: v.detach().cpu() for k, v in self.weights().items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            KeyError, ValueError: when it does not fit.
        """
        self.load_weights(state["weights"])
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
