"""Moving digits: real handwritten digits that move over a small canvas, and prompts that say which and how.

The data behind the video generator: what Moving MNIST is to 64x64 pixels (Srivastava et al. 2015, arXiv 1502.04681),
in a size that a CPU trains on in minutes. Digits come from `load_digits_split()`, whose three parts keep generator,
reward and judge apart.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from genrl.generators.digits import DIGIT_WORDS
from genrl.generators.digits_data import DigitsPart, load_digits_split
from genrl.prompts import Prompt

FRAMES, SIZE, DIGIT = 10, 16, 8
MOTIONS = ("left", "right", "up", "down", "still", "bouncing")
# Pixels a frame. A straight path fits between the walls at any of these speeds, a bounce always meets one of them.
SPEEDS = {"straight": (0.5, 0.85), "bouncing": (1.2, 1.6)}
_PARTS = ("generator", "proxy", "gold")
_DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # down, right

_MOVING = {motion: f"moving {motion}" for motion in MOTIONS} | {"still": "standing still", "bouncing": "bouncing"}
_MOVES = {motion: f"moves {motion}" for motion in MOTIONS} | {"still": "stands still", "bouncing": "bounces"}
TRAIN_TEMPLATES = ("a {word} {moving}", "the digit {digit} {moves}")
HELD_OUT_TEMPLATES = ("a video of the number {word} {moving}",)
# A base learns all of them with words and with numerals; prompts may also be any other sentence of these words.
BASE_TEMPLATES = (
    "{} {moving}",
    "a {} {moving}",
    "the digit {} {moves}",
    "the number {} {moves}",
    "a video of the number {} {moving}",
    "a handwritten {} that {moves}",
    "a small {} is {moving}",
    "this {} {moves} on paper",
)
MAX_WORDS = 12


def _vocabulary() -> dict[str, int]:
    """Word to id; 0 is padding. Digits come first (ids 1 to 20), then the words that decide the motion."""
    first = [*DIGIT_WORDS, *string.digits, *MOTIONS, "bounces"]
    phrases = [*_MOVING.values(), *_MOVES.values(), *BASE_TEMPLATES]
    others = {word for phrase in phrases for word in phrase.split() if "{" not in word}
    return {word: index + 1 for index, word in enumerate([*first, *sorted(others - set(first))])}


MOTION_VOCABULARY = _vocabulary()
_MOTION_WORDS = {**{motion: motion for motion in MOTIONS}, "bounces": "bouncing"}


def motion_of(prompt: str) -> tuple[int, str]:
    """The digit and the motion (one of MOTIONS) that a prompt asks for.

    Raises:
        ValueError: as `tokenize_motion` does.
    """
    words = _words(prompt)
    digit = next(MOTION_VOCABULARY[word] for word in words if MOTION_VOCABULARY[word] <= 20)
    return (digit - 1) % 10, next(_MOTION_WORDS[word] for word in words if word in _MOTION_WORDS)


def tokenize_motion(prompt: str) -> list[int]:
    """Token ids [MAX_WORDS] of a prompt, padded with 0; case and punctuation are ignored.

    Raises:
        ValueError: for an unknown word, for a prompt without exactly one digit and one motion, and for more than
            MAX_WORDS words.
    """
    tokens = [MOTION_VOCABULARY[word] for word in _words(prompt)]
    return tokens + [0] * (MAX_WORDS - len(tokens))


def _words(prompt: str) -> list[str]:
    words = prompt.lower().translate(str.maketrans("", "", string.punctuation)).split()
    known = f"Known words are {', '.join(MOTION_VOCABULARY)}"
    for word in words:
        if word not in MOTION_VOCABULARY:
            raise ValueError(f"prompt {prompt!r} has the unknown word {word!r}. {known}")
    digits = [word for word in words if MOTION_VOCABULARY[word] <= 20]
    motions = [word for word in words if word in _MOTION_WORDS]
    for found, what, example in ((digits, "digit", "seven"), (motions, "motion", "left")):
        if len(found) != 1:
            raise ValueError(
                f"prompt {prompt!r} has {len(found)} words {found} for the {what}; it needs exactly one, such as "
                f"{example!r}. {known}"
            )
    if len(words) > MAX_WORDS:
        raise ValueError(f"prompt {prompt!r} has {len(words)} words; at most {MAX_WORDS} are allowed, shorten it")
    return words


def motion_prompts(digit: int, motion: str) -> list[str]:
    """The 16 sentences for a digit 0..9 and a motion by which a base learns them: words and numerals."""
    return [
        template.format(name, moving=_MOVING[motion], moves=_MOVES[motion])
        for template in BASE_TEMPLATES
        for name in (DIGIT_WORDS[digit], str(digit))
    ]


def motion_ways() -> Tensor:
    """Token ids int64 [10, 6, K, L] of the K sentences for each digit and motion."""
    table = [[[tokenize_motion(p) for p in motion_prompts(digit, m)] for m in MOTIONS] for digit in range(10)]
    return torch.tensor(table)


def moving_digits(n: int, part: str | DigitsPart, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Videos of real digits, each with a random motion.

    A digit starts at a random place from which it stays on the canvas; "bouncing" goes along a row or a column and is
    reflected at least once by a wall. Places lie between pixels (linear interpolation). Speeds are constant and drawn
    from SPEEDS.

    Args:
        n: number of videos.
        part: images to use: "generator", "proxy" or "gold" of `load_digits_split()`, or such a part.
        seed: of images, motions, starts and speeds.

    Returns:
        videos float32 [N, F, 1, 16, 16] in [0, 1] (1 is ink), digits int64 [N] in 0..9, motions int64 [N], places in
        MOTIONS.

    Raises:
        ValueError: for an unknown part or n below 1.

    Example:
        >>> videos, digits, motions = moving_digits(3, "generator", seed=0)
        >>> videos.shape
        torch.Size([3, 10, 1, 16, 16])
    """
    if n < 1:
        raise ValueError(f"n = {n}; ask for at least one video")
    rng = np.random.default_rng(seed)
    images = _part(part)
    rows = rng.integers(len(images), size=n)
    motions = rng.integers(len(MOTIONS), size=n)
    places = motion_paths([MOTIONS[k] for k in motions], rng)
    videos = render_path(torch.from_numpy(images.images[rows]), torch.from_numpy(places))
    return videos, torch.from_numpy(images.labels[rows]), torch.from_numpy(motions)


def _part(part: str | DigitsPart) -> DigitsPart:
    if isinstance(part, DigitsPart):
        return part
    if part not in _PARTS:
        raise ValueError(f"part is {part!r}; give one of {', '.join(_PARTS)}, or a part of load_digits_split()")
    return getattr(load_digits_split(), part)


def motion_paths(motions: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """Random paths [N, F, 2]: (row, column) of the top left corner of the digit in each frame, within [0, 8]."""
    free, frames = SIZE - DIGIT, np.arange(FRAMES)
    paths = np.empty((len(motions), FRAMES, 2), dtype=np.float32)
    for path, motion in zip(paths, motions, strict=True):
        start = rng.uniform(0, free, size=2)
        straight, fast = rng.uniform(*SPEEDS["straight"]), rng.uniform(*SPEEDS["bouncing"])
        axis, sign = rng.integers(2), rng.choice([-1, 1])
        if motion == "bouncing":
            velocity = np.zeros(2)
            velocity[axis] = sign * fast
        else:
            velocity = straight * np.asarray(_DIRECTIONS.get(motion, (0, 0)), dtype=np.float64)
            total = velocity * (FRAMES - 1)
            start = rng.uniform(np.maximum(0, -total), free - np.maximum(0, total))
        path[:] = _reflected(start + frames[:, None] * velocity, free)
    return paths


def _reflected(place: np.ndarray, free: float) -> np.ndarray:
    """Fold a line into [0, free], as walls do."""
    folded = np.mod(place, 2 * free)
    return np.where(folded > free, 2 * free - folded, folded)


def render_path(images: Tensor, places: Tensor) -> Tensor:
    """Put digits at places on an empty canvas by linear interpolation.

    Args:
        images: [N, 1, 8, 8]. places: [N, F, 2] (row, column) of the top left corner, in pixels.

    Returns:
        float32 [N, F, 1, 16, 16].
    """
    canvas, ink = torch.arange(SIZE), torch.arange(DIGIT)
    # weight[n, f, y, i]: how much of the digit's row i falls on the canvas' row y
    down, right = (
        (1 - (canvas[:, None] - ink - places[..., k, None, None]).abs()).clamp(min=0).float() for k in (0, 1)
    )
    return torch.einsum("nfyi,nij,nfxj->nfyx", down, images[:, 0].float(), right)[:, :, None].clamp(0, 1)


class MovingDigitPrompts:
    """60 prompts, a digit and a motion each, per template; the held-out ones ask for the same in another sentence.

    Prompts carry the metadata {"label": digit, "motion": name}.

    Args:
        train_templates: texts with `{word}` ("seven") or `{digit}` ("7"), and `{moving}` ("moving left", "standing
            still", "bouncing") or `{moves}` ("moves left", "stands still", "bounces"); by default "a {word} {moving}"
            and "the digit {digit} {moves}".
        held_out_templates: by default "a video of the number {word} {moving}".
        motions: the motions to ask for, of MOTIONS; all by default.

    Raises:
        ValueError: for an unknown motion, for a template without placeholders, or one that is both trained on and held
            out.
    """

    def __init__(
        self,
        train_templates: Sequence[str] | None = None,
        held_out_templates: Sequence[str] | None = None,
        motions: Sequence[str] = MOTIONS,
    ):
        train = tuple(TRAIN_TEMPLATES if train_templates is None else train_templates)
        held_out = tuple(HELD_OUT_TEMPLATES if held_out_templates is None else held_out_templates)
        shared, unknown = sorted(set(train) & set(held_out)), sorted(set(motions) - set(MOTIONS))
        if shared:
            raise ValueError(f"templates {shared} are both trained on and held out; remove them from one of the lists")
        if unknown:
            raise ValueError(f"motions {unknown} are unknown; give some of {', '.join(MOTIONS)}")
        self.train = [prompt for template in train for prompt in _fill(template, motions)]
        self.held_out = [prompt for template in held_out for prompt in _fill(template, motions)]


def _fill(template: str, motions: Sequence[str]) -> list[Prompt]:
    if not any(field in template for field in ("{word}", "{digit}")) or not any(
        field in template for field in ("{moving}", "{moves}")
    ):
        raise ValueError(
            f"template {template!r} lacks a placeholder; write {{word}} (seven) or {{digit}} (7) for the digit, and "
            "{moving} (moving left) or {moves} (moves left) for the motion"
        )
    prompts = []
    for motion in motions:
        for k, word in enumerate(DIGIT_WORDS):
            text = template.replace("{word}", word).replace("{digit}", str(k))
            text = text.replace("{moving}", _MOVING[motion]).replace("{moves}", _MOVES[motion])
            prompts.append(Prompt(text, {"label": k, "motion": motion}))
    return prompts
