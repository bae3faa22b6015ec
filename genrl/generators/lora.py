"""LoRA adapters (Hu et al. 2021) through peft: in our own networks, and in the denoisers of diffusers pipelines."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrl.generators.base import NamedWeights, load_strictly
from genrl.generators.pipeline_loading import quiet, reading_adapter
from genrl.networks.weights import WeightSet, current

ADAPTER = "policy"
WEIGHTS_FILE = "adapter_model.safetensors"  # peft's own file names, so that peft can read the folder too
CONFIG_FILE = "adapter_config.json"
PIPELINE_FILE = "pytorch_lora_weights.safetensors"  # diffusers' file name
# What diffusers' transformers and U-Nets call the projections of their attention; a model has some of them.
ATTENTION: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "to_out", "to_qkv_mlp_proj")
ATTENTION += ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")  # the text's, in joint attention


@dataclass(frozen=True)
class LoraSettings:
    """Rank, alpha (the update is scaled by alpha / rank) and the names of the linear layers that get an adapter."""

    rank: int = 8
    alpha: float = 16
    targets: Sequence[str] = ("qkv", "proj", "fc1", "fc2")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoraSettings:
        """Raises ValueError for an unknown key, a value of another type or a rank below 1."""
        unknown = sorted(values.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise ValueError(f"unknown LoRA settings {unknown}; allowed are {', '.join(cls.__dataclass_fields__)}")
        number = (int, float)
        kinds: dict[str, tuple[Any, str]] = {"rank": (int, "an integer"), "alpha": (number, "a number")}
        kinds["targets"] = ((list, tuple), "a list of names")
        for key, value in values.items():
            if not isinstance(value, kinds[key][0]) or isinstance(value, bool):
                raise ValueError(f"generator.lora.{key} must be {kinds[key][1]}, got {value!r}")
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
        with without_adapters(self._network), torch.no_grad():
            yield

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


@contextlib.contextmanager
def without_adapters(network: nn.Module) -> Iterator[None]:
    """Disable every adapter inside; states and `requires_grad` are as before afterwards."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in network.modules() if isinstance(module, BaseTunerLayer)]
    enabled = [not layer.disable_adapters for layer in layers]
    flags = {p: p.requires_grad for p in network.parameters()}
    try:
        _enable(layers, [False] * len(layers), flags)
        yield
    finally:
        _enable(layers, enabled, flags)


# ------------------------------------------------------------------------------------------ diffusers pipelines


class PipelineWeights(NamedWeights):
    """What is trained in the denoisers of a pipeline, and the model that it is compared with.

    Args:
        network: a module that holds the denoisers.
        base: the reference is the network without any adapter; else it is the network as it is now.
        adapter: whether an adapter is trained, whose start is small enough to be kept from the beginning.
        read: gives the starting values of all trained parameters from where they came from, for a reference that is
            first asked for when they have changed; None where they cannot be read again.
    """

    def __init__(self, network: nn.Module, base: bool, adapter: bool, read: Callable[[], list[Tensor]] | None):
        super().__init__(network)
        self._network, self._base, self._read = network, base and adapter, read
        self._versions = self._read_versions()
        self._start = WeightSet(self.parameters()) if adapter and not base else None

    def _read_versions(self) -> list[int]:
        return [current(p)._version for p in self.parameters()]

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Inside it the network is the reference, without gradients; everything is as before afterwards."""
        if not self._base and self._start is None:
            start = WeightSet(self.parameters())
            if self._read_versions() != self._versions:
                if self._read is None:
                    raise RuntimeError(
                        "the weights have changed, and a pipeline object cannot be read again; enter reference() "
                        "before the first update, or give the pipeline as a folder or hub id"
                    )
                start.load_state_dict({"values": self._read()})
            self._start = start
        with without_adapters(self._network) if self._start is None else self._start.active(), torch.no_grad():
            yield


def train_adapter(
    pipe: Any,
    denoisers: Mapping[str, Any],
    trained: Sequence[str],
    settings: LoraSettings,
    sources: Mapping[str, str | os.PathLike[str]],
    seed: int,
    allow_noop: bool = False,
) -> None:
    """Give a pipeline the adapters of `sources`, and train the one named `ADAPTER`, which is new unless among them.

    Args:
        pipe, denoisers: the pipeline, and its denoisers by name; trained: the names of those that are trained.
        settings: of the trained adapter. With no targets, all projections of attention are.
        sources: {name: where from} of adapters, see `load_adapter`; all are active.
        seed: of a new adapter's initialisation.
        allow_noop: accept adapters that change nothing.

    Raises:
        ValueError: when targets match no layer, or a loaded adapter has another rank or alpha or changes nothing.
    """
    for name, source in sources.items():
        load_adapter(pipe, denoisers, source, name, allow_noop)
    for name, model in denoisers.items():
        if name in trained and ADAPTER not in sources:
            add_adapter(name, model, settings, seed)
        config = getattr(model, "peft_config", {})
        if name in trained and (config[ADAPTER].r, config[ADAPTER].lora_alpha) != (settings.rank, settings.alpha):
            has = f"rank {config[ADAPTER].r} and alpha {config[ADAPTER].lora_alpha}"
            raise ValueError(
                f"the adapter in {sources[ADAPTER]} has {has} for {name}; lora must say so too: {settings}"
            )
        if config:
            model.set_adapter([a for a in dict.fromkeys((*sources, ADAPTER)) if a in config])
        for key, p in model.named_parameters():
            p.requires_grad_(name in trained and f".{ADAPTER}." in key)
            if p.requires_grad:
                p.data = p.data.float()
        model.eval()


def add_adapter(name: str, model: Any, settings: LoraSettings, seed: int) -> None:
    """Give a diffusers model a new adapter named `ADAPTER`, which changes nothing yet; see `train_adapter`."""
    from peft import LoraConfig

    from genrl.generators.recipe import seeded

    if not hasattr(model, "add_adapter"):
        raise ValueError(f"{name}, a {type(model).__name__}, takes no LoRA adapters; lora=None trains all its weights")
    # Inside a layer that has a frozen adapter already, peft keeps the layer as base_layer, beside the adapter's own.
    linear = [key for key, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
    layers = {key.removesuffix(".base_layer") for key in linear if ".lora_" not in key}
    lists = {key for key, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    found = [t for t in settings.targets or ATTENTION if _matches(layers, t) and not _matches(lists, t)]
    wrong = sorted(set(settings.targets) - set(found))
    if wrong or not found:
        endings = sorted({re.sub(r".*?([^.]+(\.\d+)?)$", r"\1", key) for key in layers})
        raise ValueError(
            f"LoRA targets {wrong or list(ATTENTION)} match no layer of {name}; its layers end in {', '.join(endings)}"
        )
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=found, lora_dropout=0.0)
    with seeded(seed), quiet():
        model.add_adapter(config, adapter_name=ADAPTER)


def load_adapter(
    pipe: Any, denoisers: Mapping[str, Any], source: str | os.PathLike[str], name: str, allow_noop: bool = False
) -> None:
    """Add an adapter to a pipeline's denoisers.

    Args:
        pipe, denoisers: the pipeline, and its denoisers by name.
        source: what `save_adapter` wrote, or anything that the pipeline's `load_lora_weights` takes.
        name: of the adapter in the pipeline.
        allow_noop: accept one that changes nothing.

    Raises:
        ValueError: when it changes nothing: no layer takes it, or every B is zero.
    """
    folder, own = Path(source), hasattr(pipe, "load_lora_weights")
    with reading_adapter(name, source):
        try:
            if own and (not folder.is_dir() or (folder / PIPELINE_FILE).is_file()):
                pipe.load_lora_weights(str(source), adapter_name=name)
            for key, model in denoisers.items():
                if own and (folder / key).is_dir():
                    pipe.load_lora_weights(str(folder / key), adapter_name=name, **{f"load_into_{key}": True})
                elif (folder / key).is_dir():
                    model.load_lora_adapter(
                        str(folder / key), prefix=None, adapter_name=name, weight_name=PIPELINE_FILE
                    )
        except ValueError as error:
            raise ValueError(f"the adapter in {source} does not fit {type(pipe).__name__}: {error}") from error
    b = [p for model in denoisers.values() for key, p in model.named_parameters() if f"lora_B.{name}." in key]
    if not b or not (allow_noop or any(bool(p.any()) for p in b)):
        why = "every lora_B is zero, as before any training" if b else f"no layer of {', '.join(denoisers)} takes it"
        raise ValueError(f"the adapter in {source} changes nothing: {why}; choose another checkpoint of it")


def save_adapter(pipe: Any, denoisers: Mapping[str, Any], state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters named `ADAPTER`, with rank, alpha and targets, for the pipeline's `load_lora_weights`.

    The model that the pipeline's `save_lora_weights` knows goes into the folder itself, another one (the second
    expert) into a folder of its name: `load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)`.

    Args:
        pipe, denoisers: the pipeline, and its trained denoisers by name.
        state: tensors by their names in a module that holds the denoisers.
        folder: must exist.
    """
    save = getattr(type(pipe), "save_lora_weights", None)
    names = [] if save is None else list(inspect.signature(save).parameters)
    known = [n.removesuffix("_lora_layers") for n in names if n.endswith("_lora_layers")]
    for key, model in denoisers.items():
        inside = folder if key in known else folder / key
        like = next((n for n in known if key.startswith(n)), None)
        if save is None or like is None:
            model.save_lora_adapter(inside, adapter_name=ADAPTER)
            continue
        layers = {n.removeprefix(f"{key}."): p for n, p in state.items() if n.startswith(f"{key}.")}
        layers = {n.replace(f".{ADAPTER}.", "."): p.detach().cpu().contiguous() for n, p in layers.items()}
        config = {n: sorted(v) if isinstance(v, set) else v for n, v in model.peft_config[ADAPTER].to_dict().items()}
        save(inside, **{f"{like}_lora_layers": layers, f"{like}_lora_adapter_metadata": config})


def _matches(layers: Collection[str], target: str) -> bool:
    return any(key == target or key.endswith(f".{target}") for key in layers)


def _peft_name(name: str) -> str:
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def _enable(layers: list[Any], enabled: list[bool], flags: dict[nn.Parameter, bool]) -> None:
    for layer, on in zip(layers, enabled, strict=True):
        layer.enable_adapters(on)
    for p, flag in flags.items():  # peft ties requires_grad to the adapter's state; the trainable set must not change
        p.requires_grad_(flag)
