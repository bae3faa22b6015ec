"""What a generator is, and the two ways in which its weights can be trainable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from genrl.diffusion.kernels import Kernel
from genrl.diffusion.paths import Path
from genrl.diffusion.sampler import Sampler
from genrl.diffusion.schedule import Schedule
from genrl.diffusion.windows import Window
from genrl.networks.weights import WeightSet
from genrl.prompts import Prompt

Cond = Any
Noise = torch.Generator | Callable[[tuple[int, ...]], Tensor] | None


class Generator(Protocol):
    """A model that turns noise and a prompt into media, as the training loop sees it.

    Attributes:
        path: the probability path of `velocity`.
        module: the trained network. The loop may replace it by a wrapper (data parallel, autocast), so `velocity`
            always calls `self.module(...)`.
        latent_shape: shape of one latent, e.g. (1, 8, 8).

    All modules are in eval mode at all times and nothing drops out, so that a replay equals the rollout.

    A method `schedule(steps) -> Schedule` is optional: the time grid that the generator's users sample with, which is
    then the grid of training and evaluation unless a shift is asked for.

    Also optional: `make_sampler(kernel, schedule, window) -> Sampler`, for models that do not sample all of a latent at
    once (see `sampler_for`); `sampling_kernel`, the kernel that the generator's users sample with where it is not the
    ODE; `preview(media) -> [B, 3, H, W]`, pictures of media that are none; and `export_media(media, folder, names)`,
    which writes them as files.
    """

    path: Path
    module: nn.Module
    latent_shape: tuple[int, ...]

    def prepare(self, device: torch.device | str, progress: bool = True) -> None:
        """Load or train the base and move it to `device`. Constructors are cheap; the work is here. Idempotent."""
        ...

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Condition of the prompts: a nest of tensors with the batch first; ValueError names an unreadable prompt.

        A generator with the attribute `reads_metadata = True` also gets `metadata`, one dict a prompt, in which image
        conditions are.
        """
        ...

    def initial_latents(self, cond: Cond, noise: Noise) -> Tensor:
        """Noise at t = 1, float32 [B, *latent_shape]."""
        ...

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """The path's velocity, float32 like x [B, ...], at t [B]; guidance included; gradients flow."""
        ...

    def decode(self, x0: Tensor) -> Tensor:
        """Media float32 [B, C, H, W] in [0, 1]; gradients flow."""
        ...

    def trainable(self) -> list[nn.Parameter]: ...

    def reference(self) -> AbstractContextManager[None]:
        """Inside it, `velocity` is the frozen starting model, without gradients."""
        ...

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None: ...

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self: ...

    def state_dict(self) -> dict[str, Tensor]:
        """The trainable parameters only."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


def encode_prompts(generator: Generator, prompts: Sequence[Prompt]) -> Cond:
    """The generator's condition of some prompts, with their metadata where the generator reads it."""
    texts = [prompt.text for prompt in prompts]
    if getattr(generator, "reads_metadata", False):
        return generator.encode(texts, [dict(prompt.metadata) for prompt in prompts])  # type: ignore[call-arg]
    return generator.encode(texts)


def schedule_for(generator: Generator, steps: int, shift: float | None = None) -> Schedule:
    """The time grid of `steps` steps: uniform with `shift`, or the generator's own grid where no shift is given."""
    own = getattr(generator, "schedule", None)
    if shift is None and own is not None:
        return own(steps)
    return Schedule.uniform(steps, 1.0 if shift is None else shift)


def sampler_for(
    generator: Generator, kernel: Kernel, schedule: Schedule, window: str | Sequence[int] | Window = "all"
) -> Sampler:
    """The sampler of a generator: its own kind where it has one, else one that moves the whole latent."""
    own = getattr(generator, "make_sampler", None)
    if own is not None:
        return own(kernel, schedule, window)
    return Sampler(kernel, schedule, window, generator.path)


def draw_noise(noise: Noise, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Standard normal float32 noise of `shape` on `device`.

    Args:
        noise: a generator, whose device decides where the numbers are drawn (a CPU generator gives the same noise for
            every device); a function of the shape, for noise that belongs to a sample and not to its batch; or None
            for torch's global generator.
        shape: the batch first.
        device: where the result lives.
    """
    if isinstance(noise, torch.Generator):
        return torch.randn(shape, generator=noise, device=noise.device).to(device)
    if noise is None:
        return torch.randn(shape, device=device)
    return noise(shape).to(device, torch.float32)


class NamedWeights:
    """Trainable parameters by name.

    Args:
        network: the unwrapped network. Parameters that require a gradient now are the trainable ones; wrappers of the
            network share them.
    """

    def __init__(self, network: nn.Module):
        self.named = {name: p for name, p in network.named_parameters() if p.requires_grad}

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.named.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        load_strictly(self.named, state)


class TrainableWeights(NamedWeights):
    """The trainable parameters of a network and a frozen copy of their start."""

    def __init__(self, network: nn.Module):
        super().__init__(network)
        self._start = WeightSet(self.parameters())

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Hold the starting values in the parameters, in place, without gradients; the live values come back."""
        with self._start.active(), torch.no_grad():
            yield


def load_strictly(named: dict[str, nn.Parameter], state: dict[str, Tensor]) -> None:
    """Copy `state` into the parameters.

    Raises:
        ValueError: when names or shapes differ; nothing is loaded then.
    """
    missing, unknown = sorted(named.keys() - state.keys()), sorted(state.keys() - named.keys())
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit this generator: {len(missing)} missing {missing[:3]}, {len(unknown)} unknown "
            f"{unknown[:3]}; build the generator with the settings that the weights were trained with"
        )
    for name, p in named.items():
        if p.shape != state[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(state[name].shape)} in the given weights and {tuple(p.shape)} in this "
                "generator; build the generator with the settings that the weights were trained with"
            )
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(state[name])
