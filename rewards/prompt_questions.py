"""Questions about a picture or video from its prompt: several checks say more than one, and say where it fails.

A maker of questions is called with a prompt and gives a list of [question, right answer, other answer].
`VLMLikelihood(ask=...)` takes any such callable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from genrl.progress import loading

from .encoders import explained

Question = tuple[str, str, str]
PARTS = r",| and | with | while | then "  # where a prompt is split


class TemplateQuestions:
    """Fixed questions, filled in with the prompt or with each of its parts.

    Args:
        templates: questions with ``{prompt}``, asked once, or with ``{part}``, asked of every part of the prompt; one
            with neither is asked of every prompt. Each is a text, whose right answer is `answer`, or a list
            [question, answer] or [question, answer, other answer].
        answer, other: the right and the wrong answer.
        parts: regular expression at which a prompt is split into parts.

    Example:
        >>> TemplateQuestions(["Is this {prompt}?", "Is there {part}?"])("a cat and a red ball")
        [('Is this a cat and a red ball?', 'yes', 'no'), ('Is there a cat?', 'yes', 'no'), ('Is there a red ball?', 'yes', 'no')]
    """  # noqa: E501

    def __init__(
        self,
        templates: Sequence[str | list[str]] = (
            "Does this show: {prompt}? Answer yes or no.",
            "Can {part} be seen clearly? Answer yes or no.",
        ),
        answer: str = "yes",
        other: str = "no",
        parts: str = PARTS,
    ) -> None:
        if not templates or isinstance(templates, str):
            raise ValueError(f"templates is {templates!r}; give a list of at least one question.")
        self.templates, self.answer, self.other, self.parts = list(templates), answer, other, parts

    def __call__(self, prompt: str) -> list[Question]:
        pieces = [piece.strip(" .") for piece in re.split(self.parts, prompt)]
        pieces = [piece for piece in pieces if piece] or [prompt]
        asked: list[Question] = []
        for template in self.templates:
            text, answer, other = self._complete(template)
            fills = [("{part}", piece) for piece in pieces] if "{part}" in text else [("{prompt}", prompt)]
            asked += [(text.replace(*fill), answer, other) for fill in fills]
        return list(dict.fromkeys(asked))

    def _complete(self, template: str | Sequence[str]) -> Question:
        if isinstance(template, str):
            return template, self.answer, self.other
        text, answer, *rest = template
        opposite = {self.answer: self.other, self.other: self.answer}.get(answer, "")
        return text, answer, rest[0] if rest else opposite


class LanguageModelQuestions:
    """Yes-or-no questions that a language model writes about a prompt, once for each prompt.

    A line of its text is a question if it ends in a question mark; numbers and bullets before it are dropped. Where
    there is none, `fallback` is asked. All questions are answered with yes if the picture or video shows the prompt,
    so the instruction has to ask for such.

    Args:
        write: the language model: a part called with the instruction that gives its text, such as
            :class:`TransformersText`, or any function from text to text.
        count: questions of a prompt at most.
        instruction: with ``{prompt}`` and ``{count}``.
        answer, other: the right and the wrong answer.
        suffix: put behind each question.
        fallback: with ``{prompt}``.
    """

    def __init__(
        self,
        write: Callable[[str], str],
        count: int = 4,
        instruction: str = "A video was made from this prompt: {prompt}\nWrite {count} short questions that check it, "
        "one a line. Each is about one thing that can be seen (an object, a property, an action, its manner), and the "
        "answer to each is yes if the video shows what the prompt says. Write the questions only.",
        answer: str = "yes",
        other: str = "no",
        suffix: str = " Answer yes or no.",
        fallback: str = "Does this show: {prompt}?",
    ) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; a prompt needs at least one question.")
        self.write, self.count, self.instruction = write, count, instruction
        self.answer, self.other, self.suffix, self.fallback = answer, other, suffix, fallback
        self._known: dict[str, list[Question]] = {}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the language model."""
        if hasattr(self.write, "prepare"):
            self.write.prepare(device, progress)

    def __call__(self, prompt: str) -> list[Question]:
        if prompt not in self._known:
            text = self.write(self.instruction.replace("{count}", str(self.count)).replace("{prompt}", prompt))
            found = questions_in(text)[: self.count] or [self.fallback.replace("{prompt}", prompt)]
            self._known[prompt] = [(question + self.suffix, self.answer, self.other) for question in found]
        return self._known[prompt]


def questions_in(text: str) -> list[str]:
    """The different questions in a text, one a line, without numbers and bullets."""
    lines = [re.sub(r"^[\s\d.)*#-]+", "", line).strip() for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.endswith("?") and len(line) > 1))


class TransformersText:
    """A language model of transformers: a request in, its most likely text out.

    Args:
        model: hub id or folder of an instruction-tuned model.
        tokens: new tokens at most.
        dtype: of the weights; ``"auto"`` is that of the checkpoint.
        device: where the model lies; None is the device of the run.
    """

    def __init__(
        self,
        model: str = "Qwen/Qwen2.5-1.5B-Instruct",
        tokens: int = 200,
        dtype: str = "auto",
        device: str | None = None,
    ) -> None:
        self.model, self.tokens, self.dtype, self.device = str(model), tokens, dtype, device
        self._model: Any = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model, once."""
        if self._model is None:
            import transformers

            with explained("questions", self.model), loading(f"loading {self.model}", progress, "transformers"):
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
                model = transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype=self.dtype)
            self._model = model.eval().requires_grad_(False).to(self.device or device)

    def __call__(self, request: str) -> str:
        import torch

        self.prepare()
        if self._tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": request}]
            request = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = self._tokenizer(request, return_tensors="pt", add_special_tokens=False).to(self._model.device)
        with torch.no_grad():
            tokens = self._model.generate(**inputs, max_new_tokens=self.tokens, do_sample=False)
        return self._tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The same with a tiny random model in `folder`."""
        from genrl.tiny.rewards import saved_text_model

        return {**arguments, "model": str(saved_text_model(folder / "text")), "tokens": 4, "device": None}
