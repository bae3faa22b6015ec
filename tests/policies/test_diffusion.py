"""Diffusion policies against the schedulers of diffusers."""

import pytest
import torch
from policy_members import SPECS, awaken, configure, fixed_noise, generator, make_batch

from genrl.policies import DiffusionPolicy, Normalization
from genrl.policies.diffusion import cosine_alphas_cumprod, denoise, denoising_steps


def ddpm_scheduler(levels):
    from diffusers import DDPMScheduler

    return DDPMScheduler(levels, beta_schedule="squaredcos_cap_v2", clip_sample=True, variance_type="fixed_small")


def ddim_scheduler(levels):
    from diffusers import DDIMScheduler

    return DDIMScheduler(levels, beta_schedule="squaredcos_cap_v2", clip_sample=True, set_alpha_to_one=True)


@pytest.fixture
def given_noise(monkeypatch):
    """Let diffusers draw numbers of ours."""
    from diffusers.schedulers import scheduling_ddim, scheduling_ddpm

    drawn = []

    def randn(shape, **_):
        drawn.append(torch.randn(tuple(shape), generator=generator(len(drawn))))
        return drawn[-1]

    for module in (scheduling_ddpm, scheduling_ddim):
        monkeypatch.setattr(module, "randn_tensor", randn)
    return drawn


def test_the_schedule_is_that_of_diffusers():
    for levels in (10, 100, 1000):
        torch.testing.assert_close(cosine_alphas_cumprod(levels), ddpm_scheduler(levels).alphas_cumprod)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    ("make", "levels", "steps", "eta"),
    [
        (ddpm_scheduler, 100, 100, None),
        (ddpm_scheduler, 100, 20, None),
        (ddpm_scheduler, 50, 1, None),
        (ddim_scheduler, 100, 10, 0.0),
        (ddim_scheduler, 100, 100, 0.0),
        (ddim_scheduler, 100, 20, 0.7),
    ],
)
def test_every_step_equals_that_of_diffusers(make, levels, steps, eta, clip, given_noise):
    scheduler = make(levels)
    scheduler.register_to_config(clip_sample=clip)
    scheduler.set_timesteps(steps)
    # In float32, diffusers loses five digits of 1 - alpha_bar where alpha_bar is close to 1.
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.one = scheduler.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    sampler = "ddpm" if eta is None else "ddim"
    plan = denoising_steps(cosine_alphas_cumprod(levels), steps, sampler, eta or 0.0)
    assert [step.level for step in plan] == scheduler.timesteps.tolist()
    noisy = 0
    for index, step in enumerate(plan):
        x, eps_hat = torch.randn(2, 4, 8, 3, generator=generator(index + 100), dtype=torch.float64)
        before = len(given_noise)
        extra = {} if eta is None else {"eta": eta}
        expected = scheduler.step(eps_hat, step.level, x, **extra).prev_sample
        fresh = given_noise[-1] if len(given_noise) > before and step.s else None
        noisy += fresh is not None
        found = denoise(x, eps_hat, step, fresh, clip)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert noisy == (0 if eta == 0.0 else steps - 1)


def test_a_whole_chunk_equals_a_loop_over_diffusers(given_noise):
    policy = DiffusionPolicy(train_steps=20, steps=20)
    configure(policy, SPECS)
    awaken(policy).eval()
    obs = make_batch(policy)["obs"]
    scheduler = ddpm_scheduler(20)
    scheduler.set_timesteps(20)
    initial = torch.randn(5, 8, 3, generator=generator(77))
    with torch.no_grad():
        cond, x = policy.encode(obs), initial
        for level in scheduler.timesteps.tolist():
            eps_hat = policy.net(x, torch.full((5,), (level + 1) / 20), cond)
            x = scheduler.step(eps_hat, level, x).prev_sample
    chunk = policy.predict(obs, lambda step, shape: initial if step < 0 else given_noise[step])
    torch.testing.assert_close(chunk, policy.normalizer.unnormalize("action", x), atol=1e-5, rtol=1e-5)
    assert x.abs().max() <= 1 and x.abs().max() > 0.1


def test_the_loss_is_the_error_of_the_noise_that_diffusers_adds():
    policy = DiffusionPolicy(train_steps=20, steps=20)
    configure(policy, SPECS)
    batch = make_batch(policy)
    seen = []
    policy.net.register_forward_hook(lambda _, inputs, __: seen.append(inputs))
    loss, _ = policy.loss(batch, generator(4))  # the untrained network predicts 0
    source = generator(4)
    eps = torch.randn(5, 8, 3, generator=source)
    level = (torch.rand(5, generator=source) * 20).long()
    x0 = policy.normalizer.normalize("action", batch["actions"])
    torch.testing.assert_close(seen[0][0], ddpm_scheduler(20).add_noise(x0, eps, level))
    torch.testing.assert_close(seen[0][1], (level + 1) / 20)
    torch.testing.assert_close(loss, eps.square().mean())


def test_levels_are_drawn_evenly():
    policy = DiffusionPolicy(train_steps=5, steps=5)
    configure(policy, SPECS)
    times = []
    policy.net.register_forward_hook(lambda _, inputs, __: times.append(inputs[1]))
    policy.loss(make_batch(policy, rows=5000), generator())
    counts = (torch.cat(times) * 5).round().long().bincount(minlength=6)
    assert counts[0] == 0 and (counts[1:] - 1000).abs().max() < 150


def test_deterministic_ddim_uses_the_start_noise_only():
    policy = DiffusionPolicy(train_steps=20, steps=5, sampler="ddim")
    configure(policy, SPECS)
    awaken(policy).eval()
    asked = []

    def noise(step, shape):
        asked.append(step)
        return fixed_noise()(step, shape)

    policy.predict(make_batch(policy)["obs"], noise)
    assert asked == [-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 30}, r"steps = 30 does not divide train_steps = 100; choose one of .*20, 25, 50, 100"),
        ({"steps": 200}, "steps = 200"),
        ({"sampler": "euler"}, "sampler = 'euler'"),
        ({"eta": 0.5}, "belongs to 'ddim'"),
        ({"sampler": "ddim", "eta": 2.0}, "eta = 2.0"),
        ({"normalization": Normalization(action="meanstd")}, "clip_sample"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DiffusionPolicy(**settings)
    DiffusionPolicy(normalization=Normalization(action="meanstd"), clip_sample=False)
