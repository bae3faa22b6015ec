"""LoRA adapters (Hu et al. 2021) through peft, with a reference that is the network without its adapter."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from genrl.generators.base import NamedWeights, load_strictly

ADAPTER = "policy"
WEIGHTS_FILE = "adapter_model.safetensors"  # peft's own file names, so that peft can read the folder too
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True)
class LoraSettings:
    """Rank, alpha (the update is scaled by alpha / rank) and the names of the linear layers that get an adapter."""

    rank: int = 8
    alpha: float = 16
    targets: Sequence[str] = ("qkv", "proj", "fc1", "fc2")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoraSettings:
        """Raises ValueError for an unknown key or a rank below 1."""
        unknown = sorted(values.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise ValueError(f"unknown LoRA settings {unknown}; allowed are {', '.join(cls.__dataclass_fields__)}")
        settings = cls(**values)
        if settings.rank < 1:
            raise ValueError(f"a LoRA rank must be at least 1, got {settings.rank}; lora=None trains all weights")
        return settings


class LoraWeights(NamedWeights):
    """An adapter inside a network; the counterpart of `TrainableWeights`.

    Injects the adapter and freezes everything else.

    Args:
        network: changed in place; its target layers are wrapped by peft.
        settings: see `LoraSettings`.
        seed: of the adapter's initialisation (A is random, B is zero: the start equals the base).
    """

    def __init__(self, network: nn.Module, settings: LoraSettings, seed: int = 0):
        from peft import LoraConfig, inject_adapter_in_model

        from genrl.generators.recipe import seeded

        self._network = network
        self._config = LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets), lora_dropout=0.0
        )
        with seeded(seed):
            inject_adapter_in_model(self._config, network, adapter_name=ADAPTER)
        network.eval()
        super().__init__(network)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Disable the adapter, without gradients; states and `requires_grad` are as before afterwards."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self._network.modules() if isinstance(module, BaseTunerLayer)]
        enabled = [not layer.disable_adapters for layer in layers]
        flags = {p: p.requires_grad for p in self._network.parameters()}
        try:
            _enable(layers, [False] * len(layers), flags)
            with torch.no_grad():
                yield
        finally:
            _enable(layers, enabled, flags)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter and its rank, alpha and targets in peft's format."""
        from safetensors.torch import save_file

        state = {_peft_name(name): p.detach().cpu().contiguous() for name, p in self.named.items()}
        save_file(state, Path(folder) / WEIGHTS_FILE, metadata={"format": "pt"})
        self._config.save_pretrained(str(folder))

    def load(self, folder: str | os.PathLike[str], allow_noop: bool = False) -> None:
        """Read an adapter that `save` (or peft) wrote.

        Raises:
            ValueError: when names, shapes, rank or alpha differ, or when the adapter changes nothing because every B
                is zero, unless `allow_noop` says that an untrained adapter is expected.
        """
        from safetensors.torch import load_file

        folder = Path(folder)
        saved = json.loads((folder / CONFIG_FILE).read_text())
        for key, mine in (("r", self._config.r), ("lora_alpha", self._config.lora_alpha)):
            if saved[key] != mine:
                raise ValueError(
                    f"the adapter in {folder} has {key}={saved[key]}, this generator has {mine}; build it with those"
                )
        state = load_file(folder / WEIGHTS_FILE)
        names = {_peft_name(name): name for name in self.named}
        load_strictly(self.named, {names.get(key, key): value for key, value in state.items()})
        if not allow_noop and not any(p.any() for name, p in self.named.items() if "lora_B" in name):
            raise ValueError(
                f"the adapter in {folder} changes nothing: every lora_B is zero, as before any training; choose a "
                "later checkpoint, or pass allow_noop=True if an untrained adapter is what you want"
            )


def _peft_name(name: str) -> str:
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def _enable(layers: list[Any], enabled: list[bool], flags: dict[nn.Parameter, bool]) -> None:
    for layer, on in zip(layers, enabled, strict=True):
        layer.enable_adapters(on)
    for p, flag in flags.items():  # peft ties requires_grad to the adapter's state; the trainable set must not change
        p.requires_grad_(flag)
