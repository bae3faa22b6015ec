"""`VideoGenerator`: videos of moving digits by a bidirectional teacher, a causal model, or its few-step student."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from genrl.diffusion.chunks import ChunkSampler
from genrl.diffusion.kernels import Consistency, Kernel
from genrl.diffusion.sampler import Sampler
from genrl.diffusion.schedule import Schedule
from genrl.diffusion.windows import Window
from genrl.generators.base import Noise, draw_noise
from genrl.generators.moving_digits import (
    FRAMES,
    MAX_WORDS,
    MOTION_VOCABULARY,
    SIZE,
    motion_ways,
    moving_digits,
    tokenize_motion,
)
from genrl.generators.recipe import BaseRecipe, seeded, train_flow_base
from genrl.generators.token_dit import WEIGHTS_FILE, TokenDiTGenerator, _load, _save
from genrl.networks.causal_video import CausalVideoDiT

Kind = Literal["teacher", "causal", "student"]
STUDENT_STEPS, STUDENT_SHIFT = 4, 2.0


class VideoGenerator(TokenDiTGenerator):
    """Videos of a handwritten digit that moves, from prompts such as "a seven moving left".

    ``teacher`` sees the whole video at every step; ``causal`` makes it chunk by chunk, and is trained with real chunks
    as history (teacher forcing); ``student`` is distilled from the teacher, starting from the causal one, to need four
    steps (RAVEN, arXiv 2605.15190). All are deliberately unfinished, which leaves a reward something to teach.

    Args:
        kind: see above.
        dim, depth, heads: of the transformer.
        frames_per_chunk: frames that are made at once; must divide the 10 frames.
        base_steps: steps of base training of teacher and causal model.
        distil_steps: updates of the student.
        base_seed: seed of all trainings.
        videos: real videos that a base is trained on.
        weights: of a student, a folder of `save_pretrained` to take the weights from instead.
        guidance_scale: w of classifier-free guidance, in sampling and training alike; None for none.
        lora: None trains all weights; a dictionary such as {"rank": 8, "alpha": 16} trains an adapter.
        cache_dir: where trained bases are kept; by default $GENRL_CACHE or ~/.cache/genrl.
    """

    latent_shape = (FRAMES, 1, SIZE, SIZE)
    latent_axes = "FCHW"
    base_name = "moving-digits"

    def __init__(
        self,
        kind: Kind = "student",
        dim: int = 64,
        depth: int = 3,
        heads: int = 4,
        frames_per_chunk: int = 2,
        base_steps: int = 600,
        distil_steps: int = 150,
        base_seed: int = 0,
        videos: int = 6000,
        weights: str | None = None,
        guidance_scale: float | None = None,
        lora: dict[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ):
        if kind not in ("teacher", "causal", "student"):
            raise ValueError(f"kind = {kind!r} is unknown; allowed are teacher, causal, student")
        if frames_per_chunk < 1 or FRAMES % frames_per_chunk:
            raise ValueError(f"frames_per_chunk = {frames_per_chunk} does not divide the {FRAMES} frames")
        config = {name: value for name, value in locals().items() if name not in ("self", "cache_dir", "__class__")}
        network = {
            "channels": 1,
            "size": SIZE,
            "frames_per_chunk": frames_per_chunk,
            "chunks": FRAMES // frames_per_chunk,
            "patch": 4,
            "dim": dim,
            "depth": depth,
            "heads": heads,
            "vocabulary": len(MOTION_VOCABULARY) + 1,
            "causal": kind != "teacher",
        }
        self.kind, self.chunks = kind, FRAMES // frames_per_chunk
        self._videos, self._distil_steps, self._from = videos, distil_steps, weights
        self.base_name = f"moving-digits-{kind}"
        recipe = BaseRecipe(steps=base_steps, seed=base_seed, batch_size=32)
        super().__init__(network, recipe, "rectified_flow", guidance_scale, lora, cache_dir, config)
        if kind == "student":
            self.sampling_kernel = Consistency()

    # ------------------------------------------------------------------------------------------------- base and weights

    def prepare(self, device: torch.device | str, progress: bool = True) -> None:
        """Load the weights, or train and cache them first; see `Generator.prepare`.

        Raises:
            FileNotFoundError: when ``weights`` is no folder with a model.
        """
        if self._module is None and self._from is not None:
            file = Path(self._from) / WEIGHTS_FILE
            if not file.is_file():
                raise FileNotFoundError(f"weights = {self._from!r} has no {WEIGHTS_FILE}; give a saved model's folder")
            self._set_network(_load(self._build(), file))
        super().prepare(device, progress)

    def base_config(self) -> dict[str, Any]:
        own: dict[str, Any] = {"videos": self._videos, "video_version": 1}
        if self.kind == "student":
            own |= {"distil_steps": self._distil_steps, "grid": [STUDENT_STEPS, STUDENT_SHIFT]}
        return {**super().base_config(), **own}

    def training_data(self) -> tuple[Tensor, Tensor]:
        videos, digits, motions = moving_digits(self._videos, "generator", self._recipe.seed)
        return videos, motion_ways()[digits, motions]

    def _build(self) -> Any:
        with seeded(self._recipe.seed):
            return CausalVideoDiT(**self._network_config).eval()

    def _train_base(self, folder: Path, progress: bool) -> None:
        network = self._build().to(self._device)
        if self.kind == "student":
            losses = self._distil(network, progress)
        else:
            media, tokens = self.training_data()
            title = f"training the {self.base_name} base"
            forcing = self.kind == "causal"
            losses = train_flow_base(network, 2 * media - 1, tokens, self.path, self._recipe, progress, title, forcing)
        _save(network, folder / WEIGHTS_FILE)
        (folder / "losses.json").write_text(json.dumps([round(loss, 5) for loss in losses]))

    def _distil(self, student: CausalVideoDiT, progress: bool) -> list[float]:
        from genrl.generators.distill import DistilRecipe, distil_student

        teacher, causal = (self._other(kind) for kind in ("teacher", "causal"))
        for other in (teacher, causal):
            other.prepare(self._device, progress)
        student.load_state_dict(causal.module.state_dict())
        tokens = motion_ways().flatten(0, 2)  # [N, L]
        recipe = DistilRecipe(self._distil_steps, self._recipe.seed)
        grid = self.schedule(STUDENT_STEPS)
        shape = self.latent_shape
        return distil_student(student, teacher.module, tokens, self.path, grid, recipe, progress, shape=shape)

    def _other(self, kind: Kind) -> VideoGenerator:
        """The teacher or the causal model that a student is made from."""
        plain = {**self._config, "kind": kind, "weights": None, "lora": None, "guidance_scale": None}
        return VideoGenerator(**plain, cache_dir=self._cache_dir)

    # ------------------------------------------------------------------------------------------- the generator protocol

    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:  # type: ignore[override]
        tokens = torch.tensor([tokenize_motion(prompt) for prompt in prompts], dtype=torch.long, device=self._device)
        return {"tokens": tokens.reshape(len(prompts), MAX_WORDS)}

    def initial_latents(self, cond: Any, noise: Noise) -> Tensor:
        return draw_noise(noise, (len(cond["tokens"]), *self.latent_shape), self._device)

    def velocity(self, x: Tensor, t: Tensor, cond: Any) -> Tensor:
        """The velocity [B, F, 1, 16, 16]; a causal model needs cond["history"], the finished chunks."""
        tokens, past = cond["tokens"], {"history": cond["history"]} if "history" in cond else {}
        if self.guidance_scale is None:
            return self.module(x, t, tokens, **past).float()
        past = {name: torch.cat([value, value]) for name, value in past.items()}
        both = self.module(torch.cat([x, x]), torch.cat([t, t]), **_with_null(tokens), **past).float()
        return _guided(both, self.guidance_scale)

    def schedule(self, steps: int) -> Schedule:
        """The student's grid is shifted toward noise, that of the others is uniform."""
        return Schedule.uniform(steps, STUDENT_SHIFT if self.kind == "student" else 1.0)

    def make_sampler(self, kernel: Kernel, schedule: Schedule, window: str | Sequence[int] | Window = "all") -> Sampler:
        if self.kind == "teacher":
            return Sampler(kernel, schedule, window, self.path)
        return ChunkSampler(kernel, schedule, window, self.path, lambda: _Causal(self))

    def preview(self, media: Tensor) -> Tensor:
        """The first, the middle and the last frame side by side, [B, 3, 16, 48]."""
        some = media[:, [0, FRAMES // 2, FRAMES - 1], 0]
        return some.permute(0, 2, 1, 3).flatten(2)[:, None].expand(-1, 3, -1, -1)


class _Causal:
    """A causal model chunk by chunk; with guidance its cache has both conditions.

    It calls the generator's module, which may be a wrapper, so that it computes in the precision of `velocity`.
    """

    def __init__(self, generator: VideoGenerator):
        self.generator, self.frames_per_chunk = generator, FRAMES // generator.chunks

    def chunk(self, x: Tensor, t: Tensor, cond: Any, cache: Any) -> Tensor:
        module, scale = self.generator.module, self.generator.guidance_scale
        if scale is None:
            return module(x, t, cond["tokens"], one="chunk", cache=cache).float()
        x, t, both = torch.cat([x, x]), torch.cat([t, t]), _with_null(cond["tokens"])
        return _guided(module(x, t, **both, one="chunk", cache=cache).float(), scale)

    def extend(self, cache: Any, chunk: Tensor, cond: Any) -> Any:
        module, t = self.generator.module, chunk.new_zeros(len(chunk))
        if self.generator.guidance_scale is None:
            return module(chunk, t, cond["tokens"], one="extend", cache=cache)
        chunk, t, both = torch.cat([chunk, chunk]), torch.cat([t, t]), _with_null(cond["tokens"])
        return module(chunk, t, **both, one="extend", cache=cache)


def _with_null(tokens: Tensor) -> dict[str, Tensor]:
    """Network arguments of 2 B rows, the second half of which have the null condition."""
    rows = torch.arange(2 * len(tokens), device=tokens.device)
    return {"cond": torch.cat([tokens, tokens]), "null": rows >= len(tokens)}


def _guided(both: Tensor, scale: float) -> Tensor:
    conditional, unconditional = both.chunk(2)
    return unconditional + scale * (conditional - unconditional)
