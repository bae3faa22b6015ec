"""Digits as a task with a known answer: a small CNN to optimise, and a judge of another kind that is only logged.

The CNN (`DigitProxy`) sees the proxy part of the digits, the SVM (`DigitJudge`) the gold part; neither sees an image
of the other or of the generator. A proxy that rises while the judge falls is reward hacking.
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


def digit_labels(metadata: Sequence[dict], prompts: Sequence[str]) -> Tensor:
    """The prompts' digits, int64 [B], from `metadata[i]["label"]`."""
    labels = [entry.get("label") for entry in metadata]
    for label, prompt in zip(labels, prompts, strict=True):
        if label not in range(10):
            raise ValueError(
                f"prompt {prompt!r} has metadata label {label!r}; digit rewards take an integer 0 to 9 under 'label'. "
                'Use genrl.generators.DigitPrompts, or add {"label": ...} to each prompt.'
            )
    return torch.tensor([int(label) for label in labels])  # type: ignore[arg-type]


def check_digit_media(media: Tensor) -> None:
    """Raise ValueError unless media are [B, 1, 8, 8]."""
    if tuple(media.shape[1:]) != (1, 8, 8):
        raise ValueError(
            f"media has shape {tuple(media.shape)}; digit rewards take [B, 1, 8, 8]. Use them with DigitsGenerator."
        )


class DigitCNN(nn.Sequential):
    """Three convolutions and two linear layers; [B, 1, 8, 8] in [0, 1] -> logits [B, 10]. 58 k parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 24, 3, padding=1), nn.SiLU(),
            nn.Conv2d(24, 32, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2),
            nn.Conv2d(32, 48, 3, padding=1), nn.SiLU(), nn.Flatten(),
            nn.Linear(48 * 16, 48), nn.SiLU(), nn.Linear(48, 10),
        )  # fmt: skip


@dataclass(frozen=True)
class DigitRecipe:
    """How the CNN is trained. A change of any number trains, and caches, another network."""

    steps: int = 500
    batch: int = 64
    lr: float = 3e-3
    shift: float = 1.0  # pixels, sub-pixel steps
    rotation: float = 0.15  # radians
    scale: float = 0.1
    noise: float = 0.1
    seed: int = 0
    version: int = 1  # of the code below


class DigitProxy:
    """Probability that the image shows the prompt's digit, by a small CNN; the reward that the digit task optimises.

    Trained on the proxy part of the digits (448 real images) on the first `prepare`, a few CPU seconds, then cached
    under `$GENRL_CACHE` (default `~/.cache/genrl`) by the hash of its recipe.

    Reads `metadata[i]["label"]`. Media [B, 1, 8, 8].
    """

    differentiable = True
    range = (0.0, 1.0)
    name = "digit_proxy"

    def __init__(self, recipe: DigitRecipe | None = None) -> None:
        self.recipe = recipe or DigitRecipe()
        self._network: DigitCNN | None = None

    def prepare(self, device: Any, progress: bool = True) -> None:
        """Load the CNN, or train and cache it."""
        if self._network is None:
            self._network = _load_or_train(self.recipe, progress)
        self._network.to(device)

    def logits(self, media: Tensor) -> Tensor:
        """[B, 10] float32; gradients reach media."""
        check_digit_media(media)
        if self._network is None or next(self._network.parameters()).device != media.device:
            self.prepare(media.device, progress=False)
        assert self._network is not None
        return self._network(media.float())

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] probability of the prompt's digit."""
        labels = digit_labels(metadata, prompts).to(media.device)
        return self.logits(media).softmax(dim=-1).gather(1, labels[:, None])[:, 0]

    def describe(self) -> dict[str, float]:
        """`real_accuracy` on the generator's 900 real images, which it was not trained on."""
        from genrl.generators.digits_data import load_digits_split

        part = load_digits_split().generator
        with torch.no_grad():
            predicted = self.logits(torch.from_numpy(part.images)).argmax(dim=-1).numpy()
        return {"real_accuracy": float((predicted == part.labels).mean())}


class DigitJudge:
    """1 if an RBF-SVM reads the prompt's digit, else 0; its mean is an accuracy. For the log only.

    Fitted in milliseconds on the gold part (449 real images), which neither the generator nor `DigitProxy` has seen.
    `Compose` refuses a weight for it. `describe()` gives its accuracy on real images (.984): a generator at that
    level is as good as real data, and well above it is being over-optimised.

    Args:
        C, gamma: of the SVM, for pixels in [0, 1]. The accuracy on real images is flat around the defaults.
        shift: pixels by which copies of the images are moved in the four directions before fitting; 0 for none
            (.976 on real images).
    """

    differentiable = False
    range = (0.0, 1.0)
    log_only = True
    name = "digit_judge"

    def __init__(self, C: float = 10.0, gamma: float = 0.25, shift: float = 0.5) -> None:
        self.C, self.gamma, self.shift = C, gamma, shift
        self._svm: Any = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Fit the SVM. It runs on the CPU wherever the media are."""
        if self._svm is None:
            from sklearn.svm import SVC

            from genrl.generators.digits_data import load_digits_split

            part = load_digits_split().gold
            images = _with_shifts(part.images, self.shift)  # [N or 5 N, 1, 8, 8]
            labels = np.tile(part.labels, len(images) // len(part))
            self._svm = SVC(C=self.C, gamma=self.gamma).fit(images.reshape(len(images), -1), labels)

    def predict(self, media: Tensor) -> Tensor:
        """[B] int64 digit that the SVM reads."""
        check_digit_media(media)
        self.prepare()
        return torch.from_numpy(self._svm.predict(media.detach().float().cpu().numpy().reshape(len(media), -1)))

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] 1.0 or 0.0."""
        return (self.predict(media) == digit_labels(metadata, prompts)).float().to(media.device)

    def reference(self) -> float:
        """What the generator's 900 real images read: the level of real data."""
        return self.describe()["real_accuracy"]

    def describe(self) -> dict[str, float]:
        """`real_accuracy` on the generator's 900 real images: the level of real data."""
        from genrl.generators.digits_data import load_digits_split

        part = load_digits_split().generator
        predicted = self.predict(torch.from_numpy(part.images)).numpy()
        return {"real_accuracy": float((predicted == part.labels).mean())}


def _with_shifts(images: np.ndarray, shift: float) -> np.ndarray:
    """The images and, if shift > 0, four copies moved by up to one pixel (linear interpolation, empty border)."""
    if not 0 <= shift <= 1:
        raise ValueError(f"shift is {shift}; give 0 (no copies) to 1 pixel.")
    if shift == 0:
        return images
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    inner = slice(1, -1)
    views = [padded[..., :-2, inner], padded[..., 2:, inner], padded[..., inner, :-2], padded[..., inner, 2:]]
    return np.concatenate([images, *((1 - shift) * images + shift * view for view in views)])


def _load_or_train(recipe: DigitRecipe, progress: bool) -> DigitCNN:
    from safetensors.torch import load_file, save_file

    from genrl.generators.cache import cached_folder

    with torch.device("meta"):  # real parameters would draw from the global random state
        network = DigitCNN()
    network.to_empty(device="cpu")

    def make(folder: Path) -> None:
        _train(network, recipe, progress)
        save_file(network.state_dict(), folder / "model.safetensors")

    folder = cached_folder("digit-proxy", asdict(recipe), make)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.eval().requires_grad_(False)


def _train(network: DigitCNN, recipe: DigitRecipe, progress: bool) -> None:
    from genrl.generators.digits_data import load_digits_split
    from genrl.progress import progress_bar

    generator = torch.Generator().manual_seed(recipe.seed)
    for module in network:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    part = load_digits_split().proxy
    images, labels = torch.from_numpy(np.ascontiguousarray(part.images)), torch.from_numpy(part.labels)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps)
    title = "training the digit classifier"
    # prepare may be called while a reward is scored without gradients
    with torch.enable_grad(), progress_bar(title, recipe.steps, progress) as advance:
        for _ in range(recipe.steps):
            rows = torch.randint(len(part), (recipe.batch,), generator=generator)
            loss = F.cross_entropy(network(augment(images[rows], recipe, generator)), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            advance()


def augment(images: Tensor, recipe: DigitRecipe, generator: torch.Generator) -> Tensor:
    """Small random rotations, scales and sub-pixel shifts, then pixel noise; [B, 1, H, W] in [0, 1]."""
    batch, size = images.shape[0], images.shape[-1]

    def uniform(width: float, *shape: int) -> Tensor:
        return (2 * torch.rand(batch, *shape, generator=generator) - 1) * width

    angle, zoom = uniform(recipe.rotation), 1 + uniform(recipe.scale)
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).view(batch, 2, 2)
    shift = uniform(recipe.shift * 2 / size, 2, 1)  # the grid spans 2
    grid = F.affine_grid(
        torch.cat([rotation * zoom[:, None, None], shift], dim=-1), list(images.shape), align_corners=False
    )
    moved = F.grid_sample(images, grid, align_corners=False)
    noise = torch.randn(images.shape, generator=generator) * recipe.noise
    return (moved + noise).clamp(0, 1)
