"""The examples of CONTRIBUTING.md run."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.config import import_object
from genrl.diffusion import FlowSDE, Sampler, Schedule

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def examples() -> Iterator[dict]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    module = types.ModuleType("my_lab")
    sys.modules["my_lab"] = module  # dataclasses and import paths look their module up
    try:
        exec("\n".join(blocks), vars(module))
        yield vars(module)
    finally:
        del sys.modules["my_lab"]


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


def test_policy_passes_its_check_and_keeps_several_ways_in_play(examples):
    from genrl.config import build_part
    from genrl.policies import check_policy

    policy = build_part({"class_path": "my_lab.NearestPolicy", "init_args": {"candidates": 4}})
    assert type(policy) is examples["NearestPolicy"] and policy.nfe == 1
    assert check_policy(policy) == []

    class Drawn:  # noise whose first candidate is the demonstration of the row itself
        def normal(self, shape):
            assert shape == (2, 4, 3, 1)
            return torch.arange(4.0)[None, :, None, None].expand(shape)

    policy.velocity = lambda x, t, cond: torch.zeros_like(x)
    x0, cond = torch.tensor([0.0, 1.25])[:, None, None].expand(2, 3, 1), torch.zeros(2, 5)
    loss, metrics = policy._loss(x0, cond, torch.ones(2, 3), Drawn(), 0.0)
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.25**2]))
    torch.testing.assert_close(metrics["farthest"], torch.tensor((9 + 1.75**2) / 2))


def test_expert_demonstrates_in_the_environment(examples, tmp_path):
    from genrl.envs import collect, probe
    from genrl.envs.data import open_demonstrations

    assert probe("my_lab.Reach").ok
    env = {"id": "my_lab.Reach", "max_steps": 60}
    path = collect(env, expert="my_lab.Straight", episodes=4, after_success=0, path=tmp_path / "reach.hdf5")
    episodes = open_demonstrations(path).episodes
    assert [episode.seed for episode in episodes] == [0, 1, 2, 3]  # no attempt has failed
    speeds = {round(float(np.linalg.norm(episode.actions[0])), 3) for episode in episodes}
    assert speeds == {0.5, 1.0}


def test_reader_gives_episodes(examples, tmp_path):
    from genrl.envs.data import ActionRepresentation
    from genrl.envs.data.reading import read_episode, select_keys

    assert not examples["detect"](tmp_path)
    for number, steps in enumerate((3, 2)):
        rows = [f"{step},{10 * number},{step + 0.5}" for step in range(steps)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["state_0,state_1,action_0", *rows]))
    assert examples["detect"](tmp_path) and examples["name"] == "csv"
    with examples["open"](tmp_path) as reader:
        assert reader.names() == ["0", "1"]
        episode = read_episode(reader, "1", select_keys(reader, None, {}), reader.action_key)
        assert episode.obs["state"].tolist() == [[0, 10], [1, 10]] and episode.obs["state"].dtype == np.float32
        assert episode.actions.tolist() == [[0.5], [1.5]]
        ActionRepresentation.from_dict(reader.meta("action")["action_representation"])


def test_every_class_path_in_the_text_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in set(re.findall(r"`(genrl(?:\.\w+)+)(?:\(.*?)?`|class_path: (genrl[\w.]+)", text)):
        name = path[0] or path[1]
        if name.rpartition(".")[2][0].isupper() or name.endswith("check_reward"):
            import_object(name, "CONTRIBUTING.md")
