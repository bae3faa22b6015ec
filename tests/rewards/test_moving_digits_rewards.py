from __future__ import annotations

import pytest
import torch

from genrl.generators.moving_digits import MOTIONS, moving_digits
from genrl.rewards import Compose, MotionMatch, MovingDigitJudge, MovingDigitProxy, check_reward, score
from genrl.rewards.moving_digits import FrameRecipe, densest_window, judged_motion

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


@pytest.fixture(scope="module")
def real():
    """videos, prompts, metadata of 120 real videos."""
    videos, digits, motions = moving_digits(120, "generator", seed=5)
    metadata = [{"label": d, "motion": MOTIONS[m]} for d, m in zip(digits.tolist(), motions.tolist(), strict=True)]
    return videos, ["a video"] * len(videos), metadata


@pytest.fixture(scope="module")
def frame_proxy(reward_cache):
    reward = MovingDigitProxy()
    reward.prepare("cpu", progress=False)
    return reward


def test_proxy_reads_real_frames_that_it_has_not_seen(frame_proxy):
    assert frame_proxy.describe()["real_accuracy"] > 0.93


def test_judge_reads_real_videos_that_it_has_not_seen():
    found = MovingDigitJudge().describe()
    assert found["real_digit"] > 0.94 and found["real_motion"] > 0.98
    assert abs(found["real_last_chunk"] - found["real_first_chunk"]) < 0.03


def test_proxy_is_the_mean_over_frames_of_a_probability(frame_proxy, real):
    video = real[0][:1].expand(10, -1, -1, -1, -1)
    labels = [{"label": k} for k in range(10)]
    values = frame_proxy(video, ["a video"] * 10, labels)
    assert values.sum().item() == pytest.approx(1.0, abs=1e-5)
    mixed = torch.cat([video[:, :5], real[0][1:2, :5].expand(10, -1, -1, -1, -1)], dim=1)
    other = frame_proxy(real[0][1:2].expand(10, -1, -1, -1, -1)[:, :5], ["a video"] * 10, labels)
    first = frame_proxy(video[:, :5], ["a video"] * 10, labels)
    assert torch.allclose(frame_proxy(mixed, ["a video"] * 10, labels), (first + other) / 2, atol=1e-6)


def test_proxy_has_gradients_that_point_uphill(frame_proxy, real):
    media = (real[0][:16] * 0.6).requires_grad_()
    before = frame_proxy(media, real[1][:16], real[2][:16])
    (gradient,) = torch.autograd.grad(before.sum(), media)
    assert frame_proxy(media + gradient, real[1][:16], real[2][:16]).sum() > before.sum()


def test_all_pass_the_checker(frame_proxy, real):
    batch = real[0][:6], real[1][:6], real[2][:6]
    for reward in (frame_proxy, MotionMatch(), MovingDigitJudge()):
        assert check_reward(reward, *batch) == []


def test_motion_match_knows_every_motion(real):
    videos, prompts, metadata = real
    table = {m: MotionMatch()(videos, prompts, [{"motion": m}] * len(videos)) for m in MOTIONS}
    for i, entry in enumerate(metadata):
        own = table[entry["motion"]][i].item()
        assert own > 0.75 and own == max(values[i].item() for values in table.values())
        if entry["motion"] in OPPOSITE:
            assert table[OPPOSITE[entry["motion"]]][i] < 0.01


def test_motion_match_of_known_displacements():
    match = MotionMatch(slow=0.4, back=1.5).match
    right = torch.tensor([[0.0, 0.5]] * 4)
    assert match(right, "right") == 1 and match(right, "left") == 0 and match(right, "up") == 0
    assert match(right * 0.4, "right").item() == pytest.approx(0.5)  # 0.2 of 0.4 pixels
    diagonal = torch.tensor([[0.5, 0.5]] * 4)
    assert match(diagonal, "down").item() == pytest.approx(0.5**0.5)
    there_and_back = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, -1.0], [0.0, -0.5]])
    assert match(there_and_back, "bouncing").item() == pytest.approx((3 + 0.5 / 0.8) / 4)
    assert match(there_and_back[:2], "bouncing") == 0  # one way
    assert match(torch.zeros(4, 2), "still") == 1 and match(torch.zeros(4, 2), "bouncing") == 0
    assert match(right, "still").item() == pytest.approx(2.718281828 ** -(1.25**2), rel=1e-5)
    assert match(torch.cat([right, -right]), "right") == 0  # opposite steps cancel


def test_judge_sees_where_a_video_loses_its_digit(real):
    videos, prompts, metadata = real
    broken = videos.clone()
    broken[:, -2:] = 0
    found = score(MovingDigitJudge(), broken, prompts, metadata)
    whole = score(MovingDigitJudge(), videos, prompts, metadata)
    assert torch.equal(found["first_chunk"], whole["first_chunk"])
    assert found["last_chunk"].mean() < 0.3 < 0.9 < whole["last_chunk"].mean()
    first, last = found["first_chunk"], found["last_chunk"]
    middle = score(MovingDigitJudge(), broken[:, 2:-2], prompts, metadata)["digit"]
    assert torch.allclose(found["digit"], (2 * first + 6 * middle + 2 * last) / 10)


def test_judged_motion_is_turned_with_the_video(real):
    videos, _, metadata = real
    names = [entry["motion"] for entry in metadata]
    assert judged_motion(videos) == names
    mirrored = {"left": "right", "right": "left"}
    assert judged_motion(videos.flip(-1)) == [mirrored.get(name, name) for name in names]
    turned = {"left": "up", "right": "down", "up": "left", "down": "right"}
    assert judged_motion(videos.transpose(-1, -2)) == [turned.get(name, name) for name in names]
    back = {**OPPOSITE, "still": "still", "bouncing": "bouncing"}
    assert judged_motion(videos.flip(1)) == [back[name] for name in names]


def test_densest_window_is_where_the_ink_is():
    frames = torch.zeros(2, 1, 16, 16)
    image = torch.rand(8, 8) + 0.1
    frames[0, 0, 3:11, 6:14] = image
    frames[1, 0, 8:, 8:] = image
    assert torch.equal(densest_window(frames)[:, 0], image.expand(2, 8, 8))


def test_training_is_repeatable_and_leaves_the_global_random_state(tmp_path, monkeypatch, real):
    state = torch.get_rng_state()
    values = []
    for folder in ("a", "b"):
        monkeypatch.setenv("GENRL_CACHE", str(tmp_path / folder))
        with torch.no_grad():
            values.append(MovingDigitProxy(FrameRecipe(steps=3))(real[0][:4], real[1][:4], real[2][:4]))
    assert torch.equal(*values) and torch.equal(state, torch.get_rng_state())


def test_the_judge_cannot_be_trained_on():
    with pytest.raises(ValueError, match="only logged"):
        Compose({"judge": MovingDigitJudge()}, weights={"judge": 1.0})


def test_wrong_media_and_metadata_are_named(frame_proxy, real):
    with pytest.raises(ValueError, match=r"\(2, 3, 16, 16\)"):
        frame_proxy(torch.zeros(2, 3, 16, 16), ["a"] * 2, [{"label": 1}] * 2)
    with pytest.raises(ValueError, match="motion 'sideways'"):
        MotionMatch()(real[0][:1], ["a"], [{"motion": "sideways"}])
    with pytest.raises(ValueError, match="slow is 0"):
        MotionMatch(slow=0)
    with pytest.raises(ValueError, match="frames_per_chunk is 0"):
        MovingDigitJudge(frames_per_chunk=0)
