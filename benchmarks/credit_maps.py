"""Where credit maps lie, and what they cost.

    python benchmarks/credit_maps.py
    python benchmarks/credit_maps.py --overhead configs/moving_digits/tvrl.yaml --iterations 6
    python benchmarks/credit_maps.py --train --iterations 20 --seeds 0 1 2 --out runs/region

The first prints shares of the credit: of a reward that a random nonlinear network computes from a region of the frames
(all of it has to lie there), and of questions about real moving digits, near the digit. The second times training with
credit against the same without, iteration by iteration in one process, after a first pair that is left out; printed are
the median and the range of the ratio. The third trains a video model for ink in one region of its frames, with and
without credit, under two kernels; printed are the reward, and by how much the video changed inside and outside of the
region (root mean square of the pixels' difference to the videos of the start from the same noise).
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


def overhead(config: str, iterations: int, settings: list[str]) -> None:
    """Print the ratio of times."""
    from genrl.config import build, load_config
    from genrl.training import Loop

    loops = []
    for with_credit in (True, False):
        folder = tempfile.mkdtemp()
        changes = ["evaluation.every=0", "trainer.preview_every=0", "trainer.checkpoint_every=0"]
        changes += ["evaluation.train_sampler=never", "trainer.tensorboard=false", f"run_dir={folder}"]
        changes += [*settings, *([] if with_credit else ["algorithm.init_args.token_weights=null"])]
        loaded = load_config(config, changes)
        loop = Loop(**build(loaded), config=loaded.raw)
        loop.setup()
        loop.prepare()
        loops.append(loop)
    ratios, observed = [], []
    for n in range(iterations + 1):
        times = []
        for loop in loops:
            began = time.process_time()  # of all threads: other programs on the machine do not count
            collected = loop.collector.sample(loop.worker, n)
            rollout, weights, _ = loop.collector.advantages(collected)
            loop.updater.run(rollout, collected.batch, weights)
            times.append(time.process_time() - began)
        if n:
            ratios.append(times[0] / times[1])
            observed.append(times)
    with_credit, without = (median(pair[i] for pair in observed) for i in (0, 1))
    print(f"with credit {with_credit:.2f} s, without {without:.2f} s of CPU time")
    print(f"ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) over {iterations} pairs of iterations")
    for loop in loops:
        loop.worker.close()


class RegionInk:
    """Mean ink in the lower left quarter of frames 2 to 5."""

    differentiable = True
    range = (0.0, 1.0)
    name = "ink"
    inside = (slice(None), slice(2, 6), slice(None), slice(8, 16), slice(0, 8))

    def __call__(self, media: Tensor, prompts: Any, metadata: Any) -> Tensor:
        return media[self.inside].mean((1, 2, 3, 4))


def region_runs(iterations: int, seeds: list[int], out: str) -> None:
    """Train and print the table."""
    found: dict[str, list[list[float]]] = {}
    for seed in seeds:
        for kernel in ("sage", "dance"):
            for credit in (False, True):
                name = f"{'TVRL' if credit else 'GRPO'}, {kernel}"
                values = region_run(kernel, credit, iterations, seed, f"{out}/{kernel}-{credit}-{seed}")
                found.setdefault(name, []).append(values)
                print(f"# seed {seed}, {name}: " + " ".join(f"{v:.4f}" for v in values), flush=True)
    print("| method | reward before | after | change inside | change outside |")
    print("|---|---|---|---|---|")
    for name, rows in found.items():
        columns = [f"{sum(v) / len(v):.4f} ({min(v):.4f} to {max(v):.4f})" for v in zip(*rows, strict=True)]
        print(f"| {name} | " + " | ".join(columns) + " |")


def region_run(kernel: str, credit: bool, iterations: int, seed: int, folder: str) -> list[float]:
    from genrl.algorithms import PolicyGradient, RewardGradient
    from genrl.diffusion import SAGE, DanceSDE
    from genrl.generators import MovingDigitPrompts
    from genrl.generators.video import VideoGenerator
    from genrl.objectives import GRPO, PPOClip
    from genrl.training import EvaluationSettings, Loop, TrainerSettings
    from genrl.training.evaluation import deterministic_sampler, sample_set

    algorithm = PolicyGradient(
        SAGE(0.7) if kernel == "sage" else DanceSDE(0.3),
        steps=6,
        surrogate=PPOClip(),
        advantage=GRPO(),
        token_weights=VideoCredit(RewardGradient(RegionInk()), patch=4) if credit else None,
    )
    generator = VideoGenerator(kind="teacher")
    trainer = TrainerSettings(
        iterations=iterations, prompts_per_iteration=4, group_size=8, learning_rate=3e-4, checkpoint_every=0,
        preview_every=0, device="cpu", cpu_threads=1, tensorboard=False,
    )  # fmt: skip
    settings = EvaluationSettings(every=0, samples_per_prompt=1, steps=10, train_sampler="never")
    loop = Loop("region", folder, seed, generator, MovingDigitPrompts(), RegionInk(), algorithm, trainer, settings)

    def draw() -> Tensor:
        sampler = deterministic_sampler(generator, 10)
        held_out = MovingDigitPrompts().held_out[:48]
        return sample_set(generator, sampler, held_out, 1, seed=1, batch=48, device="cpu").media

    generator.prepare("cpu")
    before = draw()
    loop.run(resume="never")
    after = draw()
    reward, change = RegionInk(), (after - before).square()
    whole, inside = float(change.sum()), float(change[reward.inside].sum())
    size = change[reward.inside].numel()
    return [
        float(reward(before, [], []).mean()),
        float(reward(after, [], []).mean()),
        (inside / size) ** 0.5,
        ((whole - inside) / (change.numel() - size)) ** 0.5,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", metavar="CONFIG", help="time this configuration with and without credit")
    parser.add_argument("--train", action="store_true", help="train for a reward that depends on a region")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/region")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="changes to the configuration")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.overhead:
        overhead(arguments.overhead, arguments.iterations, arguments.set)
    elif arguments.train:
        region_runs(arguments.iterations, arguments.seeds, arguments.out)
    else:
        shares()


if __name__ == "__main__":
    main()
