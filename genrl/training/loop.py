"""The one training loop: roll-out, rewards, advantages, updates, evaluation, checkpoints.

It knows no method. An :class:`genrl.algorithms.Algorithm` gives samples and losses; the loop splits the work over
micro-batches and processes and makes sure that nothing is lost.
"""

from __future__ import annotations

import errno
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from genrl.algorithms.base import Algorithm, Batch, Metrics, Rollout, chunked
from genrl.diffusion import NonFiniteError, RowNoise
from genrl.generators.base import Generator
from genrl.rewards import as_compose, image_statistics
from genrl.training.checkpoint import (
    CheckpointError,
    any_problem,
    list_checkpoints,
    load_state,
    restore_rng,
    save_checkpoint,
    step_name,
)
from genrl.training.ema import EMA, change_norm
from genrl.training.evaluation import deterministic_sampler, measure, sample_set, save_image
from genrl.training.logging import Meter, RunWriter
from genrl.training.monitor import Monitor
from genrl.training.run_files import Summary, describe_run, dry_run_table, prepare_run_dir, write_summary
from genrl.training.scoring import RewardWorker
from genrl.training.seeding import Layout, draw_prompts, seed_everything
from genrl.training.settings import EvaluationSettings, TrainerSettings

T = TypeVar("T")
DISK_PROBLEMS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES)


class TrainingError(RuntimeError):
    """A run cannot go on; the message says where it stopped, why, and what to do."""


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
        prompts: Any,
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
        self.iteration = 0  # completed iterations
        self.updates = 0
        self.cost = 0.0  # forward-equivalents so far: a backward counts two
        self.evaluated = -1  # iteration of the last evaluation
        self._stop = self._requested = ""

    # ---------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        """Processes, base model, rewards, optimizer; everything that can fail before compute is spent does so here."""
        from accelerate import Accelerator, DistributedDataParallelKwargs

        settings = self.trainer
        if settings.cpu_threads is not None:
            torch.set_num_threads(settings.cpu_threads)
        # A condition that is never dropped leaves its null embedding without a gradient.
        ddp = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
        # Without CUDA, accelerate joins the processes of torchrun only when it is told to use the CPU.
        cpu = settings.device == "cpu" or not torch.cuda.is_available()
        self.accelerator = Accelerator(mixed_precision=settings.mixed_precision, cpu=cpu, kwargs_handlers=[ddp])
        if settings.device == "cuda" and self.accelerator.device.type != "cuda":
            raise TrainingError("trainer.device = cuda, but torch sees no CUDA device; use auto or cpu")
        if settings.processes is not None and settings.processes != self.accelerator.num_processes:
            raise TrainingError(
                f"trainer.processes = {settings.processes}, but {self.accelerator.num_processes} process(es) were "
                f"started; launch with `torchrun --nproc_per_node {settings.processes} -m genrl train ...` "
                "(`accelerate launch --cpu` starts only one)"
            )
        self.device = self.accelerator.device
        seed_everything(self.seed, self.accelerator.process_index)
        self.layout = Layout(
            settings.prompts_per_iteration,
            settings.group_size,
            self.algorithm.minibatches,
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )
        draw_prompts(len(self.prompts.train), settings.prompts_per_iteration, self.seed, 0)

    def prepare(self) -> None:
        """Load or train what the run starts from."""
        main = self.accelerator.is_main_process
        parts = [self.reward, *self.evaluation.gauges.values()]
        with self._main_first():
            self.generator.prepare(self.device, progress=main)
            for part in parts:
                if hasattr(part, "prepare"):
                    part.prepare(self.device, progress=main)
        self.algorithm.configure(self.generator)
        _refuse_dropout(self.generator.module)
        parameters = self.generator.trainable()
        wrong = [p.dtype for p in parameters if p.dtype != torch.float32]
        if wrong:
            raise TrainingError(f"trainable weights must be float32 (mixed precision is a setting), found {wrong[0]}")
        self.parameters = parameters
        self.start = [p.detach().clone() for p in parameters]
        settings = self.trainer
        optimizer = torch.optim.AdamW(
            parameters, settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self.generator.module, self.optimizer = self.accelerator.prepare(self.generator.module, optimizer)
        self.generator.module.eval()
        self.ema = None if settings.ema_decay is None else EMA(parameters, settings.ema_decay)
        self.monitor = Monitor(self.evaluation.alarm_margin, settings.collapse_fraction)

    @contextmanager
    def _main_first(self) -> Iterator[None]:
        """One process fills the caches, the others then find them."""
        if self.accelerator.is_main_process:
            yield
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            yield

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
        began = time.time()
        self.setup()
        main = self.accelerator.is_main_process
        problem = ""
        if main:
            try:
                prepare_run_dir(self.run_dir, self.config, resume)
            except (OSError, ValueError) as error:
                problem = str(error)
        problem = any_problem(self.accelerator, problem)
        if problem:
            raise TrainingError(problem)
        self.prepare()
        found = list_checkpoints(self.run_dir) if resume != "never" else []
        if found:
            self._load(found[-1][1])
        keep = self.iteration if found else None
        self.writer = RunWriter(self.run_dir, keep, self.trainer.tensorboard and main, main)
        if main:
            describe_run(self)
        worker = RewardWorker(self.reward, self.trainer.reward_timeout)
        status = "failed"
        try:
            with self._signals(), self._progress() as show:
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
        except OSError as error:
            if error.errno in DISK_PROBLEMS:
                raise self._disk_problem(error) from error
            raise
        finally:
            worker.close()
            summary = self._close(status, time.time() - began)
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

    def _disk_problem(self, error: OSError) -> CheckpointError:
        steps = list_checkpoints(self.run_dir)
        left = f"the last complete checkpoint is {steps[-1][1]}" if steps else "there is no checkpoint yet"
        return CheckpointError(
            f"run directory {self.run_dir} cannot be written any more ({error}); {left}. Free the disk and run the "
            "command again to go on from there"
        )

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
        self._iterate(*self._saving(lambda: self._sample(worker)))

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

    def _iterate(self, rollout: Rollout, batch: Batch, local: dict[str, Tensor], times: dict[str, float]) -> None:
        began = time.perf_counter()
        raw = {name: self._gather(value) for name, value in local.items()}
        metrics = self._advantages(rollout, batch, raw)
        rollout = metrics.pop("rollout")
        metrics |= self._update(rollout, batch)
        times["time/update"] = time.perf_counter() - began
        times["time/iteration"] = sum(times.values())
        self.iteration += 1
        metrics["cost/forward_equivalents"] = self.cost
        self.last = metrics
        self.writer.write("train", self.iteration, {**metrics, **times})
        for message in self.monitor.after_iteration(metrics):
            self.writer.write("event", self.iteration, {"message": message})

    # --------------------------------------------------------------------------------------- roll-out, rewards

    def _batch(self, rows: Tensor, chosen: list[int]) -> tuple[Batch, list[Any]]:
        groups = rows // self.trainer.group_size
        prompts = [self.prompts.train[chosen[p]] for p in groups.tolist()]
        key = (self.seed, "rollout", self.iteration)
        batch = Batch(
            cond=self.generator.encode([p.text for p in prompts]),
            rows=rows,
            groups=groups,
            noise=RowNoise.of(key, rows, self.device),
            group_noise=RowNoise.of((*key, "group"), groups, self.device),
            seed=self.seed,
            iteration=self.iteration,
        )
        return batch, prompts

    def _sample(self, worker: RewardWorker) -> tuple[Rollout, Batch, dict[str, Tensor], dict[str, float]]:
        """Samples of this process with their rewards and image statistics, {name: [L]}."""
        began = time.perf_counter()
        rows = self.layout.local()
        chosen = draw_prompts(
            len(self.prompts.train), self.trainer.prompts_per_iteration, self.seed, self.iteration
        )
        parts, futures, stats = [], [], []
        for part in chunked(len(rows), self.trainer.rollout_batch):
            batch, prompts = self._batch(rows[part], chosen)
            rollout = self.algorithm.rollout(self.generator.velocity, self.generator, batch)
            with torch.no_grad():
                media = self.generator.decode(rollout.x0).float().cpu()
            texts = [p.text for p in prompts]
            futures.append((worker.submit(media, texts, [dict(p.metadata) for p in prompts]), texts))
            stats.append((len(media), image_statistics(media)))
            parts.append(rollout)
        sampled = time.perf_counter()
        scores = [worker.wait(future, texts) for future, texts in futures]
        local = {name: torch.cat([s[name] for s in scores]) for name in sorted(scores[0])}
        for name in stats[0][1]:  # a mean of means: every sample carries that of its batch
            means = [torch.full((n,), values[name], dtype=torch.float64) for n, values in stats]
            local[f"stats/{name}"] = torch.cat(means)
        times = {"time/rollout": sampled - began, "time/reward": time.perf_counter() - sampled}
        joined = Rollout.concatenate(parts)
        whole, _ = self._batch(rows, chosen)
        self._chosen = chosen
        return joined, whole, local, times

    def _gather(self, values: Tensor) -> Tensor:
        """Local values [L] -> [P, G] in sample order, on every process."""
        table = torch.empty(self.layout.total, dtype=values.dtype)
        gathered = self.accelerator.gather(values.to(self.device)).cpu() if self._world > 1 else values
        for rank, part in enumerate(gathered.reshape(self._world, -1)):
            table[replace(self.layout, rank=rank).local()] = part
        return table.reshape(self.layout.prompts, self.layout.group_size)

    @property
    def _world(self) -> int:
        return self.layout.processes

    def _advantages(self, rollout: Rollout, batch: Batch, raw: dict[str, Tensor]) -> dict[str, Any]:
        """Advantages over whole groups, then this process's rows of them."""
        metrics: dict[str, Any] = {k: float(v.mean()) for k, v in raw.items() if k.startswith("stats/")}
        rewards = {name: value for name, value in raw.items() if not name.startswith("stats/")}
        for name, value in rewards.items():
            scored = value[~torch.isnan(value)].double()
            metrics[f"reward/{name}"] = float(scored.mean()) if len(scored) else math.nan
            metrics[f"reward/{name}_std"] = float(scored.std()) if len(scored) > 1 else 0.0
        counted, weights = self.reward.for_advantage(rewards)
        total = sum(weights[n] * value.double() for n, value in counted.items())
        if isinstance(total, Tensor):
            scored = total[~torch.isnan(total)]
            metrics["reward/total"] = float(scored.mean()) if len(scored) else math.nan
        result = self.algorithm.advantages(counted, weights, torch.tensor(self._chosen))
        # A sample that was not scored is left out altogether: an advantage of 0 alone would still let it take part in
        # averages and regularisers.
        nan = torch.stack([torch.isnan(value) for value in counted.values()]).any(0)  # [P, G]
        missing = nan & (result.values == 0)
        keep = self.algorithm.keep(result.values.masked_fill(missing, math.nan))
        local = rollout.rows
        weight = (~missing if keep is None else keep & ~missing).float().flatten()
        metrics |= result.metrics
        metrics["rollout"] = replace(
            rollout,
            advantage=result.values.float().flatten()[local].to(self.device),
            weight=weight[local].to(self.device),
        )
        self._weight_table = weight
        return metrics

    # ------------------------------------------------------------------------------------------------ update

    def _update(self, rollout: Rollout, batch: Batch) -> dict[str, float]:
        sampled, size = rollout.evaluations, self.layout.local_minibatch
        minibatches = []
        for m in range(self.algorithm.minibatches):
            minibatch = self._without_left_out(rollout.select(slice(m * size, (m + 1) * size)))
            if len(minibatch):
                minibatch = self.algorithm.before_update(
                    self.generator.velocity, self.generator, minibatch, batch
                )
            minibatches.append(minibatch)
        evaluations = sampled + sum(minibatch.evaluations - sampled for minibatch in minibatches)
        units = self.algorithm.units(rollout, batch)
        first, later, common = Meter(), Meter(), Meter()
        trained, self._updates_before = 0, self.updates
        for epoch in range(self.algorithm.inner_epochs):
            for m, minibatch in enumerate(minibatches):
                meter = first if epoch == m == 0 else later
                trained += self._accumulate(minibatch, m, units, meter, common)
                if epoch == m == 0:
                    gap = first.result(self.accelerator)
                    if self.updates == 0:
                        self._check_gap(gap)
                norm = self._step()
                common.add({"grad/norm": norm, "grad/norm_max": norm})
        self.algorithm.after_update()
        self.cost += self._world * (evaluations + 3.0 * trained)
        values = common.result(self.accelerator) | self.monitor.by_step(
            gap, later.result(self.accelerator) if later else gap, self.algorithm.train_sampler()
        )
        values["lr"] = self.optimizer.param_groups[0]["lr"]
        return values

    def _without_left_out(self, minibatch: Rollout) -> Rollout:
        """Left-out samples cost nothing; over several processes they stay, since all must make the same passes."""
        if self._world > 1 or minibatch.weight is None or bool(minibatch.weight.all()):
            return minibatch
        return minibatch.select(minibatch.weight.nonzero()[:, 0])

    def _accumulate(self, minibatch: Rollout, m: int, units: list[Any], meter: Meter, common: Meter) -> int:
        """Gradients of one minibatch, one backward a unit; returns the forwards spent."""
        # The mean is over the kept samples of the minibatch on all processes; gradients are averaged over processes.
        kept = self._weight_table[self._minibatch_rows(m)].sum().clamp(min=1).item() / self._world
        work = [(part, unit) for part in chunked(len(minibatch), self.algorithm.micro_batch) for unit in units]
        total = torch.zeros((), device=self.device)
        for i, (part, unit) in enumerate(work):
            micro = minibatch.select(part)
            last = i == len(work) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.generator.module):
                loss, metrics = self.algorithm.loss(self.generator.velocity, micro, unit, units)
                weighted = (loss if micro.weight is None else loss * micro.weight).sum() / kept
                self.accelerator.backward(weighted)
            share = len(micro) / max(len(minibatch), 1)
            meter.add(metrics, share)
            total = total + weighted.detach()
        common.add({"loss/total": total})
        return sum(len(range(*part.indices(len(minibatch)))) * len(unit) for part, unit in work)

    def _minibatch_rows(self, m: int) -> Tensor:
        """Sample numbers of minibatch m over all processes."""
        size = self.layout.local_minibatch
        rows = [
            replace(self.layout, rank=rank).local()[m * size : (m + 1) * size] for rank in range(self.layout.processes)
        ]
        return torch.cat(rows)

    def _step(self) -> Tensor:
        """Clip, check, step, average."""
        norm = self.accelerator.clip_grad_norm_(self.parameters, self.trainer.max_grad_norm)
        norm = torch.as_tensor(norm)
        if self.trainer.mixed_precision != "fp16" and not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad()
            if self.updates == self._updates_before:  # else the weights are in the middle of an iteration
                self._save_before_failing()
            raise NonFiniteError(
                f"the gradient norm is {float(norm)} in iteration {self.iteration + 1}, update {self.updates + 1}; the "
                "weights were not changed. Lower trainer.learning_rate, or use mixed_precision no or bf16"
            )
        if not bool(norm):
            # Nothing was learnt (no reward, or no spread in any group), so neither momentum nor weight decay may move
            # the weights.
            self.optimizer.zero_grad()
            return norm.detach()
        warmup = self.trainer.warmup_updates
        factor = min(1.0, (self.updates + 1) / warmup) if warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.trainer.learning_rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.ema is not None:
            self.ema.step()
        return norm.detach()

    def _check_gap(self, first: dict[str, float]) -> None:
        """Refuse a clip range that numerical noise alone would reach."""
        gap = max((v for k, v in first.items() if k.endswith("/gap_max")), default=0.0)
        width = min((v for k, v in first.items() if k.endswith("/clip_width_min")), default=math.inf)
        if gap <= width or self.trainer.allow_small_clip:
            return
        self.optimizer.zero_grad()
        raise TrainingError(
            f"the clip range is +-{width:.3g}, but with unchanged weights the log-ratio already differs from 0 by "
            f"up to {gap:.3g}; numerical noise would be clipped as if it were learning. Widen the clip range, use "
            "anchor: recompute, less reduced precision, or set trainer.allow_small_clip=true"
        )

    # ------------------------------------------------------------------------------- evaluation, checkpoints

    def _weights(self) -> Any:
        return nullcontext() if self.ema is None else self.ema.active()

    def _evaluate(self, first: bool = False, last: bool = False) -> None:
        settings = self.evaluation
        values: dict[str, Any] = {}
        with self._weights():
            samples = self._draw(settings.samples_per_prompt)
            found = self._saving(lambda: measure(samples, self.reward, settings.gauges))
            values |= {f"eval/{k}": v for k, v in found.items()}
            if settings.train_sampler == "always" or (settings.train_sampler == "ends" and (first or last)):
                own = self._draw(settings.samples_per_prompt, own=True)
                found = self._saving(lambda: measure(own, self.reward, settings.gauges))
                values |= {f"eval_train_sampler/{k}": v for k, v in found.items()}
        values["eval/weight_change"] = change_norm(self.parameters, self.start)
        values["eval/uses_ema"] = float(self.ema is not None)
        self.writer.write("eval", self.iteration, values)
        self.evaluated = self.iteration
        if self.accelerator.is_main_process:
            save_image(samples.grid(), self.run_dir / "samples" / f"iteration-{self.iteration:06d}.png")
        best, messages, stop = self.monitor.after_evaluation(self.iteration, values)
        for message in messages:
            self.writer.write("event", self.iteration, {"message": message})
        self._stop = self._stop or stop
        if best and self.iteration:
            self.save("best")

    def _preview(self) -> None:
        with self._weights():
            samples = self._draw(min(8, self.evaluation.samples_per_prompt))
        if self.accelerator.is_main_process:
            save_image(samples.grid(), self.run_dir / "samples" / f"iteration-{self.iteration:06d}.png")

    def _draw(self, per_prompt: int, own: bool = False) -> Any:
        ode = deterministic_sampler(self.generator, self.evaluation.steps)
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
            "updates": self.updates,
            "cost": self.cost,
            "evaluated": self.evaluated,
            "weights": {k: v.detach().cpu() for k, v in self.generator.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "monitor": self.monitor.state_dict(),
        }
        keep = self.trainer.keep_checkpoints if name is None else None
        name = step_name(self.iteration) if name is None else name

        def export(folder: Path) -> None:  # what is exported is what was evaluated
            # The state above holds the live weights by reference, so the average takes their place only here.
            with self._weights():
                self.generator.save_pretrained(folder)

        return save_checkpoint(self.run_dir, name, state, export, self.accelerator, keep)

    def _load(self, folder: Path) -> None:
        state = load_state(folder)
        try:
            self.generator.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.accelerator.scaler is not None and state["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            if self.ema is not None:
                if state["ema"] is None:
                    raise ValueError("it has no moving average, but trainer.ema_decay is set")
                self.ema.load_state_dict(state["ema"])
            self.algorithm.load_state_dict(state["algorithm"])
            self.monitor.load_state_dict(state["monitor"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{folder} does not fit this configuration: {error}. Resume with the settings that it was written "
                "with, or start anew with --resume never"
            ) from error
        self.iteration, self.updates, self.cost = state["iteration"], state["updates"], state["cost"]
        self.evaluated = state["evaluated"]
        restore_rng(folder, self.accelerator.process_index)

    # ------------------------------------------------------------------------------------- stopping, progress

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run after the iteration, the second at once."""
        import threading

        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(number: int, frame: Any) -> None:
            if self._requested:
                raise KeyboardInterrupt
            self._requested = "interrupted"
            if self.accelerator.is_main_process:
                print(f"\n{signal.Signals(number).name}: finishing the iteration and saving; repeat to stop at once")

        before = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _agree_to_stop(self) -> None:
        """Take over a request to stop, on every process at the same iteration."""
        self._stop = any_problem(self.accelerator, self._stop or self._requested)

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        from genrl.training.progress import training_progress

        with training_progress(self) as show:
            yield show

    def dry_run(self) -> dict[str, Any]:
        """Build everything, measure sizes, train nothing."""
        self.setup()
        return dry_run_table(self)


def _refuse_dropout(module: torch.nn.Module) -> None:
    """Roll-out and update must compute the same function."""
    for name, part in module.named_modules():
        if part.training and isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0:
            raise TrainingError(
                f"{name} is a dropout layer in training mode, so the update would score another function than the one "
                "that sampled; call eval() on the model before training"
            )


__all__ = ["Loop", "Metrics", "TrainingError"]
