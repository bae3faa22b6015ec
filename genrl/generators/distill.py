"""Distillation of a bidirectional video model into a causal one that needs few steps (RAVEN, arXiv 2605.15190).

The student makes a video chunk by chunk; its network sees the chunks before. It is trained by distribution matching
(`genrl.objectives.distribution_matching`) against a frozen bidirectional teacher, with a critic, a copy of the teacher
that learns how the student's samples look. What the student is given as the past while it is trained is the question:

    history                    noisy chunks z_j^u             past of chunk j                     critic learns
    raven                      own roll-out at time u         own endpoints, keys with gradient   own endpoints
    self_forcing               own roll-out at time u         own endpoints, keys detached        own endpoints
    teacher_forcing            real chunks, noised to u       real chunks                         predictions x0_hat
    diffusion_forcing          real chunks, noised to u       real chunks, noised to own times    predictions x0_hat
    diffusion_forcing_rollout  own roll-out at time u         own endpoints, noised to own times  own endpoints

All of them take one forward in which noisy and past chunks are interleaved (`genrl.networks.CausalVideoDiT`). The
values of the past never carry a gradient; under raven the weights that encode it do. One time u of the sampler's grid
is drawn for each sample.

The first two are the paper's; of the others only the names and results are known to us, and what noise is drawn and
what the critic sees is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from genrl.diffusion import RowNoise
from genrl.diffusion.batch import index_batch
from genrl.diffusion.paths import Path
from genrl.diffusion.schedule import Schedule
from genrl.objectives.credit import chunk_weights
from genrl.objectives.distribution_matching import dmd_direction, dmd_loss
from genrl.objectives.matching import flow_matching_loss
from genrl.progress import progress_bar

History = Literal["raven", "self_forcing", "teacher_forcing", "diffusion_forcing", "diffusion_forcing_rollout"]
ROLLED_OUT = ("raven", "self_forcing", "diffusion_forcing_rollout")
"""Histories that are made of the student's own samples; the others need real videos."""
_OWN_TIMES = ("diffusion_forcing", "diffusion_forcing_rollout")

# Streams of a noise source, far above any sampling step.
_TIME, _STATE, _PAST, _PAST_TIME, _LEVEL, _NOISE, _CRITIC = (30_000 + 1_000 * k for k in range(7))


@dataclass(frozen=True)
class DistillationSettings:
    """How a student is trained against its teacher.

    Attributes:
        history: see the module.
        guidance_scale: of the teacher, v = v_null + w (v_cond - v_null); None for its conditional velocity.
        chunk_weight: a of `genrl.objectives.credit.chunk_weights`; -1 is the published value, 0 weighs all alike.
        critic_learning_rate, critic_betas, critic_max_grad_norm: of the critic's AdamW.
        critic_steps: updates of the critic for one of the student (the paper's is 2).
        noise_range: times s at which teacher and critic compare are drawn uniformly between these two, and then
            shifted toward noise by ``noise_shift``.
    """

    history: History = "raven"
    guidance_scale: float | None = None
    chunk_weight: float = -1.0
    critic_learning_rate: float = 3e-4
    critic_betas: tuple[float, float] = (0.0, 0.999)
    critic_max_grad_norm: float = 1.0
    critic_steps: int = 2
    noise_range: tuple[float, float] = (0.02, 0.98)
    noise_shift: float = 1.0

    def __post_init__(self) -> None:
        if self.history not in get_args(History):
            raise ValueError(f"history = {self.history!r} is unknown; allowed are {', '.join(get_args(History))}")
        low, high = self.noise_range
        if not 0 < low < high <= 1:
            raise ValueError(f"noise_range = {list(self.noise_range)} must be two times 0 < low < high <= 1")
        if self.critic_steps < 1:
            raise ValueError(f"critic_steps = {self.critic_steps} must be at least 1")
        if not self.critic_learning_rate > 0 or not self.noise_shift > 0:
            raise ValueError(
                f"critic_learning_rate = {self.critic_learning_rate} and noise_shift = {self.noise_shift} must be "
                "positive"
            )


class Distiller:
    """The teacher, the critic with its optimizer, and the losses of a student.

    A noise source is a `genrl.diffusion.RowNoise`: every number depends on the sample alone. ``tokens`` is whatever
    condition the networks take, with the batch first.

    Args:
        teacher: bidirectional network v(x, t, tokens, null=mask); it is frozen, and the critic starts as its copy.
        path: of teacher and student.
        schedule: grid of the student's sampler, with n steps.
        frames_per_chunk: frames that the student makes at once.
        settings: see `DistillationSettings`.
    """

    def __init__(
        self, teacher: nn.Module, path: Path, schedule: Schedule, frames_per_chunk: int, settings: DistillationSettings
    ):
        self.teacher = teacher.eval().requires_grad_(False)
        self.critic = deepcopy(teacher).requires_grad_(True)
        self.path, self.grid, self.frames, self.settings = path, schedule.t, frames_per_chunk, settings
        rate, betas = settings.critic_learning_rate, settings.critic_betas
        self.optimizer = torch.optim.AdamW(self.critic.parameters(), rate, betas, weight_decay=0.0)
        self.updates = 0

    @property
    def rolled_out(self) -> bool:
        """Whether the past is made of the student's samples; otherwise of real videos."""
        return self.settings.history in ROLLED_OUT

    # ----------------------------------------------------------------------------------------- what the student sees

    def inputs(self, noise: RowNoise, states: dict[int, Tensor] | None, x0: Tensor) -> dict[str, Tensor | None]:
        """The interleaved input of a batch.

        Args:
            noise: of the samples.
            states: step k -> the student's noisy chunks at time t[k], [B, F, ...], for all steps; None for histories of
                real videos.
            x0: [B, F, ...] the student's endpoints, or real videos.

        Returns:
            ``z`` [B, F, ...] at the times ``u`` [B], ``history`` [B, F, ...] and ``history_t`` [B, J] or None.
        """
        rows, steps = len(x0), len(self.grid) - 1
        k = (noise.uniform(_TIME, (rows, 1))[:, 0] * steps).long().clamp(max=steps - 1).to(x0.device)  # [B]
        u = self.grid.to(x0.device)[k]
        if self.rolled_out:
            if states is None or len(states) < steps:
                raise ValueError(
                    f"the roll-out kept the states of {0 if states is None else len(states)} of {steps} steps; sample "
                    "with a kernel that is stochastic at every step but the last, such as Consistency"
                )
            z = torch.stack([states[i] for i in range(steps)])[k, torch.arange(rows, device=x0.device)]
        else:
            z = self.path.interpolate(x0, noise(_STATE, tuple(x0.shape)).to(x0), u)
        history, history_t = x0, None
        if self.settings.history in _OWN_TIMES:
            history_t = noise.uniform(_PAST_TIME, (rows, x0.shape[1] // self.frames)).to(x0)  # [B, J]
            history = self._noised_chunks(x0, noise(_PAST, tuple(x0.shape)).to(x0), history_t)
        return {"z": z, "u": u, "history": history, "history_t": history_t}

    def _noised_chunks(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Every chunk at its own time; x0 and eps [B, F, ...], t [B, J]."""
        chunks = (x0.unflatten(1, (-1, self.frames)).flatten(0, 1), eps.unflatten(1, (-1, self.frames)).flatten(0, 1))
        return self.path.interpolate(*chunks, t.flatten()).unflatten(0, t.shape).flatten(1, 2)

    def predict(self, student: nn.Module, inputs: dict[str, Tensor | None], tokens: Any) -> Tensor:
        """x0_hat [B, F, ...] of all chunks in one forward, with gradient."""
        z, u = inputs["z"], inputs["u"]
        assert z is not None and u is not None
        detach = self.settings.history == "self_forcing"
        past = {"history": inputs["history"], "history_t": inputs["history_t"], "detach_history": detach}
        return self.path.x0_eps(z, student(z, u, tokens, **past).float(), u)[0]

    # ------------------------------------------------------------------------------------------------------ losses

    def levels(self, noise: RowNoise, like: Tensor, stream: int = 0) -> tuple[Tensor, Tensor]:
        """A time s [B] and noise like ``like`` at which its samples are compared."""
        low, high = self.settings.noise_range
        s = low + (high - low) * noise.uniform(_LEVEL + stream, (len(like), 1))[:, 0].to(like.device)
        shift = self.settings.noise_shift
        return shift * s / (1 + (shift - 1) * s), noise(_NOISE + stream, tuple(like.shape)).to(like)

    def generator_loss(
        self, student: nn.Module, inputs: dict[str, Tensor | None], s: Tensor, eps: Tensor, tokens: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The distribution matching loss [B] of one draw, and detached metrics.

        Args:
            student: causal network, see `predict`.
            inputs: of `inputs`. s, eps: of `levels`.
        """
        x0 = self.predict(student, inputs, tokens)
        real, fake = self.compare(x0.detach(), s, eps, tokens)
        share = chunk_weights([1.0] * (x0.shape[1] // self.frames), self.settings.chunk_weight)  # [J]
        weight = share.repeat_interleave(self.frames).to(x0).reshape(-1, *(1,) * (x0.dim() - 2))  # [F, 1, ...]
        loss = dmd_loss(x0, real, fake, weight)
        return loss, {
            "distil/direction": dmd_direction(x0, real, fake).square().flatten(1).mean(1).sqrt().mean(),
            "distil/teacher_distance": (x0.detach() - real).abs().mean(),
        }

    @torch.no_grad()
    def compare(self, x0: Tensor, s: Tensor, eps: Tensor, tokens: Any) -> tuple[Tensor, Tensor]:
        """What teacher and critic make of samples x0 that are noised to s."""
        x_s = self.path.interpolate(x0, eps, s)
        real = self.path.x0_eps(x_s, guided(self.teacher, x_s, s, tokens, self.settings.guidance_scale), s)[0]
        fake = self.path.x0_eps(x_s, self.critic(x_s, s, tokens).float(), s)[0]
        return real, fake

    def critic_step(self, x0: Tensor, tokens: Any, noise: RowNoise, micro_batch: int | None = None) -> float:
        """One update of the critic by flow matching on the student's samples; the mean loss over all processes.

        Args:
            x0: [B, F, ...] samples of the student.
            micro_batch: samples per forward and backward; None for all.
        """
        s, eps = self.levels(noise, x0, 1 + self.updates % (_CRITIC - _NOISE - 1))
        total = torch.zeros((), dtype=torch.float64, device=x0.device)
        self.optimizer.zero_grad(set_to_none=True)
        size = micro_batch or len(x0)
        for start in range(0, len(x0), size):
            part = slice(start, start + size)
            x_s = self.path.interpolate(x0[part], eps[part], s[part])
            loss = flow_matching_loss(self.critic(x_s, s[part], index_batch(tokens, part)), x0[part], eps[part]).sum()
            loss.backward()
            total += loss.detach()
        count = _sum_over_processes(self.critic, torch.stack([total, total.new_tensor(len(x0))]))
        for p in self.critic.parameters():
            if p.grad is not None:
                p.grad.div_(count[1])
        nn.utils.clip_grad_norm_(self.critic.parameters(), self.settings.critic_max_grad_norm)
        self.optimizer.step()
        self.updates += 1
        return float(count[0] / count[1])

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])


def guided(network: nn.Module, x: Tensor, t: Tensor, tokens: Any, scale: float | None) -> Tensor:
    """The velocity of a network with classifier-free guidance, float32."""
    if scale is None:
        return network(x, t, tokens).float()
    null = torch.ones(len(x), dtype=torch.bool, device=x.device)
    unconditional = network(x, t, tokens, null=null).float()
    return unconditional + scale * (network(x, t, tokens).float() - unconditional)


def _sum_over_processes(module: nn.Module, numbers: Tensor) -> Tensor:
    """Add up the gradients of a module, in place, and some numbers over the processes of a run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for p in module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(p.grad)
        torch.distributed.all_reduce(numbers)
    return numbers


@torch.no_grad()
def self_rollout(
    student: Any,
    x1: Tensor,
    tokens: Any,
    path: Path,
    schedule: Schedule,
    noise: Callable[[int, tuple[int, ...]], Tensor],
) -> tuple[dict[int, Tensor], Tensor]:
    """A student's video by the consistency sampler, chunk after chunk, each given the endpoints of those before.

    Args:
        student: causal network with ``frames_per_chunk``, ``chunk`` and ``extend``.
        x1: [B, F, ...] noise at t = 1.
        noise: (step, shape) -> standard noise [B, F, ...].

    Returns:
        Step k -> the noisy chunks at time t[k], and the endpoints x0 [B, F, ...].
    """
    t, steps, frames = schedule.t.to(x1.device), schedule.n_steps, student.frames_per_chunk
    fresh = [noise(k, tuple(x1.shape)).to(x1) for k in range(steps - 1)]
    states: dict[int, list[Tensor]] = {k: [] for k in range(steps)}
    done, cache = [], None
    for start in range(0, x1.shape[1], frames):
        part = slice(start, start + frames)
        z = x1[:, part]
        for k in range(steps):
            states[k].append(z)
            at = t[k].expand(len(z))
            x0 = path.x0_eps(z, student.chunk(z, at, tokens, cache).float(), at)[0]
            z = path.interpolate(x0, fresh[k][:, part], t[k + 1]) if k + 1 < steps else x0
        done.append(z)
        if part.stop < x1.shape[1]:
            cache = student.extend(cache, z, tokens)
    return {k: torch.cat(found, 1) for k, found in states.items()}, torch.cat(done, 1)


@dataclass(frozen=True)
class DistilRecipe:
    """How a few-step student is made from a causal network.

    Attributes:
        steps: updates of the student; a count, so that the student is the same on every machine.
        batch_size: videos per update.
        learning_rate: of the student's AdamW, whose betas are (0, .999) (arXiv 2605.15190), after a rise over the
            first tenth.
        max_grad_norm: gradients of a larger norm are scaled down to it.
        ema_decay: of the moving average of the weights that is kept (.9675 in the paper).
        settings: of teacher, critic and history.
    """

    steps: int
    seed: int = 0
    batch_size: int = 24
    learning_rate: float = 3e-4
    max_grad_norm: float = 1.0
    ema_decay: float = 0.9675
    settings: DistillationSettings = DistillationSettings(critic_learning_rate=1e-3)


def distil_student(
    student: Any,
    teacher: nn.Module,
    tokens: Tensor,
    path: Path,
    schedule: Schedule,
    recipe: DistilRecipe,
    progress: bool = True,
    title: str = "distilling the student",
    shape: tuple[int, ...] | None = None,
    real: Tensor | None = None,
) -> list[float]:
    """Turn a causal network into a few-step student, in place.

    Args:
        student: causal network; see `self_rollout` and `Distiller.predict`.
        teacher: bidirectional network of the same data. It is left as it is.
        tokens: int64 [N, L] conditions, of which every update draws a batch.
        path, schedule: of the student's sampler.
        recipe: see `DistilRecipe`.
        progress, title: of the progress bar on stderr.
        shape: of a latent (F, C, H, W); by default that of ``real``.
        real: [N, F, C, H, W] latents that ``tokens`` describe, for histories of real videos.

    Returns:
        The loss of every update.

    Raises:
        ValueError: when ``shape`` and ``real`` are missing, or the history needs real videos.
    """
    from genrl.networks.weights import WeightSet

    if real is None and recipe.settings.history not in ROLLED_OUT:
        raise ValueError(f"history = {recipe.settings.history!r} needs real videos; pass real=")
    if shape is None:
        if real is None:
            raise ValueError("the shape of a latent is unknown; pass shape= or real=")
        shape = tuple(real.shape[1:])
    device = next(student.parameters()).device
    distiller = Distiller(deepcopy(teacher), path, schedule, student.frames_per_chunk, recipe.settings)
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, recipe.learning_rate, (0.0, 0.999), weight_decay=0.0)
    average = WeightSet(parameters)
    losses: list[float] = []
    with progress_bar(title, recipe.steps, progress) as advance:
        for step in range(recipe.steps):
            noise = RowNoise.of((recipe.seed, "distil", step), range(recipe.batch_size), device)
            rows = (noise.uniform(0, (recipe.batch_size, 1))[:, 0] * len(tokens)).long().clamp(max=len(tokens) - 1)
            cond = tokens.to(device)[rows]
            if distiller.rolled_out:
                x1 = noise.initial((recipe.batch_size, *shape))
                states, x0 = self_rollout(student, x1, cond, path, schedule, noise)
            else:
                assert real is not None
                states, x0 = None, real.to(device)[rows]
            inputs = distiller.inputs(noise, states, x0)
            if not distiller.rolled_out:
                with torch.no_grad():
                    x0 = distiller.predict(student, inputs, cond)
            for _ in range(recipe.settings.critic_steps):
                distiller.critic_step(x0, cond, noise)
            loss = distiller.generator_loss(student, inputs, *distiller.levels(noise, x0), cond)[0].mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, recipe.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(1.0, 10 * (step + 1) / recipe.steps)
            optimizer.step()
            average.update(min(recipe.ema_decay, (1 + step) / (10 + step)))
            losses.append(loss.item())
            advance()
    with torch.no_grad():
        for p, value in zip(parameters, average.values, strict=True):
            p.copy_(value)
    return losses
