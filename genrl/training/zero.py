"""DeepSpeed's ZeRO-2: gradients and optimizer divided over the processes, a whole copy of the weights on each.

The loop drives the engine itself and not through accelerate, which would step in every backward: the norm must be known
before a step, so that one that is not finite, or nothing, changes no weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from genrl.training.errors import SetupError
from genrl.training.sharding import norm_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero:
    """An engine around the network.

    Args:
        accelerator: of the run, made without a plug-in.
        settings: of the trainer.
    """

    lockstep, gathers = True, False  # gradients are exchanged in every backward

    def __init__(self, accelerator: Any, settings: Any):
        self.accelerator, self.settings = accelerator, settings

    def distribute(self, generator: Any) -> None:
        """The engine divides its own copy of the parameters."""

    def prepare(self, module: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """Make the engine.

        Raises:
            SetupError: without the package.
        """
        try:
            import deepspeed
        except ImportError as error:
            raise SetupError(
                "ZeRO-2 needs the package: pip install deepspeed. trainer.sharding=fsdp2 does without"
            ) from error
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        module = self.accelerator.prepare_model(module, evaluation_mode=True)  # autocast only; weights stay float32
        config = {
            "train_micro_batch_size_per_gpu": 1,  # says nothing here: the loop scales its losses itself
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.settings.max_grad_norm,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
        return self.engine, ZeroOptimizer(self.engine, parameters)

    @contextmanager
    def together(self, module: nn.Module, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """The norm; the engine clips when it steps."""
        parts = [g for group in self.engine.optimizer.averaged_gradients.values() for g in group or ()]
        return norm_of([g for g in parts if g is not None], self.accelerator.device)

    def complete(self) -> AbstractContextManager[Any]:
        return nullcontext()


class ZeroOptimizer:
    """The engine's optimizer, with a state by parameter as torch's optimizers have it.

    Args:
        engine: of DeepSpeed. parameters: the trained ones, in the order of the run.
    """

    step_was_skipped = False

    def __init__(self, engine: Any, parameters: Sequence[nn.Parameter]):
        self.engine, self.parameters = engine, list(parameters)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        """Forget gradients that no step has used."""
        zero = self.engine.optimizer
        zero.zero_grad(set_to_none=True)
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in kept:
                kept[group] = None

    def state_dict(self) -> dict[str, Any]:
        """Complete moments by the number of the parameter; every process must call it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        groups[0]["params"] = list(range(len(self.parameters)))
        steps = [entry["step"] for entry in self._inner.state.values() if "step" in entry]
        state = {}
        for i, p in enumerate(self.parameters if steps else ()):
            moments = {key: safe_get_full_optimizer_state(p, key).cpu() for key in MOMENTS}
            state[i] = {"step": steps[0].detach().cpu().clone(), **moments}
        return {"state": state, "param_groups": groups[:1]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take moments, and the weights that the parameters have now."""
        from deepspeed.utils import safe_set_full_optimizer_state

        zero = self.engine.optimizer
        zero.refresh_fp32_params()  # the engine steps a copy of its own
        if not saved["state"]:
            return
        step = max((entry["step"] for entry in saved["state"].values()), key=float)
        for group in self.param_groups:
            group |= {k: copy.copy(v) for k, v in saved["param_groups"][0].items() if k != "params"}
            for flat in group["params"]:
                moments = {key: torch.zeros_like(flat) for key in MOMENTS}
                self._inner.state[flat] = {"step": torch.as_tensor(step).clone(), **moments}
        zero._lazy_init_hp_params_optimizer_state()
        for i, p in enumerate(self.parameters):
            for key in MOMENTS if i in saved["state"] else ():
                safe_set_full_optimizer_state(p, saved["state"][i][key].to(p.device), key)
