"""The optimizer of a run, whatever is trained: learning rate, clipping, the moving average, half precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from genrl.diffusion import NonFiniteError
from genrl.networks.weights import is_sharded, local, on_main, share
from genrl.training.ema import EMA, change_norm
from genrl.training.errors import TrainingError
from genrl.training.processes import Copies, Sharing
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
        self.names: list[str] | None = None  # of the parameters, when the optimizer's state is to be kept by name
        self.updates = 0
        self.skipped = 0  # steps in a row that a gradient scaler skipped

    def start_from(self, accelerator: Any, parameters: Sequence[nn.Parameter], sharing: Sharing | None = None) -> Any:
        """Make the optimizer; returns it to be prepared.

        Args:
            accelerator: of the run. parameters: what is trained. sharing: how processes share it (default: as copies).

        Raises:
            TrainingError: when trainable weights are not float32.
        """
        self.accelerator, self.parameters = accelerator, list(parameters)
        self.sharing = Copies(accelerator, self.settings) if sharing is None else sharing
        wrong = [p.dtype for p in self.parameters if p.dtype != torch.float32]
        if wrong:
            raise TrainingError(f"trainable weights must be float32 (mixed precision is a setting), found {wrong[0]}")
        self.start = [local(p).cpu().clone() for p in self.parameters]
        self.changed = 0.0
        settings = self.settings
        self.ema = None if settings.ema_decay is None else EMA(self.parameters, settings.ema_decay)
        return torch.optim.AdamW(
            self.parameters, settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside it, the network has the weights that are evaluated and exported: the average when there is one."""
        return nullcontext() if self.ema is None else self.ema.active()

    @contextmanager
    def exported_weights(self) -> Iterator[None]:
        """As `evaluated_weights`, complete on the main process; every process must enter it."""
        with self.evaluated_weights(), self.sharing.complete():
            yield

    def weight_change(self, together: bool = True) -> float:
        """L2 distance from the start.

        Args:
            together: all processes ask. When only some do, because others have failed, sharded weights cannot be
                measured and the answer is that of the last time.
        """
        if together or not any(is_sharded(p) for p in self.parameters):
            self.changed = change_norm(self.parameters, self.start)
        return self.changed

    def step(self) -> Tensor:
        """Clip, check, step, average; returns the gradient norm before clipping.

        Raises:
            NonFiniteError: when the norm is inf or NaN; the weights are as before this update.
        """
        norm = self.sharing.clip(self.parameters, self.settings.max_grad_norm)
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
        """Weights, optimizer, average and counters.

        Complete tensors, so that any number of processes can go on from them; of sharded ones on the main process only,
        and every process must call it.
        """
        scaler = self.accelerator.scaler
        return {
            "updates": self.updates,
            "weights": self._weights(),
            "optimizer": self._optimizer_state(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            KeyError, ValueError: when it does not fit.
        """
        self._load_weights(state["weights"])
        self._load_optimizer_state(state["optimizer"])
        for group in self.optimizer.param_groups:  # settings of this run, not of the one that saved
            group["betas"], group["weight_decay"] = self.settings.betas, self.settings.weight_decay
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            if state["ema"] is None:
                raise ValueError("it has no moving average, but trainer.ema_decay is set")
            self.ema.load_state_dict(state["ema"])
        self.updates = state["updates"]

    def _weights(self) -> dict[str, Tensor]:
        if self.names is None or not any(is_sharded(p) for p in self.parameters):
            return {k: v.detach().cpu() for k, v in self.weights().items()}
        return {name: on_main(p) for name, p in zip(self.names, self.parameters, strict=True)}

    def _load_weights(self, saved: dict[str, Tensor]) -> None:
        if self.names is None or not any(is_sharded(p) for p in self.parameters):
            self.load_weights(saved)
            return
        named = dict(zip(self.names, self.parameters, strict=True))
        wrong = sorted(named.keys() ^ saved.keys()) or [n for n, p in named.items() if p.shape != saved[n].shape]
        if wrong:
            raise ValueError(f"the weights differ in names or shapes, first in {wrong[0]}")
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(_laid_out(saved[name], p))  # counted in the version of p

    def _optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state with the names of parameters in place of their numbers, where there are names."""
        raw = self.optimizer.state_dict()
        if self.names is None:
            return raw
        state = {}
        for i in sorted(raw["state"]):  # in the same order on every process
            entry = raw["state"][i]
            state[self.names[i]] = {k: on_main(v) if is_sharded(v) else v for k, v in entry.items()}
        groups = [{**group, "params": [self.names[i] for i in group["params"]]} for group in raw["param_groups"]]
        return {"state": state, "param_groups": groups}

    def _load_optimizer_state(self, saved: dict[str, Any]) -> None:
        if self.names is None:
            self.optimizer.load_state_dict(saved)
            return
        number = {name: i for i, name in enumerate(self.names)}
        state = {}
        for name, entry in saved["state"].items():
            if name not in number:
                raise ValueError(f"its optimizer has a state of {name}, which is not trained here")
            p = self.parameters[number[name]]
            state[number[name]] = {k: _laid_out(v, p) if k != "step" else v for k, v in entry.items()}
        groups = [{**group, "params": [number[n] for n in group["params"]]} for group in saved["param_groups"]]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out(value: Any, like: nn.Parameter) -> Any:
    """A complete tensor of an optimizer's state, laid out as its parameter."""
    if not is_sharded(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import DTensor

    laid: Any = like
    part = share(value, like)
    return DTensor.from_local(
        part, laid.device_mesh, laid.placements, run_check=False, shape=laid.shape, stride=laid.stride()
    )
