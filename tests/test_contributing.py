"""The examples of CONTRIBUTING.md run."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from genrl.config import import_object
from genrl.diffusion import FlowSDE, Sampler, Schedule

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def examples() -> dict:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    module = types.ModuleType("my_lab")
    sys.modules["my_lab"] = module  # dataclasses look their module up
    try:
        exec("\n".join(blocks), vars(module))
    finally:
        del sys.modules["my_lab"]
    return vars(module)


def test_kernel_keeps_the_marginal(examples):
    t, t_next = torch.tensor([1.0, 0.6, 0.2]), torch.tensor([0.8, 0.3, 0.0])
    a, b, s = examples["HalfFresh"]().coefficients(t, t_next)
    torch.testing.assert_close(a, 1 - t_next)
    torch.testing.assert_close(b**2 + s**2, t_next**2)


def test_reward_passes_its_check(examples):
    from genrl.rewards import check_reward

    assert check_reward(examples["Brightness"]()) == []


def test_generator_samples_and_keeps_its_start_as_reference(examples):
    generator = examples["Dots"]()
    generator.prepare("cpu")
    cond = generator.encode(["a", "b", "c"])
    noise = torch.Generator().manual_seed(0)
    x1 = generator.initial_latents(cond, noise)
    sampler = Sampler(FlowSDE(), Schedule.uniform(4), path=generator.path)
    media = generator.decode(sampler.rollout(generator.velocity, x1, cond, noise).x0)
    assert media.shape == (3, 1, 1, 2) and media.min() >= 0 and media.max() <= 1
    t = torch.full((3,), 0.5)
    start = generator.velocity(x1, t, cond).detach()
    with torch.no_grad():
        generator.trainable()[0].add_(1.0)
    assert not torch.equal(generator.velocity(x1, t, cond), start)
    with generator.reference():
        torch.testing.assert_close(generator.velocity(x1, t, cond), start)


def test_algorithm_gives_a_loss_per_sample(examples):
    from genrl.algorithms import Rollout

    generator, method = examples["Dots"](), examples["BestOnly"](draws=2)
    generator.prepare("cpu")
    method.configure(generator)
    x0 = torch.zeros(3, 1, 1, 2)
    extra = {"t": [torch.full((3,), 0.5)] * 2, "eps": [torch.ones_like(x0)] * 2}
    rollout = Rollout(
        generator.encode(["a"] * 3), x0, torch.arange(3), advantage=torch.tensor([-1.0, 0.0, 2.0]), extra=extra
    )
    units = [(0,), (1,)]
    loss, _ = method.loss(generator.velocity, rollout, units[0], units)
    assert loss.shape == (3,) and loss[0] == 0 and loss[1] == 0 and loss[2] > 0
    loss.sum().backward()
    assert generator.trainable()[0].grad.abs().sum() > 0


def test_every_class_path_in_the_text_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in set(re.findall(r"`(genrl(?:\.\w+)+)(?:\(.*?)?`|class_path: (genrl[\w.]+)", text)):
        name = path[0] or path[1]
        if name.rpartition(".")[2][0].isupper() or name.endswith("check_reward"):
            import_object(name, "CONTRIBUTING.md")
