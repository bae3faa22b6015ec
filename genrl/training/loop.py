"""The one training loop: roll-out, rewards, advantages, updates, evaluation, checkpoints.

It knows no method. An :class:`genrl.algorithms.Algorithm` gives samples and losses; the loop splits the work over
micro-batches and processes and makes sure that nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from genrl.algorithms.base import Algorithm
from genrl.diffusion import NonFiniteError
from genrl.generators.base import Generator
from genrl.prompts import PromptSource
from genrl.report.data import read_metrics
from genrl.rewards import as_compose
from genrl.training.checkpoint import (
    DISK_PROBLEMS,
    CheckpointError,
    any_problem,
    broadcast,
    disk_problem,
    list_checkpoints,
    load_state,
    restore_rng,
    save_checkpoint,
    step_name,
)
from genrl.training.collector import Collected, Collector
from genrl.training.ema import change_norm
from genrl.training.errors import SetupError, TrainingError
from genrl.training.evaluation import SampleSet, deterministic_sampler, measure, sample_set, save_image
from genrl.training.logging import RunWriter
from genrl.training.monitor import Monitor
from genrl.training.processes import make_accelerator
from genrl.training.progress import announce_resume, training_progress
from genrl.training.run_dir import check_parts, claim_run_dir, prepare_run_dir, save_config
from genrl.training.run_files import Summary, describe_run, dry_run_table, write_summary
from genrl.training.scoring import RewardWorker
from genrl.training.seeding import Layout, seed_everything
from genrl.training.settings import EvaluationSettings, TrainerSettings
from genrl.training.stopping import StopRequest
from genrl.training.updater import Updater

T = TypeVar("T")


class Loop:
    """Fine-tunes a generator against a reward.

    Args:
        name: of the run, for reports.
        run_dir: where everything is written.
        seed: fixes every random draw.
        generator, prompts, reward, algorithm: the parts, see :mod:`genrl.generators`, :mod:`genrl.rewards` and
            :mod:`genrl.algorithms`.
        trainer, evaluation: settings.
        config: the complete configuration, stored with the run.
    """

    def __init__(
        self,
        name: str,
        run_dir: str | Path,
        seed: int,
        generator: Generator,
        prompts: PromptSource,
        reward: Any,
        algorithm: Algorithm,
        trainer: TrainerSettings | None = None,
        evaluation: EvaluationSettings | None = None,
        config: dict[str, Any] | None = None,
    ):
        self.name, self.run_dir, self.seed = name, Path(run_dir), seed
        self.generator, self.prompts, self.algorithm = generator, prompts, algorithm
        self.reward = as_compose(reward)
        self.trainer = TrainerSettings() if trainer is None else trainer
        self.evaluation = EvaluationSettings() if evaluation is None else evaluation
        self.config = config
        self.collector = Collector(generator, algorithm, prompts, self.reward, self.trainer, seed)
        self.updater = Updater(generator, algorithm, self.trainer)
        self.iteration = 0  # completed iterations
        self.seconds = 0.0  # that iterations of earlier processes of this run took
        self.cost = 0.0  # forward-equivalents so far: a backward counts two
        self.evaluated = -1  # iteration of the last evaluation
        self._stop = ""
        self._request = StopRequest()

    # ---------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        """Processes, base model, rewards, optimizer; everything that can fail before compute is spent does so here."""
        settings = self.trainer
        self.accelerator = make_accelerator(settings)
        self.device = self.accelerator.device
        check_parts(self.generator, self.prompts)
        if not any(self.reward.weights.values()):
            raise SetupError("every reward has weight 0; give one of them a weight to optimise it")
        seed_everything(self.seed, self.accelerator.process_index)
        self.layout = Layout(
            settings.prompts_per_iteration,
            settings.group_size,
            self.algorithm.minibatches,
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )
        self.collector.prepare(self.accelerator, self.layout)
        self.collector.choose(0)  # too few prompts are reported before anything is computed

    def prepare(self) -> None:
        """Load or train what the run starts from."""
        main = self.accelerator.is_main_process
        parts = [self.reward, *self.evaluation.gauges.values()]
        with self.accelerator.main_process_first():  # it fills the caches that the others find
            self.generator.prepare(self.device, progress=main)
            for part in parts:
                if hasattr(part, "prepare"):
                    part.prepare(self.device, progress=main)
        try:
            self.algorithm.configure(self.generator)
            self.generator.encode([p.text for p in (*self.prompts.train, *self.prompts.held_out)])  # all can be read
        except ValueError as error:
            raise SetupError(str(error)) from error
        self.updater.prepare(self.accelerator, self.layout)
        self.monitor = Monitor(self.evaluation.alarm_margin, self.trainer.collapse_fraction)

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
        self.writer = RunWriter(self.run_dir, keep, self.trainer.tensorboard and main, main)
        if main:
            describe_run(self)
            if changes and goes_on:
                self._event(f"resumed with changed settings: {'; '.join(changes)}")
            if found:
                announce_resume(self)
        self.worker = worker = RewardWorker(self.reward, self.trainer.reward_timeout, self.device)
        status = "failed"
        try:
            with self._request.listening(), training_progress(self) as show:
                self._look()
                self._agree_to_stop()
                while self.iteration < self.trainer.iterations and not self._stop:
                    self._guarded_iteration(worker)
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
            worker.close()
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

    def _guarded_iteration(self, worker: RewardWorker) -> None:
        """An iteration; when it cannot be completed, the state before it is saved first."""
        self._iterate(self._saving(lambda: self.collector.sample(worker, self.iteration)))

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

    def _iterate(self, collected: Collected) -> None:
        began, before = time.perf_counter(), self.updater.updates
        rollout, weights, metrics = self.collector.advantages(collected)
        try:
            values, cost = self.updater.run(rollout, collected.batch, weights)
        except NonFiniteError as error:
            if self.updater.updates == before:  # else the weights are in the middle of an iteration
                self._save_before_failing()
            raise NonFiniteError(f"iteration {self.iteration + 1}: {error}") from error
        metrics |= values
        self.cost += cost
        times = {**collected.times, "time/update": time.perf_counter() - began}
        times["time/iteration"] = sum(times.values())
        self.iteration += 1
        metrics["cost/forward_equivalents"] = self.cost
        self.last = metrics
        self.writer.write("train", self.iteration, {**metrics, **times})
        for message in self.monitor.after_iteration(metrics):
            self._event(message)

    def _event(self, message: str) -> None:
        event, level = ("alarm", "warning") if message.startswith("alarm") else ("note", "info")
        self.writer.write("event", self.iteration, {"event": event, "level": level, "message": message})
        if self.accelerator.is_main_process:
            print(f"iteration {self.iteration}: {message}")

    # ------------------------------------------------------------------------------- evaluation, checkpoints

    def _evaluate(self, first: bool = False, last: bool = False) -> None:
        settings = self.evaluation
        values: dict[str, Any] = {}
        with self.updater.evaluated_weights():
            samples = self._draw(settings.samples_per_prompt)
            values |= {f"eval/{k}": v for k, v in self._measure(samples).items()}
            if settings.train_sampler == "always" or (settings.train_sampler == "ends" and (first or last)):
                own = self._draw(settings.samples_per_prompt, own=True)
                values |= {f"eval_train_sampler/{k}": v for k, v in self._measure(own).items()}
        values["eval/weight_change"] = change_norm(self.updater.parameters, self.updater.start)
        values["eval/uses_ema"] = float(self.updater.ema is not None)
        self.writer.write("eval", self.iteration, values)
        self.evaluated = self.iteration
        if self.accelerator.is_main_process:
            save_image(samples.grid(), self.run_dir / "samples" / f"iteration-{self.iteration:06d}.png")
        best, messages, stop = self.monitor.after_evaluation(self.iteration, values)
        for message in messages:
            self._event(message)
        self._stop = self._stop or stop
        if best and self.iteration:
            self.save("best")

    def _measure(self, samples: SampleSet) -> dict[str, float]:
        """Measured by one process for all, which could otherwise differ in a digit and then in what they do next.

        In the reward thread, so that the time limit holds here too.
        """
        settings = self.evaluation

        def work() -> dict[str, float]:
            return measure(samples, self.reward, settings.gauges, settings.batch, self.device)

        main = self.accelerator.is_main_process
        found = self._saving(lambda: self.worker.run(work, samples.texts[:3]) if main else {})
        return broadcast(self.accelerator, found)

    def _preview(self) -> None:
        with self.updater.evaluated_weights():
            samples = self._draw(min(8, self.evaluation.samples_per_prompt))
        if self.accelerator.is_main_process:
            save_image(samples.grid(), self.run_dir / "samples" / f"iteration-{self.iteration:06d}.png")

    def _draw(self, per_prompt: int, own: bool = False) -> Any:
        ode = deterministic_sampler(self.generator, self.evaluation.steps, self.algorithm.shift)
        sampler = self.algorithm.train_sampler() if own else ode
        return sample_set(
            self.generator,
            sampler,
            self.prompts.held_out,
            per_prompt,
            seed=self.evaluation.seed,
            batch=self.evaluation.batch,
            device=self.device,
            accelerator=self.accelerator,
        )

    def save(self, name: str | None = None) -> Path:
        """Write a checkpoint of the completed iterations."""
        state = {
            "iteration": self.iteration,
            "cost": self.cost,
            "evaluated": self.evaluated,
            **self.updater.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "monitor": self.monitor.state_dict(),
        }
        keep = self.trainer.keep_checkpoints if name is None else None
        name = step_name(self.iteration) if name is None else name

        def export(folder: Path) -> None:  # what is exported is what was evaluated
            # The state above holds the live weights by reference, so the average takes their place only here.
            with self.updater.evaluated_weights():
                self.generator.save_pretrained(folder)

        return save_checkpoint(self.run_dir, name, state, export, self.accelerator, keep)

    def _load(self, folder: Path) -> None:
        state = load_state(folder)
        try:
            self.updater.load_state_dict(state)
            self.algorithm.load_state_dict(state["algorithm"])
            self.monitor.load_state_dict(state["monitor"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{folder} does not fit this configuration: {error}. Resume with the settings that it was written "
                "with, or start anew with --resume never"
            ) from error
        self.iteration, self.cost, self.evaluated = state["iteration"], state["cost"], state["evaluated"]
        restore_rng(folder, self.accelerator.process_index)

    # ------------------------------------------------------------------------------------- stopping, progress

    def _agree_to_stop(self) -> None:
        """Take over a request to stop, on every process at the same iteration."""
        self._stop = any_problem(self.accelerator, self._stop or self._request.reason)

    def dry_run(self) -> dict[str, Any]:
        """Build everything, measure sizes, train nothing."""
        self.setup()
        return dry_run_table(self)
