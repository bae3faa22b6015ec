"""The built-in generators' common part: a `VelocityDiT` on token ids whose base is trained by the recipe."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from genrl.diffusion.paths import Path as ProbabilityPath
from genrl.diffusion.paths import Prediction, RectifiedFlow, VariancePreserving
from genrl.generators.base import Noise, TrainableWeights, draw_noise, load_strictly
from genrl.generators.cache import cached_folder
from genrl.generators.lora import LoraSettings, LoraWeights
from genrl.generators.recipe import RECIPE_VERSION, BaseRecipe, seeded, train_flow_base
from genrl.networks import VelocityDiT

PathName = Literal["rectified_flow", "vp"]
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def stable_diffusion_alphas(n: int = 1000) -> Tensor:
    """The "scaled linear" table of Stable Diffusion [n]: sqrt(beta) runs from sqrt(.00085) to sqrt(.012).

    Its last entry leaves A(1) = 0.068, so that an epsilon prediction still determines x0 at t = 1.
    """
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, n, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0)


class EpsilonOutput(nn.Module):
    """Turns a network of a VP path's v-prediction into one that predicts epsilon: eps = A v + B x."""

    def __init__(self, network: nn.Module, path: ProbabilityPath):
        super().__init__()
        self.network, self.path = network, path

    def forward(self, x: Tensor, t: Tensor, cond: Tensor, null: Tensor | None = None) -> Tensor:
        return self.path.x0_eps(x, self.network(x, t, cond, null=null), t)[1]


class TokenDiTGenerator(ABC):
    """A text-conditional generator that trains its own base; subclasses say what data, tokens and sizes it has.

    Latents are the pixels scaled to [-1, 1]. With `path="rectified_flow"` the network predicts the velocity; with "vp"
    it predicts epsilon on Stable Diffusion's noise schedule, as DDPO's models do, and `velocity` converts.

    Args:
        network: keyword arguments of `VelocityDiT`.
        recipe: how the base is trained.
        path: "rectified_flow" or "vp".
        guidance_scale: w of classifier-free guidance, v = v_null + w (v_cond - v_null), in sampling and in training
            alike; None for the conditional velocity alone (one network pass instead of two).
        lora: None trains all weights; a dictionary of `LoraSettings` trains an adapter.
        cache_dir: where trained bases are kept, see `cache_root`.
        config: the constructor's own arguments, for `save_pretrained`.
    """

    latent_shape: tuple[int, ...]
    base_name: str

    def __init__(
        self,
        network: dict[str, Any],
        recipe: BaseRecipe,
        path: PathName,
        guidance_scale: float | None,
        lora: dict[str, Any] | None,
        cache_dir: str | os.PathLike[str] | None,
        config: dict[str, Any],
    ):
        if path not in ("rectified_flow", "vp"):
            raise ValueError(f"path {path!r} is unknown; allowed are 'rectified_flow' and 'vp'")
        self.path: ProbabilityPath = RectifiedFlow()
        self.prediction: Prediction = "velocity"
        if path == "vp":
            self.path, self.prediction = VariancePreserving(stable_diffusion_alphas()), "epsilon"
        self.guidance_scale = guidance_scale
        self.lora = None if lora is None else LoraSettings.from_dict(lora)
        self._network_config, self._recipe, self._path_name = network, recipe, path
        self._cache_dir, self._config = cache_dir, config
        self._device = torch.device("cpu")
        self._module: nn.Module | None = None
        self._weights: TrainableWeights | LoraWeights | None = None

    # What a subclass provides

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Token ids int64 [B, L] on the generator's device.

        Raises:
            ValueError: naming a prompt that it cannot read, and why.
        """

    @abstractmethod
    def training_data(self) -> tuple[Tensor, Tensor]:
        """Media float32 [N, C, H, W] in [0, 1] and token ids int64 [N, K, L], K descriptions of each row."""

    # The network and its weights

    @property
    def module(self) -> nn.Module:
        """The network, or the wrapper that the loop put in its place.

        Raises:
            RuntimeError: before `prepare`, because an untrained network would answer without complaint.
        """
        if self._module is None:
            raise RuntimeError(f"{type(self).__name__} has no weights yet; call prepare(device) first")
        return self._module

    @module.setter
    def module(self, module: nn.Module) -> None:
        self._module = module

    @property
    def weights(self) -> TrainableWeights | LoraWeights:
        """The trainable parameters and their frozen start."""
        if self._weights is None:
            raise RuntimeError(f"{type(self).__name__} has no weights yet; call prepare(device) first")
        return self._weights

    def prepare(self, device: torch.device | str, progress: bool = True) -> None:
        """Load the base from the cache or train it there first; see `Generator.prepare`."""
        self._device = torch.device(device)
        if self._module is None:
            folder = cached_folder(
                self.base_name, self.base_config(), lambda folder: self._train_base(folder, progress), self._cache_dir
            )
            self._set_network(_load(self._build(), folder / WEIGHTS_FILE))
        self.module.to(self._device)

    def build(self, device: torch.device | str) -> None:
        """An untrained network in the shape of the real one, to measure sizes with."""
        self._device = torch.device(device)
        if self._module is None:
            self._set_network(self._build())

    def base_config(self) -> dict[str, Any]:
        """Everything that determines the base: the key of its cache folder."""
        return {
            "version": RECIPE_VERSION,
            "base": self.base_name,
            "network": self._network_config,
            "path": self._path_name,
            "recipe": asdict(self._recipe),
        }

    def _build(self) -> VelocityDiT:
        with seeded(self._recipe.seed):
            return VelocityDiT(**self._network_config).eval()

    def _train_base(self, folder: Path, progress: bool) -> None:
        network = self._build().to(self._device)
        media, tokens = self.training_data()
        title = f"training the {self.base_name} base"
        losses = train_flow_base(network, 2 * media - 1, tokens, self.path, self._recipe, progress, title)
        _save(network, folder / WEIGHTS_FILE)
        (folder / "losses.json").write_text(json.dumps([round(loss, 5) for loss in losses]))

    def _set_network(self, network: VelocityDiT) -> None:
        network = network.to(self._device)
        if self.lora is None:
            self._weights = TrainableWeights(network)
        else:
            self._weights = LoraWeights(network, self.lora, seed=self._recipe.seed)
        self._network = network
        self._module = EpsilonOutput(network, self.path).eval() if self.prediction == "epsilon" else network

    # The generator protocol

    def initial_latents(self, cond: Tensor, noise: Noise) -> Tensor:
        """Standard normal latents [B, *latent_shape], one per row of `cond`."""
        return draw_noise(noise, (len(cond), *self.latent_shape), self._device)

    def velocity(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        """The path's velocity with guidance, float32 [B, C, H, W]; t is [B]."""
        if self.guidance_scale is None:
            prediction = self.module(x, t, cond).float()
        else:
            null = torch.arange(2 * len(x), device=x.device) >= len(x)  # [2 B]
            both = self.module(torch.cat([x, x]), torch.cat([t, t]), torch.cat([cond, cond]), null=null).float()
            conditional, unconditional = both.chunk(2)
            prediction = unconditional + self.guidance_scale * (conditional - unconditional)
        return self.path.velocity_from(prediction, x, t, self.prediction)

    def decode(self, x0: Tensor) -> Tensor:
        """Latents [B, C, H, W] in about [-1, 1] to media in [0, 1]."""
        return ((x0.float() + 1) / 2).clamp(0, 1)

    def trainable(self) -> list[nn.Parameter]:
        return self.weights.parameters()

    def reference(self) -> AbstractContextManager[None]:
        """Inside it, `velocity` is the model as it was after `prepare` or `from_pretrained`; no gradients."""
        return self.weights.reference()

    def state_dict(self) -> dict[str, Tensor]:
        """The trainable parameters by name; they share memory with the live ones, as in `nn.Module.state_dict`."""
        return self.weights.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load trainable parameters; the reference stays the starting model.

        Raises:
            ValueError: when names or shapes differ.
        """
        self.weights.load_state_dict(state)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors`; with LoRA that is the base, next to peft's adapter files."""
        folder = Path(folder)
        weights = self.weights  # raises before a folder is made
        folder.mkdir(parents=True, exist_ok=True)
        _save(self._network, folder / WEIGHTS_FILE)
        if isinstance(weights, LoraWeights):
            weights.save(folder)
        config = {"generator": type(self).__name__, "arguments": self._config}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], allow_noop: bool = False) -> Self:
        """Load what `save_pretrained` wrote, ready to sample on the CPU (`prepare(device)` moves it).

        Its reference is what was loaded; for a LoRA it is the base below the adapter.

        Args:
            folder: made by `save_pretrained`.
            allow_noop: accept a LoRA that changes nothing.

        Raises:
            FileNotFoundError: when there is no `config.json`.
            ValueError: when the folder is another generator's, or for an adapter that changes nothing.
        """
        folder = Path(folder)
        if not (folder / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}; pass a folder that save_pretrained wrote")
        config = json.loads((folder / CONFIG_FILE).read_text())
        if config.get("generator") != cls.__name__:
            raise ValueError(f"{folder} holds a {config.get('generator')}, not a {cls.__name__}; use that class")
        generator = cls(**config["arguments"])
        generator._set_network(_load(generator._build(), folder / WEIGHTS_FILE))
        if isinstance(generator._weights, LoraWeights):
            generator._weights.load(folder, allow_noop=allow_noop)
        return generator


def _save(network: nn.Module, file: Path) -> None:
    """Write the network without its adapter, under the names it has without one."""
    from safetensors.torch import save_file

    state = {
        name.replace(".base_layer.", "."): p.detach().cpu().contiguous()
        for name, p in network.named_parameters()
        if "lora_" not in name
    }
    save_file(state, file, metadata={"format": "pt"})


def _load(network: VelocityDiT, file: Path) -> VelocityDiT:
    from safetensors.torch import load_file

    load_strictly(dict(network.named_parameters()), load_file(file))
    return network
