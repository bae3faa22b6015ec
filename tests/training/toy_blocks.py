"""The toy generator with a network of blocks, so that there is something to shard, and with an adapter if asked."""

from __future__ import annotations

import torch
import toy
from torch import Tensor, nn

from genrl.generators.base import TrainableWeights

HIDDEN = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.inner(self.norm(h)))


class BlockNetwork(nn.Module):
    """`experts` stacks of blocks, of which the time chooses one."""

    def __init__(self, experts: int, seed: int):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Linear(toy.PIXELS + 2 + toy.WORDS, HIDDEN)
            self.stacks = nn.ModuleList([nn.Sequential(*[Block() for _ in range(2)]) for _ in range(experts)])
            self.gain = nn.Parameter(torch.ones(3, HIDDEN)[:1].clone())  # one row: the second process holds none of it
            self.out = nn.Linear(HIDDEN, toy.PIXELS)
            nn.init.normal_(self.out.weight, std=0.05)
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(words, toy.WORDS).float()
        h = self.embed(torch.cat([x.flatten(1), t[:, None], torch.ones_like(t)[:, None], 2 * one_hot], 1))
        expert = int(t[0] < 0.7) if len(self.stacks) > 1 else 0
        return self.out(torch.tanh(self.stacks[expert](h) * self.gain)).reshape(x.shape)


class BlockGenerator(toy.ToyGenerator):
    """See `toy.ToyGenerator`.

    Args:
        experts: stacks of blocks, one for high and one for low noise. lora: train an adapter only.
        unknown_parts: says nothing of how many weights a forward uses.
    """

    def __init__(self, experts: int = 1, lora: bool = False, seed: int = 0):
        super().__init__()
        self.config = {"experts": experts, "lora": lora, "seed": seed}
        self.module = BlockNetwork(experts, seed).eval()
        self.uses_part_of_weights = experts > 1
        if lora:
            from genrl.generators.lora import LoraSettings, LoraWeights

            self.weights = LoraWeights(self.module, LoraSettings(2, 4, ("inner", "out")))
        else:
            self.weights = TrainableWeights(self.module)
