"""A diffusers pipeline run up to one evaluation of its denoiser, by its own code.

A pipeline's `__call__` encodes the prompts, prepares latents, asks its scheduler for timesteps, and at each of them
calls the denoiser and then `scheduler.step`. With a probe in the scheduler's place, one timestep gives the guided
output of the denoiser that reached `step`; none gives the decoding of latents, or the latents of the start. Guidance,
packing, masks, image conditions and the choice of an expert stay the pipeline's business.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from genrl.generators.pipeline_errors import PipelineError, check_arguments, check_sizes, explained
from genrl.generators.prompt_cache import PromptCache, keep

_OURS = ("prompt", "negative_prompt", "image", "latents", "generator", "num_inference_steps", "output_type")


@dataclass(frozen=True)
class Rows:
    """What a batch is conditioned on: a prompt a row, and an image that all rows share, known by `key`."""

    prompts: tuple[str, ...]
    image: Any = None
    key: Any = None


class Draws(TorchFunctionMode):
    """Inside, `torch.randn` gives what `draw` returns for a shape, or zeros: no global random state is touched."""

    def __init__(self, draw: Any):
        super().__init__()
        self.draw = draw

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.randn:
            return func(*args, **(kwargs or {}))
        shape = tuple(args[0] if len(args) == 1 else args)
        to = {key: kwargs[key] for key in ("device", "dtype") if kwargs.get(key) is not None}
        return torch.zeros(shape, **to) if self.draw is None else self.draw(shape).to(**to)


def constant_noise(shape: tuple[int, ...]) -> Tensor:
    """Normal noise that is the same for every row and every call."""
    return torch.randn(shape[1:], generator=torch.Generator().manual_seed(0)).expand(shape)


def probing(scheduler: Any) -> Any:
    """A copy that hands out `given` timesteps and keeps what reaches `step`; pipelines may inspect it as before."""
    kind = type(scheduler)

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.given is None:
            kind.set_timesteps(self, *args, **kwargs)
            self.grid = (self.timesteps.detach().cpu(), getattr(self, "sigmas", self.timesteps).detach().cpu())
            self.timesteps = self.timesteps[:0]
            return
        self.timesteps, self.num_inference_steps = self.given, 1
        if hasattr(self, "sigmas"):
            self.sigmas = torch.cat([self.given, self.given.new_zeros(1)]) / self.config.num_train_timesteps

    @functools.wraps(kind.step)
    def step(self: Any, model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
        from diffusers.schedulers.scheduling_utils import SchedulerOutput

        self.output, same = model_output, self.latents
        return SchedulerOutput(prev_sample=same) if kwargs.get("return_dict", True) else (same, same)

    probe, own = copy.deepcopy(scheduler), {"set_timesteps": set_timesteps, "step": step, "__module__": kind.__module__}
    probe.__class__ = type(kind.__name__, (kind,), own)
    probe.given = probe.output = probe.latents = probe.grid = None
    return probe


class Probe:
    """The functions of a pipeline. Outside of them the pipeline is as it was.

    Args:
        pipe: a diffusers pipeline. scheduler: the one whose timesteps count.
        arguments: for every call of the pipeline; ValueError names those that it does not take.
        negative: a negative prompt. texts: the pipeline's `encode_prompt` with a memory.
    """

    def __init__(self, pipe: Any, scheduler: Any, arguments: dict[str, Any], negative: str | None, texts: PromptCache):
        self.pipe, self.arguments, self.negative, self.texts = pipe, arguments, negative, texts
        self.call = inspect.unwrap(type(pipe).__call__)  # without torch.no_grad
        parameters = inspect.signature(self.call).parameters
        known = [name for name in parameters if name not in (*_OURS, "self")]
        check_arguments(type(pipe).__name__, arguments, negative, [*known, *({"negative_prompt"} & parameters.keys())])
        self.takes_image = "image" in parameters
        self.needs_image = self.takes_image and parameters["image"].default is inspect.Parameter.empty
        self.scheduler = probing(scheduler)
        self.compute_dtype = torch.float32
        self._worked: set[Any] = set()  # ways to call the pipeline that have succeeded
        self._images: OrderedDict[Any, Any] = OrderedDict()  # encoded image conditions

    def encode(self, rows: Rows) -> Any:
        """Encode one prompt with its image; returns a key that prompts which fit into one batch share."""
        self._run(rows, torch.empty(0, device=self.pipe._execution_device))
        return repr((rows.key, self.texts.shapes))

    def initial_latents(self, rows: Rows, draw: Any) -> Tensor:
        """The latents that the pipeline makes of its normal noise, float32."""
        self._run(rows, torch.empty(0, device=self.pipe._execution_device), draw=draw)
        return self._prepared.float()

    def output(self, x: Tensor, timestep: Tensor, rows: Rows) -> Tensor:
        """What reaches `scheduler.step` at one timestep [1] with latents x [B, ...]."""
        self._run(rows, timestep, x)
        output, self.scheduler.output = self.scheduler.output, None
        if output is None:
            raise ValueError(f"{type(self.pipe).__name__} never called scheduler.step: its output cannot be had")
        return output

    def decode(self, x: Tensor, rows: Rows) -> Tensor:
        """The pipeline's own decoding of final latents, in [0, 1]."""
        with Draws(constant_noise):  # some autoencoders are given a little noise
            media = self._run(rows, torch.empty(0, device=self.pipe._execution_device), x, output_type="pt")[0].float()
        sizes = dict(zip(("width", "height", "num_frames"), (*media.shape[:-3:-1], media.shape[1]), strict=True))
        check_sizes(self.pipe, self.arguments, sizes if media.ndim == 5 else {**sizes, "num_frames": None})
        return media

    def grid(self, steps: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """The timesteps [n] and sigmas that the pipeline sets for a number of steps at its resolution."""
        self._run(rows, None, num_inference_steps=steps)
        return self.scheduler.grid

    def _run(self, rows: Rows, timesteps: Any, x: Any = None, draw: Any = None, **more: Any) -> Any:
        arguments = {"num_inference_steps": 1, "output_type": "latent", **self.arguments, **more}
        arguments |= {"prompt": list(rows.prompts), "return_dict": False}
        if self.negative is not None:
            arguments["negative_prompt"] = [self.negative] * len(rows.prompts)
        if rows.image is not None:
            arguments["image"] = rows.image
        self.scheduler.given, self.scheduler.output = timesteps, None
        self._latents, self._draw, self._decodes = x, draw, "output_type" in more
        self._image, self._count = None if rows.image is None else (rows.key, len(rows.prompts)), 0
        self.texts.shapes.clear()
        kind, own, vae = type(self.pipe), vars(self.pipe), getattr(self.pipe, "vae", None)
        native = own["scheduler"]
        replaced = {"scheduler": self.scheduler, "prepare_latents": self._prepare, "encode_prompt": self.texts}
        if not getattr(self.pipe, "_all_hooks", None):  # nothing to free; looking for it takes a while
            replaced["maybe_free_model_hooks"] = lambda: None
        if rows.image is not None and hasattr(kind, "encode_image"):
            replaced["encode_image"] = functools.partial(self._condition, kind.encode_image, self.pipe)
        if rows.image is not None and vae is not None:
            vars(vae)["encode"] = functools.partial(self._condition, type(vae).encode, vae)
        own |= replaced  # past `__setattr__`, which would enter them into the pipeline's configuration
        way = (x is None, timesteps is None or len(timesteps), *more)
        try:
            with contextlib.nullcontext() if way in self._worked else explained(self.pipe, self.arguments):
                result = self.call(self.pipe, **arguments)
            self._worked.add(way)
            return result
        finally:
            for name in replaced:
                del own[name]
            own["scheduler"] = native
            vars(vae or nn.Module()).pop("encode", None)
            self._latents = self.scheduler.latents = None

    def _prepare(self, *args: Any, **kwargs: Any) -> Any:
        """`prepare_latents` of the pipeline with our noise, or with the given latents in the place of its own."""
        if self._latents is None:
            used = inspect.signature(type(self.pipe).prepare_latents).bind(self.pipe, *args, **kwargs).arguments
            check_sizes(self.pipe, self.arguments, used, latents=True)
        key = (self._image, "latents")  # with an image, they come with its encoding and masks, which stay the same
        if self._latents is None or key not in self._images:
            with Draws(self._draw):
                prepared = type(self.pipe).prepare_latents(self.pipe, *args, **kwargs)
            if self._image is not None and self._latents is not None:
                keep(self._images, key, (prepared, self._count))
        else:
            prepared, self._count = self._images[key]
        first, *rest = prepared if isinstance(prepared, (tuple, list)) else (prepared,)
        self._prepared = x = first
        if self._latents is not None:
            if first.shape != self._latents.shape:
                shapes = tuple(self._latents.shape), tuple(first.shape)
                raise PipelineError(
                    f"latents have shape {shapes[0]}, the pipeline has {shapes[1]} for {self.arguments}"
                )
            # Half precision as the pipeline itself would have it, unless the denoiser is held in float32.
            half = first.dtype if self._decodes else torch.promote_types(first.dtype, self.compute_dtype)
            x = self._latents.to(half)
        self.scheduler.latents = x
        return (x, *rest) if isinstance(prepared, (tuple, list)) else x

    def _condition(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An encoding of the image condition, computed once; what an autoencoder says is its mode, not a sample."""
        key, self._count = (self._image, self._count), self._count + 1
        if key not in self._images:
            with torch.no_grad():
                encoded = encode(*args, **kwargs)
            distribution = getattr(encoded, "latent_dist", None)
            if distribution is not None:
                distribution.sample = lambda generator=None: distribution.mode()
            keep(self._images, key, encoded)
        return self._images[key]
