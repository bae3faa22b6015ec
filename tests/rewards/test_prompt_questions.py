from __future__ import annotations

import pytest
import torch

from genrl import tiny
from genrl.rewards import LanguageModelQuestions, TemplateQuestions, TransformersText, VLMLikelihood, VLMOptions
from genrl.rewards.prompt_questions import questions_in
from genrl.tiny.rewards import saved_text_model

pytest.importorskip("transformers", reason="needs the extra rewards")
pytest.importorskip("torchvision", reason="needs the extra rewards")


def test_templates_are_filled_with_the_prompt_and_with_its_parts():
    ask = TemplateQuestions(["Is this {prompt}?", "Is there {part}?", ["Is it dark?", "no"], ["Which?", "cat", "dog"]])
    assert ask("a cat with {braces}, and a dog.") == [
        ("Is this a cat with {braces}, and a dog.?", "yes", "no"),
        ("Is there a cat?", "yes", "no"),
        ("Is there {braces}?", "yes", "no"),
        ("Is there a dog?", "yes", "no"),
        ("Is it dark?", "no", "yes"),
        ("Which?", "cat", "dog"),
    ]
    assert TemplateQuestions(["{part}?"])("and") == [("and?", "yes", "no")]
    assert TemplateQuestions(["{part}?"])("a cat and a cat") == [("a cat?", "yes", "no")]  # asked once
    with pytest.raises(ValueError, match="at least one question"):
        TemplateQuestions([])


def test_questions_are_found_in_what_a_language_model_writes():
    text = "Sure!\n1. Is there a cat?\n- Does it run?\n\n3) Is there a cat?\nThat is all.\n?"
    assert questions_in(text) == ["Is there a cat?", "Does it run?"]
    requests = []

    def write(request):
        requests.append(request)
        return text if "cat" in request else "nothing"

    ask = LanguageModelQuestions(write, count=1, instruction="{count} about {prompt}", suffix=" Say yes or no.")
    assert ask("a cat {count}") == ask("a cat {count}") == [("Is there a cat? Say yes or no.", "yes", "no")]
    assert requests == ["1 about a cat {count}"]  # once, and the prompt stays as it is
    assert ask("a dog") == [("Does this show: a dog? Say yes or no.", "yes", "no")]


def test_a_language_model_of_transformers_writes_the_same_every_time(tmp_path):
    write = TransformersText(saved_text_model(tmp_path / "text"), tokens=3)
    first = write("red cat")
    assert write("red cat") == first and isinstance(first, str)
    with pytest.raises(OSError, match="nowhere"):
        TransformersText(str(tmp_path / "nowhere")).prepare()


def test_a_vlm_is_asked_what_a_maker_of_questions_gives(tmp_path):
    folder = str(tiny.saved_vlm(tmp_path / "vlm"))
    ask = TemplateQuestions(["Is this {prompt}?", "Is there {part}?"])
    reward = VLMLikelihood(folder, options=VLMOptions(dtype="float32", frames=2), ask=ask)
    media = torch.rand(2, 3, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    own = {"questions": [["Is it red?", "yes"]]}
    asked = reward.questions(media, ["a cat and a dog", "a cat"], [{}, own])
    assert asked == [ask("a cat and a dog"), [("Is it red?", "yes", "no")]]
    found = reward(media, ["a cat and a dog", "a cat"], [{}, own])
    torch.testing.assert_close(found, reward.question_values(media, asked).nanmean(1))
    assert reward.frames_shown(3) == [0, 2]


def test_two_rewards_share_one_model_and_give_it_back(tmp_path):
    import gc

    from genrl.rewards.vlm_model import _SHARED

    folder = str(tiny.saved_vlm(tmp_path / "vlm"))
    options = VLMOptions(dtype="float32")
    one, two, other = (VLMLikelihood(folder, options=o) for o in (options, options, VLMOptions(dtype="bfloat16")))
    for reward in (one, two, other):
        reward.prepare(progress=False)
    assert one.vlm._model is two.vlm._model is not other.vlm._model
    mine = [key for key in _SHARED if key[0] == folder]
    assert len(mine) == 2
    del one, two, other, reward
    gc.collect()
    assert not [key for key in _SHARED if key[0] == folder]
