"""The policy-gradient update, against a policy gradient written by hand."""

import math
from dataclasses import replace

import pytest
import torch
import toy

from genrl.algorithms import PolicyGradient
from genrl.diffusion import CPS, DDIM, AllSteps, FixedWindow, FlowSDE
from genrl.objectives import FlowDPPO, Guard, PPOClip, Reinforce
from genrl.training.errors import TrainingError
from genrl.training.logging import Meter
from genrl.training.processes import Copies
from genrl.training.updater import Updater

STEPS, PROMPTS, GROUP, RATE = 6, 4, 4, 1e-4
TRAINER = {"iterations": 1, "learning_rate": RATE, "checkpoint_every": 0}


def started(seed=1, **changes):
    """A generator whose network is past its zero start, so that every weight has a gradient."""
    generator = toy.ToyGenerator(**changes)
    with torch.no_grad():
        generator.module.second.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    generator.weights = toy.TrainableWeights(generator.module)  # the reference starts here, too
    return generator


class Recorded:
    """A run whose roll-outs and gradients are kept."""

    def __init__(self, run_dir, algorithm, generator=None, **changes):
        self.rollouts, self.gradients = [], []
        settings = {**TRAINER, **changes.pop("trainer", {})}
        self.loop = toy.make_loop(
            run_dir, algorithm, generator=started() if generator is None else generator, trainer=settings, **changes
        )
        rollout, step = algorithm.rollout, self.loop.updater.step

        def keep_rollout(*arguments):
            self.rollouts.append(rollout(*arguments))
            return self.rollouts[-1]

        def keep_gradients():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.loop.updater.parameters]
            self.gradients.append(torch.cat([g.flatten() for g in grads]))
            return step()

        algorithm.rollout, self.loop.updater.step = keep_rollout, keep_gradients
        try:
            self.loop.run(resume="never")
        finally:
            del algorithm.rollout
        self.weights = toy.weights(self.loop)
        self.metrics = toy.rows(run_dir, "train")


def flow_sde(x, v, t, t_next, eta=0.7):
    """Mean and standard deviation as in Flow-GRPO (eq. 9 and official code, which replaces sigma at t = 1)."""
    sigma = eta * math.sqrt(t / (1 - (t if t < 1 else t_next)))
    dt = t_next - t
    mean = x + (v + sigma**2 / (2 * t) * (x + (1 - t) * v)) * dt
    return mean, sigma * math.sqrt(-dt)


def cps(x, v, t, t_next, eta=0.8):
    """Coefficients-preserving sampling (arXiv 2509.05952)."""
    x0, eps = x - t * v, x + (1 - t) * v
    return (1 - t_next) * x0 + t_next * math.cos(eta * math.pi / 2) * eps, t_next * math.sin(eta * math.pi / 2)


PUBLISHED = {"flow_sde": (FlowSDE(0.7), flow_sde), "cps": (CPS(0.8), cps)}


def policy_gradient_by_hand(rollout, transition, steps=range(STEPS - 1)):
    """d/d theta of the mean over samples and steps of -A log pi / D, and the weights after one AdamW step."""
    generator = started()
    half = torch.tensor([int(w) % 2 for w in rollout.cond["words"]])
    image = torch.sigmoid(rollout.x0)[:, 0]
    reward = torch.where(half == 0, image[:, :, :2].mean((1, 2)), image[:, :, 2:].mean((1, 2))).double()
    place = rollout.rows.argsort()  # rows are p G + g
    table = reward[place].reshape(PROMPTS, GROUP)
    table = (table - table.mean(1, keepdim=True)) / (table.std(1, keepdim=True, correction=0) + 1e-4)
    advantage = table.flatten()[rollout.rows].float()
    grid = [1 - k / STEPS for k in range(STEPS + 1)]
    loss = 0.0
    for k in steps:
        x, drawn = rollout.trajectory.states[k], rollout.trajectory.states[k + 1]
        v = generator.velocity(x, torch.full((len(x),), grid[k]), rollout.cond)
        mean, std = transition(x, v, grid[k], grid[k + 1])
        log_prob = torch.distributions.Normal(mean, std).log_prob(drawn).flatten(1).mean(1)
        loss = loss - (advantage * log_prob).mean() / len(steps)
    loss.backward()
    optimizer = torch.optim.AdamW(generator.trainable(), RATE, weight_decay=1e-4)
    gradient = torch.cat([p.grad.flatten() for p in generator.trainable()])
    torch.nn.utils.clip_grad_norm_(generator.trainable(), 1.0)
    optimizer.step()
    return gradient, torch.cat([p.detach().flatten() for p in generator.trainable()])


@pytest.mark.parametrize("steps_per_forward", [1, 2, 5])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
@pytest.mark.parametrize("kernel", PUBLISHED)
def test_one_on_policy_update_is_the_policy_gradient(tmp_path, kernel, micro_batch, steps_per_forward):
    made, transition = PUBLISHED[kernel]
    algorithm = PolicyGradient(
        made, steps=STEPS, minibatches=1, micro_batch=micro_batch, steps_per_forward=steps_per_forward
    )
    run = Recorded(tmp_path, algorithm)
    gradient, weights = policy_gradient_by_hand(run.rollouts[0], transition)
    assert len(run.gradients) == 1
    torch.testing.assert_close(run.gradients[0], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))
    torch.testing.assert_close(run.weights, weights, rtol=0, atol=1e-6)
    assert float((weights - toy.weights_of(started())).abs().max()) > 50e-6  # the comparison has something to see
    assert run.metrics[0]["ratio/first_step_gap"] == 0 and run.metrics[0]["ratio/mean"] == 1


@pytest.mark.parametrize("surrogate", [PPOClip(), Reinforce(), FlowDPPO()], ids=lambda s: type(s).__name__)
def test_every_surrogate_starts_as_the_policy_gradient(tmp_path, surrogate):
    run = Recorded(tmp_path, PolicyGradient(steps=STEPS, minibatches=1, surrogate=surrogate))
    gradient, _ = policy_gradient_by_hand(run.rollouts[0], flow_sde)
    torch.testing.assert_close(run.gradients[0], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))


def test_the_sum_reduction_is_the_mean_times_the_number_of_elements(tmp_path):
    runs = [
        Recorded(tmp_path / reduction, PolicyGradient(steps=STEPS, minibatches=1, reduction=reduction))
        for reduction in ("mean", "sum")
    ]
    torch.testing.assert_close(16 * runs[0].gradients[0], runs[1].gradients[0])


def test_ratios_are_exactly_one_for_unchanged_weights_whatever_the_batches(tmp_path):
    for n, (rollout_batch, micro) in enumerate([(None, None), (5, 3), (16, 1), (3, 8)]):
        algorithm = PolicyGradient(steps=STEPS, minibatches=1, micro_batch=micro, steps_per_forward=2)
        run = Recorded(tmp_path / str(n), algorithm, trainer={"rollout_batch": rollout_batch})
        gaps = {k: v for k, v in run.metrics[0].items() if k.endswith("/first_step_gap")}
        assert set(gaps) == {f"step_{k}/first_step_gap" for k in range(STEPS - 1)} | {"ratio/first_step_gap"}
        assert set(gaps.values()) == {0}


# ---------------------------------------------------------------------------------------------------- windows


def test_only_the_window_is_trained_and_only_it_is_stored(tmp_path):
    results = {}
    for start in (0, 2):
        algorithm = PolicyGradient(steps=STEPS, minibatches=1, window=FixedWindow(start, 2))
        run = Recorded(tmp_path / str(start), algorithm)
        steps = [start, start + 1]
        assert sorted(run.rollouts[0].trajectory.means) == steps
        assert {k.split("/")[0] for k in run.metrics[0] if k.startswith("step_")} == {f"step_{k}" for k in steps}
        gradient, weights = policy_gradient_by_hand(run.rollouts[0], flow_sde, steps)
        torch.testing.assert_close(run.weights, weights, rtol=0, atol=1e-6)
        results[start] = gradient
    assert torch.cosine_similarity(results[0], results[2], dim=0) < 0.9


def test_a_fraction_of_the_steps_is_drawn_anew_each_iteration(tmp_path):
    algorithm = PolicyGradient(steps=STEPS, minibatches=1, step_fraction=0.4)
    run = Recorded(tmp_path, algorithm, trainer={"iterations": 6})
    trained = [tuple(sorted(k for k in row if k.endswith("/t"))) for row in run.metrics]
    assert {len(t) for t in trained} == {2} and len(set(trained)) > 2
    for rollout, steps in zip(run.rollouts, trained, strict=True):  # of the others no latents are kept
        assert [f"step_{k}/t" for k in rollout.trajectory.means] == list(steps)
        assert set(rollout.trajectory.states) == {j for k in rollout.trajectory.means for j in (k, k + 1)}


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_common_prefix_run_once_gives_the_update_of_running_it_for_every_sample(tmp_path, micro_batch):
    runs = []
    for share in (False, True):
        algorithm = PolicyGradient(
            steps=STEPS, window=FixedWindow(2, 2), group_noise=True, share_prefix=share, micro_batch=micro_batch
        )
        runs.append(Recorded(tmp_path / str(share), algorithm, trainer={"iterations": 2}))
    for one, other in zip(*(r.rollouts for r in runs), strict=True):
        torch.testing.assert_close(one.x0, other.x0, rtol=0, atol=1e-6)
        for k in one.trajectory.states:
            torch.testing.assert_close(one.trajectory.states[k], other.trajectory.states[k], rtol=0, atol=1e-6)
    torch.testing.assert_close(runs[0].weights, runs[1].weights, rtol=0, atol=1e-6)
    costs = [r.metrics[-1]["cost/forward_equivalents"] for r in runs]
    # Two ODE steps of 16 samples become those of 4 groups, in each of two iterations.
    assert costs[0] - costs[1] == 2 * 2 * (PROMPTS * GROUP - PROMPTS)


def test_group_noise_starts_a_group_from_one_point_and_groups_from_different_ones(tmp_path):
    for shared in (False, True):
        algorithm = PolicyGradient(steps=STEPS, group_noise=shared)
        run = Recorded(tmp_path / str(shared), algorithm)
        rollout = run.rollouts[0]
        starts = rollout.trajectory.states[0].flatten(1)[rollout.rows.argsort()].reshape(PROMPTS, GROUP, -1)
        assert all(len(group.unique(dim=0)) == (1 if shared else GROUP) for group in starts)
        assert len(starts[:, 0].unique(dim=0)) == PROMPTS


def test_a_shared_prefix_without_shared_noise_is_refused():
    with pytest.raises(ValueError, match="share_prefix = true needs group_noise = true"):
        PolicyGradient(share_prefix=True)


def test_a_kernel_without_density_is_refused(tmp_path):
    for kernel in (FlowSDE(0.0), CPS(0.0), DDIM(0.0)):
        with pytest.raises(ValueError, match="no step with a density"):
            Recorded(tmp_path, PolicyGradient(kernel, steps=4))
    with pytest.raises(ValueError, match=r"window of 9 steps .* 5 steps"):
        Recorded(tmp_path, PolicyGradient(steps=STEPS, window=FixedWindow(0, 9)))


# ------------------------------------------------------------------------------------------------ best and worst


def test_leaving_samples_out_equals_giving_them_the_weight_zero(tmp_path, monkeypatch):
    runs = []
    for drop in (True, False):
        algorithm = PolicyGradient(steps=STEPS, keep_per_group=1, micro_batch=3)
        if not drop:
            monkeypatch.setattr(Updater, "_without_left_out", lambda self, rows: (rows, len(rows)))
        runs.append(Recorded(tmp_path / str(drop), algorithm))
    torch.testing.assert_close(runs[0].weights, runs[1].weights, rtol=0, atol=1e-6)
    # Half of the samples are left out, and cost no forward and backward.
    costs = [r.metrics[0]["cost/forward_equivalents"] for r in runs]
    assert costs == [16 * STEPS + 3 * 8 * (STEPS - 1), 16 * STEPS + 3 * 16 * (STEPS - 1)]


def test_only_the_best_and_the_worst_of_a_group_are_trained_on(tmp_path):
    algorithm = PolicyGradient(steps=STEPS, keep_per_group=1, minibatches=1)
    run = Recorded(tmp_path / "kept", algorithm)
    everything = Recorded(tmp_path / "all", PolicyGradient(steps=STEPS, minibatches=1))
    assert torch.equal(run.rollouts[0].x0, everything.rollouts[0].x0)
    assert torch.cosine_similarity(run.gradients[0], everything.gradients[0], dim=0) > 0.3
    assert not torch.allclose(run.gradients[0], everything.gradients[0], rtol=0.05)


# ------------------------------------------------------------------------------------------------- regularisers


class Flat(toy.HalfBrightness):
    def __call__(self, media, prompts, metadata):
        return torch.full((len(media),), 0.5)


@pytest.mark.parametrize("form", ["exact", "flow_grpo"])
def test_kl_to_the_start_is_zero_there_and_pulls_back_from_elsewhere(tmp_path, form):
    algorithm = PolicyGradient(steps=STEPS, minibatches=1, kl_weight=1.0, kl_form=form)
    run = Recorded(tmp_path / "at", algorithm, trainer={"iterations": 3})
    kl = [row["kl/reference"] for row in run.metrics]
    assert kl[0] == 0 < kl[1] < kl[2]

    generator = started()
    there = toy.weights_of(generator)
    with torch.no_grad():
        generator.module.second.add_(0.1)
    away = float((toy.weights_of(generator) - there).norm())
    settings = {"iterations": 20, "learning_rate": 5e-3}
    run = Recorded(tmp_path / "away", algorithm, generator, reward=Flat(), trainer=settings)
    kl = [row["kl/reference"] for row in run.metrics]
    assert kl[-1] < 0.3 * kl[0]
    assert float((run.weights - there).norm()) < away


def test_inner_epochs_reuse_the_samples_with_ratios_that_move_away_from_one(tmp_path):
    algorithm = PolicyGradient(steps=STEPS, minibatches=2, inner_epochs=2)
    run = Recorded(tmp_path, algorithm, trainer={"learning_rate": 1e-3})
    assert len(run.gradients) == 4 and len(run.rollouts) == 1 and run.loop.updater.updates == 4
    assert run.metrics[0]["ratio/first_step_gap"] == 0
    assert run.metrics[0]["step_0/log_ratio_std"] > 0
    # Against the weights of the roll-out, not of the epoch: the same samples again are further away.
    assert not torch.allclose(run.gradients[0], run.gradients[2], rtol=1e-3)
    sizes = run.metrics[0]["cost/forward_equivalents"]
    assert sizes == 16 * (STEPS + 3 * 2 * (STEPS - 1))


def test_a_surrogate_without_ratio_refuses_a_second_update_on_the_same_samples():
    with pytest.raises(ValueError, match=r"Reinforce .*minibatches = 2.*inner_epochs = 1.*minibatches: 1"):
        PolicyGradient(surrogate=Reinforce(), minibatches=2)
    with pytest.raises(ValueError, match="one update"):
        PolicyGradient(surrogate=Reinforce(), minibatches=1, inner_epochs=2)
    PolicyGradient(surrogate=Reinforce(), minibatches=1)


# ------------------------------------------------------------------------------------------------ numerical noise


def noisy():
    """The velocity depends on the number of rows by 1e-2: roll-out and update disagree."""
    return started(batch_noise=1e-3)


def test_a_clip_range_under_the_numerical_noise_is_refused_with_both_numbers(tmp_path):
    algorithm = PolicyGradient(steps=STEPS, surrogate=PPOClip(clip_range=1e-4))
    with pytest.raises(TrainingError, match=r"clip range is \+-0.0001, .* by up to 0\.0\d+.*recompute") as error:
        Recorded(tmp_path, algorithm, noisy())
    assert "allow_small_clip" in str(error.value)


@pytest.mark.parametrize("keep", [None, 1])
def test_anchors_recomputed_in_the_batches_of_the_update_have_no_gap(tmp_path, keep):
    algorithm = PolicyGradient(
        steps=STEPS, surrogate=PPOClip(clip_range=1e-4), anchor="recompute", micro_batch=3, keep_per_group=keep
    )
    run = Recorded(tmp_path, algorithm, noisy())
    assert run.metrics[0]["ratio/first_step_gap"] == 0


def test_a_small_clip_range_can_be_allowed_and_the_gap_is_logged_by_step(tmp_path):
    algorithm = PolicyGradient(steps=STEPS, surrogate=PPOClip(clip_range=1e-4))
    run = Recorded(tmp_path, algorithm, noisy(), trainer={"allow_small_clip": True})
    gaps = [run.metrics[0][f"step_{k}/first_step_gap"] for k in range(STEPS - 1)]
    assert min(gaps) > 1e-4 and max(gaps) == run.metrics[0]["ratio/first_step_gap"]


def test_a_wide_clip_range_is_not_refused(tmp_path):
    run = Recorded(tmp_path, PolicyGradient(steps=STEPS, surrogate=PPOClip(clip_range=0.9)), noisy())
    assert 0 < run.metrics[0]["ratio/first_step_gap"] < 0.9


def test_guards_clip_range_is_compared_in_units_of_the_log_ratio(tmp_path):
    """RatioNorm multiplies the log-ratio by s, so the same number clips s times later."""
    algorithm = PolicyGradient(steps=STEPS, window=AllSteps(), surrogate=Guard(clip_range=1e-4))
    with pytest.raises(TrainingError, match=r"clip range is \+-0.0001\d"):
        Recorded(tmp_path, algorithm, noisy())


def test_memory_does_not_grow_with_the_number_of_trained_steps():
    """Tensors that autograd keeps at once: those of one unit, for any number of units."""
    kept = {}
    for steps in (4, 16):
        algorithm = PolicyGradient(steps=steps, minibatches=1)
        generator = started()
        loop = toy.make_loop("unused", algorithm, generator=generator)
        loop.setup()
        algorithm.configure(generator)
        batch, _ = loop.collector.batch(loop.layout.local(), [0, 1, 2, 3], 0)
        rollout = algorithm.rollout(generator.velocity, generator, batch)
        rollout = replace(rollout, advantage=torch.ones(16), weight=torch.ones(16))
        loop.updater.accelerator, loop.updater.layout = loop.accelerator, loop.layout
        loop.updater.sharing = Copies(loop.accelerator, loop.trainer)
        loop.generator.module = loop.accelerator.prepare(generator.module)
        alive = peak = 0

        class Kept:
            def __init__(self, tensor):
                nonlocal alive, peak
                self.tensor = tensor
                alive += 1
                peak = max(peak, alive)

            def __del__(self):
                nonlocal alive
                alive -= 1

        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda k: k.tensor):
            loop.updater.accumulate(rollout, len(rollout), algorithm.units(rollout, batch), Meter(), Meter())
        kept[steps] = peak
    assert kept[4] == kept[16] > 0
