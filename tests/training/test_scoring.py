"""Rewards in the background."""

import threading
import time

import pytest
import torch
import toy

from genrl.rewards import RewardError
from genrl.training.scoring import RewardWorker

MEDIA = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
TEXTS, METADATA = ["p0", "p1", "p2"], [{"half": 0}, {"half": 1}, {"half": 0}]


def wait_for(reward, timeout=5.0, batches=1):
    worker = RewardWorker(reward, timeout)
    try:
        futures = [worker.submit(MEDIA + 0 * i, TEXTS, METADATA) for i in range(batches)]
        return [worker.wait(f, TEXTS) for f in futures]
    finally:
        worker.close()


def test_scores_come_back_by_name():
    (scores,) = wait_for(toy.HalfBrightness())
    assert torch.equal(scores["HalfBrightness" if "HalfBrightness" in scores else "bright"], toy.HalfBrightness()(
        MEDIA, TEXTS, METADATA
    ))  # fmt: skip


def test_batches_are_scored_in_order_in_another_thread():
    order, threads = [], set()

    def reward(media, prompts, metadata):
        order.append(len(order))
        threads.add(threading.current_thread().name)
        return torch.full((len(media),), float(order[-1]))

    results = wait_for(reward, batches=4)
    assert [float(next(iter(r.values()))[0]) for r in results] == [0, 1, 2, 3]
    assert threads == {"genrl-reward"}


def test_a_reward_that_hangs_is_named_after_the_limit_and_does_not_keep_the_process():
    def hanging(media, prompts, metadata):
        time.sleep(2)
        return torch.zeros(len(media))

    began = time.perf_counter()
    with pytest.raises(RewardError, match=r"within trainer.reward_timeout = 0.1 s \(prompts: 'p0', 'p1', 'p2'\)"):
        wait_for(hanging, timeout=0.1)
    assert time.perf_counter() - began < 1
    assert all(t.daemon for t in threading.enumerate() if t.name == "genrl-reward")


def test_a_timeout_of_the_reward_itself_is_its_own_error():
    def reward(media, prompts, metadata):
        raise TimeoutError("the server did not answer")

    with pytest.raises(RewardError, match=r"raised TimeoutError: the server did not answer"):
        wait_for(reward)


def test_an_interrupt_inside_a_reward_reaches_the_caller():
    def reward(media, prompts, metadata):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for(reward)


def test_work_on_several_batches_has_the_limit_of_all_of_them():
    worker = RewardWorker(toy.HalfBrightness(), 0.2)
    try:
        assert worker.run(lambda: time.sleep(0.5) or 3, TEXTS, batches=20) == 3
        with pytest.raises(RewardError, match=r"reward_timeout = 0.2 s for each of 2 batches"):
            worker.run(lambda: time.sleep(1), TEXTS, batches=2)
    finally:
        worker.close()
