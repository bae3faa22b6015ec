from __future__ import annotations

import pytest
import torch

from genrl.generators.digits import DIGIT_WORDS
from genrl.generators.moving_digits import MOTIONS, moving_digits
from genrl.rewards import MovingDigitQuestions, check_reward
from genrl.rewards.video_questions import _MOTIONS, _WORDS, KINDS, answer_classes


@pytest.fixture(scope="module")
def real():
    """videos, prompts, metadata of 24 real videos."""
    videos, digits, motions = moving_digits(24, "generator", seed=7)
    metadata = [{"label": d, "motion": MOTIONS[m]} for d, m in zip(digits.tolist(), motions.tolist(), strict=True)]
    return videos, ["a video"] * len(videos), metadata


@pytest.fixture(scope="module")
def answerer(reward_cache):
    reward = MovingDigitQuestions()
    reward.prepare("cpu", progress=False)
    return reward


def test_it_answers_about_real_videos_that_it_has_not_seen(answerer):
    found = answerer.describe()
    assert found["digit_accuracy"] > 0.9 and found["motion_accuracy"] > 0.97


def test_its_names_are_those_of_the_data():
    assert _MOTIONS == MOTIONS and _WORDS == DIGIT_WORDS


def test_right_answers_are_held_more_likely_than_wrong_ones(answerer, real):
    videos, prompts, metadata = real
    wrong = [
        {"label": (e["label"] + 3) % 10, "motion": MOTIONS[(MOTIONS.index(e["motion"]) + 1) % 6]} for e in metadata
    ]
    right, other = answerer(videos, prompts, metadata), answerer(videos, prompts, wrong)
    assert right.mean() > 0.9 and other.mean() < 0.4 and (right > other).float().mean() > 0.9


def test_the_probabilities_of_all_answers_add_up(answerer, real):
    videos = real[0][:2]
    for question, answers in [
        ("Which digit is shown?", DIGIT_WORDS),
        ("Which way does it move?", MOTIONS),
        ("Is it a seven?", ("yes", "no")),
        ("Does it move left?", ("yes", "no")),
    ]:
        values = answerer.question_values(videos, [[(question, answer, "") for answer in answers]] * 2)
        assert torch.allclose(values.sum(1), torch.ones(2), atol=1e-5)
    both = answerer.question_values(videos, [[("Is it a seven?", "yes", ""), ("Which digit is it?", "7", "")]] * 2)
    assert torch.allclose(both[:, 0], both[:, 1], atol=1e-6)


def test_another_answer_is_what_an_answer_is_compared_with(answerer, real):
    question = "Which digit is shown?"
    p = answerer.question_values(real[0][:3], [[(question, "3", ""), (question, "5", ""), (question, "3", "5")]] * 3)
    assert torch.allclose(p[:, 2], p[:, 0] / (p[:, 0] + p[:, 1]), rtol=1e-3, atol=1e-5)
    logs = MovingDigitQuestions(value="log_likelihood")
    assert torch.allclose(
        logs.question_values(real[0][:3], [[(question, "3", "")]] * 3)[:, 0].exp(), p[:, 0], rtol=1e-3, atol=1e-6
    )


def test_the_reward_is_the_mean_over_checks_and_metadata_may_bring_its_own(answerer, real):
    videos, prompts, _ = real
    metadata = [
        {"questions": [["Does it bounce?", "no"], ["Is it a 4?", "no", "yes"]]},
        {"questions": [["Which way does it move?", "up"]]},
    ]
    asked = answerer.questions(videos[:2], prompts[:2], metadata)
    assert asked[0] == [("Does it bounce?", "no", ""), ("Is it a 4?", "no", "yes")]
    values = answerer.question_values(videos[:2], asked)
    assert values.shape == (2, 2) and values[1, 1].isnan()
    reward = answerer(videos[:2], prompts[:2], metadata)
    assert torch.allclose(reward, torch.stack([values[0].mean(), values[1, 0]]))
    named = MovingDigitQuestions(per_question=True)(videos[:2], prompts[:2], metadata)
    assert list(named) == ["question_0", "question_1"] and torch.equal(named["question_0"], values[:, 0])


def test_gradient_magnitude_is_that_of_autograd_for_each_question_alone(answerer, real):
    videos, prompts, metadata = real[0][:3], real[1][:3], list(real[2][:3])
    metadata[1] = {"questions": [["Which digit is shown?", "five"]]}
    asked = answerer.questions(videos, prompts, metadata)
    values, magnitude = answerer.gradient_magnitude(videos, asked)
    assert values.shape == (3, 3) and magnitude.shape == (3, 3, 10, 16, 16) and not magnitude.requires_grad
    assert torch.allclose(values, answerer.question_values(videos, asked), equal_nan=True, atol=1e-6)
    assert values[1, 1:].isnan().all() and (magnitude[1, 1:] == 0).all()
    leaf = videos[2:].clone().requires_grad_()
    one = answerer.question_values(leaf, [asked[2][:1]])[0, 0]
    (gradient,) = torch.autograd.grad(one, leaf)
    assert torch.allclose(magnitude[2, 0], gradient[0].norm(dim=1), atol=1e-6)
    assert (magnitude[:, 0].sum((1, 2, 3)) > 0).all()
    with torch.no_grad():
        assert torch.equal(answerer.gradient_magnitude(videos, asked)[1], magnitude)


def test_it_passes_the_checker(answerer, real):
    assert check_reward(answerer, real[0][:6], real[1][:6], real[2][:6]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_default_questions_of_every_kind_are_understood(kind):
    reward = MovingDigitQuestions(kinds=[kind])
    metadata = [{"label": d, "motion": m} for d in range(10) for m in MOTIONS]
    for entry, ((question, answer, _),) in zip(
        metadata, reward.questions(torch.zeros(60, 10, 1, 16, 16), ["a"] * 60, metadata), strict=True
    ):
        classes = answer_classes(question, answer)
        truth = entry["label"] if "digit" in kind else 10 + MOTIONS.index(entry["motion"])
        assert truth in classes


def test_yes_and_no_divide_the_classes():
    everything = {"Is it a 0?": set(range(10)), "Does it move?": set(range(10, 16)), "does it stand still": {14}}
    assert answer_classes("Is it a 0?", "Yes") | answer_classes("Is it a 0?", "no") == everything["Is it a 0?"]
    assert answer_classes("Does it move?", "no") == answer_classes("does it stand still", "yes") == {14}
    assert answer_classes("Is this the digit three?", "yes") == answer_classes("what number is it", "3") == {3}


def test_what_it_does_not_know_is_named(answerer, real):
    with pytest.raises(ValueError, match="Is it a cat"):
        answer_classes("Is it a cat?", "yes")
    with pytest.raises(ValueError, match="'perhaps'"):
        answer_classes("Does it bounce?", "perhaps")
    with pytest.raises(ValueError, match="not empty"):
        answerer.questions(real[0][:1], ["a"], [{"questions": []}])
    with pytest.raises(ValueError, match="motion None"):
        answerer.questions(real[0][:1], ["a"], [{"label": 3}])
    with pytest.raises(ValueError, match="2 frames"):
        answerer(real[0][:1, :2], ["a"], [{"label": 3, "motion": "up"}])
    with pytest.raises(ValueError, match="kinds"):
        MovingDigitQuestions(kinds=["colour"])
    with pytest.raises(ValueError, match="'loud'"):
        MovingDigitQuestions(value="loud")
