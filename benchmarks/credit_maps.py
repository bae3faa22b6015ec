"""Where credit maps lie, and what they cost.

    python benchmarks/credit_maps.py
    python benchmarks/credit_maps.py --overhead configs/moving_digits/tvrl.yaml --iterations 6

The first prints shares of the credit: of a reward that a random nonlinear network computes from a region of the frames
(all of it has to lie there), and of questions about real moving digits, near the digit. The second times training with
credit against the same without, iteration by iteration in one process, after a first pair that is left out; printed are
the median and the range of the ratio.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool3d

from genrl.algorithms import Rollout, VideoCredit
from genrl.generators.moving_digits import MOTIONS, moving_digits
from genrl.prompts import Prompt
from genrl.rewards import MovingDigitQuestions

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class RegionCritic:
    """A random convolutional network that sees one region of the frames."""

    differentiable = True

    def __init__(self, frames: slice, rows: slice, columns: slice, seed: int = 0) -> None:
        self.region = (slice(None), frames, slice(None), rows, columns)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = nn.Sequential(
                nn.Conv3d(1, 8, 3, padding=1), nn.SiLU(), nn.Conv3d(8, 8, 3, padding=1), nn.SiLU(),
                nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 3), nn.Sigmoid(),
            )  # fmt: skip

    def questions(self, media: Tensor, prompts: Any, metadata: Any) -> list[list[str]]:
        return [["?"] * 3] * len(media)

    def gradient_magnitude(self, media: Tensor, questions: Any) -> tuple[Tensor, Tensor]:
        leaf = media.detach().requires_grad_()
        with torch.enable_grad():
            values = self.network(leaf[self.region].movedim(2, 1))  # [B, 3]
            gradients = [torch.autograd.grad(v.sum(), leaf, retain_graph=True)[0] for v in values.unbind(1)]
        return values.detach(), torch.stack([gradient.norm(dim=2) for gradient in gradients], 1)


def credit_of(critic: Any, media: Tensor, prompts: list[Prompt], latent: tuple[int, ...], axes: str) -> Tensor:
    """[B, f, h, w]"""
    generator = SimpleNamespace(latent_shape=latent, latent_axes=axes)
    rollout = Rollout(None, torch.zeros(len(media), *latent), torch.arange(len(media)))
    return VideoCredit(critic)(rollout, media, prompts, generator).squeeze(1 + axes.index("C"))


def shares(count: int = 200) -> None:
    """Print the table of shares."""
    videos, digits, motions = moving_digits(count, "generator", seed=1)  # [N, 10, 1, 16, 16]
    prompts = [
        Prompt(f"a {WORDS[d]} moving {MOTIONS[m]}", {"label": int(d), "motion": MOTIONS[int(m)]})
        for d, m in zip(digits.tolist(), motions.tolist(), strict=True)
    ]
    print("| critic | region | its share of the cells | of the credit |")
    print("|---|---|---|---|")
    critic = RegionCritic(slice(2, 6), slice(8, 16), slice(0, 8))
    for latent, axes, cells, name in [
        ((10, 1, 16, 16), "FCHW", (slice(2, 6), slice(8, 16), slice(0, 8)), "pixels"),
        ((10, 4, 4, 4), "FCHW", (slice(2, 6), slice(2, 4), slice(0, 2)), "4 x 4 pixels a cell"),
    ]:
        credit = credit_of(critic, videos, prompts, latent, axes)
        inside = torch.zeros_like(credit)
        inside[(slice(None), *cells)] = 1
        row(f"network on a region, {name}", "the region", inside, credit)
    near = max_pool3d((videos[:, :, 0] > 0.3).float()[:, None], (1, 5, 5), 1, (0, 2, 2))[:, 0]  # within 2 pixels of ink
    for kind in ("digit", "motion", "bounce"):
        questions = MovingDigitQuestions(kinds=[kind])
        credit = credit_of(questions, videos, prompts, (10, 1, 16, 16), "FCHW")
        row(f"{kind}, real videos", "within 2 pixels of ink", near, credit)


def row(critic: str, region: str, inside: Tensor, credit: Tensor) -> None:
    share = float((credit * inside).sum() / credit.sum())
    print(f"| {critic} | {region} | {float(inside.mean()):.3f} | {share:.3f} |")


def overhead(config: str, iterations: int) -> None:
    """Print the ratio of times."""
    from genrl.config import build, load_config
    from genrl.training import Loop

    loops = []
    for with_credit in (True, False):
        folder = tempfile.mkdtemp()
        changes = ["evaluation.every=0", "trainer.preview_every=0", "trainer.checkpoint_every=0"]
        changes += ["evaluation.train_sampler=never", "trainer.tensorboard=false", f"run_dir={folder}"]
        changes += [] if with_credit else ["algorithm.init_args.token_weights=null"]
        loaded = load_config(config, changes)
        loop = Loop(**build(loaded), config=loaded.raw)
        loop.setup()
        loop.prepare()
        loops.append(loop)
    ratios, observed = [], []
    for n in range(iterations + 1):
        times = []
        for loop in loops:
            began = time.perf_counter()
            collected = loop.collector.sample(loop.worker, n)
            rollout, weights, _ = loop.collector.advantages(collected)
            loop.updater.run(rollout, collected.batch, weights)
            times.append(time.perf_counter() - began)
        if n:
            ratios.append(times[0] / times[1])
            observed.append(times)
    print(f"with credit {median(t[0] for t in observed):.2f} s, without {median(t[1] for t in observed):.2f} s")
    print(f"ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) over {iterations} pairs of iterations")
    for loop in loops:
        loop.worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", metavar="CONFIG", help="time this configuration with and without credit")
    parser.add_argument("--iterations", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.overhead:
        overhead(arguments.overhead, arguments.iterations)
    else:
        shares()


if __name__ == "__main__":
    main()
