"""What is refused before anything is computed, and rewards that would falsify others."""

import errno
import time

import pytest
import torch
import toy

from genrl.algorithms import PolicyGradient
from genrl.rewards import Compose, RewardError, score
from genrl.training.errors import SetupError

# ------------------------------------------------------------------------------------- settings, before any compute


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_batch": 0}, "trainer.rollout_batch = 0"),
        ({"cpu_threads": 0}, "trainer.cpu_threads = 0"),
        ({"weight_decay": -1.0}, "trainer.weight_decay = -1.0"),
        ({"betas": (1.5, 2)}, r"trainer.betas = \[1.5, 2\]"),
        ({"collapse_fraction": 5}, "trainer.collapse_fraction = 5"),
        ({"group_size": 10**8}, "at most 10 million"),
    ],
)
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        toy.trainer(**settings)


def test_impossible_parts_are_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(ValueError, match=r"algorithm.micro_batch = 0"):
        PolicyGradient(micro_batch=0)
    with pytest.raises(ValueError, match=r"evaluation.gauges.x is 5"):
        toy.evaluation(gauges={"x": 5})
    unweighted = Compose({"a": toy.HalfBrightness()}, weights={"a": 0})
    for changes, message in [
        ({"trainer": {"mixed_precision": "fp16"}}, "fp16 needs a CUDA device"),
        ({"reward": unweighted}, "every reward has weight 0"),
    ]:
        with pytest.raises(SetupError, match=message):
            toy.make_loop(tmp_path, PolicyGradient(steps=3), **changes).run()
    with pytest.raises(SetupError, match="no step with a density"):
        toy.make_loop(tmp_path, PolicyGradient(steps=1)).run()


class NotLoadable(toy.HalfBrightness):
    """A reward, or with `prepare` a generator, whose files or packages are not there."""

    def __init__(self, error):
        self.error = error

    def prepare(self, device, progress=True):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("no such part"), FileNotFoundError("no file"), ImportError("no extra")])
def test_what_cannot_be_loaded_is_a_fault_of_the_configuration(tmp_path, error):
    generator = toy.ToyGenerator()
    generator.prepare = NotLoadable(error).prepare
    for changes in ({"reward": NotLoadable(error)}, {"generator": generator}):
        with pytest.raises(SetupError, match=str(error)) as caught:
            toy.make_loop(tmp_path, PolicyGradient(steps=3), **changes).run()
        assert caught.value.__cause__ is error


def test_a_full_disk_while_loading_is_no_fault_of_the_configuration(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError) as caught:
        toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=NotLoadable(full)).run()
    assert caught.value is full


# ------------------------------------------------------------------------------------- rewards that misbehave


def test_a_reward_that_edits_its_media_is_named_and_cannot_falsify_the_others(tmp_path):
    def blackens(media, prompts, metadata):
        return media.mul_(0).flatten(1).mean(1)

    with pytest.raises(RewardError, match="blackens' changed its media in place"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=blackens).run()


def test_a_reward_that_edits_its_metadata_does_not_reach_the_others():
    def clears(media, prompts, metadata):
        [entry.clear() for entry in metadata]
        return media.flatten(1).mean(1)

    def reads(media, prompts, metadata):
        return torch.tensor([float(entry["label"]) for entry in metadata])

    metadata = [{"label": 3}, {"label": 4}]
    found = score(Compose({"clears": clears, "reads": reads}), torch.rand(2, 1, 2, 2), ["a", "b"], metadata)
    assert found["reads"].tolist() == [3, 4] and metadata == [{"label": 3}, {"label": 4}]


def test_the_time_limit_holds_in_evaluation_too(tmp_path):
    def sleeps(media, prompts, metadata):
        time.sleep(20)
        return media.flatten(1).mean(1)

    began = time.time()
    with pytest.raises(RewardError, match=r"sleeps.*did not answer within trainer.reward_timeout = 0.3 s"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=sleeps, trainer={"reward_timeout": 0.3}).run()
    assert time.time() - began < 15
