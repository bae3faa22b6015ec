"""`ShapesGenerator`: a generator of 3D objects from a picture of them that trains its own base in a minute."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from genrl.diffusion.paths import RectifiedFlow
from genrl.generators.base import Noise, TrainableWeights, draw_noise, load_strictly
from genrl.generators.cache import cached_folder
from genrl.generators.meshes import export_meshes
from genrl.generators.recipe import BaseRecipe, seeded
from genrl.generators.shapes_base import Codec, base_data, fit_codec, train_base, velocity_of
from genrl.generators.shapes_data import BROKEN_SHARE, KINDS, RESOLUTION
from genrl.generators.shapes_view import RENDERERS, VIEW_SIZE, View, condition_views, shaded, to_media
from genrl.generators.token_dit import CONFIG_FILE, WEIGHTS_FILE
from genrl.networks.shapes import LatentMLP, VoxelDiT
from genrl.prompts import Prompt

SHAPES_VERSION = 1  # raise it when a change of the data, the networks or the training changes the bases
CODEC_FILE = "codec.safetensors"
FIRST_HELD_OUT = 100


class ShapesGenerator:
    """Chairs, tables, mugs, lamps, crosses and brackets on a grid, from one picture of 24x24 pixels.

    Latents are principal components of truncated signed distances; a rectified flow in them (2.3 M parameters) is
    trained on 3,000 objects, half of which are broken (a slab is missing, or a ball floats beside them) while their
    picture shows them whole. So the base draws loose and lacking parts now and then, which is what a reward can mend.

    A prompt is "chair 17": the picture is rendered from the 17th chair, or read from `metadata["image"]`, the path of
    a silhouette (bright on dark, or opaque on transparent).

    Media are [B, n, n, n] in [0, 1], indexed [x, y, z], above .5 inside.

    Args:
        network: "latent" (an MLP on principal components) or "grid" (a transformer on cubes of 4^3 cells of the grid
            itself, which takes a GPU: after a minute on a CPU it has learned next to nothing).
        latent_dim: principal components; not used by "grid".
        dim, hidden, depth: of the network.
        resolution: cells of a side, 16 or 24.
        view: "silhouette" or "depth", what the picture shows.
        base_shapes: objects that the base is trained on.
        base_steps: steps of base training, 128 objects each.
        base_seed: seed of base training.
        broken_share: share of the objects that are broken.
        cache_dir: where trained bases are kept; by default $GENRL_CACHE or ~/.cache/genrl.

    Raises:
        ValueError: for an unknown network or view, or a resolution that is no multiple of 4 from 16 on.

    Example:
        >>> ShapesGenerator().encode(["chair 17", "mug 3"]).shape
        torch.Size([2, 24, 24])
    """

    reads_metadata = True

    def __init__(
        self,
        network: Literal["latent", "grid"] = "latent",
        latent_dim: int = 128,
        dim: int = 256,
        hidden: int = 512,
        depth: int = 4,
        resolution: int = RESOLUTION,
        view: View = "silhouette",
        base_shapes: int = 3000,
        base_steps: int = 900,
        base_seed: int = 0,
        broken_share: float = BROKEN_SHARE,
        cache_dir: str | os.PathLike[str] | None = None,
    ):
        if network not in ("latent", "grid"):
            raise ValueError(f"network {network!r} is unknown; allowed are 'latent' and 'grid'")
        if view not in RENDERERS:
            raise ValueError(f"view {view!r} is unknown; allowed are {', '.join(RENDERERS)}")
        if resolution < 16 or resolution % 4:
            raise ValueError(f"resolution {resolution} must be a multiple of 4 from 16 on: thin parts need 16 cells")
        self._config: dict[str, Any] = {
            "network": network, "latent_dim": latent_dim, "dim": dim, "hidden": hidden, "depth": depth,
            "resolution": resolution, "view": view, "base_shapes": base_shapes, "base_steps": base_steps,
            "base_seed": base_seed, "broken_share": broken_share,
        }  # fmt: skip
        self.path = RectifiedFlow()
        self.resolution, self.view, self.latent_dim = resolution, view, latent_dim
        self.kind = network
        self.latent_shape: tuple[int, ...] = (latent_dim,) if network == "latent" else (1, *(resolution,) * 3)
        self._recipe = BaseRecipe(base_steps, base_seed, batch_size=128, learning_rate=1.5e-3, null_probability=0.0)
        self._cache_dir = cache_dir
        self._device = torch.device("cpu")
        self._module: nn.Module | None = None
        self._weights: TrainableWeights | None = None
        self._codec: Codec | None = None

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments of a base that trains in seconds."""
        tiny = {"latent_dim": 32, "dim": 32, "hidden": 64, "depth": 1, "base_shapes": 200, "base_steps": 20}
        return {**arguments, **tiny, "cache_dir": str(folder / "shapes")}

    # The network and its weights

    @property
    def module(self) -> nn.Module:
        """The network, or the wrapper that the loop put in its place; it predicts x0.

        Raises:
            RuntimeError: before `prepare`.
        """
        return self._ready(self._module)

    @module.setter
    def module(self, module: nn.Module) -> None:
        self._module = module

    @property
    def codec(self) -> Codec:
        return self._ready(self._codec)

    def _ready(self, part: Any) -> Any:
        if part is None:
            raise RuntimeError("ShapesGenerator has no weights yet; call prepare(device) first")
        return part

    def prepare(self, device: torch.device | str, progress: bool = True) -> None:
        """Load the base from the cache or train it there first; see `Generator.prepare`."""
        self._device = torch.device(device)
        if self._module is None:
            config = {"version": SHAPES_VERSION, "recipe": asdict(self._recipe), **self._config}
            folder = cached_folder("shapes", config, lambda folder: self._train_base(folder, progress), self._cache_dir)
            self._load(folder)
        self.module.to(self._device)
        self._codec = self.codec.to(self._device)

    def _build(self) -> nn.Module:
        c = self._config
        with seeded(self._recipe.seed):
            if self.kind == "grid":
                return VoxelDiT(self.resolution, VIEW_SIZE, dim=c["dim"], depth=c["depth"]).eval()
            return LatentMLP(self.latent_dim, VIEW_SIZE, c["dim"], c["hidden"], c["depth"]).eval()

    def _train_base(self, folder: Path, progress: bool) -> None:
        c = self._config
        shapes, whole = base_data(c["base_shapes"], self.resolution, c["broken_share"])
        codec = fit_codec(shapes, self.latent_dim if self.kind == "latent" else None, self._recipe.seed)
        views = torch.cat([RENDERERS[self.view](part) for part in whole.split(100)])
        network = self._build().to(self._device)
        losses = train_base(network, codec.encode(shapes), views, self._recipe, progress)
        codec.save(folder / CODEC_FILE)
        _save(network, folder / WEIGHTS_FILE)
        (folder / "losses.json").write_text(json.dumps([round(loss, 5) for loss in losses]))

    def _load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        network = self._build()
        load_strictly(dict(network.named_parameters()), load_file(folder / WEIGHTS_FILE))
        self._network = self._module = network.to(self._device)
        self._weights = TrainableWeights(network)
        self._codec = Codec.load(folder / CODEC_FILE).to(self._device)

    # The generator protocol

    def encode(self, prompts: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None) -> Tensor:
        """Pictures [B, 24, 24] in [0, 1]; see `condition_views`.

        Raises:
            ValueError, FileNotFoundError: for a prompt that names no object, and an image that is not there.
        """
        metadata = [{} for _ in prompts] if metadata is None else metadata
        return condition_views(prompts, metadata, self.resolution, self.view).to(self._device)

    def initial_latents(self, cond: Tensor, noise: Noise) -> Tensor:
        """Standard normal latents [B, *latent_shape], one per row of `cond`."""
        return draw_noise(noise, (len(cond), *self.latent_shape), self._device)

    def velocity(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        """The path's velocity, float32 like x; t is [B]. Below t = .05 it is that towards x0 at t = .05."""
        return velocity_of(self.module(x, t, cond).float(), x, t)

    def decode(self, x0: Tensor) -> Tensor:
        """Media [B, n, n, n] in [0, 1], above .5 inside; gradients flow."""
        return to_media(self.codec.decode(x0.float()))

    def preview(self, media: Tensor) -> Tensor:
        """Shaded pictures [B, 3, 72, 72] of media [B, n, n, n]."""
        return shaded(media)

    def export_media(self, media: Tensor, folder: str | os.PathLike[str], names: Sequence[str]) -> list[Path]:
        """Write each of media [B, n, n, n] as a mesh `NAME.ply`; equal names get a number. See `export_meshes`."""
        return export_meshes(media, folder, names)

    def trainable(self) -> list[nn.Parameter]:
        return self._ready(self._weights).parameters()

    def reference(self) -> AbstractContextManager[None]:
        """Inside it, `velocity` is the model as it was after `prepare` or `from_pretrained`; no gradients."""
        return self._ready(self._weights).reference()

    def state_dict(self) -> dict[str, Tensor]:
        return self._ready(self._weights).state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load trainable parameters; the reference stays the starting model.

        Raises:
            ValueError: when names or shapes differ.
        """
        self._ready(self._weights).load_state_dict(state)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json`, `model.safetensors` and `codec.safetensors`."""
        folder, codec = Path(folder), self.codec
        folder.mkdir(parents=True, exist_ok=True)
        _save(self._network, folder / WEIGHTS_FILE)
        codec.save(folder / CODEC_FILE)
        config = {"generator": type(self).__name__, "arguments": self._config}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Load what `save_pretrained` wrote, ready to sample on the CPU (`prepare(device)` moves it).

        Raises:
            FileNotFoundError: when there is no `config.json`.
            ValueError: when the folder is another generator's.
        """
        folder = Path(folder)
        if not (folder / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}; pass a folder that save_pretrained wrote")
        config = json.loads((folder / CONFIG_FILE).read_text())
        if config.get("generator") != cls.__name__:
            raise ValueError(f"{folder} holds a {config.get('generator')}, not a {cls.__name__}; use that class")
        generator = cls(**config["arguments"])
        generator._load(folder)
        return generator


class ShapePrompts:
    """Objects to be drawn from their pictures: 600 to train on, 48 others held out, as many of each kind.

    Args:
        train, held_out: how many of each.
        kinds: of objects.

    Raises:
        ValueError: for an unknown kind, or more than a hundred objects of a kind to train on.
    """

    def __init__(self, train: int = 600, held_out: int = 48, kinds: Sequence[str] = KINDS):
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ValueError(f"kinds {unknown or list(kinds)} are unknown; allowed are {', '.join(KINDS)}")
        if not (0 < train <= FIRST_HELD_OUT * len(kinds) and held_out > 0):
            raise ValueError(
                f"train = {train} and held_out = {held_out} objects of {len(kinds)} kinds; train on 1 to "
                f"{FIRST_HELD_OUT * len(kinds)}, and hold out at least one"
            )
        self.train = [_prompt(kinds[i % len(kinds)], i // len(kinds)) for i in range(train)]
        self.held_out = [_prompt(kinds[i % len(kinds)], FIRST_HELD_OUT + i // len(kinds)) for i in range(held_out)]


def _prompt(kind: str, seed: int) -> Prompt:
    return Prompt(f"{kind} {seed}", {"kind": kind, "seed": seed})


def _save(network: nn.Module, file: Path) -> None:
    from safetensors.torch import save_file

    state = {name: p.detach().cpu().contiguous() for name, p in network.named_parameters()}
    save_file(state, file, metadata={"format": "pt"})
