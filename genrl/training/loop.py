"""The one training loop: roll-out, rewards, advantages, updates, evaluation, checkpoints.

It knows no method. An :class:`genrl.algorithms.Algorithm` gives samples and losses; the loop splits the work over
micro-batches and processes and makes sure that nothing is lost.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from genrl.algorithms.base import Algorithm, chunked
from genrl.diffusion import NonFiniteError
from genrl.generators.base import Generator, encode_prompts
from genrl.progress import progress_bar
from genrl.prompts import PromptSource
from genrl.rewards import as_compose
from genrl.training.asynchronous import AsynchronousRollouts, check_asynchronous
from genrl.training.checkpoint import broadcast
from genrl.training.collector import Collected, Collector
from genrl.training.errors import SetupError
from genrl.training.evaluation import (
    SampleSet,
    check_names,
    deterministic_sampler,
    measure,
    prompt_means,
    sample_set,
    save_credit,
    score_samples,
)
from genrl.training.generator_facts import describe, dry_run_table, gauge_references, remaining_noise
from genrl.training.monitor import Monitor
from genrl.training.run import Run, setting_up
from genrl.training.run_dir import check_parts
from genrl.training.scoring import RewardWorker
from genrl.training.seeding import Layout
from genrl.training.settings import EvaluationSettings, TrainerSettings
from genrl.training.updater import Updater

PROMPTS_READ_AT_START = 4096


class Loop(Run):
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

    trainer: TrainerSettings
    evaluation: EvaluationSettings
    measured_on = "measured on held-out prompts"
    hint_unchanged = "check that rewards are scored (not NaN) and differ within a group"

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
        trainer = TrainerSettings() if trainer is None else trainer
        evaluation = EvaluationSettings() if evaluation is None else evaluation
        super().__init__(name, run_dir, seed, trainer, evaluation, config)
        self.generator, self.prompts, self.algorithm = generator, prompts, algorithm
        self.reward = as_compose(reward)
        self.collector = Collector(generator, algorithm, prompts, self.reward, self.trainer, seed)
        self.optimization = self.updater = Updater(generator, algorithm, trainer)
        self.rollouts: AsynchronousRollouts | None = None  # where samples come from instead of the collector

    # ---------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        """Processes, base model, rewards, optimizer; everything that can fail before compute is spent does so here."""
        super().setup()
        settings = self.trainer
        check_parts(self.generator, self.prompts)
        if not any(self.reward.weights.values()):
            raise SetupError("every reward has weight 0; give one of them a weight to optimise it")
        check_names(self.reward, self.evaluation.gauges)
        self.layout = Layout(
            settings.prompts_per_iteration,
            settings.group_size,
            self.algorithm.minibatches,
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )
        self.collector.prepare(self.accelerator, self.layout)
        self.collector.choose(0)  # too few prompts are reported before anything is computed
        if settings.asynchronous is not None:
            check_asynchronous(self.algorithm, self.config, self.accelerator.num_processes)
            parts = self.collector, self.generator, self.algorithm, settings.asynchronous, settings
            self.rollouts = AsynchronousRollouts(*parts, self.config or {}, self.run_dir)

    def prepare(self) -> None:
        """Load or train what the run starts from."""
        main = self.accelerator.is_main_process
        parts = [self.reward, *self.evaluation.gauges.values(), self.algorithm]
        with setting_up():
            with self.accelerator.main_process_first():  # it fills the caches that the others find
                self.generator.prepare(self.device, progress=main)
                for part in parts:
                    if hasattr(part, "prepare"):
                        part.prepare(self.device, progress=main)
            self.algorithm.configure(self.generator)
            self.notes += remaining_noise(self.algorithm.train_sampler(), self.seed)
            self._read_prompts(main)
        self.updater.prepare(self.accelerator, self.layout)
        margins = self.evaluation.alarm_margin, self.evaluation.drift_margin
        self.monitor = Monitor(margins[0], self.trainer.collapse_fraction, margins[1])
        self.worker = RewardWorker(self.reward.for_training(), self.trainer.reward_timeout, self.device)

    def _read_prompts(self, progress: bool) -> None:
        """Encode every prompt once: what cannot be read is found now, and caches of encoders are full.

        Of very many training prompts only the first are; the others are encoded when they are drawn.
        """
        prompts = [*self.prompts.held_out, *self.prompts.train[:PROMPTS_READ_AT_START]]
        parts = chunked(len(prompts), 32)
        with progress_bar("reading prompts", len(parts), progress and len(parts) > 4) as advance:
            for part in parts:
                encode_prompts(self.generator, prompts[part])
                advance()

    # --------------------------------------------------------------------------------------------- iterations

    def _iterate(self) -> None:
        """An iteration; when it cannot be completed, the state before it is saved first."""
        collected = self._saving(self._sample)
        if self.layout.processes > 1:
            self._saving(lambda: self.collector.check_names(collected))
        self._train(collected)

    def _sample(self) -> Collected:
        if self.rollouts is not None:
            return self.rollouts.next(self.iteration)
        return self.collector.sample(self.worker, self.iteration)

    def _train(self, collected: Collected) -> None:
        began, before = time.perf_counter(), self.updater.updates
        rollout, weights, metrics = self.collector.advantages(collected)
        try:
            values, cost = self.updater.run(rollout, collected.batch, weights)
        except NonFiniteError as error:
            if self.updater.updates == before:  # else the weights are in the middle of an iteration
                self._save_before_failing()
            raise NonFiniteError(f"iteration {self.iteration + 1}: {error}") from error
        metrics |= values | collected.metrics
        self.cost += cost
        times = {**collected.times, "time/update": time.perf_counter() - began}
        times["time/iteration"] = sum(times.values())
        self.iteration += 1
        metrics["cost/forward_equivalents"] = self.cost
        self.last = metrics
        self.writer.write("train", self.iteration, {**metrics, **times})
        self.writer.write_prompts("train", self.iteration, self.prompts.train, self.collector.by_prompt)
        for message in self.monitor.after_iteration(metrics):
            self._event(message)
        if (message := self.monitor.hopeless()) and self.iteration < self.trainer.iterations:
            self._event(message)
            self._stop = self._stop or "unscored"

    # ------------------------------------------------------------------------------- evaluation, checkpoints

    def _evaluate(self, first: bool = False, last: bool = False) -> None:
        settings = self.evaluation
        values: dict[str, Any] = {}
        with self.updater.evaluated_weights():
            samples = self._draw(settings.samples_per_prompt)
            found, by_prompt = self._measure(samples)
            values |= {f"eval/{k}": v for k, v in found.items()}
            if settings.train_sampler == "always" or (settings.train_sampler == "ends" and (first or last)):
                own = self._draw(settings.samples_per_prompt, own=True)
                values |= {f"eval_train_sampler/{k}": v for k, v in self._measure(own)[0].items()}
        values["eval/weight_change"] = self.updater.weight_change()
        values["eval/uses_ema"] = float(self.updater.ema is not None)
        self.writer.write("eval", self.iteration, values)
        self.writer.write_prompts("eval", self.iteration, self.prompts.held_out, dict(enumerate(by_prompt)))
        self.evaluated = self.iteration
        self._show(samples)
        single = {k for k in found if not k.endswith(("_low", "_high")) and k.split("/")[0] in self.reward.rewards}
        lowered = {f"eval/{k}" for k in single if self.reward.weight(k) < 0}  # they fall as they are meant to
        best, messages, stop = self.monitor.after_evaluation(self.iteration, values, lowered)
        for message in messages:
            self._event(message)
        self._stop = self._stop or stop
        if best and self.iteration:
            self.save("best")

    def _measure(self, samples: SampleSet) -> tuple[dict[str, float], list[float]]:
        """(Every number, the reward of each prompt.)

        Measured by one process for all, which could otherwise differ in a digit and then in what they do next.

        In the reward thread, so that the time limit holds here too.
        """
        settings = self.evaluation

        def work() -> tuple[dict[str, float], list[float]]:
            raw = score_samples(self.reward, samples, settings.batch, self.device)
            numbers = measure(samples, self.reward, settings.gauges, settings.batch, self.device, raw)
            return numbers, prompt_means(samples, self.reward, raw)

        main = self.accelerator.is_main_process
        # The limit is that of a batch, and every reward and gauge scores all of them.
        batches = len(chunked(len(samples.texts), settings.batch)) * (1 + len(settings.gauges))
        found = self._saving(lambda: self.worker.run(work, samples.texts[:3], batches) if main else ({}, []))
        return broadcast(self.accelerator, found)

    def _preview(self) -> None:
        with self.updater.evaluated_weights():
            samples = self._draw(min(8, self.evaluation.samples_per_prompt))
        self._show(samples)

    def _show(self, samples: SampleSet) -> None:
        """Pictures of samples, and of what the algorithm sees in them."""
        if not self.accelerator.is_main_process:
            return
        folder = self.run_dir / "samples"
        samples.save(folder / f"iteration-{self.iteration:06d}.png")
        if hasattr(self.algorithm, "show"):
            path = folder / f"credit-iteration-{self.iteration:06d}.png"
            save_credit(samples, self.algorithm.show, path, self.device)

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

    # ------------------------------------------------------------------------------------- state, description

    def export(self, folder: Path) -> None:
        self.generator.save_pretrained(folder)

    def state(self) -> dict[str, Any]:
        state = {"algorithm": self.algorithm.state_dict(), "monitor": self.monitor.state_dict()}
        if self.rollouts is not None:
            state["asynchronous"] = self.rollouts.state_dict()
        return {**state, "measured": self._measured_with()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.algorithm.load_state_dict(state["algorithm"])
        self.monitor.load_state_dict(state["monitor"])
        if self.rollouts is not None:  # a run that was not asynchronous before goes on after its iterations
            self.rollouts.load_state_dict(state.get("asynchronous", {"drawn": state["iteration"]}))
        if state.get("measured", now := self._measured_with()) != now:
            self.monitor.start_again()
            self.notes.append("evaluations have other settings than before; alarms compare with the next evaluation")

    def _measured_with(self) -> list[Any]:
        """Settings under which numbers of two evaluations can be compared."""
        settings = self.evaluation
        return [settings.seed, settings.steps, settings.samples_per_prompt, self.algorithm.shift]

    def dry_run(self) -> dict[str, Any]:
        processes, self.trainer.processes = self.trainer.processes, None  # which need not be there now
        try:
            self.setup()
            replace(self.layout, processes=processes or self.layout.processes, rank=0)  # refuses what does not divide
        except ValueError as error:
            raise SetupError(str(error)) from error
        return dry_run_table(self, processes)

    def best_iteration(self) -> int:
        return self.monitor.best_iteration

    def describe(self) -> dict[str, Any]:
        return describe(self)

    def reference(self) -> dict[str, float]:
        return gauge_references(self.evaluation.gauges)

    def summary_sections(self) -> list[tuple[str, str, set[str]]]:
        own = self.algorithm.train_sampler()
        evaluated = getattr(self.generator, "sampling_kernel", None)
        kind = "deterministic sampler" if evaluated is None else f"{type(evaluated).__name__} sampler"
        only = {"reward"} if len(self.reward.rewards) == 1 else set()  # the sum of one reward is that reward
        return [
            ("eval/", f"{kind}, {self.evaluation.steps} steps", only),
            ("eval_train_sampler/", f"sampler of training, {type(own.kernel).__name__} {own.n_steps} steps", only),
        ]

    def _release(self) -> None:
        self.worker.close()
        if self.rollouts is not None:
            self.rollouts.close()
