"""Rewards in the background, with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from torch import Tensor

from genrl.rewards import RewardError, score

Scores = dict[str, Tensor]


class RewardWorker:
    """Scores batches in one thread, in the order they come, while the caller draws the next batch.

    The thread is a daemon: a reward that hangs cannot keep the process from ending.

    Args:
        reward: see ``genrl.rewards``.
        timeout: seconds that the caller waits for one batch.
    """

    def __init__(self, reward: Any, timeout: float):
        self._reward, self._timeout = reward, timeout
        self._jobs: queue.SimpleQueue[tuple[Future[Scores], Callable[[], Scores]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="genrl-reward", daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except BaseException as error:  # handed to the waiting caller, who raises it
                future.set_exception(error)

    def submit(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Future[Scores]:
        """Queue a batch of media [B, C, H, W]."""
        future: Future[Scores] = Future()
        self._jobs.put((future, lambda: score(self._reward, media, prompts, metadata)))
        return future

    def wait(self, future: Future[Scores], prompts: Sequence[str]) -> Scores:
        """The scores name -> [B].

        Raises:
            RewardError: the reward failed, or did not answer in time.
        """
        try:
            return future.result(self._timeout)
        except FutureTimeout as error:
            if future.done():  # the reward itself raised a TimeoutError
                raise
            raise RewardError(
                f"did not answer within trainer.reward_timeout = {self._timeout:g} s",
                type(self._reward).__name__,
                list(prompts),
                "Raise the limit, or find out what the reward waits for.",
            ) from error

    def close(self) -> None:
        self._jobs.put(None)
