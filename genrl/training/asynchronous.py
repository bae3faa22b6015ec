"""Roll-outs in other processes, with weights that lag behind.

Workers rebuild generator, prompts, rewards and method from the configuration, sample and score whole iterations with
the last weights that the updater published, and hand over (sample numbers, final latents, rewards, version); the
updater encodes the prompts again. It never waits for a sampler that is ahead, drops what was drawn with weights that
are too old, and counts it. DHO (arXiv 2610.01233) trains so, with 28 accelerators that sample and 4 that update;
details are ours.

Which weights drew a sample depends on how fast the processes are, so two such runs are not equal, and a resumed run is
not the run that was never disturbed; it goes on with fresh samples.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from genrl.algorithms.base import Rollout
from genrl.rewards import as_compose
from genrl.training.collector import Collected, Collector
from genrl.training.errors import SetupError, TrainingError
from genrl.training.off_load import moved
from genrl.training.scoring import RewardWorker
from genrl.training.seeding import Layout, seed_everything
from genrl.training.settings import AsynchronousSettings, TrainerSettings

FOLDER = "asynchronous"  # in the run directory, while the run lasts
WEIGHTS = "weights.pt"
POLL = 0.2  # seconds between two looks at whether everyone is alive


def check_asynchronous(algorithm: Any, config: Mapping[str, Any] | None, processes: int) -> None:
    """Refuse a run whose samples may not come from other weights, or whose parts cannot be rebuilt.

    Raises:
        SetupError: naming what is in the way.
    """
    if not getattr(algorithm, "final_samples_only", False):
        raise SetupError(
            f"trainer.asynchronous: {type(algorithm).__name__} needs the densities of the weights that sampled, which "
            "here lag behind; use a method of the forward process (Homing, ForwardProcess, PositivesOnly, "
            "AdvantageWeightedMatching, OnlineDPO), or leave trainer.asynchronous out"
        )
    if config is None:
        raise SetupError(
            "trainer.asynchronous rebuilds the parts of the run in other processes, which needs its configuration; "
            "start it with `genrl train CONFIG`, or pass config= to Loop"
        )
    if processes > 1:
        raise SetupError(
            f"trainer.asynchronous works with one updating process, and {processes} were started; add workers "
            "(trainer.asynchronous.workers) instead of processes"
        )


class AsynchronousRollouts:
    """The updater's side: publishes weights, takes scored samples, drops old ones.

    Workers start with the first call of :meth:`next`, once a resumed run has its weights.

    Args:
        collector: of the updater; it encodes prompts and gives batches.
        generator, algorithm: whose state is published.
        settings: of the mode. trainer: of the run.
        config: complete configuration, from which workers build their parts.
        folder: of the run.

    Attributes:
        drawn: the number that the next draw of a resumed run gets; draws are numbered like iterations.
    """

    def __init__(
        self,
        collector: Collector,
        generator: Any,
        algorithm: Any,
        settings: AsynchronousSettings,
        trainer: TrainerSettings,
        config: Mapping[str, Any],
        folder: Path,
    ):
        self.collector, self.generator, self.algorithm = collector, generator, algorithm
        self.settings, self.trainer, self.config = settings, trainer, config
        self.folder = folder / FOLDER
        self.drawn = 0
        self._published = -1
        self._workers: list[Any] = []
        self._connections: list[Connection] = []
        self._items: queue.Queue[dict[str, Any]] = queue.Queue(settings.queue)
        self._problems: list[str] = []
        self._closing = False
        # A run that ends without close() must not wait for workers that wait for it.
        Finalize(self, _kill, (self._workers,), exitpriority=100)

    # ---------------------------------------------------------------------------------------------- interface

    def next(self, iteration: int) -> Collected:
        """Samples for an iteration, at most `max_lag` updates old.

        Raises:
            TrainingError: a worker failed or died; the message is the worker's.
        """
        began = time.perf_counter()
        if iteration - self._published >= self.settings.publish_every or not self._workers:
            self.publish(iteration)
        if not self._workers:
            self._start()
        dropped, wasted = 0, 0
        while True:
            item = self._take()
            self.drawn = max(self.drawn, item["number"] + 1)
            lag = iteration - item["version"]
            if lag <= self.settings.max_lag:
                break
            dropped, wasted = dropped + 1, wasted + item["evaluations"]
        metrics = {
            "async/lag_mean": float(lag),
            "async/dropped": float(dropped),
            "async/queue": float(self._items.qsize()),
        }
        return self._collected(item, wasted, {"time/rollout": time.perf_counter() - began}, metrics)

    def publish(self, version: int) -> None:
        """Put the present weights where workers look, all or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "version": version,
            "generator": self.generator.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }
        temporary = self.folder / f"{WEIGHTS}.tmp"
        torch.save(state, temporary)
        os.replace(temporary, self.folder / WEIGHTS)
        self._published = version

    def close(self) -> None:
        """End the workers and remove the published weights."""
        self._closing = True
        _kill(self._workers)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.drawn = state["drawn"]

    # ------------------------------------------------------------------------------------------------ inside

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process would inherit threads and CUDA
        devices = self.settings.devices or (str(self.collector.accelerator.device),)
        for index in range(self.settings.workers):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (
                index,
                self.drawn + index,
                self.settings.workers,
                dict(self.config),
                str(self.folder / WEIGHTS),
                devices[index % len(devices)],
                theirs,
            )
            worker = context.Process(target=run_worker, args=arguments, name=f"genrl-rollout-{index}", daemon=True)
            worker.start()
            theirs.close()  # only then does the end of the worker end the pipe
            self._workers.append(worker)
            self._connections.append(ours)
            threading.Thread(target=self._receive, args=(index, worker, ours), daemon=True).start()

    def _receive(self, index: int, worker: Any, connection: Connection) -> None:
        """Move items of a worker to the queue; while that is full the worker waits with its next one."""
        while not self._closing:
            try:
                item = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                worker.join(5)
                self._problems.append(
                    f"roll-out worker {index} died with exit code {worker.exitcode} and no message; if it was killed, "
                    "memory may have run out (fewer trainer.asynchronous.workers, smaller trainer.rollout_batch)"
                )
                return
            if "error" in item:
                self._problems.append(f"roll-out worker {index} failed: {item['error']}")
                return
            while not self._closing:
                try:
                    self._items.put(item, timeout=POLL)
                    break
                except queue.Full:
                    continue

    def _take(self) -> dict[str, Any]:
        while True:
            if self._problems:
                raise TrainingError(self._problems[0])
            try:
                return self._items.get(timeout=POLL)
            except queue.Empty:
                continue

    def _collected(
        self, item: dict[str, Any], wasted: int, times: dict[str, float], metrics: dict[str, float]
    ) -> Collected:
        parts = torch.load(io.BytesIO(item["samples"]), weights_only=True, map_location="cpu")
        rows, number = parts["rows"], item["number"]
        chosen = self.collector.choose(number)
        batch, _ = self.collector.batch(rows, chosen, number)
        rollout = Rollout(batch.cond, parts["x0"], rows, extra=parts["extra"], evaluations=item["evaluations"] + wasted)
        device = "cpu" if self.trainer.latents_on_cpu else self.collector.accelerator.device
        return Collected(moved(rollout, device), batch, parts["values"], torch.tensor(chosen), times, metrics)


def _kill(workers: list[Any]) -> None:
    """End processes that ignore polite signals, since those reach the whole process group on Ctrl-C."""
    for worker in workers:
        worker.kill()
        worker.join()


# ------------------------------------------------------------------------------------------------- the worker


def run_worker(
    index: int, first: int, stride: int, config: dict[str, Any], weights: str, device: str, connection: Connection
) -> None:
    """Sample and score draws first, first + stride, ... until the parent ends; what a worker process runs.

    Args:
        index: number of the worker.
        first, stride: which draws are its own; a draw's number stands for the iteration in prompts and noise.
        config: of the run. weights: file that the updater writes. device: where to sample.
        connection: takes the items.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides; its end ends us, however it comes
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        worker = _Worker(index, config, weights, device)
        while True:
            connection.send_bytes(pickle.dumps(worker.item(first)))
            first += stride
    except (BrokenPipeError, ConnectionError):
        return
    except BaseException as error:  # whatever it is, the updater tells the user
        text = str(error) or repr(error)
        connection.send_bytes(pickle.dumps({"error": f"{type(error).__name__}: {text}"}))
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _Worker:
    """Parts of the run in another process."""

    def __init__(self, index: int, config: dict[str, Any], weights: str, device: str):
        from genrl.config import build

        parts = build(config)
        settings: TrainerSettings = parts["trainer"]
        if settings.cpu_threads is not None:
            torch.set_num_threads(settings.cpu_threads)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        seed_everything(parts["seed"], index + 1)
        self.weights, self.version, self.seen = weights, -1, (-1, -1)
        self.generator, self.algorithm = parts["generator"], parts["algorithm"]
        reward = as_compose(parts["reward"])
        for part in (self.generator, reward):
            if hasattr(part, "prepare"):
                part.prepare(self.device, progress=False)
        self.algorithm.configure(self.generator)
        self.generator.module.eval()
        self.collector = Collector(self.generator, self.algorithm, parts["prompts"], reward, settings, parts["seed"])
        layout = Layout(settings.prompts_per_iteration, settings.group_size, self.algorithm.minibatches)
        self.collector.prepare(SimpleNamespace(device=self.device), layout)
        self.rewards = RewardWorker(reward.for_training(), settings.reward_timeout, self.device)
        if settings.mixed_precision != "no":
            _autocast(self.generator.module, self.device, settings.mixed_precision)

    def item(self, number: int) -> dict[str, Any]:
        """One scored draw, as plain bytes and numbers."""
        self._update()
        collected = self.collector.sample(self.rewards, number)
        rollout = moved(collected.rollout, "cpu")
        samples = io.BytesIO()
        kept = {"rows": rollout.rows, "x0": rollout.x0, "extra": dict(rollout.extra), "values": collected.values}
        torch.save(kept, samples)
        return {
            "number": number,
            "version": self.version,
            "evaluations": rollout.evaluations,
            "samples": samples.getvalue(),
        }

    def _update(self) -> None:
        """Take the weights that were published last, unless they are here already."""
        stat = os.stat(self.weights)
        if (stat.st_mtime_ns, stat.st_ino) == self.seen:
            return
        state = torch.load(self.weights, weights_only=True, map_location=self.device)
        self.generator.load_state_dict(state["generator"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.version, self.seen = state["version"], (stat.st_mtime_ns, stat.st_ino)


def _autocast(module: Any, device: torch.device, precision: str) -> None:
    """Network arithmetic as the updater's, which accelerate wraps in the same way."""
    from accelerate.utils import convert_outputs_to_fp32

    kind = torch.bfloat16 if precision == "bf16" else torch.float16
    module.forward = convert_outputs_to_fp32(torch.autocast(device.type, kind)(module.forward))
