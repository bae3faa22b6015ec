"""Homing, its controls and online DPO in the loop, against gradients written by hand."""

import itertools
from dataclasses import replace

import pytest
import torch
import toy
from test_forward_process import GROUP, PROMPTS, STEPS, Fixed, run, started

from genrl.algorithms import AdvantageWeightedMatching, Homing, OnlineDPO, PositivesOnly, Rollout
from genrl.algorithms.base import Batch
from genrl.algorithms.noised_samples import DRAWS, TIMES
from genrl.diffusion import RowNoise
from genrl.objectives import nft_loss
from genrl.objectives.preference import dpo_loss, matching_error

SPREAD = (1.5 * torch.randn(PROMPTS, GROUP, generator=torch.Generator().manual_seed(3))).exp()  # few good, many bad
SPREAD = SPREAD - SPREAD.mean(1, keepdim=True)


def velocities(rollout, rows, draw, t_min=0.0, shared=False, generator=None):
    """(t, eps, x_t, v) of one draw, as any reader would compute them."""
    generator = started() if generator is None else generator
    key, numbers = ((0, "rollout", 0, "group"), rows // GROUP) if shared else ((0, "rollout", 0), rows)
    noise = RowNoise.of(key, numbers)
    t = t_min + (1 - t_min) * noise.uniform(TIMES + draw, (len(rows), 1))[:, 0]
    eps = noise(DRAWS + draw, (len(rows), *toy.SHAPE))
    place = {int(row): i for i, row in enumerate(rollout.rows)}
    chosen = rollout.select(torch.tensor([place[int(row)] for row in rows]))
    tt = t[:, None, None, None]
    x_t = (1 - tt) * chosen.x0 + tt * eps
    return chosen, t, eps, x_t, generator.velocity(x_t, t, chosen.cond), generator


def gradient_of(loss, generator):
    loss.backward()
    return torch.cat([p.grad.flatten() for p in generator.trainable()])


def assert_gradient(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


# ---------------------------------------------------------------------------------------------------- homing


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("space, strength, weighting", [("x0", 1.0, "one"), ("velocity", 0.6, "advantage")])
def test_one_update_of_homing_is_the_loss_of_matched_pairs(tmp_path, space, strength, weighting, micro_batch):
    algorithm = Homing(
        steps=STEPS, advantage=Fixed(SPREAD), space=space, strength=strength, weighting=weighting, kl_weight=0.0,
        draws=1, micro_batch=micro_batch, negative_weight=0.7,
    )  # fmt: skip
    _, rollouts, gradients = run(tmp_path, algorithm)
    rollout = rollouts[0]
    used, target = [], {}
    for p in range(PROMPTS):
        values = SPREAD[p]
        positives = [g for g in range(GROUP) if values[g] > 0]
        negatives = sorted((g for g in range(GROUP) if values[g] < 0), key=lambda g: float(values[g]))[: len(positives)]
        used += [p * GROUP + g for g in [*positives, *negatives]]
        x0 = {int(row): x for row, x in zip(rollout.rows, rollout.x0, strict=True)}
        best, cheapest = None, float("inf")
        for chosen in itertools.permutations(positives, len(negatives)):
            cost = sum(
                float((x0[p * GROUP + n] - x0[p * GROUP + q]).square().sum())
                for n, q in zip(negatives, chosen, strict=True)
            )
            if cost < cheapest:
                best, cheapest = chosen, cost
        target |= {p * GROUP + g: x0[p * GROUP + g] for g in positives}
        target |= {p * GROUP + n: x0[p * GROUP + q] for n, q in zip(negatives, best, strict=True)}
    rows = torch.tensor(sorted(used))
    chosen, t, eps, x_t, v, generator = velocities(rollout, rows, 0)
    goal, tt = torch.stack([target[int(row)] for row in rows]), t[:, None, None, None]
    advantage = SPREAD.flatten()[rows]
    if space == "x0":
        error = x_t - tt * v - (chosen.x0 + strength * (goal - chosen.x0))
    else:
        error = v - (eps - chosen.x0 + strength * (chosen.x0 - goal) / tt.clamp(min=0.05))
    weight = torch.where(advantage > 0, 1.0, 0.7) * (advantage.abs() if weighting == "advantage" else 1.0)
    loss = (weight * error.square().mean((1, 2, 3))).mean()
    assert_gradient(gradients[0], gradient_of(loss, generator))
    assert len(rows) < PROMPTS * GROUP  # some negatives were surplus


def test_unused_samples_cost_nothing_and_teach_nothing(tmp_path):
    """Within the dead band nothing is evaluated; a group of equal rewards does nothing at all."""
    flat = torch.full((PROMPTS, GROUP), 0.05)
    flat[:, 0] = -0.05
    loop = toy.make_loop(
        tmp_path, Homing(steps=STEPS, advantage=Fixed(flat), dead_band=0.1), generator=started(),
        trainer={"iterations": 1, "checkpoint_every": 0},
    )  # fmt: skip
    before = toy.weights(loop).clone()
    assert loop.run().forward_equivalents == PROMPTS * GROUP * STEPS  # of the sampler alone
    assert torch.equal(toy.weights(loop), before)


def test_strength_zero_is_flow_matching_on_the_samples_that_are_used(tmp_path):
    algorithm = Homing(
        steps=STEPS, advantage=Fixed(SPREAD), space="velocity", strength=0.0, kl_weight=0, draws=1, surplus="replicate"
    )
    _, rollouts, gradients = run(tmp_path, algorithm)
    _, _, eps, _, v, generator = velocities(rollouts[0], rows := torch.arange(PROMPTS * GROUP), 0)
    x0 = torch.stack([rollouts[0].x0[int((rollouts[0].rows == row).nonzero())] for row in rows])
    assert_gradient(gradients[0], gradient_of((v - (eps - x0)).square().mean(), generator))


def test_homing_without_its_negatives_is_positives_only(tmp_path):
    """Up to the mean, which is over the samples that are used."""
    common = {"steps": STEPS, "advantage": Fixed(SPREAD), "draws": 2, "kl_weight": 0.0}
    _, _, homing = run(tmp_path / "homing", Homing(negative_weight=0.0, surplus="replicate", **common))
    _, rollouts, positives = run(tmp_path / "positives", PositivesOnly(**common))
    share = float((SPREAD > 0).float().mean())
    torch.testing.assert_close(homing[0], share * positives[0], rtol=1e-4, atol=1e-6)
    rows = torch.arange(PROMPTS * GROUP)[SPREAD.flatten() > 0]
    loss, generator = 0.0, started()
    for draw in range(2):
        chosen, t, _, x_t, v, _ = velocities(rollouts[0], rows, draw, generator=generator)
        loss = loss + (x_t - t[:, None, None, None] * v - chosen.x0).square().mean() / 2
    assert_gradient(positives[0], gradient_of(loss, generator))


def test_the_old_velocity_takes_its_share_of_the_prediction(tmp_path):
    """At v = v_old the value is the same, and the gradient beta times smaller."""
    common = {"steps": STEPS, "advantage": Fixed(SPREAD), "draws": 1, "kl_weight": 0.0}
    _, _, whole = run(tmp_path / "whole", Homing(**common))
    _, _, half = run(tmp_path / "half", Homing(beta=0.5, **common))
    torch.testing.assert_close(half[0], 0.5 * whole[0], rtol=1e-4, atol=1e-7)


def matched(algorithm, x0, advantage, groups, weight=None):
    rollout = Rollout(None, x0, torch.arange(len(x0)), advantage=advantage, weight=weight)
    return algorithm.targets(rollout, groups)


def test_groups_are_matched_apart_and_permuting_them_permutes_targets():
    x0 = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    advantage, groups = torch.randn(12, generator=torch.Generator().manual_seed(1)), torch.arange(12) // 6
    sign, target, cost = matched(Homing(), x0, advantage, groups)
    for i in range(12):
        if sign[i] < 0:
            j = int((x0 == target[i]).all(1).nonzero()[0])
            assert groups[i] == groups[j] and sign[j] > 0
            assert float(cost[i]) == pytest.approx(float((x0[i] - x0[j]).square().mean()), rel=1e-5)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    again = matched(Homing(), x0[order], advantage[order], groups[order])
    for one, other in zip((sign, target, cost), again, strict=True):
        assert torch.equal(one[order], other)


def test_a_quality_term_prefers_better_positives_where_there_is_a_choice():
    x0 = torch.tensor([[0.0], [1.0], [2.0]])
    advantage, groups = torch.tensor([-1.0, 0.1, 0.9]), torch.zeros(3, dtype=torch.long)
    assert matched(Homing(), x0, advantage, groups)[1][0].item() == 1.0
    assert matched(Homing(quality=10.0), x0, advantage, groups)[1][0].item() == 2.0
    features = Homing(features=lambda x: torch.where(x == 2, torch.zeros_like(x), x))
    assert matched(features, x0, advantage, groups)[1][0].item() == 2.0


def test_rows_that_only_keep_processes_in_step_take_no_target_away():
    x0 = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    advantage, groups = torch.tensor([-1.0, 2.0, 2.0, -1.0]), torch.zeros(4, dtype=torch.long)
    sign, target, _ = matched(Homing(), x0, advantage, groups, weight=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert sign.tolist() == [-1, 1, 0, 0] and target[0].item() == 1.0


def test_gauges_of_homing_are_logged(tmp_path):
    run(tmp_path, Homing(steps=STEPS, advantage=Fixed(SPREAD)))
    row = toy.rows(tmp_path, "train")[0]
    assert 0 < row["homing/negatives"] <= 0.5 and row["homing/left_over"] == 0
    assert row["homing/pair_distance"] > 0 and row["homing/correction"] > row["homing/pair_distance"]


# ------------------------------------------------------------------------------------------------------- AWM


@pytest.mark.parametrize("clip_range", [None, 0.2])
@pytest.mark.parametrize("matching, power", [("velocity", 0), ("t", 1), ("x0", 2)])
def test_awm_weights_the_matching_loss_by_the_advantage(tmp_path, matching, power, clip_range):
    """At the weights of the roll-out the ratio is 1, so both forms have the same gradient."""
    algorithm = AdvantageWeightedMatching(
        steps=STEPS, advantage=Fixed(SPREAD), matching=matching, clip_range=clip_range, draws=1
    )
    _, rollouts, gradients = run(tmp_path, algorithm)
    chosen, t, eps, _, v, generator = velocities(rollouts[0], torch.arange(PROMPTS * GROUP), 0)
    error = (v - (eps - chosen.x0)).square().mean((1, 2, 3)) * t**power
    assert_gradient(gradients[0], gradient_of((SPREAD.flatten() * error).mean(), generator))


def test_nft_of_the_velocity_form_has_the_direction_of_awm():
    """At v = v_old NFT's gradient is (2 r - 1) = A / A_max times that of the matching loss: weighted matching."""
    x0, eps, old = (torch.randn(4, 3, generator=torch.Generator().manual_seed(s)) for s in range(3))
    t, advantage = torch.tensor([0.2, 0.4, 0.6, 0.8]), torch.tensor([1.0, -0.5, 2.0, -2.0])
    x_t = (1 - t[:, None]) * x0 + t[:, None] * eps
    v = old.clone().requires_grad_()
    r = advantage / 4 + 0.5  # A_max = 2
    nft = torch.autograd.grad(nft_loss(v, old, x_t, t, x0, r, form="velocity").sum(), v)[0]
    awm = torch.autograd.grad((advantage * (v - (eps - x0)).square().mean(1)).sum(), v)[0]
    torch.testing.assert_close(nft, awm / 2, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- DPO


@pytest.mark.parametrize("pairs, micro_batch", [("best_worst", None), ("best_worst", 2), ("all", None), ("all", 8)])
def test_one_update_of_dpo_is_the_mean_over_pairs(tmp_path, pairs, micro_batch):
    algorithm = OnlineDPO(steps=STEPS, advantage=Fixed(SPREAD), pairs=pairs, beta=5.0, draws=1, micro_batch=micro_batch)
    generator = started(0.05)  # away from the reference, so that pairs differ in weight
    _, rollouts, gradients = run(tmp_path, algorithm, generator)
    rows = torch.arange(PROMPTS * GROUP)
    chosen, t, eps, x_t, v, generator = velocities(rollouts[0], rows, 0, shared=True, generator=started(0.05))
    with torch.no_grad(), generator.reference():
        v_ref = generator.velocity(x_t, t, chosen.cond)
    error, reference = (matching_error(u, chosen.x0, eps, t) for u in (v, v_ref))
    losses = []
    for p in range(PROMPTS):
        of = range(p * GROUP, (p + 1) * GROUP)
        values = SPREAD.flatten()
        ordered = [(i, j) for i in of for j in of if values[i] > values[j]]
        if pairs == "best_worst":
            ordered = [(max(of, key=lambda i: float(values[i])), min(of, key=lambda i: float(values[i])))]
        losses += [dpo_loss(error[i], reference[i], error[j], reference[j], 5.0) for i, j in ordered]
    assert torch.equal(t.reshape(PROMPTS, GROUP), t.reshape(PROMPTS, GROUP)[:, :1].expand(-1, GROUP))
    loss = torch.stack(losses).mean()
    assert toy.rows(tmp_path, "train")[0]["loss/total"] == pytest.approx(loss.item(), rel=1e-4)
    assert_gradient(gradients[0], gradient_of(loss, generator))


def test_dpo_starts_at_log_two(tmp_path):
    run(tmp_path, OnlineDPO(steps=STEPS, advantage=Fixed(SPREAD), beta=20.0))
    row = toy.rows(tmp_path, "train")[0]
    assert row["loss/total"] == pytest.approx(0.693147, abs=1e-6) and row["dpo/margin"] == 0


def test_groups_without_a_preference_are_left_out_of_dpo():
    advantage = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [float("nan"), 2.0, 1.0]])
    assert OnlineDPO().keep(advantage).tolist() == [[True, False, True], [False] * 3, [False, True, True]]
    assert OnlineDPO(pairs="all").keep(advantage).tolist() == [[True] * 3, [False] * 3, [False, True, True]]


def test_a_micro_batch_that_separates_pairs_is_refused(tmp_path):
    algorithm = OnlineDPO(steps=STEPS, advantage=Fixed(SPREAD), pairs="all", micro_batch=3)
    with pytest.raises(ValueError, match="micro_batch = 3 separates the samples of a pair"):
        run(tmp_path, algorithm)


# ------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "factory, arguments, message",
    [
        (Homing, {"strength": 1.5}, "strength = 1.5"),
        (Homing, {"space": "pixels"}, "space = 'pixels'"),
        (Homing, {"t_clamp": 0.0}, "t_clamp = 0.0"),
        (Homing, {"beta": 0.0}, "beta = 0.0"),
        (Homing, {"surplus": "keep"}, "surplus = 'keep'"),
        (Homing, {"dead_band": -1.0}, "dead_band = -1.0"),
        (Homing, {"times": "never"}, "times = 'never'"),
        (PositivesOnly, {"weighting": "all"}, "weighting = 'all'"),
        (AdvantageWeightedMatching, {"clip_range": 2.0}, "clip_range = 2.0"),
        (AdvantageWeightedMatching, {"matching": "eps"}, "matching = 'eps'"),
        (OnlineDPO, {"beta": -1.0}, "beta = -1.0"),
        (OnlineDPO, {"minibatches": 2}, "minibatches = 2 would separate"),
        (OnlineDPO, {"micro_batch": 3}, "micro_batch = 3 would separate"),
    ],
)
def test_impossible_settings_are_refused(factory, arguments, message):
    with pytest.raises(ValueError, match=message):
        factory(**arguments)


@pytest.mark.parametrize("factory", [Homing, PositivesOnly, AdvantageWeightedMatching, OnlineDPO])
def test_logit_normal_times_and_the_variance_preserving_path_train(tmp_path, factory):
    algorithm = factory(steps=STEPS, times="logit_normal", t_min=0.02)
    loop = toy.make_loop(
        tmp_path, algorithm, generator=toy.ToyGenerator(path="vp"), trainer={"iterations": 2, "checkpoint_every": 0}
    )
    loop.run()
    assert all(torch.isfinite(p).all() for p in loop.generator.trainable())
    assert toy.rows(tmp_path, "eval")[-1]["eval/weight_change"] > 0


def test_every_sample_has_its_own_draws_whatever_batch_it_is_in():
    generator, algorithm = started(), Homing(steps=STEPS)
    algorithm.configure(generator)
    rows = torch.arange(8)
    noise = RowNoise.of((0, "rollout", 0), rows), RowNoise.of((0, "rollout", 0, "group"), rows // 4)
    batch = Batch(generator.encode([f"p{i // 4}" for i in range(8)]), rows, rows // 4, *noise, seed=0, iteration=0)
    rollout = algorithm.rollout(generator.velocity, generator, batch)
    rollout = replace(rollout, advantage=torch.randn(8, generator=torch.Generator().manual_seed(0)))
    whole = algorithm.before_update(generator.velocity, generator, rollout, batch).select(slice(4, 8))
    part = algorithm.before_update(generator.velocity, generator, rollout.select(slice(4, 8)), batch)
    for name in ("t", "eps"):
        assert all(torch.equal(a, b) for a, b in zip(whole.extra[name], part.extra[name], strict=True))
    assert torch.equal(whole.extra["target"], part.extra["target"])
