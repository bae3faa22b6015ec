"""The sampler without a network, a generator or a loop: closed forms that can be checked by hand.

    python examples/sampler_alone.py

Data are Gaussian, x0 ~ N(m, c^2), so the velocity of the flow is known exactly. Three things are shown: that an SDE
sampler ends at the distribution of the data, that the log-ratio of unchanged weights is exactly 0, and that after a
change its mean is minus the KL and its variance twice the KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion import CPS, DanceSDE, FlowSDE, GaussianTransition, Sampler, Schedule

MEAN, STD = 2.0, 0.5


def velocity(x: Tensor, t: Tensor, shift: float | Tensor) -> Tensor:
    """Exact velocity for data N(MEAN + shift, STD^2); x [B, 1], t [B]."""
    t, mean = t[:, None], MEAN + shift
    variance = ((1 - t) * STD) ** 2 + t**2  # of x_t
    x0_hat = mean + (1 - t) * STD**2 / variance * (x - (1 - t) * mean)
    return (x - x0_hat) / t


def main() -> None:
    noise = torch.Generator().manual_seed(0)
    x1 = torch.randn(100_000, 1, generator=noise)
    print(f"data: mean {MEAN}, std {STD}")
    for kernel in (FlowSDE(0.7), FlowSDE(0.7, integrator="exact"), DanceSDE(0.3), CPS(0.4)):
        x0 = Sampler(kernel, Schedule.uniform(40)).rollout(velocity, x1, cond=0.0, generator=noise).x0
        print(f"{kernel}: mean {x0.mean():.3f}, std {x0.std():.3f}")

    sampler = Sampler(FlowSDE(0.7), Schedule.uniform(10))
    trajectory = sampler.rollout(velocity, x1, cond=0.0, generator=noise)
    k = 5
    old = GaussianTransition(trajectory.means[k], sampler.step(k, stochastic=True).s)
    for shift in (0.0, 0.5):
        now = sampler.replay(velocity, trajectory, k, cond=shift)
        log_ratio = now.log_ratio(old, trajectory.states[k + 1], reduction="sum")  # [B]
        kl = now.kl(old, reduction="sum").mean()
        print(
            f"data moved by {shift}: KL of step {k} {kl:.4f}; log-ratio: mean {log_ratio.mean():.4f}, "
            f"variance {log_ratio.var():.4f}; mean ratio {log_ratio.exp().mean():.4f}"
        )


if __name__ == "__main__":
    main()
