from __future__ import annotations

import math
import sys

import pytest
import torch
from PIL import Image

from genrl import tiny
from genrl.rewards import (
    RewardError,
    VLMLikelihood,
    VLMOptions,
    VLMRegressionHead,
    VLMScore,
    check_reward,
    score,
)
from genrl.rewards.vlm import ended
from genrl.rewards.vlm_model import VisionLanguageModel

transformers = pytest.importorskip("transformers", reason="needs the extra rewards")
pytest.importorskip("torchvision", reason="needs the extra rewards")

from tiny_vlms import FAMILIES, saved_family  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # PaliGemma's processor

PROMPTS = ["a cat", "a much longer prompt, with a dog and {braces}", "7", "a red picture of text"]
SIDE = 56  # the tiny model neither enlarges nor reduces it


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    return str(tiny.saved_vlm(tmp_path_factory.mktemp("vlm") / "qwen"))


@pytest.fixture(scope="session")
def loaded(folder):
    """The model and processor as a user of transformers loads them."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="session")
def families(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("vlms")
    return {name: str(saved_family(name, root)) for name in FAMILIES}


def pictures(batch: int = 4, frames: int | None = None, side: int = SIDE, seed: int = 0) -> torch.Tensor:
    """Media of 8-bit values, so that image files hold them exactly."""
    shape = (batch, 3, side, side) if frames is None else (batch, frames, 3, side, side)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).float() / 255


def file_of(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


def by_hand(loaded, image: torch.Tensor, question: str, answer: str) -> torch.Tensor:
    """log p(answer), teacher-forced on the whole text by the ordinary use of the processor, one sample at a time."""
    model, processor = loaded
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[prompt + answer], images=[file_of(image)], return_tensors="pt")
    ids = inputs["input_ids"][0]
    start = len(processor(text=[prompt], images=[file_of(image)], return_tensors="pt")["input_ids"][0])
    assert processor.tokenizer.decode(ids[start:]) == answer
    with torch.no_grad():
        log_probs = model(**inputs).logits[0].log_softmax(-1)
    return torch.stack([log_probs[i - 1, ids[i]] for i in range(start, len(ids))]).sum()


def values(reward, media, prompts=PROMPTS, metadata=None) -> torch.Tensor:
    (result,) = score(reward, media, prompts[: len(media)], metadata).values()
    return result


# ---------------------------------------------------------------------------------------------------- likelihood


@pytest.mark.parametrize("answer", ["yes", "dark blue 42", "7"])
def test_log_likelihood_is_that_of_teacher_forcing(folder, loaded, answer):
    media = pictures()
    reward = VLMLikelihood(folder, "log_likelihood", template="What is {prompt}?", answer=answer, both_cases=False)
    found = values(reward, media)
    expected = [by_hand(loaded, m, f"What is {p}?", answer) for m, p in zip(media, PROMPTS, strict=True)]
    assert torch.allclose(found, torch.stack(expected), atol=2e-5)


def test_the_other_values_follow_from_log_likelihoods(folder, loaded):
    media, question = pictures(2), "Is it?"
    logs = {a: torch.stack([by_hand(loaded, m, question, a) for m in media]) for a in ("yes", "Yes", "no", "No")}
    yes, no = logs["yes"].exp() + logs["Yes"].exp(), logs["no"].exp() + logs["No"].exp()
    long = torch.stack([by_hand(loaded, m, question, "a red cat") for m in media])
    expected = {
        ("two_way", "yes", True): yes / (yes + no),
        ("two_way", "yes", False): logs["yes"].exp() / (logs["yes"].exp() + logs["no"].exp()),
        ("probability", "yes", True): yes,
        ("probability", "yes", False): logs["yes"].exp(),
        ("log_likelihood", "yes", True): yes.log(),
        ("mean_log_likelihood", "a red cat", False): long / 3,
    }
    for (value, answer, both_cases), wanted in expected.items():
        reward = VLMLikelihood(folder, value, template=question, answer=answer, both_cases=both_cases)
        assert torch.allclose(values(reward, media), wanted, atol=1e-5), (value, both_cases)


def test_orientation_yes_and_no_are_opposite(folder):
    media = pictures()
    right, wrong = VLMLikelihood(folder), VLMLikelihood(folder, answer="no", other="yes")
    assert torch.allclose(values(right, media) + values(wrong, media), torch.ones(4), atol=1e-6)
    asked = [{"questions": [["Is it?", "no"]]}] * 4  # an answer of 'no' needs no third entry
    assert torch.allclose(values(right, media, metadata=asked), values(wrong, media, metadata=asked), atol=1e-6)


def test_a_model_that_says_yes_scores_high(folder):
    reward = VLMLikelihood(folder)
    reward.prepare()
    head = reward.vlm._model.get_output_embeddings()
    before = values(reward, pictures())
    with torch.no_grad():
        head.weight[reward.vlm.tokenizer.convert_tokens_to_ids("yes")] = 3 * reward_direction(reward)
    assert (values(reward, pictures()) > before).all()


def reward_direction(reward) -> torch.Tensor:
    """The mean last hidden state, so that a token along it becomes likely."""
    with torch.no_grad():
        return reward.vlm.last_hidden(pictures(), ["?"] * 4).mean((0, 1))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_neither_padding_nor_batches_change_scores(folder, batch_size):
    media = pictures()
    reward = VLMLikelihood(folder, "log_likelihood", answer="a red dog", options=VLMOptions(batch_size=batch_size))
    alone = torch.cat([values(reward, media[i : i + 1], PROMPTS[i : i + 1]) for i in range(4)])
    assert torch.allclose(values(reward, media), alone, atol=1e-5)
    assert reward.vlm.tokenizer.padding_side == "left"


@pytest.mark.parametrize("value", ["two_way", "probability", "log_likelihood", "mean_log_likelihood"])
def test_checker_finds_nothing(folder, value):
    reward = VLMLikelihood(folder, value)
    assert check_reward(reward, pictures(), PROMPTS) == []
    assert check_reward(reward, pictures(2, frames=3), PROMPTS[:2]) == []


def test_the_model_is_frozen_and_does_not_depend_on_autocast(folder):
    reward = VLMLikelihood(folder)
    plain = values(reward, pictures())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(values(reward, pictures()), plain)
    model = reward.vlm._model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_grey_media_are_like_grey_colours(folder):
    grey = pictures()[:, :1]
    reward = VLMLikelihood(folder)
    assert torch.equal(values(reward, grey), values(reward, grey.expand(-1, 3, -1, -1)))
    with pytest.raises(RewardError, match="media has 4 channels"):
        values(reward, torch.rand(4, 4, SIDE, SIDE))


# ---------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("frames", [None, 3])
def test_gradients_to_frames_equal_finite_differences(folder, frames):
    media = pictures(2, frames, side=40)  # resized on the way
    reward = VLMLikelihood(folder, "log_likelihood")
    leaf = media.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reward(leaf, PROMPTS[:2], [{}] * 2).sum(), leaf)
    assert gradient.isfinite().all() and all(part.abs().sum() > 0 for part in gradient)
    direction, step = gradient.sign(), 3e-4
    with torch.no_grad():
        up, down = (reward(media + s * step * direction, PROMPTS[:2], [{}] * 2).sum() for s in (1, -1))
    assert ((up - down) / (2 * step)).item() == pytest.approx((gradient * direction).sum().item(), rel=2e-3)


def test_gradient_magnitude_is_that_of_each_question(folder):
    media = pictures(2, frames=5, side=40)
    reward = VLMLikelihood(folder, options=VLMOptions(frames=3, batch_size=2))
    metadata = [{"questions": [["Is it red?", "yes"], ["Is it a cat?", "no"]]}, {"questions": [["Is it?", "no"]]}]
    questions = reward.questions(media, PROMPTS[:2], metadata)
    found, magnitude = reward.gradient_magnitude(media, questions)
    assert magnitude.shape == (2, 2, 5, 40, 40)
    leaf = media.clone().requires_grad_()
    table = reward.question_values(leaf, questions)
    assert torch.allclose(found, table.detach(), atol=1e-6, equal_nan=True)
    for i, j in ((0, 0), (0, 1), (1, 0)):
        (gradient,) = torch.autograd.grad(table[i, j], leaf, retain_graph=True)
        assert torch.allclose(magnitude[i, j], gradient[i].norm(dim=1), atol=1e-7)
    assert found[1, 1].isnan() and magnitude[1, 1].abs().sum() == 0
    assert (magnitude.sum((0, 1, 3, 4)) > 0).tolist() == [True, False, True, False, True]  # the frames shown


def test_checkpointing_keeps_values_and_gradients_and_saves_memory(folder):
    results = []
    for checkpointing in (False, True):
        reward = VLMLikelihood(folder, options=VLMOptions(checkpointing=checkpointing))
        reward.prepare()
        leaf, kept = pictures().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            value = reward(leaf, PROMPTS, [{}] * 4)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        results.append((value.detach(), gradient, sum(kept)))
        assert not any(module.training for module in reward.vlm._model.modules())
    (value, gradient, plain), (again, recomputed, less) = results
    assert torch.equal(value, again) and torch.allclose(gradient, recomputed, atol=1e-8)
    assert less < 0.6 * plain


# ---------------------------------------------------------------------------------------------------- pictures


def test_pixels_equal_those_of_image_files(folder, loaded):
    vlm = VisionLanguageModel(folder, VLMOptions())
    vlm.prepare()
    _, processor = loaded
    for side, tolerance in ((SIDE, 1e-5), (84, 1e-5), (50, 0.02), (200, 0.02)):  # the last two are resized
        media = pictures(2, side=side)
        ours = vlm.inputs(media, ["?"] * 2)
        theirs = processor(text=["<|image_pad|>"] * 2, images=[file_of(m) for m in media], return_tensors="pt")
        assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])
        assert (ours["pixel_values"] - theirs["pixel_values"]).abs().mean() < tolerance


def test_videos_are_reduced_to_even_frames_and_scored_like_the_processor_does(folder, loaded):
    model, processor = loaded
    media = pictures(1, frames=9)
    reward = VLMLikelihood(
        folder, "log_likelihood", template="?", both_cases=False, options=VLMOptions(frames=4, fps=8)
    )
    found = values(reward, media)
    assert reward.vlm.frame_indices(9) == [0, 3, 5, 8] and reward.vlm.frame_indices(3) == [0, 1, 2]
    shown = (media[0, [0, 3, 5, 8]] * 255).round().to(torch.uint8)
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    facts = {"fps": 3.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}  # three steps in one second
    inputs = processor(text=[text], videos=[shown], video_metadata=[facts], do_sample_frames=False, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits[0, -1].log_softmax(-1)[processor.tokenizer.convert_tokens_to_ids("yes")]
    assert found.item() == pytest.approx(expected.item(), abs=1e-2)  # video frames of this size are enlarged


@pytest.mark.parametrize("name", FAMILIES)
def test_other_processors_pass_gradients_and_score_like_image_files(families, name):
    options = VLMOptions(batch_size=2, plain_format="{image}{question}\n" if name == "paligemma" else None)
    reward = VLMLikelihood(families[name], "log_likelihood", template="?", both_cases=False, options=options)
    media = pictures(3, side=32)
    assert check_reward(reward, media, PROMPTS[:3]) == []
    assert reward.differentiable
    model = transformers.AutoModelForImageTextToText.from_pretrained(families[name], dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(families[name])
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    text = "<image>?\n"
    if processor.chat_template is not None:
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    for image, found in zip(media, values(reward, media), strict=True):
        inputs = processor(text=[text], images=[[file_of(image)]], return_tensors="pt")
        inputs.pop("labels", None)
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        expected = logits.log_softmax(-1)[processor.tokenizer.convert_tokens_to_ids("yes")]
        assert found.item() == pytest.approx(expected.item(), abs=0.02)  # idefics3 enlarges the image
    videos = pictures(2, frames=3, side=32)
    assert check_reward(reward, videos, PROMPTS[:2]) == []  # several images, where there is no video processor
    if name != "paligemma":
        several = VLMLikelihood(families[name], "log_likelihood", answer="a red cat")
        assert check_reward(several, media, PROMPTS[:3]) == []


def test_variables_reach_the_chat_template(families):
    options = VLMOptions(chat={"enable_thinking": False})
    reward = VLMLikelihood(families["qwen3_5"], options=options)
    reward.prepare()
    text = reward.vlm.tokenizer.decode(reward.vlm.inputs(pictures(1), ["?"])["input_ids"][0])
    assert text.endswith("<|im_start|>assistant\n<think></think>")


def test_a_processor_without_tensors_gives_scores_and_refuses_gradients(families):
    pil = VLMLikelihood(families["llava"], options=VLMOptions(processor={"backend": "pil"}))
    tensors = VLMLikelihood(families["llava"])
    media = pictures(2, side=40)
    assert torch.allclose(values(pil, media), values(tensors, media), atol=5e-3)
    assert tensors.differentiable and not pil.differentiable
    with pytest.raises(RewardError, match=r"LlavaProcessor.*passes no gradients to frames"):
        score(pil, media.requires_grad_(), PROMPTS[:2], gradients=True)


def test_a_model_that_would_see_the_answer_is_refused(families):
    options = VLMOptions(plain_format="{image}{question}\n")
    one = VLMLikelihood(families["paligemma"], options=options)
    several = VLMLikelihood(families["paligemma"], "log_likelihood", answer="a red cat", options=options)
    assert values(one, pictures(2)).isfinite().all()
    with pytest.raises(RewardError, match=r"sees an answer while it predicts it.*one token"):
        values(several, pictures(2))


# ---------------------------------------------------------------------------------------------------- questions

CHECKS = [
    {"questions": [["Is it a cat?", "yes"], ["What colour?", "red", "blue"], ["Is there text?", "no"]]},
    {"questions": [["Is it a dog?", "yes"]]},
]


def test_questions_of_a_sample_count_as_their_mean(folder):
    media = pictures(2)
    mean = values(VLMLikelihood(folder), media, metadata=CHECKS)
    each = score(VLMLikelihood(folder, per_question=True), media, PROMPTS[:2], CHECKS)
    assert list(each) == ["question_0", "question_1", "question_2"]
    table = torch.stack(list(each.values()), dim=1)
    assert table.isnan().tolist() == [[False] * 3, [False, True, True]]
    assert torch.allclose(mean, table.nanmean(1))
    for i, j in ((0, 0), (0, 1), (0, 2), (1, 0)):
        alone = values(VLMLikelihood(folder), media[i : i + 1], metadata=[{"questions": [CHECKS[i]["questions"][j]]}])
        assert alone.item() == pytest.approx(table[i, j].item(), abs=1e-5)


def test_a_number_of_questions_gives_every_batch_the_same_names(folder):
    four = score(VLMLikelihood(folder, per_question=4), pictures(1), PROMPTS[:1], CHECKS[1:])
    assert list(four) == [f"question_{i}" for i in range(4)]
    assert [value.isnan().item() for value in four.values()] == [False, True, True, True]
    with pytest.raises(RewardError, match="a prompt has 3 questions, and per_question is 2"):
        score(VLMLikelihood(folder, per_question=2), pictures(1), PROMPTS[:1], CHECKS[:1])


def test_the_template_takes_prompts_as_they_are(folder):
    reward = VLMLikelihood(folder, template="Is {prompt} in this {medium}? {x}")
    ((question,),) = reward.questions(pictures(1), ["a {medium} of {prompt}"], [{}])
    assert question == ("Is a {medium} of {prompt} in this image? {x}", "yes", "no")
    ((question,),) = reward.questions(pictures(1, frames=2), ["it"], [{}])
    assert question[0] == "Is it in this video? {x}"


@pytest.mark.parametrize(
    ("questions", "problem"),
    [
        ([], "give a list of"),
        ("Is it?", "give a list of"),
        ([["Is it?"]], r"give \[question, answer\]"),
        (["Is it?"], r"give \[question, answer\]"),
        ([["How many?", 3]], r"give \[question, answer\]"),
        ([["What colour?", "red"]], "no other answer is known"),
    ],
)
def test_questions_that_cannot_be_asked_are_named(folder, questions, problem):
    with pytest.raises(RewardError, match=f"'a cat'.*{problem}"):
        values(VLMLikelihood(folder), pictures(1), metadata=[{"questions": questions}])


def test_a_system_message_is_part_of_the_chat(folder):
    media = pictures(1)
    plain, told = VLMLikelihood(folder), VLMLikelihood(folder, options=VLMOptions(system="Be strict."))
    assert values(plain, media).item() != values(told, media).item()
    assert "Be strict." in told.vlm.tokenizer.decode(told.vlm.inputs(media, ["?"])["input_ids"][0])


def test_an_answer_is_continued_from_its_prefix(folder, loaded):
    media = pictures(1)
    reward = VLMLikelihood(folder, "log_likelihood", template="?", answer="5", options=VLMOptions(prefix="Score: "))
    whole, start = (by_hand(loaded, media[0], "?", text) for text in ("Score: 5", "Score: "))
    assert values(reward, media).item() == pytest.approx((whole - start).item(), abs=1e-4)


# ---------------------------------------------------------------------------------------------------- score


@pytest.mark.parametrize(("low", "high"), [(1, 5), (0, 3), (1, 12)])
def test_score_is_the_expected_rating(folder, loaded, low, high):
    media = pictures(2)
    reward = VLMScore(folder, low, high, template="{prompt} {low}-{high}")
    expected = []
    for image, prompt in zip(media, PROMPTS, strict=False):
        numbers = range(low, high + 1)
        chances = [by_hand(loaded, image, f"{prompt} {low}-{high}", str(n)).exp() for n in numbers]
        if high == 12:  # "1" as an answer of its own is what does not go on to "10", "11" or "12"
            chances[0] = chances[0] - sum(chances[9:])
        p = torch.stack(chances)
        expected.append((p / p.sum() * torch.tensor(numbers)).sum())
    assert torch.allclose(values(reward, media), torch.stack(expected), atol=1e-4)
    assert reward.range == (low, high)


def test_a_certain_ten_is_a_ten_and_no_one():
    """p("1") is 1, too, for a model that says "10" in two tokens; with "100" in three."""
    digits = [[int(d) for d in str(n)] for n in range(1, 11)]
    logs = torch.full((2, 10), -20.0)
    logs[0, [0, 9]] = 0.0  # always 10
    logs[1, 0], logs[1, 9] = 0.0, torch.tensor(0.25).log()  # 1, and a quarter of the time 10
    p = ended(logs, digits).softmax(1)
    assert torch.allclose(p[:, [0, 9]], torch.tensor([[0.0, 1.0], [0.75, 0.25]]), atol=1e-5)
    chain = ended(torch.tensor([[0.9, 0.5, 0.2]]).log(), [[1], [1, 0], [1, 0, 0]]).exp()
    assert torch.allclose(chain, torch.tensor([[0.4, 0.3, 0.2]]))
    alone = torch.tensor([[0.5, 0.5]]).log()
    assert torch.equal(ended(alone, [[1], [10]]), alone)  # a vocabulary with a token for "10"


def test_score_is_differentiable_and_stays_on_its_scale(folder):
    assert check_reward(VLMScore(folder), pictures(), PROMPTS) == []
    with pytest.raises(ValueError, match="low is 5 and high is 1"):
        VLMScore(folder, 5, 1)


# ---------------------------------------------------------------------------------------------------- head


def write_head(path, weight, metadata=None, **more) -> str:
    from safetensors.torch import save_file

    save_file({"weight": weight, **more}, path, metadata)
    return str(path)


def last_states(loaded, image, text) -> tuple[torch.Tensor, torch.Tensor]:
    model, processor = loaded
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[prompt], images=[file_of(image)], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True).hidden_states[-1][0], inputs["input_ids"][0]


def test_head_reads_the_state_at_the_end_of_the_prompt(folder, loaded, tmp_path):
    bias, width = torch.tensor([0.5, -1.0]), loaded[0].get_input_embeddings().weight.shape[1]
    weight = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    head = write_head(tmp_path / "head.safetensors", weight, {"names": "quality,motion"}, bias=bias)
    reward = VLMRegressionHead(folder, head, mean=[1.0, 2.0], std=[2.0, 0.5])
    found = score(reward, pictures(), PROMPTS)
    assert list(found) == ["quality", "motion"]
    for i, (image, prompt) in enumerate(zip(pictures(), PROMPTS, strict=True)):
        states, _ = last_states(loaded, image, prompt)
        expected = (weight @ states[-1] + bias - torch.tensor([1.0, 2.0])) / torch.tensor([2.0, 0.5])
        assert torch.allclose(torch.stack([column[i] for column in found.values()]), expected, atol=1e-4)
    assert check_reward(reward, pictures(), PROMPTS) == []


@pytest.mark.parametrize("rows", [1, 2])
def test_head_reads_the_states_at_reward_tokens(folder, loaded, tmp_path, rows):
    width = loaded[0].get_input_embeddings().weight.shape[1]
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    head = write_head(tmp_path / "head.safetensors", weight)
    tokens = ["<|vision_start|>", "red"]
    reward = VLMRegressionHead(
        folder, head, names=["a", "b"], template="{prompt}red", reward_tokens=tokens, options=VLMOptions(batch_size=2)
    )
    prompts = ["a cat", "a much longer prompt", "7"]
    found = score(reward, pictures(3), prompts)
    for i, prompt in enumerate(prompts):
        states, ids = last_states(loaded, pictures(3)[i], f"{prompt}red")
        for k, (name, token) in enumerate(zip("ab", tokens, strict=True)):
            (place,) = (ids == loaded[1].tokenizer.convert_tokens_to_ids(token)).nonzero().flatten().tolist()
            assert found[name][i].item() == pytest.approx((weight[k % rows] @ states[place]).item(), abs=1e-4)
    with pytest.raises(RewardError, match="must stand once in a prompt"):
        score(reward, pictures(1), ["red"])


def test_heads_that_do_not_fit_are_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        VLMRegressionHead(folder, str(tmp_path / "none.safetensors")).prepare()
    with pytest.raises(ValueError, match=r"weight \(2, 7\).*must be \[K, "):
        VLMRegressionHead(folder, write_head(tmp_path / "narrow.safetensors", torch.zeros(2, 7))).prepare()
    vlm = VisionLanguageModel(folder, VLMOptions())
    vlm.prepare()
    good = write_head(tmp_path / "good.safetensors", torch.zeros(2, vlm.hidden_size))
    for settings, problem in (({"names": ["a"]}, "names has 1 entries for 2"), ({"mean": [0.0] * 3}, "mean has 3")):
        with pytest.raises(ValueError, match=problem):
            VLMRegressionHead(folder, good, **settings).prepare()
    with pytest.raises(ValueError, match="std is"):
        VLMRegressionHead(folder, good, std=[0.0, 1.0])


# ---------------------------------------------------------------------------------------------------- loading


def test_checkpoints_that_cannot_be_loaded_are_explained(folder, tmp_path, loaded):
    with pytest.raises(OSError, match="vlm_likelihood cannot load"):
        VLMLikelihood(str(tmp_path / "nothing")).prepare()
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    model, processor = loaded
    model.save_pretrained(broken)
    processor.save_pretrained(broken)
    weights = load_file(broken / "model.safetensors")
    weights.pop(next(name for name in weights if "mlp" in name))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(OSError, match="1 weights are missing"):
        VLMLikelihood(str(broken)).prepare()


def test_a_missing_chat_template_is_named(families):
    with pytest.raises(ValueError, match=r"no chat template.*plain_format"):
        VLMLikelihood(families["paligemma"]).prepare()


def test_a_format_that_the_processor_does_not_understand_fails_before_anything_is_scored(families):
    reward = VLMLikelihood(families["paligemma"], options=VLMOptions(plain_format="{image}<image>{question}"))
    with pytest.raises(ValueError, match="2 <image> tokens"):
        reward.prepare()
    assert not reward.vlm.loaded


@pytest.mark.parametrize("missing", ["transformers", "torchvision"])
def test_the_missing_extra_is_named(folder, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r'pip install "genrl\[rewards\]"'):
        VLMLikelihood(folder).prepare()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"frames": 0}, "frames is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"plain_format": "{question}"}, "has no {image}"),
    ],
)
def test_options_that_cannot_be_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        VLMOptions(**settings)
    with pytest.raises(ValueError, match="value is 'logit'"):
        VLMLikelihood(value="logit")


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (VLMLikelihood, {"value": "probability"}),
        (VLMScore, {}),
        (VLMRegressionHead, {"model": "x", "head": "y", "names": ["a", "b"], "reward_tokens": ["<|a|>", "<|b|>"]}),
    ],
)
def test_tiny_twins_score_images_and_videos(cls, arguments, tmp_path):
    options = VLMOptions.tiny_arguments({"dtype": "bfloat16", "device": "cuda:7", "frames": 16}, tmp_path)
    reward = cls(**cls.tiny_arguments(arguments, tmp_path), options=VLMOptions(**options))
    for media in (torch.rand(2, 3, 32, 32), torch.rand(2, 5, 3, 32, 32)):
        assert all(math.isfinite(v) for column in score(reward, media, PROMPTS[:2]).values() for v in column)
