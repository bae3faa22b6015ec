"""Distillation in the ordinary loop: the roll-out is the student's own, rewards are only measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from genrl.algorithms.base import Batch, Metrics, Rollout, Unit
from genrl.diffusion import Consistency, RowNoise, Sampler, VelocityFn
from genrl.generators.base import Generator, sampler_for, schedule_for
from genrl.generators.distill import DistillationSettings, Distiller, History
from genrl.objectives import Advantages
from genrl.prompts import Prompt


class RealVideos(Protocol):
    """Real videos that fit prompts, for students that are trained on a real past."""

    def __call__(self, prompts: Sequence[Prompt], noise: RowNoise) -> Tensor:
        """Latents [B, F, C, H, W], one for each prompt."""
        ...


class Distillation:
    """Few-step distillation of a causal video model by distribution matching (RAVEN, arXiv 2605.15190).

    An iteration draws the student's videos by the consistency sampler, trains the critic on them, and takes one update
    of the student at one drawn time for each sample. See `genrl.generators.distill` for the histories. The reward is
    logged and evaluated as always, and trains nothing.

    The generator is causal: its ``module`` takes ``history``, ``history_t`` and ``detach_history``, and its sampler
    goes chunk by chunk. It is evaluated by the consistency sampler from the start.

    Args:
        teacher: bidirectional generator of the same latents and prompts; frozen.
        history: ``"raven"``, ``"self_forcing"``, ``"teacher_forcing"``, ``"diffusion_forcing"`` or
            ``"diffusion_forcing_rollout"``.
        steps: of the student's sampler, for each chunk.
        shift: of its grid toward noise; None takes the generator's own grid. The paper's is 5.
        guidance_scale: of the teacher (3 in the paper); None for none.
        chunk_weight: a of the chunk weights; -1 in the paper, 0 weighs chunks alike.
        critic_learning_rate: of the critic's AdamW, whose betas are ``critic_betas``.
        critic_steps: updates of the critic in an iteration, each with its own noise. In the paper a critic's update has
            a roll-out of its own; here they share that of the iteration, which costs most.
        noise_range, noise_shift: times at which teacher and critic compare, see
            `genrl.generators.distill.DistillationSettings`.
        data: real videos for prompts; needed by teacher_forcing and diffusion_forcing.
        minibatches: updates of the student in an iteration.
        micro_batch: samples per forward and backward, of student and critic; None takes a whole minibatch.

    Raises:
        ValueError: for a setting out of range, or a history of real videos without ``data``.
    """

    inner_epochs = 1

    def __init__(
        self,
        teacher: Generator,
        history: History = "raven",
        steps: int = 4,
        shift: float | None = None,
        guidance_scale: float | None = None,
        chunk_weight: float = -1.0,
        critic_learning_rate: float = 3e-4,
        critic_betas: tuple[float, float] = (0.0, 0.999),
        critic_steps: int = 2,
        noise_range: tuple[float, float] = (0.02, 0.98),
        noise_shift: float = 1.0,
        data: RealVideos | None = None,
        minibatches: int = 1,
        micro_batch: int | None = None,
    ):
        if minibatches < 1 or (micro_batch is not None and micro_batch < 1):
            raise ValueError(
                f"minibatches = {minibatches} and micro_batch = {micro_batch} must be at least 1; micro_batch: null "
                "takes a whole minibatch"
            )
        first, second = (float(beta) for beta in critic_betas)
        low, high = (float(s) for s in noise_range)
        self.settings = DistillationSettings(
            history=history,
            guidance_scale=guidance_scale,
            chunk_weight=chunk_weight,
            critic_learning_rate=critic_learning_rate,
            critic_betas=(first, second),
            critic_steps=critic_steps,
            noise_range=(low, high),
            noise_shift=noise_shift,
        )
        if history in ("teacher_forcing", "diffusion_forcing") and data is None:
            raise ValueError(
                f"history = {history!r} shows the student real videos; give data, such as "
                "genrl.generators.RealMovingDigits"
            )
        self.teacher, self.data, self.steps, self.shift = teacher, data, steps, shift
        self.minibatches, self.micro_batch = minibatches, micro_batch
        self.sampler: Sampler | None = None

    # ------------------------------------------------------------------------------------------------------ set-up

    def prepare(self, device: Any, progress: bool = True) -> None:
        """Load or train the teacher."""
        self.teacher.prepare(device, progress=progress)

    def configure(self, generator: Generator) -> None:
        """Take the teacher's copy as the critic.

        Raises:
            ValueError: when the generator is not causal, or teacher and student have other latents.
        """
        network: Any = generator.module
        if not hasattr(network, "frames_per_chunk") or not getattr(network, "causal", True):
            raise ValueError(
                f"{type(generator).__name__} does not make videos chunk by chunk; distillation needs a causal "
                "generator, such as VideoGenerator with kind: causal"
            )
        if getattr(generator, "guidance_scale", None) is not None:
            raise ValueError(
                f"the student has guidance_scale = {generator.guidance_scale}, but it learns its teacher's guidance; "  # type: ignore[attr-defined]
                "set guidance_scale: null for the generator, and algorithm.guidance_scale"
            )
        if tuple(self.teacher.latent_shape) != tuple(generator.latent_shape):
            raise ValueError(
                f"the teacher's latents have shape {tuple(self.teacher.latent_shape)}, the student's "
                f"{tuple(generator.latent_shape)}; teacher and student must make the same videos"
            )
        generator.sampling_kernel = Consistency()  # type: ignore[attr-defined]  # whose user the student becomes
        schedule = schedule_for(generator, self.steps, self.shift)
        self.sampler = sampler_for(generator, Consistency(), schedule)
        self.generator = generator
        self.chunks = generator.latent_shape[0] // network.frames_per_chunk
        self.distiller = Distiller(
            self.teacher.module, generator.path, schedule, network.frames_per_chunk, self.settings
        )

    def train_sampler(self) -> Sampler:
        if self.sampler is None:
            raise RuntimeError("configure(generator) must be called first")
        return self.sampler

    # --------------------------------------------------------------------------------------------------- iteration

    def rollout(self, velocity_fn: VelocityFn, generator: Generator, batch: Batch) -> Rollout:
        """The student's own videos, with the noisy chunks of every step."""
        x1 = generator.initial_latents(batch.cond, batch.noise.initial)
        trajectory = self.train_sampler().rollout(velocity_fn, x1, batch.cond, batch.noise)
        extra = {}
        if self.data is not None and not self.distiller.rolled_out:
            extra["real"] = self.data(batch.prompts, batch.noise).to(x1)
        return Rollout(
            batch.cond,
            trajectory.x0,
            batch.rows,
            trajectory=trajectory if self.distiller.rolled_out else None,
            extra=extra,
            evaluations=trajectory.evaluations,
        )

    def advantages(
        self, rewards: dict[str, Tensor], weights: dict[str, float] | None, prompt_ids: Tensor
    ) -> Advantages:
        """Ones: every sample is trained on, and also one that was not scored."""
        return Advantages(torch.ones_like(next(iter(rewards.values()))), {})

    def keep(self, advantages: Tensor) -> Tensor | None:
        return None

    def before_update(self, velocity_fn: VelocityFn, generator: Generator, rollout: Rollout, batch: Batch) -> Rollout:
        """Draw what the student sees, and train the critic."""
        noise, distiller = batch.noise.for_rows(rollout.rows), self.distiller
        trajectory, x0 = rollout.trajectory, rollout.extra.get("real", rollout.x0)
        states = None if trajectory is None else {k: trajectory.states[k] for k in trajectory.states if k < self.steps}
        inputs = distiller.inputs(noise, states, x0)
        if not distiller.rolled_out:
            with torch.no_grad():
                x0 = distiller.predict(self._student, inputs, _tokens(rollout.cond))
        losses = [
            distiller.critic_step(x0, _tokens(rollout.cond), noise, self.micro_batch)
            for _ in range(self.settings.critic_steps)
        ]
        s, eps = distiller.levels(noise, x0)
        critic = torch.full((len(rollout),), sum(losses) / len(losses), device=x0.device)
        extra = {"inputs": inputs, "s": s, "eps": eps, "critic": critic}
        evaluations = rollout.evaluations + round(len(rollout) * sum(self._extra_cost().values()))
        return replace(rollout, trajectory=None, extra=extra, evaluations=evaluations)

    @property
    def _student(self) -> nn.Module:
        return self.generator.module  # the loop may have put a wrapper there

    def _extra_cost(self) -> dict[str, float]:
        """Forward-equivalents of a sample beside its roll-out and one ordinary forward and backward."""
        past = (self.chunks - 1) / self.chunks  # the chunks that are interleaved
        return {
            "critic": 3.0 * self.settings.critic_steps,
            "compare": 2.0 if self.settings.guidance_scale is None else 3.0,
            "past": 3.0 * past + (0.0 if self.distiller.rolled_out else 1 + past),
        }

    def units(self, rollout: Rollout, batch: Batch) -> list[Unit]:
        return [(0,)]

    def loss(self, velocity_fn: VelocityFn, rollout: Rollout, unit: Unit, units: list[Unit]) -> tuple[Tensor, Metrics]:
        """The distribution matching loss of the drawn time."""
        inputs, s, eps = (rollout.extra[name] for name in ("inputs", "s", "eps"))
        loss, metrics = self.distiller.generator_loss(self._student, inputs, s, eps, _tokens(rollout.cond))
        return loss, {**metrics, "distil/critic_loss": rollout.extra["critic"].mean()}

    def after_update(self) -> None:
        pass

    def forwards_per_sample(self, group_size: int = 1) -> dict[str, float]:
        extra = self._extra_cost()
        finished = (self.chunks - 1) / self.chunks  # are read once each
        return {"sample": self.steps + finished, "no_grad": sum(extra.values()), "train": 1.0}

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        return {"distiller": self.distiller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.distiller.load_state_dict(state["distiller"])


def _tokens(cond: Any) -> Any:
    """What the networks take of a generator's condition."""
    return cond["tokens"]
