"""The life of a run, whatever it trains: its folder, resuming, iterations, evaluations, checkpoints, the summary.

What is trained is the business of :class:`genrl.training.Loop` (generators against rewards) and
:class:`genrl.training.Imitation` (policies from demonstrations), which fill in the methods at the end of this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from genrl.report.data import read_metrics
from genrl.training.checkpoint import (
    DISK_PROBLEMS,
    CheckpointError,
    any_problem,
    disk_problem,
    list_checkpoints,
    load_state,
    restore_rng,
    save_checkpoint,
    step_name,
)
from genrl.training.errors import SetupError, TrainingError
from genrl.training.logging import RunWriter, write_json
from genrl.training.optimization import Optimization
from genrl.training.processes import make_accelerator
from genrl.training.progress import announce_resume, training_progress
from genrl.training.run_dir import claim_run_dir, prepare_run_dir, save_config
from genrl.training.run_files import Summary, run_facts, write_summary
from genrl.training.seeding import seed_everything
from genrl.training.settings import RunSettings
from genrl.training.stopping import StopRequest

T = TypeVar("T")


@contextmanager
def setting_up() -> Iterator[None]:
    """Turn what cannot be loaded into SetupError; a disk that fails is no fault of the configuration."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, SetupError) or (isinstance(error, OSError) and error.errno in DISK_PROBLEMS):
            raise
        raise SetupError(str(error)) from error


class Run:
    """A run that survives being killed.

    Args:
        name: of the run, for reports.
        run_dir: where everything is written.
        seed: fixes every random draw.
        trainer, evaluation: settings.
        config: the complete configuration, stored with the run.
    """

    optimization: Optimization
    stride = 1  # iterations that one call of `_iterate` completes
    measured_on = "measured"  # heading of the table at the end
    hint_unchanged = "check the learning rate"
    cost_unit = "forward-equivalents"

    def __init__(
        self,
        name: str,
        run_dir: str | Path,
        seed: int,
        trainer: RunSettings,
        evaluation: Any,
        config: dict[str, Any] | None = None,
    ):
        self.name, self.run_dir, self.seed = name, Path(run_dir), seed
        self.trainer, self.evaluation, self.config = trainer, evaluation, config
        self.iteration = 0  # completed iterations
        self.seconds = 0.0  # that iterations of earlier processes of this run took
        self.cost = 0.0  # forward-equivalents so far: a backward counts two
        self.evaluated = -1  # iteration of the last evaluation
        self.last: dict[str, float] = {}  # metrics of the last iteration
        self.notes: list[str] = []  # what resuming has changed
        self._stop = ""
        self._request = StopRequest()

    # ------------------------------------------------------------------------------------------------ running

    def run(self, resume: str = "auto") -> Summary:
        """Train.

        Args:
            resume: ``"auto"`` goes on from the last checkpoint in the run directory if there is one, ``"never"``
                starts anew, ``"require"`` fails without one.

        Raises:
            RewardError: a reward failed; a checkpoint of the last complete iteration was saved before.
            CheckpointError: a checkpoint could not be written or read.
            TrainingError: numbers stopped being finite, or the clip range lies under the numerical noise.
        """
        self.began = time.time()
        try:
            self.setup()
        except ValueError as error:
            raise SetupError(str(error)) from error
        main = self._request.announce = self.accelerator.is_main_process
        lock, changes, problem = None, [], ""
        if main:
            try:
                lock = claim_run_dir(self.run_dir)
                changes = prepare_run_dir(self.run_dir, self.config, resume)
            except (OSError, ValueError) as error:
                problem = str(error)
        problem = any_problem(self.accelerator, problem)
        try:
            if problem:
                raise SetupError(problem)
            return self._run(resume, changes)
        finally:
            if lock is not None:
                lock.release()

    def _run(self, resume: str, changes: list[str]) -> Summary:
        main = self.accelerator.is_main_process
        self.prepare()
        found = list_checkpoints(self.run_dir) if resume != "never" else []
        if found:
            self._load(found[-1][1])
            rows = [row for row in read_metrics(self.run_dir) if row["kind"] == "train"]
            self.seconds = sum(row["time/iteration"] for row in rows if row["iteration"] <= self.iteration)
        goes_on = self.iteration < self.trainer.iterations
        if main and (goes_on or not found):
            save_config(self.run_dir, self.config)
        keep = self.iteration if found else None
        again = self.evaluated != self.iteration  # an evaluation of this iteration was not complete when it was saved
        self.writer = RunWriter(self.run_dir, keep, self.trainer.tensorboard and main, main, again)
        if main:
            write_json(self.run_dir / "run.json", {**run_facts(self), **self.describe()})
            if changes and goes_on:
                self._event(f"resumed with changed settings: {'; '.join(changes)}")
            for note in self.notes if goes_on else []:
                self._event(note)
            if found:
                announce_resume(self)
        status = "failed"
        try:
            with self._request.listening(), training_progress(self) as show:
                self._look()
                self._agree_to_stop()
                while self.iteration < self.trainer.iterations and not self._stop:
                    self._iterate()
                    show(self)
                    self._look()
                    self._agree_to_stop()
                    every = self.trainer.checkpoint_every
                    done = self.iteration >= self.trainer.iterations
                    if done or self._stop or (every and self.iteration % every == 0):
                        self.save()
            status = self._stop or "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except OSError as error:
            if error.errno in DISK_PROBLEMS:
                raise disk_problem(self.run_dir, error) from error
            raise
        finally:
            self._release()
            summary = self._close(status, self.seconds + time.time() - self.began)
        return summary

    def _close(self, status: str, seconds: float) -> Summary:
        """Write the summary; a disk that is full does not hide what went wrong before."""
        summary = Summary.of(self, status, seconds)
        try:
            self.writer.close()
            if self.accelerator.is_main_process:
                write_summary(self, summary)
        except OSError as error:
            print(f"the summary of {self.run_dir} could not be written: {error}")
        return summary

    def _look(self) -> None:
        """Evaluate or draw a preview when this iteration is due for it."""
        if self.evaluated == self.iteration:
            return
        done = self.iteration >= self.trainer.iterations
        every, preview = self.evaluation.every, self.trainer.preview_every
        if done or self.iteration == 0 or (every and self.iteration % every == 0):
            self._evaluate(first=self.iteration == 0, last=done)
        elif preview and self.iteration % preview == 0:
            self._preview()

    def _saving(self, work: Callable[[], T]) -> T:
        """The result of work that communicates nothing and moves no weights.

        When it fails on any process, all of them save the last completed iteration and stop.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        problem = any_problem(self.accelerator, "" if error is None else str(error) or repr(error))
        if problem:
            try:
                self._save_before_failing()
            except CheckpointError as second:
                raise TrainingError(f"{problem}\nBesides, {second}") from error
            raise error if error is not None else TrainingError(f"another process failed: {problem}")
        return result

    def _save_before_failing(self) -> None:
        if self.iteration and not any(i == self.iteration for i, _ in list_checkpoints(self.run_dir)):
            self.save()

    def _event(self, message: str) -> None:
        event, level = ("alarm", "warning") if message.startswith("alarm") else ("note", "info")
        self.writer.write("event", self.iteration, {"event": event, "level": level, "message": message})
        if self.accelerator.is_main_process:
            print(f"iteration {self.iteration}: {message}")

    # -------------------------------------------------------------------------------------------- checkpoints

    def save(self, name: str | None = None) -> Path:
        """Write a checkpoint of the completed iterations."""
        state = {
            "iteration": self.iteration,
            "cost": self.cost,
            "evaluated": self.evaluated,
            **self.optimization.state_dict(),
            **self.state(),
        }
        keep = self.trainer.keep_checkpoints if name is None else None
        name = step_name(self.iteration) if name is None else name

        export = self.optimization.exported_weights  # what is exported is what was evaluated
        return save_checkpoint(self.run_dir, name, state, self.export, self.accelerator, keep, export)

    def _load(self, folder: Path) -> None:
        state = load_state(folder)
        try:
            self.optimization.load_state_dict(state)
            self.load_state(state)
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{folder} does not fit this configuration: {error}. Resume with the settings that it was written "
                "with, or start anew with --resume never"
            ) from error
        self.iteration, self.cost, self.evaluated = state["iteration"], state["cost"], state["evaluated"]
        restore_rng(folder, self.accelerator.process_index)

    def _agree_to_stop(self) -> None:
        """Take over a request to stop, on every process at the same iteration."""
        self._stop = any_problem(self.accelerator, self._stop or self._request.reason)

    # --------------------------------------------------------------------------------- what is filled in

    def setup(self) -> None:
        """Join the processes; everything that can fail before compute is spent does so here, with a ValueError."""
        self.accelerator = make_accelerator(self.trainer)
        self.device = self.accelerator.device
        seed_everything(self.seed, self.accelerator.process_index)

    def prepare(self) -> None:
        """Load or make what the run starts from, and hand it to the optimizer."""
        raise NotImplementedError

    def _iterate(self) -> None:
        """Train one iteration (or `stride`), advance `iteration`, write its metrics."""
        raise NotImplementedError

    def _evaluate(self, first: bool, last: bool) -> None:
        """Measure the weights that are exported, set `evaluated`, write the values."""
        raise NotImplementedError

    def _preview(self) -> None:
        """Write a picture of how it goes."""

    def export(self, folder: Path) -> None:
        """Write the trained model for use elsewhere; the weights that are evaluated are in place."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights and the optimizer."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""

    def describe(self) -> dict[str, Any]:
        """What `run.json` says about the parts."""
        return {}

    def reference(self) -> dict[str, float]:
        """What real data reads on the evaluated numbers."""
        return {}

    def summary_sections(self) -> list[tuple[str, str, set[str]]]:
        """(prefix of evaluated metrics, title, metrics to leave out) of the table at the end."""
        return [("eval/", "evaluation", set())]

    def best_iteration(self) -> int:
        """Iteration of the best evaluation so far."""
        return 0

    def dry_run(self) -> dict[str, Any]:
        """Build everything, measure sizes, train nothing."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of threads and processes, however the run ended."""
