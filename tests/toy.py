"""A generator, prompts and rewards so small that a whole training run takes a fraction of a second.

Images are 4x4 with one channel; prompt "p3" asks for a bright right half, "p4" for a bright left one. The network
computes every row on its own, so results do not depend on the batch a row is in, to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrl.diffusion import RectifiedFlow, VariancePreserving
from genrl.generators.base import Noise, TrainableWeights, draw_noise
from genrl.prompts import Prompt
from genrl.training import EvaluationSettings, Loop, TrainerSettings

SHAPE = (1, 4, 4)
PIXELS, WORDS = 16, 10


class ToyNetwork(nn.Module):
    """Two layers; `first` sees pixels, time and the prompt, `second` starts at zero."""

    def __init__(self, hidden: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(hidden, PIXELS + 2 + WORDS, generator=generator) / 4)
        self.second = nn.Parameter(torch.zeros(PIXELS, hidden))
        self.bias = nn.Parameter(torch.zeros(PIXELS))

    def forward(self, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(words, WORDS).float()
        inputs = torch.cat([x.flatten(1), t[:, None], torch.ones_like(t)[:, None], 2 * one_hot], 1)
        # Products and sums over the last dimension instead of matmul, whose rounding depends on the number of rows.
        hidden = torch.tanh((inputs[:, None, :] * self.first).sum(-1))
        return ((hidden[:, None, :] * self.second).sum(-1) + self.bias).reshape(x.shape)


class ToyGenerator:
    """Starts as the exact flow from noise to N(0, I).

    Args:
        hidden: width. seed: of the start weights. path: "rectified_flow" or "vp".
        batch_noise: adds this times the number of rows to the velocity, as a kernel whose rounding depends on the
            batch does.
    """

    latent_shape = SHAPE

    def __init__(self, hidden: int = 16, seed: int = 0, path: str = "rectified_flow", batch_noise: float = 0.0):
        self.config = {"hidden": hidden, "seed": seed, "path": path, "batch_noise": batch_noise}
        self.path = RectifiedFlow() if path == "rectified_flow" else VariancePreserving(alphas())
        self.rectified = path == "rectified_flow"
        self.batch_noise = batch_noise
        self.module: nn.Module = ToyNetwork(hidden, seed).eval()
        self.weights = TrainableWeights(self.module)
        self.rows = 0  # rows that the network has seen

    def prepare(self, device: Any, progress: bool = True) -> None:
        pass

    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        for text in prompts:
            if text not in {f"p{k}" for k in range(WORDS)}:
                raise ValueError(f"prompt {text!r} is unknown; known are p0 to p{WORDS - 1}")
        return {"words": torch.tensor([int(text[1:]) for text in prompts])}

    def initial_latents(self, cond: dict[str, Tensor], noise: Noise) -> Tensor:
        return draw_noise(noise, (len(cond["words"]), *SHAPE), "cpu")

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Tensor]) -> Tensor:
        self.rows += len(x)
        v = self.module(x, t, cond["words"])
        if self.rectified:  # E[eps - x0 | x_t] for x0 ~ N(0, I); on the variance-preserving path it is 0
            v = v + ((2 * t - 1) / ((1 - t) ** 2 + t**2))[:, None, None, None] * x
        return v + self.batch_noise * len(x)

    def decode(self, x0: Tensor) -> Tensor:
        return torch.sigmoid(x0)

    def trainable(self) -> list[nn.Parameter]:
        return self.weights.parameters()

    @contextmanager
    def reference(self) -> Iterator[None]:
        with self.weights.reference():
            yield

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights.load_state_dict(state)

    def save_pretrained(self, folder: Any) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        torch.save(self.state_dict(), folder / "weights.pt")

    @classmethod
    def from_pretrained(cls, folder: Any) -> ToyGenerator:
        made = cls(**json.loads((Path(folder) / "config.json").read_text()))
        made.load_state_dict(torch.load(Path(folder) / "weights.pt", weights_only=True))
        return made


def alphas() -> Tensor:
    """A short variance-preserving table."""
    return torch.linspace(0.9999, 0.98, 1000, dtype=torch.float64).cumprod(0)


class ToyPrompts:
    """All ten words to train on, the first four held out."""

    def __init__(self) -> None:
        self.train = [Prompt(f"p{k}", {"half": k % 2}) for k in range(WORDS)]
        self.held_out = self.train[:4]


class HalfBrightness:
    """Mean of the half that the prompt asks for, in [0, 1]."""

    differentiable = True
    range = (0.0, 1.0)
    name = "bright"

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        halves = torch.stack([media[:, 0, :, :2].mean((1, 2)), media[:, 0, :, 2:].mean((1, 2))], 1)  # [B, 2]
        return halves[torch.arange(len(media)), torch.tensor([m["half"] for m in metadata])]


class Darkness:
    """The opposite of all brightness: falls when the reward is hacked by making everything bright."""

    differentiable = True
    range = (0.0, 1.0)
    name = "dark"

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        return 1 - media.mean((1, 2, 3))


def trainer(**changes: Any) -> TrainerSettings:
    """Small and quiet settings."""
    small: dict[str, Any] = {
        "iterations": 3,
        "prompts_per_iteration": 4,
        "group_size": 4,
        "learning_rate": 1e-2,
        "checkpoint_every": 1,
        "preview_every": 0,
        "device": "cpu",
        "cpu_threads": 1,
        "tensorboard": False,
    }
    return TrainerSettings(**{**small, **changes})


def evaluation(**changes: Any) -> EvaluationSettings:
    small: dict[str, Any] = {"every": 0, "samples_per_prompt": 2, "steps": 2, "train_sampler": "never"}
    return EvaluationSettings(**{**small, **changes})


def make_loop(run_dir: Any, algorithm: Any, **changes: Any) -> Loop:
    """A run of the toy. `trainer` and `evaluation` may be dictionaries of changes."""
    parts: dict[str, Any] = {
        "name": "toy",
        "seed": 0,
        "generator": ToyGenerator(),
        "prompts": ToyPrompts(),
        "reward": HalfBrightness(),
    }
    settings = {
        "trainer": trainer(**changes.pop("trainer", {})),
        "evaluation": evaluation(**changes.pop("evaluation", {})),
    }
    return Loop(run_dir=run_dir, algorithm=algorithm, **{**parts, **settings, **changes})


def rows(run_dir: Any, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run without the timings."""
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    kept = [r for r in lines if kind is None or r["kind"] == kind]
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in kept]


def weights(loop: Loop) -> Tensor:
    """All trainable weights as one vector."""
    return weights_of(loop.generator)


def weights_of(generator: ToyGenerator) -> Tensor:
    return torch.cat([p.detach().flatten() for p in generator.trainable()])
