import numpy as np
import pytest
import torch

from genrl.generators import MOTIONS, MovingDigitPrompts, load_digits_split, moving_digits
from genrl.generators.digits import DIGIT_WORDS
from genrl.generators.moving_digits import (
    BASE_TEMPLATES,
    MAX_WORDS,
    MOTION_VOCABULARY,
    SPEEDS,
    motion_of,
    motion_paths,
    motion_prompts,
    motion_ways,
    render_path,
    tokenize_motion,
)


def centres(videos):
    """Centre of mass [N, F, 2] of the ink."""
    ink = videos[:, :, 0]
    place = torch.arange(16.0)
    total = ink.sum((-1, -2))
    return torch.stack([(ink.sum(-1) * place).sum(-1) / total, (ink.sum(-2) * place).sum(-1) / total], -1)


def test_videos_have_their_shapes_and_ranges_and_depend_on_nothing_but_the_seed():
    videos, digits, motions = moving_digits(50, "generator", seed=3)
    assert videos.shape == (50, 10, 1, 16, 16) and videos.dtype == torch.float32
    assert digits.dtype == motions.dtype == torch.int64 and digits.shape == motions.shape == (50,)
    assert videos.min() >= 0 and videos.max() <= 1
    torch.manual_seed(9)
    for again, first in zip(
        moving_digits(50, load_digits_split().generator, seed=3), (videos, digits, motions), strict=True
    ):
        assert torch.equal(again, first)
    assert not torch.equal(moving_digits(50, "proxy", seed=3)[0], videos)


def test_no_ink_is_lost_at_the_walls():
    images = load_digits_split().generator.images
    paths = motion_paths([MOTIONS[k % 6] for k in range(120)], np.random.default_rng(0))
    assert paths.min() >= 0 and paths.max() <= 8
    videos = render_path(torch.from_numpy(images[:120]), torch.from_numpy(paths))
    ink = torch.from_numpy(images[:120]).sum((1, 2, 3))
    assert torch.allclose(videos.sum((2, 3, 4)), ink[:, None].expand(-1, 10), rtol=1e-5)


def test_whole_places_copy_the_digit():
    image = torch.rand(1, 1, 8, 8)
    video = render_path(image, torch.tensor([[[3.0, 5.0], [0.0, 8.0]]]))
    assert torch.allclose(video[0, 0, 0, 3:11, 5:13], image[0, 0]) and video[0, 0].sum() == pytest.approx(
        image.sum().item()
    )
    assert torch.allclose(video[0, 1, 0, :8, 8:], image[0, 0])


def test_the_centre_of_mass_moves_as_the_label_says():
    videos, _, motions = moving_digits(300, "generator", seed=0)
    steps = centres(videos).diff(dim=1)  # [N, F - 1, 2]
    low, high = SPEEDS["straight"]
    for name, axis, sign in [("left", 1, -1), ("right", 1, 1), ("up", 0, -1), ("down", 0, 1)]:
        rows = steps[motions == MOTIONS.index(name)]
        speed = rows[..., axis] * sign
        assert len(rows) > 20 and speed.min() > low - 1e-3 and speed.max() < high + 1e-3
        assert rows[..., 1 - axis].abs().max() < 1e-4
        assert (speed.amax(1) - speed.amin(1)).max() < 1e-3  # even
    assert steps[motions == MOTIONS.index("still")].abs().max() < 1e-4
    bouncing = steps[motions == MOTIONS.index("bouncing")]
    axis = bouncing.abs().sum(1).argmax(-1)
    along = bouncing.gather(2, axis[:, None, None].expand(-1, 9, 1))[..., 0]
    assert (along.amin(1) < -0.5).all() and (along.amax(1) > 0.5).all()  # both ways
    assert along.abs().max() < SPEEDS["bouncing"][1] + 1e-3


@pytest.mark.parametrize("motion", MOTIONS)
def test_every_base_sentence_is_understood(motion):
    for digit in range(10):
        prompts = motion_prompts(digit, motion)
        assert len(set(prompts)) == 2 * len(BASE_TEMPLATES)
        assert all(motion_of(prompt) == (digit, motion) for prompt in prompts)


def test_tokens_are_padded_and_ignore_case_and_punctuation():
    tokens = tokenize_motion("A Seven, moving left!")
    assert tokens == tokenize_motion("a seven moving left") and len(tokens) == MAX_WORDS
    assert [MOTION_VOCABULARY[w] for w in ["a", "seven", "moving", "left"]] == tokens[:4] and set(tokens[4:]) == {0}
    ways = motion_ways()
    assert ways.shape == (10, 6, 16, MAX_WORDS)
    assert ways[7, 1].tolist() == [tokenize_motion(p) for p in motion_prompts(7, "right")]


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("a purple seven moving left", "'purple'"),
        ("a thing moving left", "'thing'"),
        ("a moving left", "0 words"),
        ("a seven 3 moving left", "2 words"),
        ("a seven moving", "for the motion"),
        ("a seven moving left right", "for the motion"),
        ("a a a a a a a a a a a seven moving left", "at most 12"),
    ],
)
def test_prompts_that_cannot_be_shown_are_refused(prompt, part):
    with pytest.raises(ValueError, match=part):
        tokenize_motion(prompt)


def test_prompts_say_what_their_metadata_says_and_held_out_ones_are_others():
    prompts = MovingDigitPrompts()
    assert len(prompts.train) == 120 and len(prompts.held_out) == 60
    for prompt in [*prompts.train, *prompts.held_out]:
        assert motion_of(prompt.text) == (prompt.metadata["label"], prompt.metadata["motion"])
    assert not {p.text for p in prompts.train} & {p.text for p in prompts.held_out}
    few = MovingDigitPrompts(["this {word} {moves}"], [], motions=["up"])
    assert [p.text for p in few.train] == [f"this {word} moves up" for word in DIGIT_WORDS] and few.held_out == []


def test_impossible_arguments_are_named():
    with pytest.raises(ValueError, match="'nowhere'"):
        moving_digits(2, "nowhere", 0)
    with pytest.raises(ValueError, match="n = 0"):
        moving_digits(0, "gold", 0)
    with pytest.raises(ValueError, match="'sideways'"):
        MovingDigitPrompts(motions=["sideways"])
    with pytest.raises(ValueError, match="placeholder"):
        MovingDigitPrompts(["a {word}"])
    with pytest.raises(ValueError, match="held out"):
        MovingDigitPrompts(["a {word} {moving}"], ["a {word} {moving}"])
