"""Distillation: a student becomes its teacher on Gaussians, and what each history shows it."""

from copy import deepcopy
from typing import get_args

import pytest
import torch
from toy_video import SHAPE, CausalVideo, GaussianVideo

from genrl.diffusion import RectifiedFlow, RowNoise, Schedule
from genrl.generators.distill import (
    ROLLED_OUT,
    DistillationSettings,
    Distiller,
    DistilRecipe,
    History,
    distil_student,
    guided,
    self_rollout,
)

HISTORIES = get_args(History)
PATH, TWO = RectifiedFlow(), Schedule.uniform(2)
TOKENS = torch.zeros(1, 1, dtype=torch.long)


def teacher():
    return GaussianVideo((0.5, -0.4), ((0.6, 0.0), (0.5, 0.35)))


def noise_of(rows=8, key=0):
    return RowNoise.of((key,), range(rows))


def parts(history, rows=8, **settings):
    student = CausalVideo(TWO.t)
    distiller = Distiller(teacher(), PATH, TWO, 1, DistillationSettings(history=history, **settings))
    noise, tokens = noise_of(rows), TOKENS.expand(rows, 1)
    states, x0 = self_rollout(student, noise.initial((rows, *SHAPE)), tokens, PATH, TWO, noise)
    return student, distiller, distiller.inputs(noise, states, x0), states, x0, tokens, noise


@pytest.mark.parametrize("history", ["raven", "self_forcing"])
def test_a_one_step_student_gets_the_distribution_of_its_teacher(history):
    """Mean and covariance, the correlation of the chunks with them, which only the past can give."""
    grid = Schedule.uniform(1)
    student, goal = CausalVideo(grid.t), teacher()
    settings = DistillationSettings(history, chunk_weight=0.0, critic_learning_rate=0.03, critic_steps=2)
    recipe = DistilRecipe(300, batch_size=128, learning_rate=0.015, ema_decay=0.95, settings=settings)
    distil_student(student, goal, TOKENS, PATH, grid, recipe, progress=False, shape=SHAPE)
    noise = noise_of(20_000)
    _, x0 = self_rollout(student, noise.initial((20_000, *SHAPE)), TOKENS.expand(20_000, 1), PATH, grid, noise)
    flat = x0.flatten(1)
    torch.testing.assert_close(flat.mean(0), goal.mean.detach(), atol=0.06, rtol=0)
    torch.testing.assert_close(torch.cov(flat.T), goal.covariance().detach(), atol=0.06, rtol=0)


def test_distillation_leaves_the_teacher_alone_and_does_not_depend_on_global_seeds():
    weights = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        student, goal = CausalVideo(TWO.t), teacher()
        before = goal.mean.detach().clone()
        distil_student(student, goal, TOKENS, PATH, TWO, DistilRecipe(3), progress=False, shape=SHAPE)
        assert torch.equal(goal.mean, before) and goal.mean.requires_grad
        weights.append(student.scale.detach().clone())
    assert torch.equal(*weights)


def test_student_equal_to_teacher_and_critic_is_a_fixed_point():
    """The critic starts as the teacher's copy, so that the first gradient is exactly zero."""
    student, distiller, inputs, _, x0, tokens, noise = parts("raven")
    loss, metrics = distiller.generator_loss(student, inputs, *distiller.levels(noise, x0), tokens)
    loss.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in student.parameters())
    assert metrics["distil/direction"] == 0


def test_guidance_moves_the_teacher_but_not_the_critic():
    _, distiller, _, _, x0, tokens, noise = parts("raven", guidance_scale=2.0)
    s, eps = distiller.levels(noise, x0)
    real, fake = distiller.compare(x0, s, eps, tokens)
    # The toy's unconditional prediction of x0 is 0.
    torch.testing.assert_close(real, 2 * fake)
    x_s = PATH.interpolate(x0, eps, s)
    v = guided(distiller.teacher, x_s, s, tokens, 1.0)
    torch.testing.assert_close(v, guided(distiller.teacher, x_s, s, tokens, None))


def last_chunk_gradient(history):
    """d (prediction of the last chunk) / d (key weight)."""
    student, distiller, inputs, _, _, tokens, _ = parts(history)
    distiller.predict(student, inputs, tokens)[:, 1].sum().backward()
    return student.key.grad


def test_the_weights_that_encode_the_past_learn_under_raven_and_not_under_self_forcing():
    assert last_chunk_gradient("raven") != 0
    assert last_chunk_gradient("self_forcing") is None


@pytest.mark.parametrize("history", HISTORIES)
def test_values_of_the_past_carry_no_gradient(history):
    _, _, inputs, *_ = parts(history)
    assert not any(x.requires_grad for x in inputs.values() if x is not None)


@pytest.mark.parametrize("history", ROLLED_OUT)
def test_noisy_chunks_are_the_states_of_the_roll_out_at_the_drawn_time(history):
    _, _, inputs, states, x0, _, _ = parts(history, rows=40)
    assert set(inputs["u"].tolist()) == {1.0, 0.5}  # every time but the last
    for row, u in enumerate(inputs["u"].tolist()):
        assert torch.equal(inputs["z"][row], states[{1.0: 0, 0.5: 1}[u]][row])
    if history != "diffusion_forcing_rollout":
        assert torch.equal(inputs["history"], x0) and inputs["history_t"] is None


@pytest.mark.parametrize("history", ["teacher_forcing", "diffusion_forcing"])
def test_noisy_chunks_are_noised_real_ones_where_the_past_is_real(history):
    _, _, inputs, _, x0, _, _ = parts(history, rows=40)
    eps = (inputs["z"] - (1 - inputs["u"])[:, None, None, None, None] * x0) / inputs["u"][:, None, None, None, None]
    assert abs(float(eps.mean())) < 0.4 and float(eps.std()) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("history", ["diffusion_forcing", "diffusion_forcing_rollout"])
def test_every_past_chunk_is_noised_to_a_time_of_its_own(history):
    _, _, inputs, _, x0, _, _ = parts(history, rows=40)
    t = inputs["history_t"]
    assert t.shape == (40, 2) and len(t.unique()) == 80 and 0 <= float(t.min()) < float(t.max()) <= 1
    eps = (inputs["history"] - (1 - t)[..., None, None, None] * x0) / t[..., None, None, None]
    assert float(eps.std()) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("history", HISTORIES)
def test_what_a_sample_sees_does_not_depend_on_its_batch(history):
    _, distiller, inputs, states, x0, _, _ = parts(history)
    some = torch.tensor([5, 2])
    alone = distiller.inputs(noise_of().for_rows(some), {k: z[some] for k, z in states.items()}, x0[some])
    for name, value in inputs.items():
        assert alone[name] is None if value is None else torch.equal(alone[name], value[some])
    whole = distiller.levels(noise_of(), x0)
    for one, other in zip(distiller.levels(noise_of().for_rows(some), x0[some]), whole, strict=True):
        assert torch.equal(one, other[some])


def test_the_interleaved_forward_predicts_what_the_roll_out_did():
    """At the last time of the grid, x0_hat is the endpoint."""
    student, distiller, inputs, states, x0, tokens, _ = parts("raven")
    last = {**inputs, "z": states[1], "u": torch.full((8,), 0.5)}
    torch.testing.assert_close(distiller.predict(student, last, tokens), x0)


def test_the_critic_learns_the_students_distribution():
    _, distiller, _, _, x0, tokens, noise = parts("raven", rows=512, critic_learning_rate=0.02)
    losses = [distiller.critic_step(x0, tokens, noise) for _ in range(200)]
    flat = x0.flatten(1)
    assert sum(losses[-50:]) < sum(losses[:50])
    torch.testing.assert_close(distiller.critic.mean.detach(), flat.mean(0), atol=0.15, rtol=0)
    torch.testing.assert_close(distiller.critic.covariance().detach(), torch.cov(flat.T), atol=0.25, rtol=0)
    assert torch.equal(distiller.teacher.mean, teacher().mean) and distiller.updates == 200


def one_of_two(rank, folder):
    """One process of two, each with half of eight samples."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    _, distiller, _, _, x0, tokens, noise = parts("raven")
    half = slice(4 * rank, 4 * rank + 4)
    losses = [distiller.critic_step(x0[half], tokens[half], noise.for_rows(noise.rows[half])) for _ in range(2)]
    torch.save((losses, distiller.critic.state_dict()), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_train_the_critic_that_one_would(tmp_path):
    torch.multiprocessing.spawn(one_of_two, (str(tmp_path),), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    _, distiller, _, _, x0, tokens, noise = parts("raven")
    losses = [distiller.critic_step(x0, tokens, noise) for _ in range(2)]
    for theirs, critic in found:
        assert theirs == pytest.approx(losses, rel=1e-4)
        for name, value in distiller.critic.state_dict().items():
            torch.testing.assert_close(critic[name], value, rtol=1e-3, atol=1e-5)


def test_micro_batches_change_a_critics_update_by_rounding_only():
    critics = []
    for size in (None, 3):
        _, distiller, _, _, x0, tokens, noise = parts("raven")
        loss = distiller.critic_step(x0, tokens, noise, size)
        critics.append((loss, distiller.critic.factor.detach()))
    assert critics[0][0] == pytest.approx(critics[1][0], rel=1e-5)
    torch.testing.assert_close(critics[0][1], critics[1][1], rtol=1e-3, atol=1e-5)


def test_chunk_weights_scale_the_chunks_gradient():
    grads = []
    for a in (0.0, -1.0):
        student, distiller, inputs, _, x0, tokens, noise = parts("raven", chunk_weight=a, guidance_scale=2.0)
        loss, _ = distiller.generator_loss(student, inputs, *distiller.levels(noise, x0), tokens)
        loss.sum().backward()
        grads.append(student.bias.grad.clone())
    # Two equal chunks have the weights 2/3 and 4/3.
    torch.testing.assert_close(grads[1], grads[0] * torch.tensor([2 / 3, 4 / 3]))


def test_a_state_that_is_loaded_goes_on_bit_for_bit():
    def go_on(distiller, x0, tokens, noise, n):
        return [distiller.critic_step(x0, tokens, noise) for _ in range(n)]

    _, one, _, _, x0, tokens, noise = parts("raven")
    go_on(one, x0, tokens, noise, 2)
    other = parts("raven")[1]
    other.load_state_dict(deepcopy(one.state_dict()))
    assert go_on(one, x0, tokens, noise, 3) == go_on(other, x0, tokens, noise, 3)
    assert torch.equal(one.critic.factor, other.critic.factor)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"history": "none"}, "history = 'none' is unknown.*raven"),
        ({"noise_range": (0.5, 0.2)}, r"noise_range = \[0.5, 0.2\]"),
        ({"critic_steps": 0}, "critic_steps = 0"),
        ({"critic_learning_rate": 0.0}, "critic_learning_rate = 0.0"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DistillationSettings(**settings)


def test_missing_real_videos_and_states_are_named():
    recipe = DistilRecipe(1, settings=DistillationSettings("teacher_forcing"))
    with pytest.raises(ValueError, match="'teacher_forcing' needs real videos"):
        distil_student(CausalVideo(TWO.t), teacher(), TOKENS, PATH, TWO, recipe, shape=SHAPE)
    with pytest.raises(ValueError, match="shape"):
        distil_student(CausalVideo(TWO.t), teacher(), TOKENS, PATH, TWO, DistilRecipe(1))
    _, distiller, _, states, x0, _, noise = parts("raven")
    with pytest.raises(ValueError, match=r"states of 1 of 2 steps.*Consistency"):
        distiller.inputs(noise, {0: states[0]}, x0)


def test_students_of_real_videos_are_distilled_from_them():
    real = torch.randn(30, *SHAPE, generator=torch.Generator().manual_seed(0))
    recipe = DistilRecipe(3, settings=DistillationSettings("diffusion_forcing"))
    student = CausalVideo(TWO.t)
    losses = distil_student(student, teacher(), TOKENS.expand(30, 1), PATH, TWO, recipe, progress=False, real=real)
    assert len(losses) == 3 and student.scale.grad is not None


def video_network(seed=0):
    """A small causal transformer whose last layer does something."""
    from genrl.generators.recipe import seeded
    from genrl.networks.causal_video import CausalVideoDiT

    with seeded(seed):
        network = CausalVideoDiT(size=8, frames_per_chunk=2, chunks=3, dim=16, depth=2, heads=2, vocabulary=9)
        for p in network.parameters():
            torch.nn.init.normal_(p, std=0.15)
    return network


def test_the_roll_out_is_that_of_the_chunk_sampler_and_one_forward_repeats_its_steps():
    from genrl.diffusion import Consistency
    from genrl.diffusion.chunks import ChunkSampler

    network, four = video_network(), Schedule.uniform(4, 2.0)
    noise, tokens = noise_of(5), torch.arange(1, 6)[:, None]
    x1 = noise.initial((5, 6, 1, 8, 8))
    states, x0 = self_rollout(network, x1, tokens, PATH, four, noise)
    trajectory = ChunkSampler(Consistency(), four, "all", PATH, lambda: network).rollout(None, x1, tokens, noise)
    torch.testing.assert_close(x0, trajectory.x0, atol=1e-5, rtol=1e-4)
    assert (x0 - x1).abs().max() > 0.1
    for k in range(4):
        torch.testing.assert_close(states[k], trajectory.states[k], atol=1e-5, rtol=1e-4)
    u = four.t[3].expand(5)
    v = network(states[3], u, tokens, history=x0)
    torch.testing.assert_close(PATH.x0_eps(states[3], v, u)[0], x0, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("history", "learns"), [("raven", True), ("self_forcing", False)])
def test_keys_and_values_of_the_past_learn_from_the_last_chunk_under_raven_only(history, learns):
    """The past of the last chunk reaches it through keys and values alone, so that a gradient to it is theirs."""
    network, distiller = video_network(), parts(history)[1]
    noise = noise_of(4)
    past = noise(1, (4, 6, 1, 8, 8)).requires_grad_()
    z, u = noise(2, (4, 6, 1, 8, 8)), torch.full((4,), 0.5)
    inputs = {"z": z, "u": u, "history": past, "history_t": None}
    last = distiller.predict(network, inputs, torch.ones(4, 1, dtype=torch.long))[:, -2:]
    (gradient,) = torch.autograd.grad(last.sum(), past, allow_unused=True)
    found = 0.0 if gradient is None else gradient.flatten(3).abs().sum((0, 2, 3))
    assert bool((torch.as_tensor(found)[:4] > 0).all()) if learns else not torch.as_tensor(found).any()
