"""A reward of your own, from Python: check it, train on it for a moment, look at the result.

    python examples/own_reward.py            # about half a minute; the first time also the base model, as long again

Digits are taught to lean: the reward is how far the ink of the upper half lies to the right of that of the lower half.
The judge, which knows nothing of this, shows whether they are still the digits that the prompts ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genrl.config import build, load_config
from genrl.rewards import Compose, DigitProxy, check_reward
from genrl.training import Loop


class Slant:
    """Horizontal distance between the centres of ink of the upper and the lower half, in image widths.

    Not scored (NaN) where a half has no ink.
    """

    differentiable = True
    range = (-1.0, 1.0)
    name = "slant"

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        columns = torch.linspace(0, 1, media.shape[-1], device=media.device)  # [W]
        upper, lower = media.mean(1).chunk(2, dim=1)  # [B, H/2, W] each
        ink = [half.sum(dim=(1, 2)) for half in (upper, lower)]
        centres = [(half.sum(1) * columns).sum(1) / mass for half, mass in zip((upper, lower), ink, strict=True)]
        return centres[0] - centres[1]  # [B]; 0 / 0 is NaN


def main() -> None:
    for finding in check_reward(Slant(), media=torch.rand(4, 1, 8, 8)):
        print("check_reward:", finding)
    changes = ["trainer.iterations=20", "run_dir=runs/own_reward", "name=own_reward"]
    # Each reward is normalised by itself; in a plain sum the one of larger variance, `correct`, would decide.
    changes.append("algorithm.advantage=genrl.objectives.GDPO")
    config = load_config("configs/digits/diffusion_nft.yaml", changes)
    # In YAML this would be a Compose with class paths; objects serve as well. Without the caps and without `correct`,
    # the digits lean until nobody can read them.
    reward = Compose({"slant": Slant(), "correct": DigitProxy()}, caps={"slant": 0.1, "correct": 0.9})
    parts = build(config) | {"reward": reward}
    summary = Loop(**parts).run(resume="never")
    for name in ("eval/slant", "eval/judge", "eval/spread_nn"):
        print(f"{name}: {summary.before[name]:.3f} before, {summary.after[name]:.3f} after")


if __name__ == "__main__":
    main()
