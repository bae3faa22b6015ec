"""Frozen image and text encoders behind the CLIP-like rewards."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from genrl.progress import loading

from .pixels import Pixels

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KEPT_TEXTS = 4096


@dataclass(frozen=True)
class LoadedModel:
    """A model and how it is called.

    module: holds all weights. pixels: its preprocessing. image: pixel values [N, 3, h, w] -> features [N, D].
    tokenize: prompts -> (token tensors, which are cut to the context length, length of every prompt before).
    text: token tensors -> features [N, D]. context: tokens that it reads. logit_scale: factor of its cosines.
    """

    module: nn.Module
    pixels: Pixels
    image: Callable[[Tensor], Tensor]
    tokenize: Callable[[list[str]], tuple[dict[str, Tensor], list[int]]] | None = None
    text: Callable[[dict[str, Tensor]], Tensor] | None = None
    context: int = 0
    logit_scale: float = 1.0


class Encoder:
    """Unit features of images and prompts by a frozen model; loaded on first use, in evaluation mode at all times.

    The model stays on the device of `prepare`; inputs are brought there in chunks, and features return to the device
    of the images. Autocast is off inside, so that values do not depend on who calls.

    Args:
        load: makes the `LoadedModel`, on the CPU.
        owner: name of the reward, for messages.
        batch_size: images, or prompts, of one forward pass. Without gradients it bounds the memory.
        dtype: of the weights. Preprocessing and cosines stay in float32.
    """

    def __init__(self, load: Callable[[], LoadedModel], owner: str, batch_size: int = 32, dtype: Dtype = "float32"):
        if batch_size < 1:
            raise ValueError(f"{owner}: batch_size is {batch_size}; give 1 or more images a forward pass.")
        if dtype not in DTYPES:
            raise ValueError(f"{owner}: dtype is {dtype!r}; known: {', '.join(DTYPES)}.")
        self._load, self._owner = load, owner
        self.batch_size, self.dtype = batch_size, DTYPES[dtype]
        self.device = torch.device("cpu")
        self._model: LoadedModel | None = None
        self._texts: OrderedDict[str, Tensor] = OrderedDict()  # the most recently used last
        self._warned = False

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model unless that has been done, and move it to `device`."""
        if self._model is None:
            # Constructors of networks draw their weights before they load the real ones.
            with torch.random.fork_rng(devices=[]), loading(f"loading {self._owner}", progress, "transformers"):
                self._model = self._load()
            self._model.module.eval().requires_grad_(False).to(self.dtype)
        if torch.device(device) != self.device:
            self._texts.clear()
            self.device = torch.device(device)
        self._model.module.to(self.device)

    @property
    def model(self) -> LoadedModel:
        """The model, loaded to the CPU if it has not been prepared."""
        if self._model is None:
            self.prepare(self.device, progress=False)
        assert self._model is not None
        return self._model

    def images(self, frames: Tensor) -> Tensor:
        """Unit features [N, D], float32, of frames [N, C, H, W] in [0, 1]; gradients reach the frames."""
        if self._model is None:
            self.prepare(frames.device, progress=False)
        with torch.autocast(self.device.type, enabled=False):
            features = [self._image_features(chunk) for chunk in frames.split(self.batch_size)]
        return torch.cat(features).to(frames.device)

    def _image_features(self, frames: Tensor) -> Tensor:
        pixels = self.model.pixels(frames.to(self.device))
        return F.normalize(self.model.image(pixels.to(self.dtype)).float(), dim=-1)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Tensor:
        """Unit features [N, D], float32 on the model's device. Kept for prompts that were seen before."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._texts]
        for start in range(0, len(new), self.batch_size):
            chunk = new[start : start + self.batch_size]
            self._texts.update(zip(chunk, self._text_features(chunk), strict=True))
        for prompt in prompts:
            self._texts.move_to_end(prompt)
        features = torch.stack([self._texts[prompt] for prompt in prompts])
        while len(self._texts) > _KEPT_TEXTS:
            self._texts.popitem(last=False)
        return features

    def _text_features(self, prompts: list[str]) -> Tensor:
        model = self.model
        if model.tokenize is None or model.text is None:
            raise ValueError(f"{self._owner}: {type(model.module).__name__} has no text encoder; give a CLIP model.")
        tokens, lengths = model.tokenize(prompts)
        self._warned = warn_of_truncation(self._owner, prompts, lengths, model.context, self._warned)
        with torch.autocast(self.device.type, enabled=False):
            features = model.text({name: value.to(self.device) for name, value in tokens.items()})
        return F.normalize(features.float(), dim=-1)


def warn_of_truncation(owner: str, prompts: Sequence[str], lengths: Sequence[int], context: int, warned: bool) -> bool:
    """Warn, once, that prompts are longer than the model reads. Returns whether that has been done."""
    long = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length > context]
    if long and not warned:
        warnings.warn(
            f"{owner}: {len(long)} of {len(prompts)} prompts have more than {context} tokens; what is beyond is not "
            f"scored (first: {long[0][:60]!r}...). Later ones are cut without a warning.",
            stacklevel=2,
        )
    return warned or bool(long)


def split_frames(media: Tensor, frame_stride: int = 1) -> Tensor:
    """Media [B, C, H, W] or [B, F, C, H, W] as [B, F', C, H, W], every `frame_stride`-th frame."""
    return media[:, ::frame_stride] if media.dim() == 5 else media.unsqueeze(1)


def check_frame_stride(owner: str, frame_stride: int) -> int:
    """`frame_stride`, or ValueError if it is not a positive number."""
    if frame_stride < 1:
        raise ValueError(f"{owner}: frame_stride is {frame_stride}; 1 takes every frame, k every k-th.")
    return frame_stride


def frame_features(encoder: Encoder, media: Tensor, frame_stride: int = 1) -> Tensor:
    """Unit features [B, F', D] of every `frame_stride`-th frame; F' = 1 for images."""
    frames = split_frames(media, frame_stride)  # [B, F', C, H, W]
    return encoder.images(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])


def prompt_cosines(encoder: Encoder, media: Tensor, prompts: Sequence[str], frame_stride: int = 1) -> Tensor:
    """Cosine [B, F'] of every `frame_stride`-th frame with its prompt."""
    images = frame_features(encoder, media, frame_stride)  # [B, F', D]
    texts = encoder.texts(prompts).to(images.device)  # [B, D]
    return (images * texts[:, None]).sum(dim=-1)


def check_scale(owner: str, scale: float) -> float:
    """`scale`, or ValueError if it is not a positive number."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{owner}: scale is {scale}; give a positive number. To reward the opposite, negate a weight.")
    return float(scale)


class PromptCosine:
    """A reward that is a multiple of the cosine of media and prompt, averaged over frames.

    Args:
        load: makes the model. owner: name of the reward, for messages.
        scale: factor of the cosine.
        frame_stride, batch_size, dtype: see `CLIPScore`.
        clamp: negative cosines count as 0.
    """

    differentiable = True

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        owner: str,
        scale: float,
        frame_stride: int,
        batch_size: int,
        dtype: Dtype,
        clamp: bool = False,
    ) -> None:
        self.encoder = Encoder(load, owner, batch_size, dtype)
        self.scale, self.clamp = check_scale(owner, scale), clamp
        self.frame_stride = check_frame_stride(owner, frame_stride)
        self.range = (0.0 if clamp else -self.scale, self.scale)

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model to `device`."""
        self.encoder.prepare(device, progress)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] scaled cosine."""
        cosines = prompt_cosines(self.encoder, media, prompts, self.frame_stride)  # [B, F]
        return self.scale * (cosines.clamp(min=0) if self.clamp else cosines).mean(dim=1)


@contextlib.contextmanager
def explained(owner: str, source: str) -> Iterator[None]:
    """Errors inside as one OSError that names the reward, the checkpoint and the remedy."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0][:300].rstrip(".")
        if Path(source).exists():
            remedy = "Give the folder or file of a model of the expected kind."
        elif os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
            remedy = "HF_HUB_OFFLINE is set, so nothing is downloaded: unset it, or give a local folder."
        else:
            remedy = "Check the name and the network, or give a local folder."
        raise OSError(f"{owner} cannot load {source!r}: {reason}. {remedy}") from error
