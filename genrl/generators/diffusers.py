"""`DiffusersGenerator`: any diffusers pipeline as a generator, without an adapter for its family."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from genrl.diffusion.paths import VariancePreserving
from genrl.diffusion.schedule import Schedule
from genrl.diffusion.schedulers import choose_path
from genrl.generators.base import Noise, draw_noise
from genrl.generators.lora import ADAPTER, LoraSettings, PipelineWeights, save_adapter, train_adapter
from genrl.generators.pipeline_errors import check_pipeline
from genrl.generators.pipeline_loading import load_pipeline, quiet
from genrl.generators.probe import Probe, Rows
from genrl.generators.prompt_cache import PromptCache
from genrl.networks.routed import Routed
from genrl.networks.weights import whole

CONFIG_FILE = "genrl.json"
DENOISERS = ("transformer", "unet", "prior")  # beginnings of the names that diffusers gives to denoisers


class DiffusersGenerator:
    """A diffusers pipeline: what is trained is the function that the pipeline itself evaluates, guidance included.

    Args:
        model: hub id or folder of a pipeline, or a pipeline object, which is then changed in place.
        lora: None trains all weights of the denoisers. A dictionary with `rank`, `alpha` and `targets` (names of
            layers; by default all projections of attention) trains an adapter.
        adapters: LoRA adapters {name: folder or hub id}. The one named "policy" is trained on, others are frozen.
        reference: what the policy is compared with: "base", the model without adapters, or "start", as it was found.
        train: names of the denoisers to train, such as ["transformer_2"]; None trains all.
        guidance_scale, negative_prompt, height, width, num_frames: arguments of the pipeline's call.
        call: further ones, such as {"true_cfg_scale": 4.0}. Rules that count steps see a single step.
        dtype: of frozen weights; trained ones are float32.
        scheduler: name of a diffusers scheduler to use instead of the pipeline's.
        gradient_checkpointing: recompute activations in the backward pass.
        vae_tiling, vae_slicing: decode in pieces.
        attention_backend: of diffusers, for example "flash".
        offload_text_encoders: keep them on the CPU except while new prompts are encoded.
        prompt_cache: "memory", or a folder for encoded prompts.
        load: further arguments of `from_pretrained`, such as `variant`, `revision` or `trust_remote_code`.
        seed: of a new adapter's initialisation.

    Conditions are int64 [B] on the CPU: rows of a table of the prompts and images that were encoded. Rows that differ
    in time, image or length of the encoded prompt are evaluated one after the other.
    """

    reads_metadata = True
    most: Callable[[int], int] | None = None  # set by a loop that shards: the largest of the processes' numbers
    latent_shape: tuple[int, ...]

    def __init__(
        self,
        model: Any,
        lora: dict[str, Any] | None = None,
        adapters: dict[str, str] | None = None,
        reference: Literal["base", "start"] = "base",
        train: list[str] | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        call: dict[str, Any] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        scheduler: str | None = None,
        gradient_checkpointing: bool = False,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        attention_backend: str | None = None,
        offload_text_encoders: bool = False,
        prompt_cache: str = "memory",
        load: dict[str, Any] | None = None,
        seed: int = 0,
    ):
        self._config = {k: v for k, v in locals().items() if k != "self"}
        if reference not in ("base", "start") or dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"{reference=}, {dtype=}; allowed are base, start and float32, bfloat16, float16")
        if adapters and lora is None:
            raise ValueError(f"adapters {list(adapters)} need lora settings: the one named {ADAPTER!r} is trained")
        self.lora = None if lora is None else LoraSettings.from_dict({"targets": (), **lora})
        self.model, self.adapters, self.train, self.load = model, dict(adapters or {}), train, dict(load or {})
        sizes = {"guidance_scale": guidance_scale, "height": height, "width": width, "num_frames": num_frames}
        self.call = {**{k: v for k, v in sizes.items() if v is not None}, **(call or {})}
        self._negative = self.call.pop("negative_prompt", negative_prompt)
        self._device, self._on_disk = torch.device("cpu"), isinstance(model, (str, os.PathLike))
        if not self._on_disk:
            check_pipeline(model)
        self._module: nn.Module | None = None
        self._table: list[tuple[Rows, Any]] = []  # a condition's row: prompt and image, and what can be joined with it
        self._rows: dict[Any, int] = {}
        self._timesteps: dict[float, tuple[float, torch.dtype]] = {}  # t of a grid -> the scheduler's own timestep
        self._last: Tensor | None = None
        self.allow_noop = False

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny pipeline of the same family and small sizes, to try a recipe with."""
        from genrl import tiny

        small = tiny.call_arguments(family := tiny.family_of(str(arguments["model"])))
        own = {key: small.pop(key, None) for key in ("height", "width", "num_frames")}
        own |= {"load": None, "adapters": None, "attention_backend": None, "prompt_cache": "memory", "dtype": "float32"}
        own |= {"model": str(tiny.saved_pipeline(family)), "call": {**(arguments.get("call") or {}), **small}}
        return {**arguments, **own}

    def prepare(self, device: torch.device | str, progress: bool = True) -> None:
        """Load the pipeline and freeze what is not trained; ValueError says which call or setting does not fit it."""
        self._device = torch.device(device)
        if self._module is None:
            self._build(self._load_pipeline(progress))
        for part in self.parts.values():
            if not (self._probe.texts.asleep and part in self._probe.texts.encoders):
                part.to(self._device)
        if not self._table:  # row 0 stands where only sizes matter
            size, some = (self.call.get("width") or 512, self.call.get("height") or 512), None
            if self._probe.needs_image:
                from PIL import Image

                some = Image.new("RGB", size, "gray")
            self._table.append((Rows(("",), some, "some image"), None))
            self.latent_shape = tuple(self._probe.initial_latents(self._table[0][0], torch.zeros).shape[1:])
            self._probe.texts.move_encoders(asleep=True)

    def _load_pipeline(self, progress: bool = False) -> Any:
        if not self._on_disk:
            return self.model
        dtypes = {"default": getattr(torch, self._config["dtype"])}
        if self.lora is None:  # what is trained is read in full precision
            dtypes |= {name: torch.float32 for name in self.train or [f"{n}{i}" for n in DENOISERS for i in ("", "_2")]}
        return load_pipeline(self.model, dtypes, self.load, progress)

    def _build(self, pipe: Any) -> None:
        check_pipeline(pipe)
        self.pipe, config, kind = pipe, self._config, type(pipe)
        # Where a text encoder happens to be must not decide where the pipeline makes its tensors.
        device = property(lambda pipe: self._device)
        pipe.__class__ = type(kind.__name__, (kind,), {"_execution_device": device, "__module__": kind.__module__})
        pipe.set_progress_bar_config(disable=True)
        for name in {"safety_checker", "watermark"} & vars(pipe).keys():  # they edit pictures, and pass no gradients
            setattr(pipe, name, None)
        scheduler, self.path, self.prediction = choose_path(pipe.scheduler, config["scheduler"])
        texts = PromptCache(pipe, config["prompt_cache"], config["offload_text_encoders"])
        self._probe = Probe(pipe, scheduler, self.call, self._negative, texts)
        self.parts = _modules(pipe)
        for part in self.parts.values():
            part.eval().requires_grad_(False)
        denoisers = {name: part for name, part in self.parts.items() if name.startswith(DENOISERS)}
        trained = list(denoisers) if self.train is None else self.train
        if not trained or set(trained) - denoisers.keys():
            raise ValueError(f"train = {trained} are not among the denoisers of {kind.__name__}: {list(denoisers)}")
        if self.lora is not None:
            train_adapter(pipe, denoisers, trained, self.lora, self.adapters, config["seed"], self.allow_noop)
        else:
            for name in trained:
                denoisers[name].float().requires_grad_(True)
        for part in denoisers.values():
            if config["gradient_checkpointing"]:
                part.enable_gradient_checkpointing()
            if config["attention_backend"] is not None:
                with quiet():
                    part.set_attention_backend(config["attention_backend"])
        for name in [name for name in ("tiling", "slicing") if config[f"vae_{name}"]]:
            getattr(pipe.vae, f"enable_{name}")()
        self._network = self._module = Routed(denoisers, lambda: self.module)
        self._probe.compute_dtype = denoisers[trained[0]].dtype
        lora, base = self.lora is not None, config["reference"] == "base"
        self.weights = PipelineWeights(self._network, base, lora, self._read_start if self._on_disk else None)

    def _read_start(self) -> list[Tensor]:
        fresh = _modules(self._load_pipeline())
        state = {f"{name}.{key}": p for name, part in fresh.items() for key, p in part.named_parameters()}
        return [state[name].float() for name in self.weights.named]

    @property
    def module(self) -> nn.Module:
        """The denoisers, or the wrapper that the loop put in their place; RuntimeError before `prepare`."""
        if self._module is None:
            raise RuntimeError("DiffusersGenerator has no weights yet; call prepare(device) first")
        return self._module

    @module.setter
    def module(self, module: nn.Module) -> None:
        self._module = module

    @property
    def uses_part_of_weights(self) -> bool:
        return len(list(self._network.children())) > 1

    def trainable(self) -> list[nn.Parameter]:
        _ = self.module  # raises before prepare
        return self.weights.parameters()

    def reference(self) -> AbstractContextManager[None]:
        return self.weights.reference()

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights.load_state_dict(state)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter for the pipeline's `load_lora_weights`, or the whole pipeline for its `from_pretrained`."""
        folder, named = Path(folder), self.weights.named
        folder.mkdir(parents=True, exist_ok=True)
        if self.lora is not None:
            trained = {key: part for key, part in self._network.named_children() if key in self._network.trained}
            save_adapter(self.pipe, trained, {name: whole(p) for name, p in named.items()}, folder)
        else:
            with quiet():
                self.pipe.save_pretrained(folder)
        config = {**self._config, "model": str(self.model) if self._on_disk else None}
        (folder / CONFIG_FILE).write_text(json.dumps({"generator": type(self).__name__, "arguments": config}, indent=2))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], allow_noop: bool = False, **changed: Any) -> Self:
        """Load what `save_pretrained` wrote, ready to sample on the CPU.

        `allow_noop` accepts a LoRA that changes nothing; `changed` are arguments to use instead of the saved ones.
        """
        file = Path(folder) / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}; pass a folder that save_pretrained wrote")
        arguments = json.loads(file.read_text())["arguments"]
        if arguments["lora"] is None:
            arguments["model"] = str(folder)
        else:
            arguments["adapters"] = {**(arguments["adapters"] or {}), ADAPTER: str(folder)}
        arguments |= changed
        if arguments["model"] is None:
            raise ValueError(f"{folder} was trained from a pipeline object; pass model= with its folder or hub id")
        generator = cls(**arguments)
        generator.allow_noop = allow_noop
        generator.prepare("cpu")
        return generator

    def schedule(self, steps: int) -> Schedule:
        """The time grid that the pipeline itself samples with at this resolution, with its own timesteps."""
        timesteps, sigmas = self._probe.grid(steps, self._table[0][0])
        if len(timesteps) != steps:
            raise ValueError(f"the scheduler made {len(timesteps)} steps where {steps} were asked for")
        if isinstance(self.path, VariancePreserving):
            sigmas = (timesteps.double() + 1) / self.path.n
        grid = Schedule.from_sigmas(sigmas, timesteps)
        self._timesteps |= {t: (own.item(), own.dtype) for t, own in zip(grid.t.tolist(), timesteps, strict=False)}
        return grid

    def encode(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None) -> Tensor:
        """Rows int64 [B] of the table of prompts, on the CPU; each prompt is encoded when it is first seen.

        "image" in a prompt's metadata, a path or a PIL image, is the pipeline's image condition.
        """
        _ = self.module
        found = []
        for prompt, facts in zip(prompts, metadata or [{}] * len(prompts), strict=True):
            image = facts.get("image")
            key = (prompt, str(image) if isinstance(image, (str, os.PathLike)) else id(image))
            if key not in self._rows:
                rows = Rows((prompt,), self._open(prompt, image), key[1])
                self._table.append((rows, self._probe.encode(rows)))
                self._rows[key] = len(self._table) - 1
            found.append(self._rows[key])
        self._probe.texts.move_encoders(asleep=True)
        return torch.tensor(found, dtype=torch.long)

    def _open(self, prompt: str, image: Any) -> Any:
        if image is not None and not self._probe.takes_image:
            raise ValueError(f"{prompt!r} has an image, but {type(self.pipe).__name__} takes none")
        if image is None and self._probe.needs_image:
            raise ValueError(f"{type(self.pipe).__name__} needs an image in the metadata of {prompt!r}")
        if isinstance(image, (str, os.PathLike)):
            from PIL import Image

            return Image.open(image).convert("RGB")
        return image

    def initial_latents(self, cond: Tensor, noise: Noise) -> Tensor:
        """Latents at t = 1, float32 [B, *latent_shape], in the layout that the pipeline's loop has them in."""
        drawn: dict[tuple[int, ...], Tensor] = {}

        def draw(shape: tuple[int, ...], index: Tensor) -> Tensor:
            if shape[0] != len(index):  # not a row each: it is not the latents that are drawn
                return torch.zeros(shape)
            if shape[1:] not in drawn:  # for all groups at once: a row's noise does not depend on who shares its group
                drawn[shape[1:]] = draw_noise(noise, (len(cond), *shape[1:]), self._device)
            return drawn[shape[1:]][index.to(self._device)]

        return self._grouped(cond, None, lambda rows, i, _: self._probe.initial_latents(rows, lambda s: draw(s, i)))

    def velocity(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        """The path's velocity, float32 [B, ...], with the pipeline's guidance; t is [B]."""
        self._last = cond

        def evaluate(rows: Rows, index: Tensor, time: float) -> Tensor:
            x_rows, t_rows = (x, t) if len(index) == len(x) else (x[index.to(x.device)], t[index.to(t.device)])
            output = self._probe.output(x_rows, self._timestep(time), rows).float()
            if torch.is_grad_enabled() and not output.requires_grad:
                raise ValueError(f"{type(self.pipe).__name__} switches gradients off inside its call: it cannot train")
            return self.path.velocity_from(output, x_rows, t_rows, self.prediction)

        times = [t.host] * len(x) if hasattr(t, "host") else t.tolist()  # a sampler's need no waiting for the device
        return self._grouped(cond, times, evaluate)

    def decode(self, x0: Tensor, cond: Tensor | None = None) -> Tensor:
        """Media float32 [B, C, H, W], or [B, F, C, H, W] of a video, in [0, 1]; gradients flow.

        `cond`, by default that of the last `velocity`, matters to pipelines that write their image into the result.
        """
        if cond is None:
            known = self._last is not None and len(self._last) == len(x0)
            cond = self._last if known else torch.zeros(len(x0), dtype=torch.long)
        return self._grouped(cond, None, lambda rows, index, _: self._probe.decode(x0[index.to(x0.device)], rows))

    def _grouped(self, cond: Any, times: list[float] | None, function: Any) -> Tensor:
        """Call `function(rows, their places, time)` for what fits into one call; results in the order of `cond`."""
        ids, groups = cond.tolist(), dict[Any, list[int]]()
        for i, row in enumerate(ids):
            groups.setdefault((self._table[row][1], 0.0 if times is None else times[i]), []).append(i)
        parts = [self._evaluate(function, ids, members, time) for (_, time), members in groups.items()]
        # Every evaluation of a sharded network is an exchange; processes with fewer groups repeat one without effect.
        for _ in range(0 if times is None or self.most is None else self.most(len(parts)) - len(parts)):
            (_, time), members = next(iter(groups.items()))
            parts[0] = parts[0] + 0 * self._evaluate(function, ids, members, time)
        order = torch.tensor([i for members in groups.values() for i in members]).argsort()
        return parts[0] if len(parts) == 1 else torch.cat(parts)[order.to(parts[0].device)]

    def _evaluate(self, function: Any, ids: list[int], members: list[int], time: float) -> Tensor:
        first = self._table[ids[members[0]]][0]
        prompts = tuple(self._table[ids[i]][0].prompts[0] for i in members)
        return function(Rows(prompts, first.image, first.key), torch.tensor(members), time)

    def _timestep(self, t: float) -> Tensor:
        """The scheduler's own timestep [1] at a time of its grids, or the value between two."""
        n = self._probe.scheduler.config.num_train_timesteps
        between = t * n - 1 if isinstance(self.path, VariancePreserving) else t * n
        value, dtype = self._timesteps.get(t, (between, torch.float32))
        return torch.full((1,), value, dtype=dtype, device=self._device)


def _modules(pipe: Any) -> dict[str, Any]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
