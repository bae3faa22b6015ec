"""`MovingDigitQuestions`: a small frozen network that answers questions about videos of moving digits.

It stands where `VLMLikelihood` stands for real videos, with the same methods, so that methods which ask a
vision-language model can be tried in CPU minutes: several checks a video, the likelihood of each right answer, and its
gradient on the frames.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .classifier import DigitRecipe, augment, digit_labels
from .moving_digits import VARIED, cached_network, check_digit_video, initialise, motion_labels, noisy
from .vlm import Question

KINDS = ("digit", "motion", "bounce", "is_digit", "is_motion")
_DIGITS, _CLASSES = 10, 16  # classes 0..9 are digits, 10..15 the motions
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_MOTIONS = ("left", "right", "up", "down", "still", "bouncing")
_FORMS = (
    (re.compile(r"(which|what) (digit|number) (is shown|is it|is this|do you see)"), "digit"),
    (re.compile(r"(which way|how|where) does (it|the digit|the number) move"), "motion"),
    (re.compile(r"is (it|this|the digit|the number) (a |an |the digit )?(?P<digit>[a-z]+|[0-9])"), "is_digit"),
    (re.compile(r"does (it|the digit|the number) (move )?(?P<motion>left|right|up|down|bounce)"), "is_motion"),
    (re.compile(r"does (it|the digit|the number) (?P<motion>stand still|move)"), "is_motion"),
)


class VideoAnswerer(nn.Module):
    """Convolutions on frames for the digit, on three frames at a time for the motion.

    [B, F, 1, 16, 16] -> log-probabilities [B, 16]: ten digits and, normalised by themselves, six motions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 48, 3, padding=1), nn.SiLU(),
            nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(48, _DIGITS),
        )  # fmt: skip
        self.steps = nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=2, padding=2), nn.SiLU(), nn.Conv2d(24, 32, 3, padding=1), nn.SiLU(),
            nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.SiLU(),
        )  # fmt: skip
        self.motion = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, _CLASSES - _DIGITS))

    def forward(self, videos: Tensor) -> Tensor:
        return torch.cat([self.digit_logits(videos).log_softmax(-1), self.motion_logits(videos).log_softmax(-1)], -1)

    def digit_logits(self, videos: Tensor) -> Tensor:
        """[B, 10]; the frames' logits are averaged, as of independent witnesses."""
        return self.frames(videos.flatten(0, 1)).unflatten(0, videos.shape[:2]).mean(1)

    def motion_logits(self, videos: Tensor) -> Tensor:
        """[B, 6] from the mean and the largest of what triples of frames show; no order beyond three frames."""
        triples = torch.cat([videos[:, :-2], videos[:, 1:-1], videos[:, 2:]], dim=2)  # [B, F - 2, 3, H, W]
        found = self.steps(triples.flatten(0, 1)).unflatten(0, triples.shape[:2])
        return self.motion(torch.cat([found.mean(1), found.amax(1)], dim=-1))


@dataclass(frozen=True)
class AnswererRecipe:
    """How the answerer is trained. A change of any number trains, and caches, another network.

    Attributes:
        videos: of the proxy part of the digits; each image is varied as `digits` says.
        batch: videos in a step; the digit is learned from one frame of each, the motion, which is easier, from the
            first `moving` of them.
        noise: standard deviation of pixel noise, and of the ink's strength around 1.
    """

    steps: int = 600
    batch: int = 64
    moving: int = 16
    lr: float = 6e-3
    videos: int = 4000
    digits: DigitRecipe = VARIED
    noise: float = 0.05
    seed: int = 0
    version: int = 1  # of the code below


class MovingDigitQuestions:
    """How likely a small video question answerer holds the right answers: [B], larger is better; differentiable.

    The reward is the mean over a sample's questions. These are `metadata[i]["questions"]`, a list of [question, answer]
    or [question, answer, other answer]; without them the `kinds` are asked, with answers from the metadata's "label"
    and "motion":

    ============  ================================  ============================
    kind          question                          answers
    ============  ================================  ============================
    digit         Which digit is shown?             zero to nine, or 0 to 9
    motion        Which way does it move?           left, right, up, down, still, bouncing
    bounce        Does it bounce?                   yes, no
    is_digit      Is it a seven?                    yes, no
    is_motion     Does it move left?, Does it stand still?, Does it move?      yes, no
    ============  ================================  ============================

    The network (26 k weights) is trained on the first `prepare` on real digits of the proxy part, then cached under
    `$GENRL_CACHE` by the hash of its recipe. It knows digits and motions; a question selects some of its
    probabilities, as a vision-language model's answer does of its vocabulary.

    Args:
        value: ``"two_way"`` is p(answer) / (p(answer) + p(other)), and p(answer) where no other answer is named;
            ``"log_likelihood"`` is log p(answer), up to 0.
        kinds: questions that are asked by default.
        per_question: return them on their own, as `question_0`, `question_1`, ...; NaN where a sample has less.
        recipe: of the training.

    Media [B, F, 1, 16, 16] of three frames or more.
    """

    differentiable = True
    name = "moving_digit_questions"

    def __init__(
        self,
        value: Literal["two_way", "log_likelihood"] = "two_way",
        kinds: Sequence[str] = ("digit", "motion", "bounce"),
        per_question: bool = False,
        recipe: AnswererRecipe | None = None,
    ) -> None:
        if value not in ("two_way", "log_likelihood"):
            raise ValueError(f"value is {value!r}; give two_way or log_likelihood.")
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ValueError(f"kinds is {list(kinds)!r}; give one or more of {', '.join(KINDS)}.")
        self.value, self.kinds, self.per_question = value, tuple(kinds), per_question
        self.recipe = recipe or AnswererRecipe()
        self.range = (0.0, 1.0) if value == "two_way" else (-math.inf, 0.0)
        self._network: nn.Module | None = None

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the network, or train and cache it."""
        if self._network is None:
            recipe = self.recipe

            def train(network: nn.Module) -> None:
                _train(network, recipe, progress)

            self._network = cached_network("moving-digit-questions", VideoAnswerer, asdict(recipe), train)
        self._network.to(device)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | dict[str, Tensor]:
        """[B], or one [B] a question."""
        values = self.question_values(media, self.questions(media, prompts, metadata))
        if self.per_question:
            return {f"question_{i}": column for i, column in enumerate(values.unbind(1))}
        return values.nanmean(1)

    def questions(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> list[list[Question]]:
        """What is asked about each sample, as (question, answer, other answer or "").

        Raises:
            ValueError: `metadata[i]["questions"]` is empty or has an entry that is not two or three texts, or there are
                neither questions nor "label" and "motion".
        """
        asked: list[list[Question]] = []
        for prompt, entry in zip(prompts, metadata, strict=True):
            if "questions" not in entry:
                (label,), (motion,) = digit_labels([entry], [prompt]).tolist(), motion_labels([entry], [prompt])
                asked.append([_default_question(kind, label, motion) for kind in self.kinds])
                continue
            given = entry["questions"]
            well_formed = (not isinstance(one, str) and len(one) in (2, 3) for one in given)
            if isinstance(given, str) or not given or not all(well_formed):
                raise ValueError(
                    f"prompt {prompt!r} has metadata questions {given!r}; give a list of [question, answer] or "
                    "[question, answer, other answer], not empty, or leave the entry out."
                )
            asked.append([(one[0], one[1], one[2] if len(one) == 3 else "") for one in given])
        return asked

    def question_values(self, media: Tensor, questions: Sequence[Sequence[Question]]) -> Tensor:
        """The value of every question, [B, Q] float32; NaN where a sample has fewer than Q; gradients reach media.

        Raises:
            ValueError: for a question or an answer that the network does not know, naming the known forms.
        """
        check_digit_video(media)
        if media.shape[1] < 3:
            raise ValueError(f"media has {media.shape[1]} frames; the answerer looks at three at a time, so give more.")
        if self._network is None or next(self._network.parameters()).device != media.device:
            self.prepare(media.device, progress=False)
        assert self._network is not None
        logs = self._network(media.float())  # [B, 16]
        table = [[torch.nan] * max(map(len, questions))] * len(media)
        values = logs.new_tensor(table)  # [B, Q]
        at = [(i, j) for i, asked in enumerate(questions) for j in range(len(asked))]
        classes = [answer_classes(*questions[i][j][:2]) for i, j in at]
        rows, columns = torch.tensor(at, device=media.device).unbind(1)
        right = _log_mass(logs[rows], classes)
        if self.value == "two_way":
            others = [
                answer_classes(questions[i][j][0], questions[i][j][2]) if questions[i][j][2] else _others(own)
                for (i, j), own in zip(at, classes, strict=True)
            ]
            right = (right - _log_mass(logs[rows], others)).sigmoid()
        return values.index_put((rows, columns), right)

    def gradient_magnitude(self, media: Tensor, questions: Sequence[Sequence[Question]]) -> tuple[Tensor, Tensor]:
        """How much each pixel matters to each question.

        Args:
            media: [B, F, 1, 16, 16].
            questions: as `questions()` gives them.

        Returns:
            Values [B, Q], and |d value / d pixel|, the norm over channels, [B, Q, F, H, W]. NaN and 0 where a sample
            has fewer questions.
        """
        with torch.enable_grad():
            leaf = media.detach().float().requires_grad_()
            values = self.question_values(leaf, questions)
            # A sum over samples keeps them apart, since no sample's value depends on another's pixels.
            gradients = [
                torch.autograd.grad(column.nan_to_num().sum(), leaf, retain_graph=True)[0]
                for column in values.unbind(1)
            ]
        return values.detach(), torch.stack([gradient.norm(dim=2) for gradient in gradients], dim=1)

    def describe(self) -> dict[str, float]:
        """`digit_accuracy` and `motion_accuracy` on real videos of the generator's digits, which it has not seen."""
        from genrl.generators.moving_digits import moving_digits

        videos, digits, motions = moving_digits(300, "generator", seed=1)
        self.prepare(videos.device, progress=False)
        assert self._network is not None
        with torch.no_grad():
            logs = self._network(videos)
        digit, motion = logs[:, :_DIGITS].argmax(1), logs[:, _DIGITS:].argmax(1)
        return {
            "digit_accuracy": float((digit == digits).float().mean()),
            "motion_accuracy": float((motion == motions).float().mean()),
        }


def answer_classes(question: str, answer: str) -> frozenset[int]:
    """The classes (0..9 digits, 10..15 motions) in which an answer to a question is right.

    Raises:
        ValueError: for a question or an answer that is not understood.
    """
    text = question.lower().strip().rstrip("?").strip()
    answer = answer.lower().strip()
    for pattern, kind in _FORMS:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        if kind == "digit" and answer in (*_WORDS, *map(str, range(10))):
            return frozenset([_digit(answer)])
        if kind == "motion" and answer in _MOTIONS:
            return frozenset([_DIGITS + _MOTIONS.index(answer)])
        if kind.startswith("is_") and answer in ("yes", "no"):
            if kind == "is_digit":
                if match["digit"] not in (*_WORDS, *map(str, range(10))):
                    continue
                whole, yes = set(range(_DIGITS)), {_digit(match["digit"])}
            else:
                whole, yes = set(range(_DIGITS, _CLASSES)), _motion_classes(match["motion"])
            return frozenset(yes if answer == "yes" else whole - yes)
    raise ValueError(
        f"question {question!r} with answer {answer!r} is not understood; known are 'Which digit is shown?' (zero to "
        f"nine), 'Which way does it move?' ({', '.join(_MOTIONS)}), and with yes or no 'Is it a seven?', 'Does it move "
        "left?', 'Does it bounce?', 'Does it stand still?', 'Does it move?'"
    )


def _others(classes: frozenset[int]) -> frozenset[int]:
    """All other digits, or all other motions."""
    digits = min(classes) < _DIGITS
    return frozenset(range(_DIGITS) if digits else range(_DIGITS, _CLASSES)) - classes


def _log_mass(logs: Tensor, classes: Sequence[frozenset[int]]) -> Tensor:
    """log of the summed probability [N] of some classes of each row of log-probabilities [N, 16]."""
    counted = torch.tensor([[k in some for k in range(_CLASSES)] for some in classes], device=logs.device)
    return logs.masked_fill(~counted, -torch.inf).logsumexp(1)


def _digit(name: str) -> int:
    return int(name) if name.isdigit() else _WORDS.index(name)


def _motion_classes(name: str) -> set[int]:
    still = _DIGITS + _MOTIONS.index("still")
    if name == "move":
        return set(range(_DIGITS, _CLASSES)) - {still}
    return {still} if name == "stand still" else {_DIGITS + _MOTIONS.index({"bounce": "bouncing"}.get(name, name))}


def _default_question(kind: str, label: int, motion: str) -> Question:
    if kind == "digit":
        return "Which digit is shown?", _WORDS[label], ""
    if kind == "motion":
        return "Which way does it move?", motion, ""
    if kind == "bounce":
        return "Does it bounce?", *(("yes", "no") if motion == "bouncing" else ("no", "yes"))
    if kind == "is_digit":
        return f"Is it a {_WORDS[label]}?", "yes", "no"
    asked = {"still": "Does it stand still?", "bouncing": "Does it bounce?"}.get(motion, f"Does it move {motion}?")
    return asked, "yes", "no"


def _train(network: nn.Module, recipe: AnswererRecipe, progress: bool) -> None:
    from genrl.generators.digits_data import DigitsPart, load_digits_split
    from genrl.generators.moving_digits import moving_digits
    from genrl.progress import progress_bar

    assert isinstance(network, VideoAnswerer)
    draw = torch.Generator().manual_seed(recipe.seed)
    initialise(network, draw)
    part = load_digits_split().proxy
    rows = torch.randint(len(part), (recipe.videos,), generator=draw)
    varied = augment(torch.from_numpy(np.ascontiguousarray(part.images))[rows], recipe.digits, draw)
    drawn = DigitsPart(varied.numpy(), part.labels[rows.numpy()], part.indices[rows.numpy()])
    videos, digits, motions = moving_digits(recipe.videos, drawn, recipe.seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps)
    # prepare may be called while a reward is scored without gradients
    with torch.enable_grad(), progress_bar("training the video question answerer", recipe.steps, progress) as advance:
        for _ in range(recipe.steps):
            some = torch.randint(recipe.videos, (recipe.batch,), generator=draw)
            batch = noisy(videos[some], recipe.noise, draw)
            frame = torch.randint(videos.shape[1], (recipe.batch,), generator=draw)
            seen = batch[torch.arange(recipe.batch), frame][:, None]  # [B, 1, 1, H, W]
            loss = F.cross_entropy(network.digit_logits(seen), digits[some])
            loss = loss + F.cross_entropy(network.motion_logits(batch[: recipe.moving]), motions[some][: recipe.moving])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            advance()
