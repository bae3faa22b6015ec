"""Rewards by vision-language models: answers to questions, ratings, and heads on the last hidden state.

Any model that transformers loads with `AutoModelForImageTextToText` serves, by hub id or folder. All three rewards are
differentiable with respect to the frames where the model's processor is (see `vlm_model`).

Models that fit: Qwen/Qwen2-VL-2B-Instruct (Apache-2.0, 4.4 GB in bfloat16), Qwen/Qwen2.5-VL-7B-Instruct (Apache-2.0,
17 GB; the 3B model of that series is for research only). Activations come on top: with gradients, and without
`options.checkpointing`, about as much again for a few small frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .base import reward_name
from .vlm_model import VisionLanguageModel, VLMOptions, chunks

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
Question = tuple[str, str, str]  # question, right answer, the other answer ("" if there is none)
_DEFAULTS = VLMOptions()


class _VLMReward:
    """What the three rewards share: the model, and where it lies."""

    differentiable = True

    def __init__(self, model: str, options: VLMOptions) -> None:
        self.model, self.options = str(model), options
        self.vlm = VisionLanguageModel(model, options, reward_name(self))

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model, and find out whether gradients pass its processor (`differentiable`)."""
        self.vlm.prepare(device, progress)
        self.differentiable = self.vlm.differentiable

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The same reward with a tiny random model in `folder`."""
        from genrl import tiny

        return {**arguments, "model": str(tiny.saved_vlm(folder / "vlm"))}


class VLMLikelihood(_VLMReward):
    """How likely a vision-language model holds the right answers to questions about the media: [B], larger is better.

    The questions of a sample are `metadata[i]["questions"]`, a list of [question, answer] or [question, answer, other
    answer]; without them those of `ask`, or `template`, to which `answer` is right. Several count as their mean.

    Args:
        model: hub id or folder.
        value: ``"two_way"`` is p(answer) / (p(answer) + p(other)), in [0, 1]: what else the model might say does not
            count. ``"probability"`` is p(answer). ``"log_likelihood"`` is its logarithm, the sum over the answer's
            tokens, and ``"mean_log_likelihood"`` that sum divided by the number of tokens, both up to 0.
        template: the question, with ``{prompt}`` and ``{medium}``, which becomes image or video.
        answer, other: the right answer to the template and the wrong one. Questions that have one of them as their
            answer need not name the other.
        both_cases: add up the probabilities of 'yes' and 'Yes', whichever is given.
        ask: what makes the questions of a prompt whose metadata has none: a part called with the prompt that gives such
            a list, as `TemplateQuestions` and `LanguageModelQuestions` do. None asks `template`.
        per_question: return so many questions on their own, as `question_0`, `question_1`, ...; NaN where a sample has
            less. True takes as many as a batch has, which serves where all prompts have equally many.
        options: loading and running, see `VLMOptions`.
    """

    name = "vlm_likelihood"

    def __init__(
        self,
        model: str = MODEL,
        value: Literal["two_way", "probability", "log_likelihood", "mean_log_likelihood"] = "two_way",
        template: str = "Does this {medium} show: {prompt}? Answer yes or no.",
        answer: str = "yes",
        other: str = "no",
        both_cases: bool = True,
        per_question: bool | int = False,
        options: VLMOptions = _DEFAULTS,
        ask: Callable[[str], Sequence[Sequence[str]]] | None = None,
    ) -> None:
        super().__init__(model, options)
        self.ask = ask
        known = ("two_way", "probability", "log_likelihood", "mean_log_likelihood")
        if value not in known:
            raise ValueError(f"value is {value!r}; give one of {', '.join(known)}.")
        self.value, self.template = value, template
        self.answer, self.other = answer, other
        self.both_cases, self.per_question = both_cases, per_question
        self.range = (-math.inf, 0.0) if "log" in value else (0.0, 1.0)

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model, and what makes the questions."""
        super().prepare(device, progress)
        if self.ask is not None and hasattr(self.ask, "prepare"):
            self.ask.prepare(device, progress)

    def frames_shown(self, count: int) -> list[int]:
        """Which of `count` frames the model sees; the others have no gradient."""
        return self.vlm.frame_indices(count)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | dict[str, Tensor]:
        """[B], or one [B] a question."""
        values = self.question_values(media, self.questions(media, prompts, metadata))
        if self.per_question:
            columns = list(values.unbind(1))
            if self.per_question is not True:
                if len(columns) > self.per_question:
                    raise ValueError(
                        f"a prompt has {len(columns)} questions, and per_question is {self.per_question}; give the "
                        "largest number of questions that a prompt has."
                    )
                columns += [values.new_full((len(values),), torch.nan)] * (self.per_question - len(columns))
            return {f"question_{i}": column for i, column in enumerate(columns)}
        return values.nanmean(1)

    def questions(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> list[list[Question]]:
        """What is asked about each sample.

        Raises:
            ValueError: `metadata[i]["questions"]` is empty or has an entry that is not two or three texts, or no other
                answer is known where `value` needs one.
        """
        asked = []
        for prompt, entry in zip(prompts, metadata, strict=True):
            given = entry.get("questions")
            if "questions" not in entry:
                asking = [(fill(self.template, media, prompt=prompt), self.answer, self.other)]
                given = asking if self.ask is None else [*self.ask(prompt)]
            if isinstance(given, str) or not given:
                raise ValueError(
                    f"prompt {prompt!r} has metadata questions {given!r}; give a list of [question, answer] pairs, not "
                    "empty, or leave the entry out."
                )
            asked.append([self._question(one, prompt) for one in given])
        return asked

    def _question(self, given: Any, prompt: str) -> Question:
        if isinstance(given, str) or len(given) not in (2, 3) or not all(isinstance(part, str) for part in given):
            raise ValueError(f"prompt {prompt!r} has the question {given!r}; give [question, answer] or three texts.")
        question, answer, *rest = given
        opposite = {self.answer: self.other, self.other: self.answer}
        other = rest[0] if rest else opposite.get(answer, "")
        if self.value == "two_way" and not other:
            raise ValueError(
                f"prompt {prompt!r}: the answer to {question!r} is {answer!r}, and no other answer is known. Add it as "
                f"third entry, answer with {self.answer!r} or {self.other!r}, or set value: log_likelihood."
            )
        return question, answer, other

    def question_values(self, media: Tensor, questions: Sequence[Sequence[Question]]) -> Tensor:
        """The value of every question, [B, Q] float32; NaN where a sample has fewer than Q."""
        if not self.vlm.loaded:
            self.prepare(media.device)
        at = [(i, j) for i, asked in enumerate(questions) for j in range(len(asked))]
        values = self._values(media, [questions[i][j] for i, j in at], [i for i, _ in at]).to(media.device)
        table = values.new_full((len(questions), max(map(len, questions))), torch.nan)
        rows, columns = torch.tensor(at, device=media.device).unbind(1)
        return table.index_put((rows, columns), values)

    def gradient_magnitude(self, media: Tensor, questions: Sequence[Sequence[Question]]) -> tuple[Tensor, Tensor]:
        """How much each pixel matters to each question, for rewards that are spread over tokens.

        Args:
            media: [B, C, H, W] or [B, F, C, H, W].
            questions: as `questions()` gives them.

        Returns:
            Values [B, Q], and |d value / d pixel|, the norm over channels, as [B, Q, H, W] or [B, Q, F, H, W]; 0 in
            frames that the model is not shown (`vlm.frame_indices`). NaN and 0 where a sample has fewer questions.
            One backward pass for `options.batch_size` questions, so that no graph is kept longer.
        """
        shape = (len(questions), max(map(len, questions)))
        pixels = (*media.shape[1:-3], *media.shape[-2:])
        values = torch.full(shape, torch.nan, device=media.device)
        magnitude = torch.zeros(*shape, *pixels, device=media.device)
        at = [(i, j) for i, asked in enumerate(questions) for j in range(len(asked))]
        if not self.vlm.loaded:
            self.prepare(media.device)
        for part in chunks(len(at), self.vlm.options.batch_size):
            rows, columns = torch.tensor(at[part], device=media.device).unbind(1)
            with torch.enable_grad():
                leaf = media[rows].detach().float().requires_grad_()  # [b, ...]
                value = self._values(leaf, [questions[i][j] for i, j in at[part]], list(range(len(rows))))
                (gradient,) = torch.autograd.grad(value.sum(), leaf)
            values[rows, columns] = value.detach().to(media.device)
            magnitude[rows, columns] = gradient.norm(dim=-3)
        return values, magnitude

    def _values(self, media: Tensor, asked: Sequence[Question], about: list[int]) -> Tensor:
        """[N] for N questions about samples `about` of media."""
        forms = [[*self._forms(answer), *self._forms(other or answer)] for _, answer, other in asked]  # 4 each
        known = torch.tensor([[form is not None for form in row] for row in forms])
        answers = [[form or answer for form in row] for row, (_, answer, _) in zip(forms, asked, strict=True)]
        if self.value != "two_way":
            known, answers = known[:, :2], [row[:2] for row in answers]
        logs = self.vlm.log_likelihoods(media, [question for question, _, _ in asked], answers, about)
        logs = logs.masked_fill(~known.to(logs.device), -torch.inf)
        right = logs[:, :2].logsumexp(1)
        if self.value == "two_way":
            return (right - logs[:, 2:].logsumexp(1)).sigmoid()
        if self.value == "mean_log_likelihood":
            lengths = [len(self.vlm.answer_ids(question, answer, media)) for question, answer, _ in asked]
            return right / torch.tensor(lengths, device=right.device)
        return right.exp() if self.value == "probability" else right

    def _forms(self, answer: str) -> tuple[str, str | None]:
        """An answer, and the same with its first letter in the other case, if that counts and differs."""
        first = answer[:1]
        other = (first.lower() if first.isupper() else first.upper()) + answer[1:]
        return answer, other if self.both_cases and other != answer else None


class VLMScore(_VLMReward):
    """The rating that a vision-language model gives, as an expectation over the numbers that it might say.

    sum_k k p(k), with p the model's probabilities of the answers `low` to `high`, normalised over these: [B] in
    [low, high], larger is better. "1" does not count where the model goes on to "10". Unlike a rating that is read from
    generated text it is continuous and differentiable.

    Args:
        model: hub id or folder. Models trained to rate, such as UnifiedReward's, want the question of their training.
        low, high: the scale.
        template: the question, with ``{prompt}``, ``{medium}`` (image or video), ``{low}`` and ``{high}``. It must ask
            for a number at once: what the model says first is what counts.
        options: loading and running, see `VLMOptions`.
    """

    name = "vlm_score"

    def __init__(
        self,
        model: str = MODEL,
        low: int = 1,
        high: int = 5,
        template: str = "How well does this {medium} show: {prompt}? Answer with one number from {low} (not at all) to "
        "{high} (perfectly), and nothing else.",
        options: VLMOptions = _DEFAULTS,
    ) -> None:
        super().__init__(model, options)
        if low >= high:
            raise ValueError(f"low is {low} and high is {high}; the scale needs two numbers at least, low below high.")
        self.low, self.high, self.template = low, high, template
        self.range = (float(low), float(high))

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] expected rating."""
        if not self.vlm.loaded:
            self.prepare(media.device)
        questions = [
            fill(self.template, media, prompt=prompt, low=str(self.low), high=str(self.high)) for prompt in prompts
        ]
        numbers = range(self.low, self.high + 1)
        answers = [[str(number) for number in numbers]] * len(questions)
        logs = self.vlm.log_likelihoods(media, questions, answers, list(range(len(questions))))  # [B, K]
        logs = ended(logs, [self.vlm.answer_ids(questions[0], answer, media) for answer in answers[0]])
        expected = logs.softmax(1) @ torch.tensor(numbers, dtype=logs.dtype, device=logs.device)
        return expected.to(media.device)


class VLMRegressionHead(_VLMReward):
    """Scores by a linear head on a vision-language model's last hidden state, as reward models are trained.

    name -> [B]: row k of the head times the state at the end of the prompt, or at `reward_tokens[k]`. Unbounded; larger
    is better where the head was trained so.

    Args:
        model: hub id or folder, with adapters merged.
        head: a .safetensors file with `weight` [K, D] and optionally `bias` [K]. With `reward_tokens` K may be 1: one
            head for all tokens.
        names: of the K scores; those in the file's metadata under `names` (joined by commas) if not given.
        template: the text that the head was trained with, with ``{prompt}`` and ``{medium}``.
        reward_tokens: tokens in the template, one a name, at which the states are read (VideoAlign:
            ``<|VQ_reward|> <|MQ_reward|> <|TA_reward|>``).
        mean, std: of each score, subtracted and divided by.
        options: loading and running, see `VLMOptions`.
    """

    name = "vlm_head"
    range = (-math.inf, math.inf)

    def __init__(
        self,
        model: str,
        head: str,
        names: list[str] | None = None,
        template: str = "{prompt}",
        reward_tokens: list[str] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        options: VLMOptions = _DEFAULTS,
    ) -> None:
        super().__init__(model, options)
        self.head, self.names, self.template = str(head), names, template
        self.reward_tokens, self.mean, self.std = reward_tokens, mean, std
        if std is not None and min(std) <= 0:
            raise ValueError(f"std is {std}; scores are divided by it, so give numbers above 0.")
        self._weight: Tensor | None = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model and the head."""
        super().prepare(device, progress)
        if self._weight is None:
            self._load_head()

    def _load_head(self) -> None:
        if not Path(self.head).is_file():
            raise FileNotFoundError(f"head {self.head} does not exist; give a .safetensors file with `weight` [K, D].")
        from safetensors import safe_open

        with safe_open(self.head, "pt") as file:
            if "weight" not in file.keys():  # noqa: SIM118  not a dict
                raise ValueError(f"head {self.head} holds {sorted(file.keys())}; it needs `weight` [K, D].")
            weight = file.get_tensor("weight").float()
            bias = file.get_tensor("bias").float() if "bias" in file.keys() else torch.zeros(len(weight))  # noqa: SIM118
            named = (file.metadata() or {}).get("names")
        width = self.vlm.hidden_size
        if weight.dim() != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
            raise ValueError(
                f"head {self.head} has weight {tuple(weight.shape)} and bias {tuple(bias.shape)}; {self.vlm.id} has "
                f"hidden states of {width}, so they must be [K, {width}] and [K]."
            )
        count = len(weight) if self.reward_tokens is None or len(weight) > 1 else len(self.reward_tokens)
        self.names = self.names or (named.split(",") if named else [f"score_{i}" for i in range(count)])
        lists = {"names": self.names, "reward_tokens": self.reward_tokens, "mean": self.mean, "std": self.std}
        for what, values in lists.items():
            if values is not None and len(values) != count:
                raise ValueError(f"{what} has {len(values)} entries for {count} scores; give one for each score.")
        self._weight, self._bias = weight.expand(count, -1), bias.expand(count)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        """name -> [B]."""
        if self._weight is None:
            self.prepare(media.device)
        assert self._weight is not None and self.names is not None
        tokens = self.vlm.tokenizer.convert_tokens_to_ids(self.reward_tokens or [])
        questions = [fill(self.template, media, prompt=prompt) for prompt in prompts]
        states = self.vlm.last_hidden(media, questions, tokens).float()  # [B, K or 1, D]
        scores = (states * self._weight.to(states.device)).sum(-1) + self._bias.to(states.device)  # [B, K]
        scores = scores - scores.new_tensor(self.mean or 0.0)
        scores = (scores / scores.new_tensor(self.std or 1.0)).to(media.device)
        return dict(zip(self.names, scores.unbind(1), strict=True))

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The same reward with a tiny random model and a random head for it in `folder`."""
        from safetensors.torch import save_file

        changed = super().tiny_arguments(arguments, folder)
        vlm = VisionLanguageModel(changed["model"], VLMOptions(), "tiny")
        vlm.prepare()
        names = arguments.get("names") or arguments.get("reward_tokens") or ["score"]
        count = len(arguments.get("mean") or arguments.get("std") or names)
        weight = torch.randn(count, vlm.hidden_size, generator=torch.Generator().manual_seed(0)) / vlm.hidden_size**0.5
        head = folder / f"head_{count}.safetensors"
        save_file({"weight": weight}, head)
        return changed | {"head": str(head), "reward_tokens": None}


def ended(logs: Tensor, ids: Sequence[Sequence[int]]) -> Tensor:
    """log p of answers that end, [B, K], from log p of answers that may go on: from "1" that of "10" is taken off.

    Args:
        logs: [B, K] log-likelihoods of K answers. ids: their tokens.
    """
    columns = []
    for one, log in zip(ids, logs.unbind(1), strict=True):
        longer = [j for j, other in enumerate(ids) if len(other) > len(one) and _starts(other, one)]
        # "100" is a part of "10" already.
        next_ones = [
            j for j in longer if not any(len(ids[i]) < len(ids[j]) and _starts(ids[j], ids[i]) for i in longer)
        ]
        if next_ones:
            share = (logs[:, next_ones].logsumexp(1) - log).exp().clamp(max=1 - 1e-6)  # at most 1 but for rounding
            log = log + torch.log1p(-share)
        columns.append(log)
    return torch.stack(columns, dim=1)


def _starts(whole: Sequence[int], start: Sequence[int]) -> bool:
    return list(whole[: len(start)]) == list(start)


def fill(template: str, media: Tensor, **fields: str) -> str:
    """A template with its fields filled in; other braces, in the template or in a prompt, stay."""
    text = template.replace("{medium}", "video" if media.dim() == 5 else "image")
    for name, value in fields.items():
        if name != "prompt":
            text = text.replace(f"{{{name}}}", value)
    return text.replace("{prompt}", fields["prompt"])  # last, as a prompt may contain braces
