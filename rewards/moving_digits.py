"""Moving digits as a task with a known answer: which digit is it, does it move as the prompt says.

`MovingDigitProxy` (a small CNN on the proxy part of the digits) and `MotionMatch` (phase correlation) are what a video
generator is trained for. `MovingDigitJudge` shares neither an image nor a method with them: an SVM on the gold part
reads the digit, the centre of the ink gives the motion. It is only logged.

Prompts carry {"label": digit, "motion": name}, as `genrl.generators.MovingDigitPrompts` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .classifier import DigitRecipe, augment, digit_labels
from .motion import check_video, displacement

VARIED = DigitRecipe(shift=0.5, noise=0.0)  # how digits are turned, scaled and shifted before they go on the canvas


def motion_labels(metadata: Sequence[dict], prompts: Sequence[str]) -> list[str]:
    """The prompts' motions, from `metadata[i]["motion"]`."""
    from genrl.generators.moving_digits import MOTIONS

    motions = [entry.get("motion") for entry in metadata]
    for motion, prompt in zip(motions, prompts, strict=True):
        if motion not in MOTIONS:
            raise ValueError(
                f"prompt {prompt!r} has metadata motion {motion!r}; motion rewards take one of {', '.join(MOTIONS)} "
                "under 'motion'. Use genrl.generators.MovingDigitPrompts, or add {\"motion\": ...} to each prompt."
            )
    return motions  # type: ignore[return-value]


def check_digit_video(media: Tensor) -> None:
    """Raise ValueError unless media are [B, F, 1, 16, 16] with two frames or more."""
    if media.dim() != 5 or tuple(media.shape[2:]) != (1, 16, 16) or media.shape[1] < 2:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; moving-digit rewards take videos [B, F, 1, 16, 16] of two frames "
            "or more. Use them with VideoGenerator."
        )


class FrameCNN(nn.Sequential):
    """Three convolutions, the maximum over places, one linear layer; [B, 1, 16, 16] -> logits [B, 10]. 24 k weights."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.SiLU(),
            nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


@dataclass(frozen=True)
class FrameRecipe:
    """How the frame classifier is trained. A change of any number trains, and caches, another network.

    Attributes:
        digits: how the digit itself is varied, before it is put somewhere on the canvas.
        noise: standard deviation of pixel noise, and of the ink's strength around 1.
    """

    steps: int = 600
    batch: int = 64
    lr: float = 6e-3
    digits: DigitRecipe = VARIED
    noise: float = 0.05
    seed: int = 0
    version: int = 1  # of the code below


class MovingDigitProxy:
    """Probability that a frame shows the prompt's digit, averaged over the frames, by a small CNN; differentiable.

    Trained on the proxy part of the digits (448 real images) at random places of the canvas on the first `prepare`,
    about ten CPU seconds, then cached under `$GENRL_CACHE` by the hash of its recipe.

    Reads `metadata[i]["label"]`. Media [B, F, 1, 16, 16].
    """

    differentiable = True
    range = (0.0, 1.0)
    name = "moving_digit_proxy"

    def __init__(self, recipe: FrameRecipe | None = None) -> None:
        self.recipe = recipe or FrameRecipe()
        self._network: nn.Module | None = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the CNN, or train and cache it."""
        if self._network is None:
            recipe = self.recipe

            def train(network: nn.Module) -> None:
                _train_frames(network, recipe, progress)

            self._network = cached_network("moving-digit-proxy", FrameCNN, asdict(recipe), train)
        self._network.to(device)

    def logits(self, media: Tensor) -> Tensor:
        """[B, F, 10] float32; gradients reach media."""
        check_digit_video(media)
        if self._network is None or next(self._network.parameters()).device != media.device:
            self.prepare(media.device, progress=False)
        assert self._network is not None
        return self._network(media.float().flatten(0, 1)).unflatten(0, media.shape[:2])

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] mean probability of the prompt's digit."""
        labels = digit_labels(metadata, prompts).to(media.device)
        right = self.logits(media).softmax(dim=-1).gather(2, labels[:, None, None].expand(-1, media.shape[1], 1))
        return right[..., 0].mean(1)

    def describe(self) -> dict[str, float]:
        """`real_accuracy` on frames of the generator's real digits, which it was not trained on."""
        from genrl.generators.moving_digits import moving_digits

        videos, digits, _ = moving_digits(300, "generator", seed=1)
        with torch.no_grad():
            predicted = self.logits(videos).argmax(-1)
        return {"real_accuracy": float((predicted == digits[:, None]).float().mean())}


class MotionMatch:
    """How well the content moves as `metadata[i]["motion"]` says, [B] in [0, 1], by phase correlation.

    d_k is the displacement from frame k to the next (`genrl.rewards.displacement`), in pixels:

    - left, right, up, down, along the unit vector u: max(0, mean over k of cos(d_k, u) min(1, |d_k| / `slow`)): each
      step counts by its direction, and by its length only while that is shorter than `slow`.
    - still: mean over k of exp(-(|d_k| / `slow`)^2).
    - bouncing: along the axis a of the larger sum |d_k|: mean over k of |d_ka| / |d_k| min(1, |d_k| / (2 `slow`)),
      times min(1, least way / `back`), where the least way is what is gone in the lesser of the two directions.

    Real videos read about 1, one of the opposite direction 0; independent noise about .1 for a direction, but .6 for
    bouncing, as it moves far and both ways: pair it with a reward for what is seen. Ours; there is no published one.

    Args:
        slow: pixels a frame below which a digit hardly moves. Real ones go 0.5 to 0.85, and bounce with 1.2 to 1.6.
        back: pixels that a bouncing digit must go in either direction.
    """

    differentiable = False
    range = (0.0, 1.0)
    name = "motion_match"

    def __init__(self, slow: float = 0.4, back: float = 1.5) -> None:
        for name, value in (("slow", slow), ("back", back)):
            if value <= 0:
                raise ValueError(f"{name} is {value}; give a distance in pixels above 0.")
        self.slow, self.back = slow, back

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B]."""
        check_video(media, 2, type(self).__name__)
        motions = motion_labels(metadata, prompts)
        moved = displacement(media[:, :-1], media[:, 1:])  # [B, F - 1, 2]
        return torch.stack([self.match(one, motion) for one, motion in zip(moved, motions, strict=True)])

    def match(self, moved: Tensor, motion: str) -> Tensor:
        """The score, a scalar, of displacements [F - 1, 2]."""
        length = moved.norm(dim=-1)  # [F - 1]
        if motion == "still":
            return (-(length / self.slow).square()).exp().mean()
        if motion == "bouncing":
            along = moved[:, moved.abs().sum(0).argmax()]
            straight = along.abs() / length.clamp_min(1e-6) * (length / (2 * self.slow)).clamp(max=1)
            least = torch.minimum(along.clamp_min(0).sum(), (-along).clamp_min(0).sum())
            return straight.mean() * (least / self.back).clamp(max=1)
        u = moved.new_tensor({"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}[motion])
        cosine = moved @ u / length.clamp_min(1e-6)
        return (cosine * (length / self.slow).clamp(max=1)).mean().clamp_min(0)


class MovingDigitJudge:
    """What an SVM and the centre of the ink say about videos of moving digits; for the log only.

    Returns, [B] each and in [0, 1]:
        digit: share of the frames in which the prompt's digit is read.
        motion: 1 if the centre of the ink goes as the prompt says.
        both: 1 if most frames show the digit and the motion is right.
        first_chunk, last_chunk: `digit` in the first and in the last frames only; a generator that goes frame by frame
            and loses its way is worse in the last ones.

    The SVM is fitted on the gold part (449 real images), on the 8x8 window of a frame that holds most ink. Neither the
    generator nor the trained rewards have seen these images. `Compose` refuses a weight for it.

    Args:
        C, gamma: of the SVM, for pixels in [0, 1].
        frames_per_chunk: how many frames are the first and the last.
        copies: times that each image is put somewhere on the canvas for fitting.
    """

    differentiable = False
    range = (0.0, 1.0)
    log_only = True
    name = "moving_digit_judge"

    def __init__(self, C: float = 10.0, gamma: float = 0.15, frames_per_chunk: int = 2, copies: int = 6) -> None:
        if frames_per_chunk < 1 or copies < 1:
            raise ValueError(f"frames_per_chunk is {frames_per_chunk} and copies {copies}; both must be at least 1.")
        self.C, self.gamma, self.frames_per_chunk, self.copies = C, gamma, frames_per_chunk, copies
        self._svm: Any = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Fit the SVM. It runs on the CPU wherever the media are."""
        if self._svm is None:
            from sklearn.svm import SVC

            from genrl.generators.digits_data import load_digits_split
            from genrl.generators.moving_digits import DIGIT, SIZE, render_path

            part = load_digits_split().gold
            rng = np.random.default_rng(0)
            places = rng.uniform(0, SIZE - DIGIT, size=(len(part), self.copies, 2)).astype(np.float32)
            frames = render_path(torch.from_numpy(part.images), torch.from_numpy(places)).flatten(0, 1)
            windows = densest_window(frames).flatten(1).numpy()
            self._svm = SVC(C=self.C, gamma=self.gamma).fit(windows, np.repeat(part.labels, self.copies))

    def predict(self, media: Tensor) -> Tensor:
        """[B, F] int64 digit that the SVM reads in each frame."""
        check_digit_video(media)
        self.prepare()
        windows = densest_window(media.detach().float().cpu().flatten(0, 1)).flatten(1)
        return torch.from_numpy(self._svm.predict(windows.numpy())).unflatten(0, media.shape[:2])

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        labels, motions = digit_labels(metadata, prompts), motion_labels(metadata, prompts)
        right = (self.predict(media) == labels[:, None]).float()  # [B, F]
        seen = judged_motion(media)
        motion = torch.tensor([float(a == b) for a, b in zip(seen, motions, strict=True)])
        found = {
            "digit": right.mean(1),
            "motion": motion,
            "both": (right.mean(1) > 0.5).float() * motion,
            "first_chunk": right[:, : self.frames_per_chunk].mean(1),
            "last_chunk": right[:, -self.frames_per_chunk :].mean(1),
        }
        return {name: value.to(media.device) for name, value in found.items()}

    def describe(self) -> dict[str, float]:
        """The same on real videos of the generator's digits: the level of real data."""
        from genrl.generators.moving_digits import MOTIONS, moving_digits

        videos, digits, motions = moving_digits(300, "generator", seed=1)
        metadata = [{"label": d, "motion": MOTIONS[m]} for d, m in zip(digits.tolist(), motions.tolist(), strict=True)]
        values = self(videos, ["a video"] * len(videos), metadata)
        return {f"real_{name}": float(value.mean()) for name, value in values.items()}


def densest_window(frames: Tensor) -> Tensor:
    """The 8x8 window [N, 1, 8, 8] of each frame [N, 1, 16, 16] that holds most ink; the first of equal ones."""
    windows = frames[:, 0].unfold(1, 8, 1).unfold(2, 8, 1).flatten(1, 2)  # [N, 81, 8, 8]
    best = windows.sum((-1, -2)).argmax(1)
    return windows[torch.arange(len(frames), device=frames.device), best][:, None]


def judged_motion(media: Tensor, ink: float = 0.25, least: float = 1.5, turn: float = 0.15) -> list[str]:
    """The motion of the centre of the ink in each video.

    Args:
        media: [B, F, 1, H, W].
        ink: pixels below this are paper, so that faint noise does not pull the centre.
        least: pixels that the centre must cross, in all, to have moved.
        turn: share of the way that must go the other way in a bounce.
    """
    dark = (media.detach().float()[:, :, 0] - ink).clamp_min(0)  # [B, F, H, W]
    total = dark.sum((-1, -2)).clamp_min(1e-6)
    rows, columns = (torch.arange(n, device=media.device).float() for n in dark.shape[-2:])
    centre = torch.stack([(dark.sum(-1) @ rows) / total, (dark.sum(-2) @ columns) / total], dim=-1)  # [B, F, 2]
    names = []
    for path in centre.cpu():
        spread = path.amax(0) - path.amin(0)
        axis = int(spread.argmax())
        steps = path.diff(dim=0)[:, axis]
        there, back = float(steps.clamp_min(0).sum()), float((-steps).clamp_min(0).sum())
        if spread[axis] < least:
            names.append("still")
        elif min(there, back) > turn * (there + back):
            names.append("bouncing")
        else:
            names.append((("up", "down"), ("left", "right"))[axis][there > back])
    return names


def cached_network(name: str, build: type[nn.Module], key: dict[str, Any], train: Any) -> nn.Module:
    """A frozen network from the cache; `train(network)` fills in its weights the first time."""
    from safetensors.torch import load_file, save_file

    from genrl.generators.cache import cached_folder

    with torch.device("meta"):  # real parameters would draw from the global random state
        network = build()
    network.to_empty(device="cpu")

    def make(folder: Path) -> None:
        train(network)
        save_file(network.state_dict(), folder / "model.safetensors")

    network.load_state_dict(load_file(cached_folder(name, key, make) / "model.safetensors"))
    return network.eval().requires_grad_(False)


def initialise(network: nn.Module, generator: torch.Generator) -> None:
    """Kaiming weights and zero biases for all convolutions and linear layers."""
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]


def noisy(frames: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Ink of another strength for each row of [B, ...], and pixel noise; in [0, 1]."""
    shape = (len(frames), *([1] * (frames.dim() - 1)))
    strength = 1 + noise * torch.randn(shape, generator=generator)
    return (frames * strength + noise * torch.randn(frames.shape, generator=generator)).clamp(0, 1)


def _train_frames(network: nn.Module, recipe: FrameRecipe, progress: bool) -> None:
    from genrl.generators.digits_data import load_digits_split
    from genrl.generators.moving_digits import DIGIT, SIZE, render_path
    from genrl.progress import progress_bar

    generator = torch.Generator().manual_seed(recipe.seed)
    initialise(network, generator)
    part = load_digits_split().proxy
    images, labels = torch.from_numpy(np.ascontiguousarray(part.images)), torch.from_numpy(part.labels)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps)
    # prepare may be called while a reward is scored without gradients
    with torch.enable_grad(), progress_bar("training the frame classifier", recipe.steps, progress) as advance:
        for _ in range(recipe.steps):
            rows = torch.randint(len(part), (recipe.batch,), generator=generator)
            places = torch.rand(recipe.batch, 1, 2, generator=generator) * (SIZE - DIGIT)
            frames = render_path(augment(images[rows], recipe.digits, generator), places)[:, 0]
            loss = F.cross_entropy(network(noisy(frames, recipe.noise, generator)), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            advance()
