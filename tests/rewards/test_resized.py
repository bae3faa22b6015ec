"""Rewards that see the media at another size."""

import pytest
import torch

from genrl.generators import load_digits_split
from genrl.rewards import Compose, DigitJudge, DigitSpread, Resized, reward_name, score


class Seen:
    """Keeps what it is given; the reward is the mean."""

    differentiable = True
    range = (0.0, 1.0)
    name = "seen"

    def __call__(self, media, prompts, metadata):
        self.media = media
        return media.flatten(1).mean(1)


def call(reward, media):
    return reward(media, ["a"] * len(media), [{}] * len(media))


def test_enlarged_grey_digits_are_recovered_exactly():
    part = load_digits_split().gold
    images, labels = torch.from_numpy(part.images[:40]), [{"label": int(k)} for k in part.labels[:40]]
    large = images.repeat_interleave(2, -1).repeat_interleave(2, -2).expand(-1, 3, -1, -1)  # [B, 3, 16, 16]
    prompts = ["a digit"] * 40
    judge, spread = DigitJudge(), DigitSpread()
    resized = Resized(judge, 8, gray=True)
    torch.testing.assert_close(resized.resize(large), images)
    assert score(resized, large, prompts, labels).keys() == score(judge, images, prompts, labels).keys()
    assert torch.equal(resized(large, prompts, labels), judge(images, prompts, labels))
    expected = spread.measure(images, prompts, labels)
    assert Resized(spread, 8, gray=True).measure(large, prompts, labels) == pytest.approx(expected, abs=1e-5)


def test_sizes_are_averaged_down_and_interpolated_up_within_the_range():
    media = torch.rand(2, 3, 6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    seen = Seen()
    call(Resized(seen, (3, 2)), media)
    blocks = media.detach().reshape(2, 3, 3, 2, 2, 2).mean(dim=(3, 5))
    torch.testing.assert_close(seen.media.detach(), blocks)
    for size in ((9, 9), (2, 9)):
        call(Resized(seen, size), media).sum().backward()
        assert seen.media.shape == (2, 3, *size) and seen.media.min() >= -1e-6 and seen.media.max() <= 1 + 1e-6
    assert media.grad.abs().sum() > 0


def test_frames_of_a_video_are_resized_one_by_one():
    video = torch.rand(2, 5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = Seen()
    call(Resized(seen, 4, gray=True), video)
    assert seen.media.shape == (2, 5, 1, 4, 4)
    torch.testing.assert_close(seen.media[1, 3, 0, 0, 0], video[1, 3, :, :2, :2].mean())


def test_all_else_is_the_rewards():
    judge = Resized(DigitJudge(), 8)
    assert reward_name(judge) == "digit_judge" and judge.range == (0.0, 1.0) and judge.log_only
    assert judge.reference() == DigitJudge().reference()
    assert not hasattr(judge, "measure") and not hasattr(judge, "predict")
    assert hasattr(Resized(DigitSpread(), 8), "measure")
    assert not hasattr(Resized(lambda media, prompts, metadata: media.mean((1, 2, 3)), 8), "range")
    with pytest.raises(ValueError, match="log_only"):
        Compose({"judge": judge}, weights={"judge": 1.0})
    with pytest.raises(ValueError, match="size is 0"):
        Resized(Seen(), 0)
