"""The sampler: exactly n steps, windows of stochastic steps, shared prefixes, and what a trajectory keeps."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from diffusion_members import ALL, NOISY, PATHS, SHAPE, elementwise, old_transition, sampler_of, start
from torch import Tensor

from genrl.diffusion import (
    CPS,
    DeterministicTransitionError,
    Euler,
    FixedWindow,
    FlowSDE,
    Sampler,
    Schedule,
    Trajectory,
    index_batch,
    repeat_batch,
)

noisy_kernels = pytest.mark.parametrize("name", NOISY)
all_paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


# ---- the roll-out ---------------------------------------------------------------------------------------


@all_paths
def test_deterministic_roll_out_is_the_euler_loop(path) -> None:
    sampler = Sampler(Euler(), Schedule.uniform(6), "all", path)
    assert sampler.steps() == () and sampler.eligible == ()
    x1, cond = start(dtype=torch.float64)
    trajectory = sampler.rollout(elementwise, x1, cond)
    x, t = x1, sampler.schedule.t.double()
    for k in range(6):
        v = elementwise(x, t[k].expand(8), cond)
        x0_hat, eps_hat = path.x0_eps(x, v, t[k])
        x = path.interpolate(x0_hat, eps_hat, t[k + 1])
    torch.testing.assert_close(trajectory.x0, x, rtol=1e-10, atol=1e-10)
    assert not trajectory.states and not trajectory.means and trajectory.evaluations == 48


@noisy_kernels
def test_roll_out_is_the_loop_of_its_kernel_with_an_ode_step_at_the_end(name) -> None:
    sampler = sampler_of(name)
    x1, cond = start(dtype=torch.float64)
    noises = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    trajectory = sampler.rollout(elementwise, x1, cond, lambda step, shape: noises[step].reshape(shape))
    x, t = x1, sampler.schedule.t.double()
    for k in range(5):
        v = elementwise(x, t[k].expand(8), cond)
        if k < 4:
            transition = ALL[name].transition(x, v, t[k], t[k + 1])
            x = transition.mean + transition.std * noises[k]
            torch.testing.assert_close(trajectory.means[k], transition.mean, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(trajectory.states[k + 1], x, rtol=1e-9, atol=1e-9)
        else:
            x = x - t[k] * v
    torch.testing.assert_close(trajectory.x0, x, rtol=1e-9, atol=1e-9)


def test_a_batch_equals_its_samples_one_by_one() -> None:
    sampler = sampler_of("flow_sde")
    x1, cond = start()
    noises = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(8))
    whole = sampler.rollout(elementwise, x1, cond, lambda k, shape: noises[k])
    singles = [
        sampler.rollout(elementwise, x1[i : i + 1], cond[i : i + 1], lambda k, shape, i=i: noises[k, i : i + 1])
        for i in range(8)
    ]
    joined = Trajectory.concatenate(singles)
    torch.testing.assert_close(joined.x0, whole.x0, rtol=0, atol=1e-6)
    for k in whole.states:
        torch.testing.assert_close(joined.states[k], whole.states[k], rtol=0, atol=1e-6)
    assert joined.evaluations == whole.evaluations == 40


def test_zero_noise_equals_the_ode_exactly() -> None:
    x1, cond = start()
    plain = Sampler(Euler(), Schedule.uniform(5)).rollout(elementwise, x1, cond)
    quiet = Sampler(FlowSDE(0.0), Schedule.uniform(5)).rollout(elementwise, x1, cond)
    assert quiet.steps == ()
    torch.testing.assert_close(quiet.x0, plain.x0, rtol=0, atol=0)


def test_a_generator_makes_the_roll_out_reproducible() -> None:
    sampler = sampler_of("cps")
    x1, cond = start()
    first, second, other = (sampler.rollout(elementwise, x1, cond, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    torch.testing.assert_close(first.x0, second.x0, rtol=0, atol=0)
    assert not torch.equal(first.x0, other.x0)


def test_noise_may_be_a_function_of_the_step() -> None:
    asked = []

    def noise(step: int, shape: tuple[int, ...]) -> Tensor:
        asked.append((step, shape))
        return torch.zeros(shape)

    x1, cond = start()
    trajectory = sampler_of("cps", steps=[1, 2]).rollout(elementwise, x1, cond, noise)
    assert asked == [(1, SHAPE), (2, SHAPE)]
    torch.testing.assert_close(trajectory.states[2], trajectory.means[1], rtol=0, atol=0)


def test_roll_out_has_no_graph_and_float32_states_for_half_precision_networks() -> None:
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    x1, cond = start()

    def network(x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        return x.bfloat16() * weight

    sampler = sampler_of("flow_sde")
    trajectory = sampler.rollout(network, x1.half(), cond)
    tensors = [*trajectory.states.values(), *trajectory.means.values(), trajectory.x0]
    assert all(tensor.dtype == torch.float32 and not tensor.requires_grad for tensor in tensors)
    new = sampler.replay(network, trajectory, 2, cond)
    assert new.mean.dtype == torch.float32 and new.mean.requires_grad
    assert (new.log_ratio(old_transition(sampler, trajectory, 2), trajectory.states[3]) == 0).all()


# ---- windows and prefix sharing -------------------------------------------------------------------------


@pytest.mark.parametrize("steps, kept", [([0], {0, 1}), ([1, 2], {1, 2, 3}), ([0, 3], {0, 1, 3, 4}), ([], set())])
def test_only_states_around_stochastic_steps_are_stored(steps, kept) -> None:
    x1, cond = start()
    trajectory = sampler_of("flow_sde", steps=steps).rollout(elementwise, x1, cond)
    assert set(trajectory.states) == kept and set(trajectory.means) == set(steps) and trajectory.steps == tuple(steps)


def test_steps_outside_the_window_are_ode_steps() -> None:
    x1, cond = start(dtype=torch.float64)
    trajectory = sampler_of("flow_sde", steps=FixedWindow(2, 1)).rollout(elementwise, x1, cond)
    x, t = x1, trajectory.t.double()
    for k in (0, 1):
        x = x - (t[k] - t[k + 1]) * elementwise(x, t[k].expand(8), cond)
    torch.testing.assert_close(trajectory.states[2], x)
    x = trajectory.states[3]
    for k in (3, 4):
        x = x - (t[k] - t[k + 1]) * elementwise(x, t[k].expand(8), cond)
    torch.testing.assert_close(trajectory.x0, x)


@pytest.mark.parametrize("steps", [(2, 3), (3, 1), (0,), ()])
def test_sharing_the_prefix_equals_running_every_sample(steps) -> None:
    """(3, 1) is out of order: noise of step 1 must not be shared by samples that part at step 3."""
    generator = torch.Generator().manual_seed(9)
    x1, cond = torch.randn(2, *SHAPE[1:], generator=generator), torch.randn(2, generator=generator)
    expand = torch.tensor([0, 0, 0, 1, 1, 1])
    noises = torch.randn(5, 6, *SHAPE[1:], generator=generator)

    def noise(k: int, shape: tuple[int, ...]) -> Tensor:
        assert shape == (6, *SHAPE[1:])
        return noises[k]

    sampler = sampler_of("flow_sde", steps=[1])
    shared = sampler.rollout(elementwise, x1, cond, noise, steps=steps, expand=expand)
    single = sampler.rollout(elementwise, x1[expand], cond[expand], noise, steps=steps)
    torch.testing.assert_close(shared.x0, single.x0, rtol=0, atol=0)
    assert shared.steps == single.steps == tuple(sorted(steps))
    for k in single.states:
        torch.testing.assert_close(shared.states[k], single.states[k], rtol=0, atol=0)
    first = min(steps, default=5)
    assert single.evaluations == 30 and shared.evaluations == 2 * first + 6 * (5 - first)


# ---- trajectories ---------------------------------------------------------------------------------------


def test_select_and_concatenate_are_inverse() -> None:
    x1, cond = start()
    trajectory = sampler_of("flow_sde", steps=[1, 3]).rollout(elementwise, x1, cond)
    parts = [trajectory.select(slice(0, 3)), trajectory.select(torch.arange(3, 8))]
    assert len(parts[0].x0) == 3 and len(parts[1].means[3]) == 5
    joined = Trajectory.concatenate(parts)
    torch.testing.assert_close(joined.x0, trajectory.x0, rtol=0, atol=0)
    for name in ("states", "means"):
        for k, value in getattr(trajectory, name).items():
            torch.testing.assert_close(getattr(joined, name)[k], value, rtol=0, atol=0)
    assert joined.steps == trajectory.steps and Trajectory.concatenate(parts[:1]) is parts[0]


def test_trajectories_of_different_steps_or_grids_are_not_joined() -> None:
    x1, cond = start()
    first = sampler_of("flow_sde", steps=[1]).rollout(elementwise, x1, cond)
    for other in (sampler_of("flow_sde", steps=[2]), sampler_of("flow_sde", n=6, steps=[1])):
        with pytest.raises(ValueError, match="cannot be joined"):
            Trajectory.concatenate([first, other.rollout(elementwise, x1, cond)])


def test_conditions_of_any_nest_are_indexed_and_repeated() -> None:
    tree = {"a": torch.arange(4), "b": [torch.arange(8).reshape(4, 2), None], "c": (3, "x")}
    picked = index_batch(tree, torch.tensor([2, 0]))
    assert picked["a"].tolist() == [2, 0] and picked["b"][0].tolist() == [[4, 5], [0, 1]]
    assert picked["b"][1] is None and picked["c"] == (3, "x") and index_batch(None, slice(0, 1)) is None
    assert repeat_batch(tree, 2)["a"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert repeat_batch(tree, 2)["b"][0].shape == (8, 2)


# ---- refusals -------------------------------------------------------------------------------------------


def test_a_trajectory_of_another_grid_is_refused_with_both() -> None:
    x1, cond = start()
    trajectory = sampler_of("flow_sde").rollout(elementwise, x1, cond)
    with pytest.raises(ValueError, match=r"sampled on 5 steps .* has 6 steps"):
        sampler_of("flow_sde", n=6).replay(elementwise, trajectory, 0, cond)
    with pytest.raises(ValueError, match="replay needs the sampler of the roll-out"):
        Sampler(FlowSDE(), Schedule.uniform(5, shift=3.0)).replay(elementwise, trajectory, 0, cond)


def test_a_step_that_was_not_stochastic_is_refused() -> None:
    x1, cond = start()
    sampler = sampler_of("flow_sde", steps=[1, 2])
    trajectory = sampler.rollout(elementwise, x1, cond)
    for step in (0, (1, 4)):
        with pytest.raises(ValueError, match=r"was not stochastic; stored are \[1, 2\]"):
            sampler.replay(elementwise, trajectory, step, cond)


@pytest.mark.parametrize("steps", [[4], range(5), [-1], [7]])
def test_steps_without_a_density_are_refused(steps) -> None:
    with pytest.raises(ValueError, match=r"has no density with FlowSDE.*can be \[0, 1, 2, 3\]"):
        sampler_of("flow_sde", steps=steps)
    with pytest.raises(ValueError, match="has no density"):
        sampler_of("flow_sde").rollout(elementwise, *start(), steps=list(steps))


def test_a_window_that_picks_other_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="step 4 of 5 has no density"):
        sampler_of("flow_sde", steps=lambda eligible, iteration, seed: [4]).steps()


@pytest.mark.parametrize("kernel", [Euler(), FlowSDE(0.0), CPS(0.0)])
def test_deterministic_kernels_cannot_be_asked_for_densities(kernel) -> None:
    with pytest.raises(ValueError, match="the kernel is deterministic"):
        Sampler(kernel, Schedule.uniform(5), [0])
    sampler = Sampler(kernel, Schedule.uniform(5))
    transition = sampler.transition(elementwise, *_first(), start()[1])
    with pytest.raises(DeterministicTransitionError):
        transition.log_prob(start()[0])


def _first():
    return start()[0], Sampler(Euler(), Schedule.uniform(5)).step(0, False)


def test_unknown_names_of_steps_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed are 'all'"):
        sampler_of("flow_sde", steps="some")
    sampler = sampler_of("flow_sde")
    x1, cond = start()
    with pytest.raises(ValueError, match=r"shape \(8, 1\) where the latents have \(8, 3, 5, 7\)"):
        sampler.rollout(lambda x, t, cond: x.flatten(1)[:, :1], x1, cond)
    trajectory = sampler.rollout(elementwise, x1, cond)
    with pytest.raises(ValueError, match="where the latents have"):
        sampler.replay(lambda x, t, cond: x.flatten(1)[:, :1], trajectory, (0, 1), cond)


def test_a_kernel_that_is_not_finite_is_refused_before_sampling() -> None:
    from genrl.diffusion import PathKernel

    class Broken(PathKernel):
        def rf_coefficients(self, t, t_next):
            return 1 - t_next, t_next / (1 - t), t_next

    with pytest.raises(ValueError, match=r"inf or NaN at step 0, from t = 1 to 0.8"):
        Sampler(Broken(), Schedule.uniform(5))


def test_rows_of_any_container_are_selected_or_refused() -> None:
    rows = torch.arange(4.0)
    index = torch.tensor([2, 0])
    Pair = collections.namedtuple("Pair", "a b")
    picked = index_batch({"x": collections.UserDict(y=rows), "z": Pair(rows, "text"), "n": [rows, None]}, index)
    assert picked["x"]["y"].tolist() == picked["z"].a.tolist() == picked["n"][0].tolist() == [2, 0]
    assert isinstance(picked["z"], Pair) and picked["z"].b == "text" and picked["n"][1] is None

    @dataclasses.dataclass
    class Hidden:
        x: torch.Tensor

    with pytest.raises(TypeError, match="Hidden"):
        index_batch({"c": Hidden(rows)}, index)
