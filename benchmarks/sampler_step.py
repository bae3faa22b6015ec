"""One sampler step of genrl against the same step written out by hand, in time and in peak memory.

    python benchmarks/sampler_step.py [--rounds 40] [--shape 16 16 64 64] [--device cpu]

The hand-written step is Flow-GRPO's as published (arXiv 2505.05470): standard deviation and mean from tensors of times,
the drawn point, the full log-density with its normalisers averaged over the latent, and in training a second such
log-density, the difference to the first, and its exponential. genrl's step keeps the behaviour mean instead of a
log-density and forms the log-ratio from the two means.

Both run in one process, in turns, and the best of all rounds counts. Peak memory is what the allocator hands out during
the step, over what was there before.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from genrl.diffusion import FlowSDE, GaussianTransition, Sampler, Schedule

NOISE_LEVEL = 0.7
STEP = 3


def by_hand(x: Tensor, v: Tensor, sigmas: Tensor, index: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(x', log-density, mean) of Flow-GRPO's step; x' is drawn unless it is given."""
    x, v = x.float(), v.float()
    shape = (-1,) + (1,) * (x.dim() - 1)
    sigma, sigma_next = sigmas[index].view(shape), sigmas[index + 1].view(shape)
    dt = sigma_next - sigma  # negative
    std_t = NOISE_LEVEL * torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigmas[1], sigma)))
    mean = x * (1 + std_t**2 / (2 * sigma) * dt) + v * (1 + std_t**2 * (1 - sigma) / (2 * sigma)) * dt
    std = std_t * torch.sqrt(-dt)
    if drawn is None:
        drawn = mean + std * torch.randn_like(mean)
    log_prob = -((drawn.detach() - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
    return drawn, log_prob.mean(dim=tuple(range(1, x.dim()))), mean


def best_times(runs: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Best wall-clock seconds of each run; the runs take turns so that a busy machine slows all of them."""
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for name, run in runs.items():
            _synchronise(device)
            start = time.perf_counter()
            run()
            _synchronise(device)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Largest number of bytes that the run holds at once, over what was allocated before."""
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _silent_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler's own start and stop lines come from C++, past sys.stderr."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(shape: tuple[int, ...], device: str, rounds: int) -> dict[str, tuple[float, float, int, int]]:
    """Case -> (seconds by hand, seconds of genrl, peak bytes by hand, peak bytes of genrl)."""
    torch.manual_seed(0)
    schedule = Schedule.uniform(10, shift=3.0)
    sampler = Sampler(FlowSDE(NOISE_LEVEL), schedule)
    step = sampler.step(STEP, True)
    sigmas = schedule.t.to(device)
    index = torch.full((shape[0],), STEP, device=device)
    x = torch.randn(shape, device=device)
    v_old = torch.randn(shape, device=device)
    v = (v_old + 0.001 * torch.randn(shape, device=device)).requires_grad_()
    advantages = torch.randn(shape[0], device=device)
    drawn, log_prob_old, _ = by_hand(x, v_old, sigmas, index, None)
    old = sampler.transition(lambda x, t, cond: v_old, x, step)

    def draw() -> tuple[Tensor, Tensor]:
        transition = sampler.transition(lambda x, t, cond: v_old, x, step)
        return transition.sample(), transition.mean

    def draw_with_density() -> tuple[Tensor, Tensor, Tensor]:
        transition = sampler.transition(lambda x, t, cond: v_old, x, step)
        point = transition.sample()
        return point, transition.mean, transition.log_prob(point)

    def rollout_by_hand() -> tuple[Tensor, ...]:
        return by_hand(x, v_old, sigmas, index, None)

    def replay(kl: bool) -> Tensor:
        new = sampler.transition(lambda x, t, cond: v, x, step)
        loss = (-advantages * new.log_ratio(old, drawn).exp()).mean()
        if kl:
            loss = loss + 0.04 * new.kl(old).mean()
        return torch.autograd.grad(loss, v)[0]

    def replay_by_hand(kl: bool) -> Tensor:
        _, log_prob, mean = by_hand(x, v, sigmas, index, drawn)
        loss = (-advantages * (log_prob - log_prob_old).exp()).mean()
        if kl:
            loss = loss + 0.04 * ((mean - old.mean) ** 2 / (2 * step.s**2)).mean()
        return torch.autograd.grad(loss, v)[0]

    check_agreement(old, drawn, log_prob_old, replay, replay_by_hand)
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "roll-out step (mean, draw)": (rollout_by_hand, draw),
        "roll-out step and log-density": (rollout_by_hand, draw_with_density),
        "replay, ratio, backward": (lambda: replay_by_hand(False), lambda: replay(False)),
        "replay, ratio, KL, backward": (lambda: replay_by_hand(True), lambda: replay(True)),
    }
    results = {}
    for name, (hand, ours) in cases.items():
        with torch.set_grad_enabled("replay" in name):
            times = best_times({"hand": hand, "ours": ours}, rounds, device)
            memory = peak_bytes(hand, device), peak_bytes(ours, device)
        results[name] = (times["hand"], times["ours"], *memory)
    return results


def check_agreement(
    old: GaussianTransition,
    drawn: Tensor,
    log_prob_old: Tensor,
    replay: Callable[[bool], Tensor],
    replay_by_hand: Callable[[bool], Tensor],
) -> None:
    """A faster step that computes something else would be no result."""
    torch.testing.assert_close(old.log_prob(drawn), log_prob_old, rtol=1e-4, atol=1e-4)
    for kl in (False, True):
        torch.testing.assert_close(replay(kl), replay_by_hand(kl), rtol=1e-2, atol=1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shape", type=int, nargs="+", default=[16, 16, 64, 64])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape = tuple(arguments.shape)
    latent = math.prod(shape) * 4
    print(f"torch {torch.__version__}, {arguments.device}, latents {list(shape)} ({latent / 2**20:.1f} MiB)")
    print(f"{'':32}{'by hand':>10}{'genrl':>10}{'ratio':>8}   peak memory in latents: by hand, genrl, ratio")
    for name, (hand, ours, hand_bytes, our_bytes) in compare(shape, arguments.device, arguments.rounds).items():
        print(
            f"{name:32}{hand * 1e3:8.2f}ms{ours * 1e3:8.2f}ms{ours / hand:8.2f}"
            f"{hand_bytes / latent:14.2f}{our_bytes / latent:8.2f}{our_bytes / max(hand_bytes, 1):8.2f}"
        )


if __name__ == "__main__":
    main()
