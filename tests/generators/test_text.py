import numpy as np
import pytest

from genrl.generators import RenderedTextGenerator, TextPrompts
from genrl.generators.text import render_text, text_of


def test_prompts_are_disjoint_seeded_and_readable():
    prompts = TextPrompts(train=20, held_out=30)
    train, held_out = ({p.metadata["text"] for p in part} for part in (prompts.train, prompts.held_out))
    assert len(train) == 20 and len(held_out) == 30 and not train & held_out
    assert all(text_of(p.text) == p.metadata["text"] for p in prompts.train + prompts.held_out)
    assert TextPrompts(20, 30).train == prompts.train != TextPrompts(20, 30, seed=1).train
    with pytest.raises(ValueError, match="100"):
        TextPrompts(60, 60)


@pytest.mark.parametrize("prompt", ["42", 'the text "4"', 'the text "4a"', "the text 42", 'the text "٤٢"'])
def test_a_prompt_of_another_form_is_named(prompt):
    with pytest.raises(ValueError, match="double quotes") as error:
        RenderedTextGenerator().encode([prompt])
    assert repr(prompt) in str(error.value)


def test_the_order_of_the_characters_is_kept():
    assert RenderedTextGenerator().encode(['the text "07"', 'The text "70"']).tolist() == [[1, 18], [8, 11]]


def test_renderings_are_seeded_varied_dark_on_light_and_not_cut_off():
    images = [render_text("42", np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert images[0].shape == (1, 16, 24) and images[0].dtype == np.float32
    assert np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[2])
    rng = np.random.default_rng(0)
    for k in range(100):
        image = render_text(f"{k:02d}", rng)[0]
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert border.min() > 0.5 and image.min() < 0.4 and image.max() <= 1
