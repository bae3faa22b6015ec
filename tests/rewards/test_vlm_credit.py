"""Credit maps from vision-language models: TVRL's critic, end to end with tiny ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from genrl import tiny
from genrl.algorithms import Rollout, VideoCredit
from genrl.algorithms.token_weights import checked_weights
from genrl.prompts import Prompt
from genrl.rewards import TemplateQuestions, VLMLikelihood, VLMOptions

pytest.importorskip("transformers", reason="needs the extra rewards")
pytest.importorskip("torchvision", reason="needs the extra rewards")

from tiny_vlms import saved_family

ASK = TemplateQuestions(["Is this {prompt}?", "Is there {part}?"])
PROMPTS = [Prompt("a red cat"), Prompt("a dog and a cat", {"questions": [["Is it a dog?", "yes"]]})]


def videos(frames: int, side: int = 56) -> torch.Tensor:
    return torch.rand(2, frames, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.saved_vlm(tmp_path_factory.mktemp("vlm") / "qwen"))


def credit_of(folder, media, batch_size=4, shape=(4, 3, 7, 7), **settings):
    critic = VLMLikelihood(folder, options=VLMOptions(dtype="float32", frames=4, batch_size=batch_size), ask=ASK)
    part = VideoCredit(critic, **settings)
    part.prepare(progress=False)
    generator = SimpleNamespace(latent_shape=shape)
    part.configure(generator)
    weights = part(Rollout(None, torch.zeros(2, *shape), torch.arange(2)), media, PROMPTS, generator)
    return critic, checked_weights(weights, torch.zeros(2, *shape), "VideoCredit")


def test_the_map_is_the_pooled_gradient_of_each_answer(folder):
    media = videos(9)
    critic, weights = credit_of(folder, media, interpolation="nearest")
    assert weights.shape == (2, 1, 3, 7, 7)  # CFHW with three latent frames of 9
    shown = critic.frames_shown(9)
    assert shown == [0, 3, 5, 8]
    nearest = [min(shown, key=lambda at: (abs(at - f), at)) for f in range(9)]
    for i, prompt in enumerate(PROMPTS):
        maps = []
        for question in critic.questions(media[i : i + 1], [prompt.text], [prompt.metadata])[0]:
            leaf = media[i : i + 1].clone().requires_grad_()
            critic.question_values(leaf, [[question]]).sum().backward()
            pixels = leaf.grad[0].norm(dim=1)[nearest]  # [F, H, W]
            frames = torch.stack([pixels[0], pixels[1:5].mean(0), pixels[5:].mean(0)])
            cells = frames.reshape(3, 7, 8, 7, 8).mean((2, 4))
            maps.append(cells / cells.mean())
        torch.testing.assert_close(weights[i, 0], torch.stack(maps).mean(0), rtol=1e-3, atol=1e-4)


def test_the_critic_learns_nothing_and_its_batches_do_not_matter(folder):
    media = videos(5).requires_grad_()
    critic, weights = credit_of(folder, media, shape=(4, 2, 7, 7))
    assert not weights.requires_grad and media.grad is None
    assert all(p.grad is None and not p.requires_grad for p in critic.vlm._model.parameters())
    for batch_size in (1, 3):
        _, other = credit_of(folder, media, batch_size, shape=(4, 2, 7, 7))
        torch.testing.assert_close(other, weights, rtol=1e-3, atol=1e-4)
    assert float(weights.std()) > 0.05  # there is something to see


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_newer_critics_give_credit(family, tmp_path):
    _, weights = credit_of(str(saved_family(family, tmp_path)), videos(9, 64), shape=(4, 3, 8, 8))
    assert float(weights.std()) > 0.01
