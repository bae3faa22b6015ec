"""A diffusers pipeline run up to one evaluation of its denoiser, by its own code.

A pipeline's `__call__` encodes the prompts, prepares latents, asks its scheduler for timesteps, and at each of them
calls the denoiser and then `scheduler.step`. With a probe in the scheduler's place that call becomes

* with one timestep, the guided output of the denoiser that reached `step`;
* with none, the pipeline's decoding of given latents, or the latents that it would start from;
* the timesteps and sigmas that it would sample with.

Guidance, packing, position ids, masks, image conditions and the choice of an expert stay the pipeline's business.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from genrl.diffusion.batch import map_tensors

Draw = Callable[[tuple[int, ...]], Tensor]
KEPT = 16  # joined prompts and encoded image conditions that stay on the device
_TEXTS = re.compile(r"(negative_)?prompt(_\d)?")  # arguments of encode_prompt that have one entry a row
_OURS = ("prompt", "negative_prompt", "image", "latents", "generator", "num_inference_steps", "output_type")


@dataclass(frozen=True)
class Rows:
    """What a batch is conditioned on: a prompt a row, and an image that all rows share, known by `key`."""

    prompts: tuple[str, ...]
    image: Any = None
    key: Any = None


class Draws(TorchFunctionMode):
    """Inside, `torch.randn` gives what `draw` returns for a shape, or zeros: no global random state is touched."""

    def __init__(self, draw: Draw | None):
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
    """A copy of a scheduler that hands out the timesteps in `given` and keeps what reaches `step` in `output`.

    It has the class, the configuration and the parameters of methods that pipelines inspect.
    """
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

    probe = copy.deepcopy(scheduler)
    methods = {"set_timesteps": set_timesteps, "step": step, "__module__": kind.__module__}
    probe.__class__ = type(kind.__name__, (kind,), methods)
    probe.given = probe.output = probe.latents = probe.grid = None
    return probe


class Probe:
    """The functions of a pipeline. Outside of them the pipeline is as it was.

    Args:
        pipe: a diffusers pipeline. scheduler: the one whose timesteps count.
        arguments: for every call of the pipeline. negative: a negative prompt.
        cache: folder in which encoded prompts are kept, or None for memory.
        offload: the text encoders may leave the device, and come back when a new prompt must be encoded.

    Raises:
        ValueError: naming the calls that the pipeline lacks, or arguments that it does not take.
    """

    def __init__(
        self,
        pipe: Any,
        scheduler: Any,
        arguments: dict[str, Any],
        negative: str | None,
        cache: Path | None,
        offload: bool,
    ):
        self.pipe, self.arguments, self.negative, self.cache = pipe, arguments, negative, cache
        kind = type(pipe)
        self.call = inspect.unwrap(kind.__call__)  # without torch.no_grad
        self.parameters = inspect.signature(self.call).parameters
        lacking = [n for n in ("prepare_latents", "encode_prompt") if not callable(getattr(pipe, n, None))]
        lacking += [f"scheduler.{n}" for n in ("set_timesteps", "step") if not callable(getattr(scheduler, n, None))]
        lacking += [f"argument {n}" for n in ("prompt", "num_inference_steps") if n not in self.parameters]
        if lacking:
            raise ValueError(f"{kind.__name__} cannot be driven from outside, because it has no {', '.join(lacking)}")
        wanted = {*arguments, *(() if negative is None else ("negative_prompt",))}
        wrong = sorted((wanted - self.parameters.keys()) | (arguments.keys() & set(_OURS)))
        if wrong:
            allowed = ", ".join(name for name in self.parameters if name not in (*_OURS, "self"))
            raise ValueError(f"{', '.join(wrong)} cannot be given to {kind.__name__}; what can is {allowed}")
        self.scheduler = probing(scheduler)
        self.device, self.compute_dtype = torch.device("cpu"), torch.float32
        names = [n for n, part in pipe.components.items() if isinstance(part, nn.Module) and n.startswith("text_enc")]
        self.encoders = [getattr(pipe, name) for name in names]
        self.offload, self.asleep = offload, offload
        self._identity = (kind.__name__, _fingerprint(self.encoders) if cache is not None else "")
        self._signature = inspect.signature(pipe.encode_prompt)
        self._texts: dict[Any, Any] = {}  # encode_prompt's result of every prompt, on the CPU
        self._recent: OrderedDict[Any, Any] = OrderedDict()  # joined results and image conditions, on the device
        self._shapes: list[Any] = []

    def encode(self, rows: Rows) -> Any:
        """Encode one prompt with its image; returns a key that prompts which fit into one batch share."""
        self._shapes = []
        self._run(rows, torch.empty(0, device=self.device))
        return tuple(self._shapes)

    def initial_latents(self, rows: Rows, draw: Draw) -> Tensor:
        """The latents that the pipeline makes of its normal noise, float32."""
        self._run(rows, torch.empty(0, device=self.device), draw=draw)
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
            return self._run(rows, torch.empty(0, device=self.device), x, output_type="pt")[0].float()

    def grid(self, steps: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """The timesteps [n] and sigmas that the pipeline sets for a number of steps at its resolution."""
        self._run(rows, None, num_inference_steps=steps)
        return self.scheduler.grid

    def move_encoders(self, asleep: bool) -> None:
        """Take the text encoders from the device, if they may leave it, or back to it."""
        if self.offload and self.asleep != asleep:
            self.asleep = asleep
            for encoder in self.encoders:
                encoder.to("cpu" if asleep else self.device)

    def _run(
        self, rows: Rows, timesteps: Tensor | None, x: Tensor | None = None, draw: Draw | None = None, **more: Any
    ) -> Any:
        arguments = {"num_inference_steps": 1, "output_type": "latent", **self.arguments, **more}
        arguments |= {"prompt": list(rows.prompts), "return_dict": False}
        if self.negative is not None:
            arguments["negative_prompt"] = [self.negative] * len(rows.prompts)
        if rows.image is not None:
            arguments["image"] = rows.image
        self.scheduler.given, self.scheduler.output = timesteps, None
        self._latents, self._draw, self._decodes = x, draw, "output_type" in more
        self._image, self._count = (rows.key, len(rows.prompts)), 0
        # Written past `__setattr__`, which would enter them into the pipeline's configuration.
        own, vae = vars(self.pipe), vars(getattr(self.pipe, "vae", None) or nn.Module())
        native = own["scheduler"]
        own |= {"scheduler": self.scheduler, "prepare_latents": self._prepare, "encode_prompt": self._encode}
        if rows.image is not None:
            vae["encode"] = self._condition
        try:
            return self.call(self.pipe, **arguments)
        finally:
            own["scheduler"] = native
            del own["prepare_latents"], own["encode_prompt"]
            vae.pop("encode", None)
            self._latents = self.scheduler.latents = None

    def _prepare(self, *args: Any, **kwargs: Any) -> Any:
        """`prepare_latents` of the pipeline with our noise, or with the given latents in the place of its own."""
        with Draws(self._draw):
            prepared = type(self.pipe).prepare_latents(self.pipe, *args, **kwargs)
        first, *rest = prepared if isinstance(prepared, (tuple, list)) else (prepared,)
        self._prepared = x = first
        if self._latents is not None:
            if first.shape != self._latents.shape:
                name, shapes = type(self.pipe).__name__, (tuple(self._latents.shape), tuple(first.shape))
                raise ValueError(f"latents have shape {shapes[0]}, {name} has {shapes[1]} for {self.arguments}")
            # Half precision as the pipeline itself would have it, unless the denoiser is held in float32.
            half = first.dtype if self._decodes else torch.promote_types(first.dtype, self.compute_dtype)
            x = self._latents.to(half)
        self.scheduler.latents = x
        return (x, *rest) if isinstance(prepared, (tuple, list)) else x

    def _condition(self, *args: Any, **kwargs: Any) -> Any:
        """The autoencoder's posterior of an image condition, computed once; its sample is its mode."""
        key, self._count = (self._image, self._count), self._count + 1
        if key not in self._recent:
            with torch.no_grad():
                posterior = type(self.pipe.vae).encode(self.pipe.vae, *args, **kwargs)
            distribution = getattr(posterior, "latent_dist", None)
            if distribution is not None:
                distribution.sample = lambda generator=None: distribution.mode()
            self._keep(key, posterior)
        return self._recent[key]

    def _encode(self, *args: Any, **kwargs: Any) -> Any:
        """`encode_prompt` of the pipeline, one prompt at a time and each only once."""
        call = self._signature.bind(*args, **kwargs)
        given = dict(call.arguments)
        texts = [name for name, value in given.items() if _TEXTS.fullmatch(name) and isinstance(value, list)]
        common = repr(sorted((k, v) for k, v in given.items() if k not in texts and k != "device"))
        rows = tuple(zip(*(given[name] for name in texts), strict=True))
        if (common, rows) not in self._recent:
            found = []
            for row in rows:
                call.arguments = {**given, **{name: [text] for name, text in zip(texts, row, strict=True)}}
                found.append(self._encode_row(call, (common, row)))
            single = not isinstance(found[0], tuple)
            slots = zip(*([(item,) for item in found] if single else found), strict=True)
            joined = map_tensors(lambda x: x.to(self.device), tuple(collate(slot) for slot in slots))
            self._keep((common, rows), joined[0] if single else joined)
        result = self._recent[common, rows]
        self._shapes.append([getattr(x, "shape", None) for x in result])
        return result

    def _encode_row(self, call: inspect.BoundArguments, key: Any) -> Any:
        if key in self._texts:
            return self._texts[key]
        name = hashlib.sha256(repr((self._identity, key)).encode()).hexdigest()
        file = None if self.cache is None else self.cache / f"{name}.pt"
        if file is not None and file.is_file():
            return torch.load(file, weights_only=True)
        self.move_encoders(asleep=False)
        with torch.no_grad():
            result = type(self.pipe).encode_prompt(self.pipe, *call.args, **call.kwargs)
        result = map_tensors(lambda x: x.detach().cpu(), result)
        if file is None:
            self._texts[key] = result
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(result, file.with_suffix(f".{id(self)}"))
            file.with_suffix(f".{id(self)}").replace(file)
        return result

    def _keep(self, key: Any, value: Any) -> None:
        self._recent[key] = value
        if len(self._recent) > KEPT:
            self._recent.popitem(last=False)


def collate(rows: Sequence[Any]) -> Any:
    """One slot of `encode_prompt`'s results for several prompts: what has one row is joined, all else is shared."""
    first = rows[0]
    if isinstance(first, list):
        return [item for row in rows for item in row]
    return torch.cat(list(rows)) if isinstance(first, Tensor) and first.shape[:1] == (1,) else first


def _fingerprint(modules: Sequence[nn.Module]) -> str:
    """Tells text encoders apart by the names, shapes and some values of their weights."""
    digest = hashlib.sha256()
    for name, p in (item for module in modules for item in module.named_parameters()):
        some = p.detach().flatten()[:: max(1, p.numel() // 16)].float().cpu().numpy()
        digest.update(f"{name} {tuple(p.shape)}".encode() + some.tobytes())
    return digest.hexdigest()
