"""Rewards in the background, with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch
from torch import Tensor

from genrl.rewards import Compose, RewardError, score

Scores = dict[str, Tensor]
T = TypeVar("T")


class RewardWorker:
    """Scores batches in one thread, in the order they come, while the caller draws the next batch.

    The thread is a daemon: a reward that hangs cannot keep the process from ending.

    Args:
        reward: see ``genrl.rewards``.
        timeout: seconds that the caller waits for one batch.
        device: of the media, made current in the thread.
    """

    def __init__(self, reward: Any, timeout: float, device: torch.device | None = None):
        self._reward, self._timeout, self._device = reward, timeout, device
        names = list(reward.rewards) if isinstance(reward, Compose) else [type(reward).__name__]
        self._name = ", ".join(names)
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="genrl-reward", daemon=True).start()

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device belongs to a thread, and a new one has device 0
        while (job := self._jobs.get()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except BaseException as error:  # handed to the waiting caller, who raises it
                future.set_exception(error)

    def submit(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Future[Scores]:
        """Queue a batch of media [B, C, H, W]."""
        return self._queue(lambda: score(self._reward, media, prompts, metadata))

    def run(self, work: Callable[[], T], prompts: Sequence[str], batches: int = 1) -> T:
        """Other work with the rewards, in the same thread; the limit is that of so many batches."""
        return self.wait(self._queue(work), prompts, batches)

    def _queue(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future

    def wait(self, future: Future[T], prompts: Sequence[str], batches: int = 1) -> T:
        """The result, for a batch its scores name -> [B].

        Raises:
            RewardError: the reward failed, or did not answer in time.
        """
        try:
            return future.result(self._timeout * batches)
        except FutureTimeout as error:
            if future.done():  # the reward itself raised a TimeoutError
                raise
            each = f" for each of {batches} batches" if batches > 1 else ""
            raise RewardError(
                f"did not answer within trainer.reward_timeout = {self._timeout:g} s{each}",
                self._name,
                list(prompts),
                "Raise the limit, or find out what the reward waits for.",
            ) from error

    def close(self) -> None:
        self._jobs.put(None)
