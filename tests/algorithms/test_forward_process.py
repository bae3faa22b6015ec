"""DiffusionNFT's update, against its loss written by hand."""

import pytest
import torch
import toy

from genrl.algorithms import ForwardProcess
from genrl.algorithms.forward_process import _DRAWS, _TIMES
from genrl.diffusion import RowNoise
from genrl.objectives import Advantages

STEPS, PROMPTS, GROUP, RATE = 4, 4, 4, 1e-4


class Fixed:
    """Advantages that are given, [P, G]."""

    def __init__(self, values):
        self.values = values

    def __call__(self, rewards, weights=None, prompt_ids=None):
        return Advantages(self.values, {"advantage/zero_std_groups": 0.0, "advantage/nan_share": 0.0})

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


SPREAD = torch.linspace(-4, 6, PROMPTS * GROUP).reshape(PROMPTS, GROUP)  # also beyond A_max = 5


def started(move=0.0):
    generator = toy.ToyGenerator()
    with torch.no_grad():
        generator.module.second.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
        generator.weights = toy.TrainableWeights(generator.module)
        generator.module.second.add_(move)
    return generator


def run(run_dir, algorithm, generator=None, iterations=1, rate=RATE, **changes):
    """Run, and keep roll-outs and the gradient of every update."""
    rollouts, gradients = [], []
    loop = toy.make_loop(
        run_dir, algorithm, generator=started() if generator is None else generator,
        trainer={"iterations": iterations, "learning_rate": rate, "checkpoint_every": 0}, **changes,
    )  # fmt: skip
    rollout, step = algorithm.rollout, loop.updater.step

    def keep_rollout(*arguments):
        rollouts.append(rollout(*arguments))
        return rollouts[-1]

    def keep_gradients():
        gradients.append(torch.cat([p.grad.flatten().clone() for p in loop.updater.parameters]))
        return step()

    algorithm.rollout, loop.updater.step = keep_rollout, keep_gradients
    loop.run(resume="never")
    return loop, rollouts, gradients


def by_hand(rollout, form, beta, draws, kl_weight, t_min=0.0, t_max=1.0, move=0.0):
    """Gradient of the loss of arXiv 2509.16117 at v = v_old, averaged over samples and draws."""
    generator, old = started(move), started(move)
    noise = RowNoise.of((0, "rollout", 0), rollout.rows)
    r = (SPREAD.flatten()[rollout.rows] / 10 + 0.5).clamp(0, 1)
    x0, loss = rollout.x0, 0.0
    for draw in range(draws):
        t = t_min + (t_max - t_min) * noise.uniform(_TIMES + draw, (len(x0), 1))[:, 0]
        eps = noise(_DRAWS + draw, tuple(x0.shape))
        tt = t[:, None, None, None]
        x_t = (1 - tt) * x0 + tt * eps
        v = generator.velocity(x_t, t, rollout.cond)
        with torch.no_grad():
            v_old = old.velocity(x_t, t, rollout.cond)
        plus, minus = beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v
        if form == "velocity":
            target = eps - x0
            good, bad = ((u - target).pow(2).mean((1, 2, 3)) for u in (plus, minus))
        else:
            good, bad = (
                (e.pow(2).mean((1, 2, 3)) / e.detach().abs().mean((1, 2, 3)).clamp(min=1e-5)) / beta
                for e in (x_t - tt * plus - x0, x_t - tt * minus - x0)
            )
        sample_loss = r * good + (1 - r) * bad
        if kl_weight:
            with torch.no_grad(), old.reference():
                v_ref = old.velocity(x_t, t, rollout.cond)
            sample_loss = sample_loss + kl_weight * (v - v_ref).pow(2).mean((1, 2, 3))
        loss = loss + sample_loss.mean() / draws
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in generator.trainable()])
    optimizer = torch.optim.AdamW(generator.trainable(), RATE, weight_decay=1e-4)
    torch.nn.utils.clip_grad_norm_(generator.trainable(), 1.0)
    optimizer.step()
    return gradient, toy.weights_of(generator)


@pytest.mark.parametrize("micro_batch", [None, 1, 3])
@pytest.mark.parametrize("form", ["x0", "velocity"])
@pytest.mark.parametrize("beta, draws, kl_weight, move", [(1.0, 2, 0.0, 0.0), (0.3, 3, 0.0, 0.0), (0.5, 1, 0.7, 0.05)])
def test_one_update_is_the_published_loss(tmp_path, form, beta, draws, kl_weight, move, micro_batch):
    algorithm = ForwardProcess(
        steps=STEPS, advantage=Fixed(SPREAD), form=form, beta=beta, draws=draws, kl_weight=kl_weight,
        micro_batch=micro_batch, minibatches=1, t_min=0.1,
    )  # fmt: skip
    loop, rollouts, gradients = run(tmp_path, algorithm, started(move))
    gradient, weights = by_hand(rollouts[0], form, beta, draws, kl_weight, t_min=0.1, move=move)
    torch.testing.assert_close(gradients[0], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))
    torch.testing.assert_close(toy.weights(loop), weights, rtol=0, atol=2e-6)
    assert float((weights - toy.weights_of(started(move))).abs().max()) > 50e-6


@pytest.mark.parametrize("form", ["x0", "velocity"])
def test_neutral_samples_push_nowhere(tmp_path, form):
    """r = 1/2 pulls toward a sample as much as it pushes away: no gradient at v = v_old, hence no change at all."""
    algorithm = ForwardProcess(steps=STEPS, advantage=Fixed(torch.zeros(PROMPTS, GROUP)), form=form, inner_epochs=2)
    loop, _, gradients = run(tmp_path, algorithm, iterations=2)
    _, _, pushed = run(tmp_path / "pushed", ForwardProcess(steps=STEPS, advantage=Fixed(SPREAD), form=form))
    assert max(float(g.norm()) for g in gradients) < 1e-5 * float(pushed[0].norm())
    if form == "x0":
        assert all(float(g.norm()) == 0 for g in gradients)
        assert torch.equal(toy.weights(loop), toy.weights_of(started()))


def test_good_and_bad_samples_push_in_opposite_directions(tmp_path):
    found = []
    for sign in (1, -1):
        values = torch.full((PROMPTS, GROUP), 2.0 * sign)
        _, _, gradients = run(
            tmp_path / str(sign), ForwardProcess(steps=STEPS, advantage=Fixed(values), form="velocity", minibatches=1)
        )
        found.append(gradients[0])
    torch.testing.assert_close(found[0], -found[1], rtol=1e-3, atol=1e-6)


def test_the_reference_term_is_zero_at_the_start_and_pulls_back_from_elsewhere(tmp_path):
    neutral = Fixed(torch.zeros(PROMPTS, GROUP))
    algorithm = ForwardProcess(steps=STEPS, advantage=neutral, kl_weight=1.0)
    loop, _, _ = run(tmp_path / "at", algorithm, iterations=2)
    assert [r["kl/velocity_reference"] for r in toy.rows(tmp_path / "at", "train")] == [0, 0]
    assert torch.equal(toy.weights(loop), toy.weights_of(started()))
    loop, _, _ = run(tmp_path / "away", algorithm, started(0.1), iterations=20, rate=5e-3)
    distance = [r["kl/velocity_reference"] for r in toy.rows(tmp_path / "away", "train")]
    assert distance[-1] < 0.3 * distance[0]


def test_the_old_policy_is_an_average_that_samples_and_anchors(tmp_path):
    """With decay 0.5 it goes half way to the weights after every iteration."""
    algorithm = ForwardProcess(steps=STEPS, advantage=Fixed(SPREAD), old_decay=0.5)
    path = [toy.weights_of(started())]
    original = algorithm.after_update
    seen = []

    def after():
        original()
        path.append(toy.weights(loop).clone())
        seen.append(torch.cat([v.flatten() for v in algorithm._old.values]))

    algorithm.after_update = after
    loop = toy.make_loop(tmp_path, algorithm, generator=started(), trainer={"iterations": 3, "checkpoint_every": 0})
    loop.run()
    expected = path[0]
    for live, old in zip(path[1:], seen, strict=True):
        expected = 0.5 * expected + 0.5 * live
        torch.testing.assert_close(old, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(seen[-1], path[-1], atol=1e-4)


def test_draws_do_not_depend_on_the_split_into_micro_batches_or_rollout_batches(tmp_path):
    runs = []
    for n, (rollout_batch, micro) in enumerate([(None, None), (5, 3)]):
        algorithm = ForwardProcess(steps=STEPS, micro_batch=micro)
        loop = toy.make_loop(
            tmp_path / str(n), algorithm, generator=started(),
            trainer={"iterations": 2, "rollout_batch": rollout_batch, "learning_rate": RATE},
        )  # fmt: skip
        loop.run()
        runs.append(toy.weights(loop))
    torch.testing.assert_close(*runs, rtol=0, atol=2e-6)


def test_optimality_and_the_share_at_its_clip_are_logged(tmp_path):
    run(tmp_path, ForwardProcess(steps=STEPS, advantage=Fixed(SPREAD), minibatches=1))
    row = toy.rows(tmp_path, "train")[0]
    r = (SPREAD / 10 + 0.5).clamp(0, 1)
    assert row["nft/optimality"] == pytest.approx(float(r.mean()), abs=1e-6)
    assert row["nft/at_clip"] == pytest.approx(float((SPREAD >= 5).float().mean()))
    assert row["nft/velocity_change"] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"t_min": 0.5, "t_max": 0.5}, "t_min = 0.5 and t_max = 0.5"),
        ({"old_decay": 1.0}, "old_decay = 1.0"),
        ({"beta": 0.0}, "beta = 0.0"),
        ({"draws": 0}, "draws = 0"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ForwardProcess(**arguments)
