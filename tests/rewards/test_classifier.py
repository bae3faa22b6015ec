from __future__ import annotations

import pytest
import torch

from genrl.rewards import DigitJudge, DigitProxy, check_reward, score
from genrl.rewards.classifier import DigitRecipe


def metadata_of(part):
    return [{"label": int(label)} for label in part.labels]


def test_proxy_and_judge_and_generator_share_no_image(split):
    parts = [set(part.indices.tolist()) for part in (split.generator, split.proxy, split.gold)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 1797


def test_proxy_reads_the_generators_half(proxy):
    assert proxy.describe()["real_accuracy"] >= 0.96


def test_judge_reads_the_generators_half():
    assert DigitJudge().describe()["real_accuracy"] >= 0.97


def test_judge_score_is_its_accuracy(split):
    judge, part = DigitJudge(), split.generator
    values = score(judge, torch.from_numpy(part.images), ["digit"] * len(part), metadata_of(part))["digit_judge"]
    assert set(values.tolist()) == {0.0, 1.0}
    assert values.mean().item() == pytest.approx(judge.describe()["real_accuracy"])


def test_proxy_score_is_the_probability_of_the_prompts_digit(proxy, split):
    media = torch.from_numpy(split.generator.images[:1]).expand(10, -1, -1, -1)
    values = score(proxy, media, ["digit"] * 10, [{"label": i} for i in range(10)])["digit_proxy"]
    assert values.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert values.argmax().item() == split.generator.labels[0]


def test_both_pass_the_checker(proxy, batch):
    assert check_reward(proxy, *batch) == []
    judge = DigitJudge()
    media, prompts, _ = batch
    assert check_reward(judge, media, prompts, [{"label": int(label)} for label in judge.predict(media)]) == []


def test_gradient_points_uphill(proxy, split):
    media, labels = torch.from_numpy(split.generator.images[:32]) * 0.6, metadata_of(split.generator)[:32]
    media = media.requires_grad_()
    before = proxy(media, ["digit"] * 32, labels)
    (gradient,) = torch.autograd.grad(before.sum(), media)
    after = proxy(media + 1e-2 * gradient, ["digit"] * 32, labels)
    assert (after.sum() > before.sum()).item()


def test_training_is_repeatable_cached_and_leaves_the_global_random_state(tmp_path, monkeypatch, batch, capsys):
    recipe = DigitRecipe(steps=3, seed=5)
    state = torch.get_rng_state()
    first = DigitProxy(recipe)
    first.prepare("cpu")
    assert "training the digit classifier" in capsys.readouterr().err
    second = DigitProxy(recipe)
    second.prepare("cpu")
    assert capsys.readouterr().err == ""  # came from the cache
    monkeypatch.setenv("GENRL_CACHE", str(tmp_path))
    third = DigitProxy(recipe)
    with torch.no_grad():
        values = [reward(*batch) for reward in (first, second, third)]  # the third trains on its first call
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    assert torch.equal(state, torch.get_rng_state())
    assert len(list(tmp_path.glob("*/model.safetensors"))) == 1


@pytest.mark.parametrize("reward", [DigitProxy(DigitRecipe(steps=1)), DigitJudge()])
@pytest.mark.parametrize("label", [None, "7", 10, -1])
def test_a_missing_or_wrong_label_is_named(reward, label, batch):
    with pytest.raises(ValueError, match=f"label {label!r}"):
        reward(batch[0], batch[1], [{"label": label}] * 4)


def test_other_image_sizes_are_refused(proxy):
    with pytest.raises(ValueError, match=r"\(2, 3, 8, 8\)"):
        proxy(torch.zeros(2, 3, 8, 8), ["a", "b"], [{"label": 1}] * 2)


def test_judge_refuses_a_shift_of_more_than_a_pixel():
    with pytest.raises(ValueError, match="shift is 2"):
        DigitJudge(shift=2).prepare()
