import numpy as np
import pytest
import torch
from generator_members import TINY
from sklearn.datasets import load_digits

from genrl.generators import DigitPrompts, DigitsGenerator, load_digits_split
from genrl.generators.digits import BASE_TEMPLATES, DIGIT_WORDS, VOCABULARY, digit_of, tokenize


def test_the_three_parts_are_disjoint_complete_and_stratified():
    split = load_digits_split()
    parts = [split.generator, split.proxy, split.gold]
    assert [len(part) for part in parts] == [900, 448, 449]
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(1797))
    data = load_digits()
    for part in parts:
        assert part.images.shape == (len(part), 1, 8, 8)
        assert part.images.dtype == np.float32 and part.labels.dtype == np.int64
        assert np.array_equal(part.images[:, 0] * 16, data.images[part.indices])
        assert np.array_equal(part.labels, data.target[part.indices])
        assert np.abs(np.bincount(part.labels) / len(part) - 0.1).max() < 0.01
    assert np.array_equal(load_digits_split().gold.indices, split.gold.indices)


@pytest.mark.parametrize("template", BASE_TEMPLATES)
def test_words_and_numerals_of_every_template_are_understood(template):
    for k, word in enumerate(DIGIT_WORDS):
        assert digit_of(template.format(word)) == digit_of(template.format(k)) == k


def test_case_and_punctuation_do_not_matter():
    assert tokenize("The digit, SEVEN!") == tokenize("the digit seven")


def test_an_unknown_word_is_named_with_the_vocabulary():
    with pytest.raises(ValueError) as error:
        DigitsGenerator().encode(["the digit 7", "a purple seven"])
    assert "'a purple seven'" in str(error.value) and "'purple'" in str(error.value)
    assert all(word in str(error.value) for word in VOCABULARY)


@pytest.mark.parametrize("prompt", ["a handwritten digit", "the digit 7 4", "seven 7", ""])
def test_a_prompt_without_exactly_one_digit_is_named(prompt):
    with pytest.raises(ValueError, match="exactly one") as error:
        DigitsGenerator().encode([prompt])
    assert repr(prompt) in str(error.value)


def test_a_prompt_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="at most 12"):
        tokenize("a " * 12 + "seven")


def test_prompts_are_one_a_digit_and_the_held_out_ones_are_other_texts():
    prompts = DigitPrompts()
    assert [prompt.metadata for prompt in prompts.train] == 2 * [{"label": k} for k in range(10)]
    assert [p.metadata for p in prompts.held_out] == [{"label": k} for k in range(10)]
    assert prompts.train[7].text == "a handwritten seven" and prompts.train[17].text == "number 7"
    assert prompts.held_out[7].text == "a drawing of the number seven"
    assert not {p.text for p in prompts.train} & {p.text for p in prompts.held_out}
    for prompt in prompts.train + prompts.held_out:
        assert digit_of(prompt.text) == prompt.metadata["label"]
    assert len(DigitPrompts(train_templates=["number {digit}", "number {word}"]).train) == 20


def test_templates_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="placeholder"):
        DigitPrompts(train_templates=["a handwritten digit"])
    with pytest.raises(ValueError, match="both"):
        DigitPrompts(held_out_templates=["a handwritten {word}"])


def test_the_vp_module_predicts_epsilon_and_velocity_is_its_v_prediction(cache):
    generator = DigitsGenerator(**TINY, path="vp", cache_dir=cache)
    generator.prepare("cpu", progress=False)
    cond = generator.encode(["number 3", "number 4"])
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([1.0, 0.25])
    with torch.no_grad():
        eps, velocity = generator.module(x, t, cond), generator.velocity(x, t, cond)
    torch.testing.assert_close(generator.path.x0_eps(x, velocity, t)[1], eps, atol=1e-5, rtol=1e-4)
    # Stable Diffusion's table: DDPM's products of 1 - beta.
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    a = np.sqrt(np.prod(1 - betas[:250]))
    assert generator.path.alpha(torch.tensor(0.25)).item() == pytest.approx(a, rel=1e-6)


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match="'ve'"):
        DigitsGenerator(path="ve")
