"""Sampling with exact transition densities, and the replay that training differentiates.

The roll-out and the replay share one arithmetic (:meth:`Sampler.transition`): replay is sampling with the noise known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from genrl.diffusion.batch import index_batch, repeat_batch
from genrl.diffusion.kernels import Euler, Kernel, linear_mean
from genrl.diffusion.paths import Path, RectifiedFlow
from genrl.diffusion.schedule import Schedule
from genrl.diffusion.transition import GaussianTransition
from genrl.diffusion.windows import AllSteps, Window

VelocityFn = Callable[[Tensor, Tensor, Any], Tensor]
"""(x [B, ...], t [B] float32, cond) -> v [B, ...]."""

StepNoise = Callable[[int, tuple[int, ...]], Tensor]
"""(step, shape) -> standard noise; for noise that depends on the sample and not on the batch it is drawn in."""


@dataclass(frozen=True)
class Step:
    """The numbers of one step, on the host.

    Args:
        index: k; the step goes from t to t_next.
        c_x, c_v, s: mean = c_x x + c_v v, standard deviation s (0 for an ODE step).
        a: weight of x0_hat in the mean.
    """

    index: int
    t: float
    t_next: float
    c_x: float
    c_v: float
    s: float
    a: float

    @property
    def dt(self) -> float:
        """D = t - t' > 0."""
        return self.t - self.t_next

    @property
    def kappa(self) -> float:
        """Velocity sensitivity: d mean / d v = -kappa I."""
        return -self.c_v


@dataclass(frozen=True)
class Trajectory:
    """What training needs of a roll-out; only stochastic steps keep their latents.

    Args:
        t: [n + 1] float32 grid that was used.
        steps: indices of the stochastic steps that were kept.
        states: grid index k -> x at t[k], [B, ...] float32, for the starts and ends of stochastic steps.
        means: step k -> behaviour mean, [B, ...] float32.
        x0: [B, ...] the final point.
        evaluations: network evaluations spent, counted per sample.
    """

    t: Tensor
    steps: tuple[int, ...]
    states: Mapping[int, Tensor]
    means: Mapping[int, Tensor]
    x0: Tensor
    evaluations: int

    def select(self, index: Tensor | slice) -> Trajectory:
        """The same trajectory for some of its samples."""
        return Trajectory(
            self.t,
            self.steps,
            {k: index_batch(x, index) for k, x in self.states.items()},
            {k: index_batch(x, index) for k, x in self.means.items()},
            index_batch(self.x0, index),
            self.evaluations,
        )

    @staticmethod
    def concatenate(parts: Sequence[Trajectory]) -> Trajectory:
        """Join roll-outs of several batches that used the same grid and steps.

        Raises:
            ValueError: when they did not.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        for part in parts[1:]:
            if part.steps != first.steps or not torch.equal(part.t, first.t):
                raise ValueError(
                    f"trajectories of steps {list(first.steps)} on {_short(first.t)} and {list(part.steps)} on "
                    f"{_short(part.t)} cannot be joined; sample all batches of an iteration with the same steps"
                )
        return Trajectory(
            first.t,
            first.steps,
            {k: torch.cat([p.states[k] for p in parts]) for k in first.states},
            {k: torch.cat([p.means[k] for p in parts]) for k in first.means},
            torch.cat([p.x0 for p in parts]),
            sum(p.evaluations for p in parts),
        )


class Sampler:
    """Runs a kernel over a schedule, stochastic inside a window and the ODE outside it.

    Args:
        kernel: the transition kernel of stochastic steps.
        schedule: the time grid.
        stochastic_steps: ``"all"``, step indices (a range or list), or a window (see :mod:`genrl.diffusion.windows`).
            A step has a density when its s is above 0 and it does not end at t = 0, where the target would be clean
            data; the others are ODE steps and cannot be asked for.
        path: the path of the velocity network.

    Raises:
        ValueError: when a step is asked for that has no density.

    Example:
        >>> sampler = Sampler(Consistency(), Schedule.uniform(4))
        >>> trajectory = sampler.rollout(lambda x, t, cond: x, torch.zeros(2, 3))
        >>> trajectory.steps
        (0, 1, 2)
    """

    def __init__(
        self,
        kernel: Kernel,
        schedule: Schedule,
        stochastic_steps: str | Sequence[int] | Window = "all",
        path: Path | None = None,
    ):
        self.kernel, self.schedule = kernel, schedule
        self.path: Path = RectifiedFlow() if path is None else path
        # float64 from the stored float32 times: the coefficients are exact for the grid that the network sees.
        t = schedule.t.double()
        self._noisy = _table(kernel, t, self.path)
        self._ode = _table(Euler(), t, self.path)
        self.eligible = tuple(k for k, step in enumerate(self._noisy) if step.s > 0 and step.t_next > 0)
        if stochastic_steps == "all":
            self.window: Window = AllSteps()
        elif callable(stochastic_steps):
            self.window = stochastic_steps
        elif isinstance(stochastic_steps, str):
            raise ValueError(f"stochastic_steps = {stochastic_steps!r}; allowed are 'all', a list of steps or a window")
        else:
            fixed = tuple(stochastic_steps)
            self._check(fixed)
            self.window = lambda eligible, iteration, seed: fixed

    @property
    def n_steps(self) -> int:
        return self.schedule.n_steps

    def steps(self, iteration: int = 0, seed: int = 0) -> tuple[int, ...]:
        """The stochastic steps of an iteration; a function of its arguments alone."""
        if not self.eligible:
            return ()
        chosen = tuple(sorted(self.window(self.eligible, iteration, seed)))
        self._check(chosen)
        return chosen

    def _check(self, steps: Sequence[int]) -> None:
        bad = [k for k in steps if k not in self.eligible]
        if bad:
            raise ValueError(
                f"step {bad[0]} of {self.n_steps} has no density with {self.kernel}; stochastic steps can be "
                f"{list(self.eligible) or 'none (the kernel is deterministic)'}"
            )

    def step(self, k: int, stochastic: bool) -> Step:
        """The numbers of step k."""
        return (self._noisy if stochastic else self._ode)[k]

    def transition(self, velocity_fn: VelocityFn, x: Tensor, step: Step, cond: Any = None) -> GaussianTransition:
        """Evaluate the network once and form the transition of one step."""
        t = torch.full((len(x),), step.t, device=x.device, dtype=torch.float32)  # [B]
        t.host = step.t  # type: ignore[attr-defined]  # for networks that need the number without a device's wait
        v = _velocity(velocity_fn, x, t, cond)
        return GaussianTransition(linear_mean(x, v, step.c_x, step.c_v), step.s)

    @torch.no_grad()
    def rollout(
        self,
        velocity_fn: VelocityFn,
        x1: Tensor,
        cond: Any = None,
        generator: torch.Generator | StepNoise | None = None,
        steps: Sequence[int] | None = None,
        expand: Tensor | None = None,
        keep: Sequence[int] | None = None,
    ) -> Trajectory:
        """Sample from x1 to x0 without gradients.

        Args:
            velocity_fn: see :data:`VelocityFn`.
            x1: start latents [B, ...] at t = t[0].
            cond: conditioning of the B samples, any nest of tensors.
            generator: a torch generator, or a callable (step, shape) -> noise.
            steps: the stochastic steps; by default those of iteration 0.
            expand: int64 [B'], to run the ODE steps before the first stochastic one only once for the samples that
                share start and conditioning: sample i of the result then starts from row expand[i] of x1 and cond.
            keep: stochastic steps whose latents are kept, for those that are not trained on; by default all.

        Returns:
            A trajectory of B (or B') samples in float32, whose steps are those that were kept.
        """
        steps = self.steps() if steps is None else tuple(sorted(steps))
        self._check(steps)
        kept = steps if keep is None else tuple(k for k in steps if k in keep)
        first = steps[0] if steps else self.n_steps
        x = x1 if x1.dtype == torch.float64 else x1.float()
        states: dict[int, Tensor] = {}
        means: dict[int, Tensor] = {}
        evaluations = 0
        for k in range(self.n_steps):
            if k == first and expand is not None:
                x, cond = index_batch(x, expand), index_batch(cond, expand)
            noisy = k in steps
            transition = self.transition(velocity_fn, x, self.step(k, noisy), cond)
            evaluations += len(x)
            if noisy:
                start, x = x, transition.at(_noise(generator, k, transition.mean))
                if k in kept:
                    states[k], means[k], states[k + 1] = start, transition.mean, x
            else:
                x = transition.mean
        if first == self.n_steps and expand is not None:
            x = index_batch(x, expand)
        return Trajectory(self.schedule.t, kept, states, means, x, evaluations)

    def replay(
        self, velocity_fn: VelocityFn, trajectory: Trajectory, step: int | Sequence[int] | Tensor, cond: Any = None
    ) -> GaussianTransition:
        """The transition of a stored step under the current network, with gradients.

        Args:
            velocity_fn: the network, as in the roll-out.
            trajectory: a roll-out of this sampler, or some of its samples.
            step: one stochastic step k, giving [B, ...]; or several, which are evaluated in one forward and give
                [K * B, ...] in the order of the steps; or an int64 tensor [B] of stored steps, one of its own for each
                sample, giving [B, ...].
            cond: conditioning of the B samples.

        Raises:
            ValueError: when the trajectory was sampled on another grid, or the step was not stochastic.
        """
        if not torch.equal(trajectory.t, self.schedule.t):
            raise ValueError(
                f"the trajectory was sampled on {len(trajectory.t) - 1} steps {_short(trajectory.t)}, this sampler has "
                f"{self.n_steps} steps {_short(self.schedule.t)}; replay needs the sampler of the roll-out"
            )
        if isinstance(step, Tensor):
            return self._replay_own(velocity_fn, trajectory, step, cond)
        chosen = (step,) if isinstance(step, int) else tuple(step)
        missing = [k for k in chosen if k not in trajectory.means]
        if missing:
            raise ValueError(f"step {missing[0]} was not stochastic; stored are {list(trajectory.steps)}")
        if isinstance(step, int):
            return self.transition(velocity_fn, trajectory.states[step], self.step(step, True), cond)
        numbers = [self.step(k, True) for k in chosen]
        x = torch.cat([trajectory.states[k] for k in chosen])  # [K * B, ...]
        t, s = torch.tensor([(n.t, n.s) for n in numbers], dtype=torch.float64).float().T  # [K] each
        t, s = (row.repeat_interleave(len(x) // len(chosen)).to(x.device) for row in (t, s))  # [K * B]
        v = _velocity(velocity_fn, x, t, repeat_batch(cond, len(chosen)))
        # Step by step, since numbers and tensors as coefficients round differently and unchanged weights must give 0.
        rows = zip(x.chunk(len(chosen)), v.chunk(len(chosen)), numbers, strict=True)
        mean = torch.cat([linear_mean(x_k, v_k, n.c_x, n.c_v) for x_k, v_k, n in rows])
        return GaussianTransition(mean, s, deterministic=False)

    def _replay_own(
        self, velocity_fn: VelocityFn, trajectory: Trajectory, steps: Tensor, cond: Any
    ) -> GaussianTransition:
        """One forward in which every sample is at a step of its own."""
        numbers = {k: self.step(k, True) for k in trajectory.steps}
        x = of_each(trajectory.states, steps, trajectory.steps)  # [B, ...]
        t, s = (self.numbers(name, steps, x) for name in ("t", "s"))  # [B] each
        v = _velocity(velocity_fn, x, t, cond)
        # With numbers as coefficients, which round as those of the roll-out.
        means = {k: linear_mean(x, v, n.c_x, n.c_v) for k, n in numbers.items()}
        return GaussianTransition(of_each(means, steps, trajectory.steps), s, deterministic=False)

    def numbers(self, name: str, steps: Tensor, like: Tensor) -> Tensor:
        """A number of :class:`Step` for each sample, [B] float32, when sample b is at stochastic step steps[b]."""
        table = torch.tensor([getattr(step, name) for step in self._noisy], dtype=torch.float64)
        return table.float().to(like.device)[steps.to(like.device)]


def of_each(tensors: Mapping[int, Tensor], steps: Tensor, among: Sequence[int], later: int = 0) -> Tensor:
    """Row b of tensors[steps[b] + later] for each sample b, [B, ...]; waits for no device.

    Args:
        tensors: grid index -> [B, ...]. steps: int64 [B], each in ``among``. later: 1 for the states that steps end at.
    """
    taken = tensors[among[0] + later]
    steps = steps.to(taken.device).reshape(-1, *(1,) * (taken.dim() - 1))
    for k in among[1:]:
        taken = torch.where(steps == k, tensors[k + later], taken)
    return taken


def _velocity(velocity_fn: VelocityFn, x: Tensor, t: Tensor, cond: Any) -> Tensor:
    v = velocity_fn(x, t, cond)
    if v.shape != x.shape:
        raise ValueError(f"the velocity has shape {tuple(v.shape)} where the latents have {tuple(x.shape)}")
    return v


def _noise(generator: torch.Generator | StepNoise | None, step: int, like: Tensor) -> Tensor:
    if generator is None or isinstance(generator, torch.Generator):
        device = like.device if generator is None else generator.device
        return torch.randn(like.shape, generator=generator, device=device, dtype=like.dtype).to(like.device)
    return generator(step, tuple(like.shape)).to(like)


def _table(kernel: Kernel, t: Tensor, path: Path) -> list[Step]:
    c_x, c_v, s = kernel.linear_coefficients(t[:-1], t[1:], path)
    a = kernel.coefficients(t[:-1], t[1:], path)[0]
    rows = torch.stack(torch.broadcast_tensors(t[:-1], t[1:], c_x, c_v, s, a), 1)  # [n, 6]
    if not bool(torch.isfinite(rows).all()):
        bad = int((~torch.isfinite(rows).all(1)).nonzero()[0])
        raise ValueError(f"{kernel} gives inf or NaN at step {bad}, from t = {t[bad]:.6g} to {t[bad + 1]:.6g}")
    return [Step(k, *row) for k, row in enumerate(rows.tolist())]


def _short(t: Tensor) -> str:
    values = [f"{value:.4g}" for value in t.tolist()]
    return "[" + ", ".join(values if len(values) <= 6 else [*values[:3], "...", *values[-2:]]) + "]"
