"""Time grids: exact counts, the shift formula, and the tables of diffusers schedulers."""

from __future__ import annotations

import math

import pytest
import torch

from genrl.diffusion import Schedule


@pytest.mark.parametrize("n", [1, 2, 7, 28, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
def test_n_steps_are_exactly_n_transitions_from_noise_to_data(n, shift) -> None:
    schedule = Schedule.uniform(n, shift)
    assert schedule.n_steps == n and schedule.t.shape == (n + 1,)
    assert schedule.t[0] == 1 and schedule.t[-1] == 0 and schedule.t.dtype == torch.float32


def test_shift_formula() -> None:
    expected = [3 * u / (1 + 2 * u) for u in (1, 0.75, 0.5, 0.25, 0)]
    assert Schedule.uniform(4, shift=3).t.tolist() == pytest.approx(expected, abs=1e-7)
    assert Schedule.uniform(4).t.tolist() == [1, 0.75, 0.5, 0.25, 0]


def test_sigmas_get_a_final_zero_only_when_it_is_missing() -> None:
    assert Schedule.from_sigmas([1.0, 0.5]).t.tolist() == [1, 0.5, 0]
    assert Schedule.from_sigmas(torch.tensor([1.0, 0.5, 0.0])).t.tolist() == [1, 0.5, 0]
    assert Schedule.from_sigmas([0.8, 0.4]).t[0] == torch.tensor(0.8)  # a late start is kept


def test_times_are_stored_in_float32_whatever_they_came_as() -> None:
    third = Schedule(torch.tensor([1, 1 / 3, 0], dtype=torch.float64)).t
    assert third.dtype == torch.float32 and third[1] == torch.tensor(1 / 3, dtype=torch.float32)


@pytest.mark.parametrize(
    "t, message",
    [
        ([0.0, 0.5, 1.0], "flip an ascending table"),
        ([1.0, 0.5, 0.5, 0.0], "drop repeated entries"),
        ([1.0, 0.4, 0.6, 0.0], r"t\[1\] = 0.4 is followed by 0.6"),
        ([1.0, math.nan, 0.0], "must decrease"),
        ([999.0, 500.0, 0.0], "divide timesteps by 1000"),
        ([1.0, 0.0, -0.1], r"\[0, 1\]"),
        ([1.0], r"n >= 1"),
        ([[1.0, 0.0]], r"\[n \+ 1\]"),
    ],
)
def test_grids_that_cannot_be_sampled_are_refused(t, message) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(torch.tensor(t))


def test_ascending_sigmas_are_refused() -> None:
    with pytest.raises(ValueError, match="flip an ascending table"):
        Schedule.from_sigmas([0.1, 0.5, 1.0])


def test_numbers_that_make_no_grid_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        Schedule.uniform(0)
    for shift in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="shift must be positive"):
            Schedule.uniform(4, shift)
    with pytest.raises(ValueError, match="3 timesteps do not fit 3 times"):
        Schedule(torch.tensor([1.0, 0.5, 0.0]), timesteps=torch.tensor([1, 2, 3]))


# ---- diffusers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching_scheduler_gives_its_sigmas(shift) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    schedule = Schedule.from_scheduler(scheduler, 10)
    assert schedule.n_steps == 10
    torch.testing.assert_close(schedule.t, scheduler.sigmas, rtol=0, atol=0)
    torch.testing.assert_close(schedule.timesteps, scheduler.timesteps, rtol=0, atol=0)
    torch.testing.assert_close(schedule.timesteps, 1000 * schedule.t[:-1], rtol=1e-6, atol=0)


def test_flow_matching_scheduler_with_given_sigmas_and_dynamic_shift() -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigmas, mu = [1.0, 0.75, 0.5, 0.25], 1.15
    schedule = Schedule.from_scheduler(scheduler, 4, sigmas=sigmas, mu=mu)
    expected = [math.exp(mu) / (math.exp(mu) + (1 / sigma - 1)) for sigma in sigmas]  # exponential time shift
    assert schedule.t.tolist() == pytest.approx([*expected, 0], abs=1e-6)
    assert schedule.n_steps == 4


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_ddim_timesteps_become_entries_of_the_variance_preserving_table(spacing) -> None:
    diffusers = pytest.importorskip("diffusers")
    from genrl.diffusion import VariancePreserving

    scheduler = diffusers.DDIMScheduler(beta_schedule="scaled_linear", timestep_spacing=spacing, steps_offset=1)
    schedule = Schedule.from_scheduler(scheduler, 20)
    assert schedule.n_steps == 20 and schedule.t[-1] == 0
    assert schedule.timesteps.tolist() == scheduler.timesteps.tolist()
    path = VariancePreserving(scheduler.alphas_cumprod)
    table = scheduler.alphas_cumprod[scheduler.timesteps].double()
    torch.testing.assert_close(path.alphas_cumprod(schedule.t[:-1].double()), table, rtol=0, atol=0)


def test_scheduler_with_another_number_of_steps_is_refused_before_sampling() -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.HeunDiscreteScheduler()
    with pytest.raises(ValueError, match="HeunDiscreteScheduler made 19 steps where 10 were asked for"):
        Schedule.from_scheduler(scheduler, 10)
    with pytest.raises(ValueError, match="made 2 steps where 3"):
        Schedule.from_scheduler(diffusers.FlowMatchEulerDiscreteScheduler(), 3, sigmas=[1.0, 0.5])


def test_ascending_flow_matching_scheduler_is_refused() -> None:
    diffusers = pytest.importorskip("diffusers")
    with pytest.raises(ValueError, match="flip an ascending table"):
        Schedule.from_scheduler(diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), 4)


def test_scheduler_without_a_table_is_refused() -> None:
    class Bare:
        config = None
        timesteps = torch.tensor([1, 0])

        def set_timesteps(self, n: int, device: str) -> None: ...

    with pytest.raises(ValueError, match="Bare has neither sigmas nor alphas_cumprod"):
        Schedule.from_scheduler(Bare(), 2)
