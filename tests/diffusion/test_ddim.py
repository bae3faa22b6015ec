"""The variance-preserving path against diffusers' DDIM and the DDPM posterior, for every step, the last included."""

from __future__ import annotations

import pytest
import torch

from genrl.diffusion import DDIM, Sampler, Schedule, VariancePreserving

diffusers = pytest.importorskip("diffusers")

ATOL = 1e-10


def make(final_is_one: bool, spacing: str = "leading", offset: int = 1, n: int = 10, **config):
    """(scheduler, path, schedule); the path ends as the scheduler's config says."""
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=final_is_one,
        timestep_spacing=spacing,
        steps_offset=offset,
        **config,
    )
    schedule = Schedule.from_scheduler(scheduler, n)
    # In float32 the scheduler's own 1 - ab and sqrt(1 - ab' - s^2) are off by up to 4e-4.
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = torch.as_tensor(scheduler.final_alpha_cumprod).double()
    path = VariancePreserving(scheduler.alphas_cumprod, float(scheduler.final_alpha_cumprod))
    return scheduler, path, schedule


@pytest.mark.parametrize("final_is_one", [True, False])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("spacing, offset", [("leading", 0), ("leading", 1), ("trailing", 0)])
def test_every_step_equals_diffusers_ddim(eta, final_is_one, spacing, offset) -> None:
    scheduler, path, schedule = make(final_is_one, spacing, offset)
    generator = torch.Generator().manual_seed(0)
    x, eps, noise = torch.randn(3, 2, 4, 3, 3, generator=generator, dtype=torch.float64)
    for k, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(eps, int(timestep), x, eta=eta, variance_noise=noise).prev_sample
        t, t_next = schedule.t[k].double(), schedule.t[k + 1].double()
        v = path.velocity_from(eps, x, t, "epsilon")
        ours = DDIM(eta).transition(x, v, t, t_next, path)
        torch.testing.assert_close(ours.at(noise), theirs, rtol=0, atol=ATOL)


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_every_prediction_type_equals_diffusers_ddim(kind) -> None:
    scheduler, path, schedule = make(True, prediction_type=kind)
    x, output, noise = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for k in (1, 5, 8):
        theirs = scheduler.step(output, int(scheduler.timesteps[k]), x, eta=0.7, variance_noise=noise).prev_sample
        t, t_next = schedule.t[k].double(), schedule.t[k + 1].double()
        v = path.velocity_from(output, x, t, kind)
        torch.testing.assert_close(DDIM(0.7).transition(x, v, t, t_next, path).at(noise), theirs, rtol=0, atol=ATOL)


def test_zero_terminal_snr_scheduler_starts_from_pure_noise() -> None:
    config = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    scheduler, path, schedule = make(True, "trailing", 0, **config)
    x, output, noise = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    theirs = scheduler.step(output, int(scheduler.timesteps[0]), x, eta=1.0, variance_noise=noise).prev_sample
    t, t_next = schedule.t[0].double(), schedule.t[1].double()
    v = path.velocity_from(output, x, t, "v_prediction")
    torch.testing.assert_close(DDIM(1.0).transition(x, v, t, t_next, path).at(noise), theirs, rtol=0, atol=ATOL)


def test_eta_one_is_the_ddpm_posterior() -> None:
    """q(x_t' | x_t, x0) of Ho et al. 2020, eq. 6 and 7, for steps of any length (alpha = ab / ab')."""
    _, path, schedule = make(True)
    generator = torch.Generator().manual_seed(3)
    x0, eps = torch.randn(2, 9, 5, generator=generator, dtype=torch.float64)
    t, t_next = schedule.t[:-2].double(), schedule.t[1:-1].double()
    ab, ab_next = path.alphas_cumprod(t)[:, None], path.alphas_cumprod(t_next)[:, None]
    beta = 1 - ab / ab_next
    x = path.interpolate(x0, eps, t)
    mean = ab_next.sqrt() * beta / (1 - ab) * x0 + (ab / ab_next).sqrt() * (1 - ab_next) / (1 - ab) * x
    got = DDIM(1.0).transition(x, path.velocity(x0, eps, t), t, t_next, path)
    torch.testing.assert_close(got.mean, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.std[:, None] ** 2, (1 - ab_next) / (1 - ab) * beta, rtol=1e-10, atol=0)


@pytest.mark.parametrize("final_is_one", [True, False])
def test_trained_steps_have_finite_densities_and_the_last_is_left_out(final_is_one) -> None:
    """The last step has variance or not, depending on the checkpoint's set_alpha_to_one; it is an ODE step in both."""
    _, path, schedule = make(final_is_one)
    sampler = Sampler(DDIM(1.0), schedule, path=path)
    assert sampler.steps() == tuple(range(9))
    x1 = torch.randn(3, 4, generator=torch.Generator().manual_seed(4))
    trajectory = sampler.rollout(lambda x, t, cond: 0.1 * x, x1, generator=torch.Generator().manual_seed(5))
    for k in trajectory.steps:
        transition = sampler.replay(lambda x, t, cond: 0.1 * x, trajectory, k)
        assert torch.isfinite(transition.log_prob(trajectory.states[k + 1], "sum")).all()


@pytest.mark.parametrize("final_is_one", [True, False])
def test_a_whole_ddim_roll_out_equals_diffusers(final_is_one) -> None:
    scheduler, path, schedule = make(final_is_one)

    def network(x: torch.Tensor) -> torch.Tensor:  # an epsilon prediction
        return torch.tanh(x)

    x1 = torch.randn(2, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    x = x1
    for timestep in scheduler.timesteps:
        x = scheduler.step(network(x), int(timestep), x).prev_sample

    def velocity(x: torch.Tensor, t: torch.Tensor, cond: None) -> torch.Tensor:
        return path.velocity_from(network(x), x, t.double(), "epsilon")

    sampler = Sampler(DDIM(1.0), schedule, stochastic_steps=[], path=path)
    torch.testing.assert_close(sampler.rollout(velocity, x1).x0, x, rtol=0, atol=ATOL)
