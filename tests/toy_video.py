"""Two frames of one pixel, two chunks of one frame: a Gaussian teacher, and a causal student that can equal it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrl.diffusion import RectifiedFlow, Sampler, Schedule, Trajectory
from genrl.generators.base import TrainableWeights, draw_noise
from genrl.generators.distill import self_rollout

SHAPE = (2, 1, 1, 1)


class GaussianVideo(nn.Module):
    """The exact velocity of N(m, L L^T) on [B, 2, 1, 1, 1]; trained, it fits other Gaussians."""

    def __init__(self, mean: tuple[float, float], factor: tuple[tuple[float, float], tuple[float, float]]):
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(mean))
        self.factor = nn.Parameter(torch.tensor(factor))
        self.seen: list[Tensor] = []

    def covariance(self) -> Tensor:
        return self.factor @ self.factor.T

    def forward(self, x: Tensor, t: Tensor, tokens: Tensor, null: Tensor | None = None) -> Tensor:
        flat, at = x.flatten(1), t[:, None, None]
        c = (1 - at) ** 2 * self.covariance() + at**2 * torch.eye(2)  # [B, 2, 2], of x
        off = flat - (1 - t[:, None]) * self.mean
        # Two equations by Cramer's rule, which is much faster than a batched solver.
        solved = torch.stack(
            [c[:, 1, 1] * off[:, 0] - c[:, 0, 1] * off[:, 1], c[:, 0, 0] * off[:, 1] - c[:, 1, 0] * off[:, 0]], 1
        )
        solved = solved / (c[:, 0, 0] * c[:, 1, 1] - c[:, 0, 1] * c[:, 1, 0])[:, None]
        x0 = self.mean + (1 - t[:, None]) * solved @ self.covariance()
        x0 = x0 if null is None else torch.where(null[:, None], 0 * x0, x0)
        return ((flat - x0) / t[:, None]).reshape(x.shape)


class CausalVideo(nn.Module):
    """x0_hat_j = bias + scale z_j + past (key h_{j-1}) with numbers of its own for each step and chunk."""

    frames_per_chunk, causal = 1, True

    def __init__(self, grid: Tensor, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        steps = len(grid) - 1
        self.register_buffer("grid", grid)
        self.bias, self.scale, self.past = (
            nn.Parameter(0.3 * torch.randn(steps, 2, generator=generator) + start) for start in (0.0, 1.0, 0.3)
        )
        self.key = nn.Parameter(torch.tensor(0.7))

    def step(self, t: Tensor) -> Tensor:
        return (self.grid[:-1] - t[:, None]).abs().argmin(1)  # [B]

    def velocity(self, z: Tensor, t: Tensor, j: int, key: Tensor) -> Tensor:
        k = self.step(t)
        x0 = self.bias[k, j] + self.scale[k, j] * z.flatten() + (self.past[k, j] * key if j else 0)
        return ((z.flatten() - x0) / t).reshape(z.shape)

    def forward(self, x, t, tokens, history=None, history_t=None, detach_history=False, null=None):
        if history is None:
            raise ValueError("a causal network needs a history")
        key = self.key * history[:, 0].flatten()
        key = key.detach() if detach_history else key
        return torch.cat([self.velocity(x[:, j : j + 1], t, j, key) for j in range(2)], 1)

    def chunk(self, x, t, tokens, cache, null=None):
        j = 0 if cache is None else 1
        return self.velocity(x, t, j, torch.zeros(len(x)) if cache is None else cache)

    def extend(self, cache, chunk, tokens):
        return self.key * chunk.flatten()


class ChunkedSampler(Sampler):
    """The consistency sampler, chunk by chunk."""

    network: Any = None

    def rollout(self, velocity_fn, x1, cond=None, generator=None, steps=None, expand=None, keep=None):
        noise = (lambda k, shape: torch.zeros(shape)) if generator is None else generator
        states, x0 = self_rollout(self.network, x1, cond["tokens"], self.path, self.schedule, noise)
        kept = tuple(range(self.n_steps - 1))
        return Trajectory(self.schedule.t, kept, states, dict(states), x0, len(x1) * (2 * self.n_steps + 1) // 2)


class ToyVideos:
    """A generator of such videos: the teacher, or a causal one."""

    latent_shape = SHAPE
    path = RectifiedFlow()

    def __init__(self, kind: str = "causal", seed: int = 0):
        self.kind, self.seed = kind, seed
        if kind == "teacher":
            self.module: nn.Module = GaussianVideo((0.5, -0.4), ((0.6, 0.0), (0.5, 0.35)))
        else:
            self.module = CausalVideo(Schedule.uniform(2).t, seed)
        self.weights = TrainableWeights(self.module)

    def prepare(self, device, progress=True):
        pass

    def encode(self, prompts: Sequence[str]):
        return {"tokens": torch.tensor([[int(text[1:])] for text in prompts])}

    def initial_latents(self, cond, noise):
        return draw_noise(noise, (len(cond["tokens"]), *SHAPE), "cpu")

    def make_sampler(self, kernel, schedule, window="all"):
        sampler = ChunkedSampler(kernel, schedule, window, self.path)
        sampler.network = self.module
        return sampler

    def velocity(self, x, t, cond):
        return self.module(x, t, cond["tokens"], history=cond.get("history"))

    def decode(self, x0):
        return torch.sigmoid(x0).expand(-1, -1, -1, 4, 4)

    def trainable(self):
        return self.weights.parameters()

    def reference(self):
        return self.weights.reference()

    def state_dict(self):
        return self.weights.state_dict()

    def load_state_dict(self, state):
        self.weights.load_state_dict(state)

    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(folder) / "weights.pt")


class FirstFrame:
    """How bright the first frame is."""

    differentiable = True
    range = (0.0, 1.0)
    name = "first"

    def __call__(self, media, prompts, metadata):
        return media[:, 0].mean((1, 2, 3))


def real_videos(prompts, noise):
    """Samples of the Gaussian, for histories of real videos."""
    eps = noise(50_000, (len(prompts), 2))
    flat = torch.tensor([0.5, -0.4]) + eps @ torch.tensor([[0.6, 0.0], [0.5, 0.35]]).T
    return flat.reshape(-1, *SHAPE)
