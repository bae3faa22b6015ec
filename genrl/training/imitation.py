"""Training a policy from demonstrations: the same run as a generator's, with batches instead of roll-outs."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from genrl.diffusion import NonFiniteError, derive_seed
from genrl.envs.settings import EnvSettings
from genrl.training.checkpoint import any_problem
from genrl.training.ema import change_norm
from genrl.training.errors import SetupError
from genrl.training.logging import Meter
from genrl.training.optimization import Optimization
from genrl.training.policy_evaluation import Assessment, Assessor
from genrl.training.policy_settings import PolicyEvaluationSettings, PolicyTrainerSettings
from genrl.training.run import Run, setting_up

VALIDATION_ROWS = 1024  # chunks that the validation loss is measured on at most


class DemonstrationSource(Protocol):
    """What `data:` of a configuration must be."""

    def load(self) -> Any:
        """The demonstrations, a `genrl.envs.data.Demonstrations`."""
        ...


class Imitation(Run):
    """Trains a policy on demonstrations and evaluates it in its environment.

    Args:
        name: of the run, for reports.
        run_dir: where everything is written.
        seed: fixes every random draw.
        policy: a policy of :mod:`genrl.policies`, or your own `ChunkPolicy`.
        data: where the demonstrations come from.
        env: what the policy is evaluated in; None measures only the loss on held-out demonstrations.
        trainer, evaluation: settings.
        config: the complete configuration, stored with the run.
    """

    trainer: PolicyTrainerSettings
    evaluation: PolicyEvaluationSettings
    measured_on = "measured"
    hint_unchanged = "check trainer.learning_rate and that the demonstrations are not empty"
    cost_unit = "training chunks"

    def __init__(
        self,
        name: str,
        run_dir: str | Path,
        seed: int,
        policy: Any,
        data: DemonstrationSource,
        env: EnvSettings | None = None,
        trainer: PolicyTrainerSettings | None = None,
        evaluation: PolicyEvaluationSettings | None = None,
        config: dict[str, Any] | None = None,
    ):
        trainer = PolicyTrainerSettings() if trainer is None else trainer
        evaluation = PolicyEvaluationSettings() if evaluation is None else evaluation
        super().__init__(name, run_dir, seed, trainer, evaluation, config)
        data = data.bound_to(env) if hasattr(data, "bound_to") else data  # its own environment, or this one
        self.policy, self.data, self.env = policy, data, env
        self.stride = trainer.log_every
        self.optimization = Optimization(trainer, lambda: policy.state_dict(), lambda s: policy.load_state_dict(s))
        self.best: dict[str, float] = {}  # iteration and score of the best evaluation
        self.waiting: int | None = None  # iteration whose evaluation has begun and is not written; on every process

    # ---------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        super().setup()
        if self.evaluation.every % self.trainer.log_every:
            raise SetupError(
                f"evaluation.every = {self.evaluation.every} is no multiple of trainer.log_every = "
                f"{self.trainer.log_every}; evaluations happen between two lines of metrics"
            )
        processes = self.accelerator.num_processes
        if self.trainer.batch_size % processes:
            raise SetupError(
                f"trainer.batch_size = {self.trainer.batch_size} cannot be shared by {processes} processes; choose a "
                "multiple of that"
            )
        if self.env is not None and self.accelerator.is_main_process:
            self._probe(self.env)

    @staticmethod
    def _probe(env: EnvSettings) -> None:
        """An environment that cannot be made is an error now, not after training."""
        made = env.make()
        made.close()

    def prepare(self) -> None:
        with setting_up():
            with self.accelerator.main_process_first():  # it fills the cache that the others find
                # A part that holds out episodes itself says exactly which and how many are left to train on.
                splits = getattr(self.data, "load_split", None)
                loaded = splits() if splits is not None else self.data.load()
            self._take(loaded)
        self.policy.to(self.device)
        optimizer = self.optimization.start_from(self.accelerator, self.policy.trained_parameters())
        # The module is not wrapped: losses differentiate the network in ways that wrappers do not support, and one sum
        # of gradients after the backward pass says the same.
        self.optimization.optimizer = self.accelerator.prepare(optimizer)
        self._draws = torch.Generator(device=self.device)
        self.assessor = Assessor(
            self.run_dir, self.env, self.evaluation, self.trainer.cpu_threads, str(self.device)
        )

    def _take(self, demonstrations: Any) -> None:
        """Build data set, normaliser and networks from the demonstrations."""
        from genrl.envs.data import ChunkDataset
        from genrl.policies import Normalizer

        fraction = getattr(self.data, "validation_fraction", 0.0)
        if isinstance(demonstrations, tuple):
            train, held_out = demonstrations
        else:
            train, held_out = demonstrations.split(fraction, self.seed) if fraction else (demonstrations, None)
        env = train.meta.get("env") if self.env is None else self.env.to_dict()
        task = {**train.meta, "env": env, "demonstrations": len(train.episodes)}
        normalizer = Normalizer.fit(train.arrays(), self.policy.normalization.modes(train.specs))
        self.policy.configure(train.specs, train.action_dim, normalizer, seed=self.seed, task=task)
        self.dataset = ChunkDataset(train, self.policy.chunking, self.device)
        self.held_out = None if held_out is None else ChunkDataset(held_out, self.policy.chunking, self.device)
        self.demonstrations = train
        if self.accelerator.is_main_process:
            for note in train.summary().notes:
                print(f"demonstrations: {note}")
        if self.env is not None:
            self._check_observations(train.specs)

    def _check_observations(self, specs: dict[str, Any]) -> None:
        """The environment must show what the policy was trained to see."""
        assert self.env is not None
        with contextlib.closing(self.env.make()) as made:
            found, action_dim = dict(made.specs), int(made.action_space.shape[0])
            representation = dict(made.action_representation)
        for name, spec in specs.items():
            if name not in found:
                raise SetupError(
                    f"the demonstrations have the observation {name!r}, which {self.env.id} does not show (it shows "
                    f"{', '.join(found)}); choose data.obs or env.observations so that they agree"
                )
            if tuple(found[name].shape) != tuple(spec.shape):
                raise SetupError(
                    f"observation {name!r} is {tuple(spec.shape)} in the demonstrations but {tuple(found[name].shape)} "
                    f"in {self.env.id}; record and evaluate with the same settings of env"
                )
        if action_dim != self.demonstrations.action_dim:
            raise SetupError(
                f"the demonstrations have {self.demonstrations.action_dim} action dimensions, {self.env.id} takes "
                f"{action_dim}"
            )
        given = self.demonstrations.meta.get("action_representation")
        if given and representation:
            from genrl.envs.data.actions import ActionRepresentation

            ActionRepresentation.from_dict(given).require(ActionRepresentation.from_dict(representation), self.env.id)

    # ------------------------------------------------------------------------------------------- iterations

    def _iterate(self) -> None:
        began, meter = time.perf_counter(), Meter()
        end = min(self.iteration + self.stride, self.trainer.iterations)
        self.policy.train()
        for update in range(self.iteration, end):
            try:
                meter.add(self._update(update))
            except NonFiniteError as error:
                raise NonFiniteError(f"iteration {update + 1}: {error}") from error
        self.policy.eval()
        metrics = meter.result(self.accelerator)
        metrics["lr"] = self.optimization.optimizer.param_groups[0]["lr"]
        metrics["data/epochs"] = end * self.trainer.batch_size / len(self.dataset)
        self.cost = float(end * self.trainer.batch_size)
        self.iteration, self.last = end, metrics
        self.writer.write("train", end, {**metrics, "time/iteration": time.perf_counter() - began})

    def _update(self, update: int) -> dict[str, Tensor]:
        """One optimizer update; returns its metrics."""
        batch = self.dataset.batch(self._rows(update))
        self._draws.manual_seed(derive_seed(self.seed, "loss", update))
        share = (self.accelerator.process_index, self.accelerator.num_processes)
        with self.accelerator.autocast():
            loss, metrics = self.policy.loss(batch, self._draws, update / self.trainer.iterations, share)
        self.accelerator.backward(loss)
        self._average_gradients()
        norm = self.optimization.step()
        self.policy.after_update(self.optimization.updates)
        parts = {f"policy/{name}": value for name, value in metrics.items() if name != "loss"}
        return {**parts, "loss/total": loss.detach(), "grad/norm": norm, "grad/norm_max": norm}

    def _rows(self, update: int) -> Tensor:
        """Chunks of this process in an update.

        Every epoch is a permutation that follows from the seed, and batches run on over its end, so that a resumed run
        sees the same chunks without having saved a position.
        """
        n, size = len(self.dataset), self.trainer.batch_size
        share = size // self.accelerator.num_processes
        first = update * size + self.accelerator.process_index * share
        positions = torch.arange(first, first + share)
        rows = torch.empty(share, dtype=torch.long)
        for epoch in range(first // n, (first + share - 1) // n + 1):
            inside = positions // n == epoch
            rows[inside] = self._permutation(epoch)[positions[inside] % n]
        return rows

    def _permutation(self, epoch: int) -> Tensor:
        cached: tuple[int, Tensor] | None = getattr(self, "_epoch", None)
        if cached is None or cached[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            cached = self._epoch = (epoch, torch.randperm(len(self.dataset), generator=generator))
        return cached[1]

    def _average_gradients(self) -> None:
        if self.accelerator.num_processes == 1:
            return
        with_gradient = [p for p in self.optimization.parameters if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in with_gradient])
        flat = self.accelerator.reduce(flat, "mean")
        for parameter, part in zip(with_gradient, flat.split([p.numel() for p in with_gradient]), strict=True):
            parameter.grad = part.reshape(parameter.shape)

    # ------------------------------------------------------------------------------------------- evaluation

    @torch.no_grad()
    def _evaluate(self, first: bool, last: bool) -> None:
        """Losses at once; episodes in the background, whose values are written when the next evaluation is due."""
        self._collect()
        values = {
            "eval/weight_change": change_norm(self.optimization.parameters, self.optimization.start),
            "eval/uses_ema": float(self.optimization.ema is not None),
        }
        with self.optimization.evaluated_weights():
            if self.held_out is not None:
                values |= self._validation(self.held_out)
            if self.assessor.active and not first:
                self.waiting = self.iteration
                main = self.accelerator.is_main_process
                self._saving(lambda: self.assessor.start(self.iteration, self.policy, values, last) if main else None)
        self.evaluated = self.iteration
        if first or not self.assessor.active:
            self._record(Assessment(self.iteration, values))
        elif last or not self.assessor.background:
            self._collect()

    def _validation(self, held_out: Any) -> dict[str, float]:
        """Loss and error of the action on held-out demonstrations, with the same noise every time."""
        was_training = self.policy.training
        self.policy.eval()
        rows = torch.linspace(0, len(held_out) - 1, min(len(held_out), VALIDATION_ROWS)).long()
        batch = held_out.batch(rows)
        self._draws.manual_seed(derive_seed(self.seed, "validation"))
        # Always as at the end of training: schedules would make the losses of two iterations different quantities.
        loss, _ = self.policy.loss(batch, self._draws, progress=1.0)
        chunk = self.policy.predict(batch["obs"], self._noise(len(rows)))
        valid = batch["valid"][..., None].float()
        error = ((chunk - batch["actions"]).square() * valid).sum() / (valid.sum() * chunk.shape[-1])
        self.policy.train(was_training)
        return {"eval/held_out_loss": float(loss), "eval/held_out_action_mse": float(error)}

    def _noise(self, rows: int) -> Any:
        from genrl.diffusion import RowNoise

        return RowNoise.of((self.seed, "validation"), range(rows), self.device)

    def _collect(self) -> None:
        """Take in the evaluation that runs in the background, on every process."""
        if self.waiting is None:
            return
        self.waiting = None
        problem, found = "", None
        if self.accelerator.is_main_process:
            try:
                found = self.assessor.result()
            except RuntimeError as error:
                problem = str(error)
        problem = any_problem(self.accelerator, problem)
        if problem:  # nothing is saved: the checkpoint before the evaluation does it again
            raise RuntimeError(problem)
        if found is not None:
            self._record(found)

    def _record(self, found: Assessment) -> None:
        self.writer.write("eval", found.iteration, found.values)
        score = _score(found.values)
        if found.iteration and score > self.best.get("score", -math.inf):
            self.best = {"iteration": found.iteration, "score": score}
            if self.accelerator.is_main_process:
                with self.optimization.evaluated_weights():
                    self.assessor.keep_best(found, self.policy)
        if self.accelerator.is_main_process:
            self.assessor.discard(found)

    # -------------------------------------------------------------------------------------------- checkpoints

    def save(self, name: str | None = None) -> Path:
        problem: RuntimeError | None = None
        if self.waiting not in (None, self.iteration):
            try:
                self._collect()
            except RuntimeError as error:  # what was trained is saved all the same
                problem = error
        path = super().save(name)
        if problem is not None:
            raise problem
        return path

    def export(self, folder: Path) -> None:
        self.policy.save_pretrained(folder)

    def state(self) -> dict[str, Any]:
        # An evaluation that is still running is done again from this checkpoint, with the same result.
        unfinished = {"evaluated": -1} if self.waiting is not None else {}
        return {"best": self.best, "iterations": self.trainer.iterations} | unfinished

    def load_state(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        if state["iterations"] != self.trainer.iterations:
            self.notes.append(
                f"trainer.iterations: {state['iterations']} -> {self.trainer.iterations}; the learning rate's cosine "
                "and every schedule of the policy now end there, so they jump at this point"
            )

    def best_iteration(self) -> int:
        return int(self.best.get("iteration", 0))

    def _release(self) -> None:
        self.assessor.close()

    # -------------------------------------------------------------------------------------------- description

    def summary_sections(self) -> list[tuple[str, str, set[str]]]:
        title = "held-out demonstrations" if self.env is None else f"{self.evaluation.episodes} episodes, last weights"
        return [("eval/", title, {"episodes", "distinct_starts"})]

    def describe(self) -> dict[str, Any]:
        chunking = self.policy.chunking
        return {
            "kind": "policy",
            "method": type(self.policy).__name__,
            "env": None if self.env is None else self.env.to_dict(),
            "sizes": {
                "parameters": sum(p.numel() for p in self.optimization.parameters),
                "demonstrations": len(self.demonstrations.episodes),
                "transitions": sum(len(episode.actions) for episode in self.demonstrations.episodes),
                "chunks": len(self.dataset),
                "network_calls_per_action_chunk": self.policy.nfe,
                "horizon": chunking.horizon,
                "executed_actions": chunking.n_action_steps,
                "observed_steps": chunking.n_obs_steps,
            },
        }

    def dry_run(self) -> dict[str, Any]:
        self.setup()
        self.prepare()
        facts = self.describe()
        return {
            "name": self.name,
            "run_dir": str(self.run_dir),
            "method": facts["method"],
            "device": str(self.device),
            "processes": self.accelerator.num_processes,
            "environment": "none" if self.env is None else self.env.id,
            **facts["sizes"],
            "epochs": round(self.trainer.iterations * self.trainer.batch_size / len(self.dataset), 1),
        }


def _score(values: dict[str, float]) -> float:
    """What makes one evaluation better than another: success, else return, else the error of held-out actions."""
    for name, sign in (("eval/success", 1), ("eval/return", 1), ("eval/held_out_action_mse", -1)):
        value = values.get(name, math.nan)
        if math.isfinite(value):
            return sign * value
    return -math.inf
