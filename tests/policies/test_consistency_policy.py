"""Consistency policies: the loss at the true function, schedules, teachers, coupling, sampling, and both modes."""

from __future__ import annotations

import math

import policy_members as members
import pytest
import torch
import two_modes
from policy_members import awaken, generator, make_batch
from torch import nn

from genrl.networks import ObsSpec
from genrl.objectives import karras_grid
from genrl.policies import RECIPES, Chunking, ConsistencyPolicy, ConsistencyRecipe, NoiseLevels, Normalizer

MEAN, STD = 0.7, 0.4
LEVELS = NoiseLevels()
VARIANTS = tuple(RECIPES)


class ExactNet(nn.Module):
    """F such that f is the true consistency function of actions N(MEAN, STD^2), float64; keeps the times it saw."""

    def __init__(self):
        super().__init__()
        self.anything = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.times: list[torch.Tensor] = []

    def forward(self, x, t, cond):
        self.times.append(t.detach().clone())
        s = LEVELS.sigma_data
        sigma = (LEVELS.sigma_min * (LEVELS.sigma_max / LEVELS.sigma_min) ** t.double())[:, None, None]
        y = x * (sigma**2 + s**2).sqrt()
        f = MEAN + STD * (y - MEAN) / (STD**2 + sigma**2).sqrt()
        c_skip = s**2 / ((sigma - LEVELS.sigma_min) ** 2 + s**2)
        c_out = s * (sigma - LEVELS.sigma_min) / (sigma**2 + s**2).sqrt()
        return (f - c_skip * y) / c_out.clamp(min=1e-12) + 0 * self.anything


def exact_policy(**settings):
    policy = ConsistencyPolicy(chunking=settings.pop("chunking", Chunking(1, 1, 1)), **settings)
    features = {"state": ("identity", (1,)), "action": ("identity", (1,))}
    policy.configure({"state": ObsSpec((1,), "state")}, 1, Normalizer(features))
    policy.net = ExactNet()
    return policy.double()


def gaussian_batch(rows: int = 200_000, seed: int = 0):
    actions = MEAN + STD * torch.randn(rows, 1, 1, generator=generator(seed), dtype=torch.float64)
    return {"obs": {"state": torch.zeros(rows, 1, 1)}, "actions": actions, "valid": torch.ones(rows, 1).bool()}


def build(variant: str = "ict", **settings):
    return awaken(members.Member("", ConsistencyPolicy, {"variant": variant, **settings}).build())


# ---- the loss ---------------------------------------------------------------------------------------------


def test_the_loss_at_the_true_function_is_the_known_floor():
    """f' - f of one path: STD [(1/S' - 1/S) STD e + (sigma'/S' - sigma/S) z], S^2 = STD^2 + sigma^2; 10 intervals."""
    recipe = ConsistencyRecipe(
        "doubling", first=10, last=10, density="uniform", distance="squared", weighted=False, pretraining=0.0
    )
    loss, metrics = exact_policy(recipe=recipe).loss(gaussian_batch(), generator(1))
    loss = loss.detach()
    sigma = karras_grid(11, dtype=torch.float64)
    s = (STD**2 + sigma**2).sqrt()
    floor = STD**2 * (((1 / s).diff() * STD) ** 2 + (sigma / s).diff() ** 2)
    # At the lowest level f is the identity and not the true function, which differs there by 1e-5.
    assert float(loss) == pytest.approx(float(floor.mean()), rel=0.02)
    assert float(metrics["rms"]) == pytest.approx(math.sqrt(float(loss)))


def test_references_take_the_sampling_noise_out_of_the_loss():
    """All rows share one state, so the batch is a sample of the conditional distribution."""
    batch = gaussian_batch(2000)
    losses = {
        references: float(
            exact_policy(
                recipe=ConsistencyRecipe(
                    "easy", stages=4, density="uniform", distance="squared", weighted=False, references=references
                )
            ).loss(batch, generator(1), 0.5)[0]
        )
        for references in (None, 0.1)
    }
    assert losses[0.1] < 0.2 * losses[None]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_network_reads_a_bounded_time_at_every_level_and_stage(variant):
    policy = exact_policy(variant=variant)
    if policy.teacher is not None:
        policy.teacher.module = ExactNet()
    for progress in (0.0, 0.3, 0.7, 1.0):
        policy.loss(gaussian_batch(500), generator(2), progress)
    policy.predict({"state": torch.zeros(4, 1, 1)})
    times = torch.cat(policy.net.times)
    assert times.min() >= 0 and times.max() <= 1 + 1e-6
    assert times.max() > 0.9 and times.min() < 0.3
    assert float(build(variant).net.time.frequencies.max()) == 20.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_function_is_the_identity_at_the_lowest_level(variant):
    policy = build(variant)
    y, cond = torch.randn(5, 8, 3, generator=generator()), torch.randn(5, policy.encoder_net.out_dim)
    f = policy._map(policy.velocity, y, torch.full((5,), LEVELS.sigma_min), cond)
    torch.testing.assert_close(f, y, rtol=1e-6, atol=1e-6)


def test_pairs_follow_their_schedules():
    u = torch.linspace(0, 0.999, 200)
    counts = [RECIPES["ict"].pairs(u, progress, LEVELS).n for progress in (0, 0.3, 0.6, 0.9, 1)]
    assert counts == [11, 21, 41, 81, 81]
    assert RECIPES["ct"].pairs(u, 0.0, LEVELS).n == 2 and RECIPES["ct"].pairs(u, 1.0, LEVELS).n == 40
    for variant in VARIANTS:
        gaps = []
        for progress in (0.0, 0.2, 0.5, 0.8, 1.0):
            pairs = RECIPES[variant].pairs(u, progress, LEVELS)
            assert (pairs.r < pairs.sigma).all() and (pairs.r >= 0).all()
            assert pairs.sigma.max() <= LEVELS.sigma_max and pairs.sigma.min() > LEVELS.sigma_min
            gaps.append(float(((pairs.sigma - pairs.r) / pairs.sigma).mean()))
        assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.5 * gaps[0]
    assert (RECIPES["ect"].pairs(u, 0.05, LEVELS).r == 0).all()  # diffusion training first
    stages = {kind: ConsistencyRecipe(kind, pretraining=0.0, stages=4) for kind in ("easy", "smooth")}
    u = torch.full((1,), 0.9)
    levels = {
        kind: [float(recipe.pairs(u, progress / 100, LEVELS).r) for progress in range(100)]
        for kind, recipe in stages.items()
    }
    assert len(set(levels["easy"])) == 4 and len(set(levels["smooth"])) > 80


def test_denoising_is_added_on_the_lowest_levels():
    policy = build("slct")
    pairs = policy.rules.pairs(torch.linspace(0, 0.999, 1000), 0.0, LEVELS)
    grid = karras_grid(11)
    assert pairs.sigma[pairs.early].max() <= grid[2] + 1e-6 < pairs.sigma[~pairs.early].min()
    assert "denoising_loss" in policy.loss(make_batch(policy), generator())[1]
    assert "denoising_loss" not in build("ict").loss(make_batch(policy), generator())[1]


@pytest.mark.parametrize("variant", [*VARIANTS, "sct-near", "flow_map"])
def test_padded_actions_do_not_count(variant):
    near = {"recipe": ConsistencyRecipe("smooth", references=10.0)} if variant == "sct-near" else {}
    policy = build(variant.removesuffix("-near"), mask_padding=True, **near)
    batch = make_batch(policy)
    batch["obs"] = {name: value[:1].expand_as(value) for name, value in batch["obs"].items()}  # one state: all couple
    # What networks make of the padded part of their input is not the question here.
    policy.net = Blind(policy.net, batch["valid"])
    if variant == "ct":
        policy.teacher.module = Blind(policy.teacher.module, batch["valid"])
    changed = {**batch, "actions": torch.where(batch["valid"][..., None], batch["actions"], 40.0)}
    losses = [policy.loss(data, generator(2), 0.5)[0] for data in (batch, changed)]
    torch.testing.assert_close(*losses)
    policy.mask_padding = False
    assert abs(policy.loss(changed, generator(2), 0.5)[0] / losses[0] - 1) > 1e-4


class Blind(nn.Module):
    """A network that sees no padded action."""

    def __init__(self, inner: nn.Module, valid: torch.Tensor):
        super().__init__()
        self.inner, self.valid = inner, valid

    def forward(self, x, *rest):
        valid = self.valid.repeat_interleave(len(x) // len(self.valid), 0)
        return self.inner(x * valid[..., None], *rest)


@pytest.mark.parametrize("variant", ["ict", "ect", "sct"])
def test_several_pairs_of_levels_are_several_copies_of_a_chunk(variant):
    """The references of `sct` are copied as well, which weighs them equally."""
    policy = build(variant, pairs=3)
    batch = make_batch(policy)
    loss, metrics = policy.loss(batch, generator(6), 0.5)
    policy.pairs = 1
    copies = {name: value.repeat_interleave(3, 0) for name, value in batch.items() if name != "obs"}
    copies["obs"] = {name: value.repeat_interleave(3, 0) for name, value in batch["obs"].items()}
    expected, numbers = policy.loss(copies, generator(6), 0.5)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["rms"], numbers["rms"])
    with pytest.raises(ValueError, match="pairs = 0"):
        build(pairs=0)


# ---- parts of the variants --------------------------------------------------------------------------------


def test_only_plain_consistency_training_has_a_teacher_which_makes_its_targets():
    assert [variant for variant in VARIANTS if build(variant).teacher is not None] == ["ct"]
    policy = build("ct")
    batch = make_batch(policy)
    before = policy.loss(batch, generator(), 0.5)[0]
    with torch.no_grad():
        for p in policy.teacher.module.parameters():
            p.add_(0.5)
    assert policy.loss(batch, generator(), 0.5)[0] != before
    start = [p.clone() for p in policy.teacher.module.parameters()]
    policy.after_update(1000)
    for old, new, live in zip(start, policy.teacher.module.parameters(), policy.net.parameters(), strict=True):
        torch.testing.assert_close(new, 0.95 * old + 0.05 * live)


def test_latent_consistency_training_has_no_gains_and_couples_noise_within_equal_states(monkeypatch):
    policy = build("slct")
    norms = [layer for layer in policy.net.modules() if isinstance(layer, nn.LayerNorm)]
    assert norms and all(not layer.weight.requires_grad and bool((layer.weight == 1).all()) for layer in norms)
    assert all(layer.weight.requires_grad for layer in build("ict").net.modules() if isinstance(layer, nn.LayerNorm))

    seen = []
    monkeypatch.setattr(
        "genrl.policies.consistency.optimal_coupling", lambda *arguments: seen.append(arguments) or torch.arange(5)
    )
    policy.loss(make_batch(policy), generator())
    assert len(seen) == policy.pairs
    for noise, data, states, radius in seen:
        assert noise.shape == data.shape == (5, 8, 3) and len(states) == 5 and radius == 0.0


def test_coupling_leaves_rows_of_different_states_alone():
    """Each state of a batch is another one, so slct trains on the noise that ict would."""
    policies = [
        build(recipe=ConsistencyRecipe(coupling=coupling, density="uniform", pretraining=0.0))
        for coupling in (None, 0.0)
    ]
    losses = [policy.loss(make_batch(policy, rows=8), generator(3), 0.5)[0] for policy in policies]
    assert losses[0] == losses[1]
    same = make_batch(policies[0], rows=8)
    same["obs"] = {name: value[:1].expand_as(value) for name, value in same["obs"].items()}
    losses = [policy.loss(same, generator(3), 0.5)[0] for policy in policies]
    assert losses[0] != losses[1]


# ---- sampling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_samples_of_the_true_function_have_the_distribution_of_the_data(steps):
    policy = exact_policy(steps=steps)
    assert policy.nfe == steps
    rows, source = 100_000, generator(4)
    actions = policy.predict(
        {"state": torch.zeros(rows, 1, 1)},
        lambda step, shape: torch.randn(shape, generator=source, dtype=torch.float64),
    )
    assert len(policy.net.times) == steps
    assert float(actions.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(actions.std()) == pytest.approx(STD, rel=0.02)


def test_a_warm_start_stays_near_the_last_chunk_as_the_flow_map_does():
    """N( m + (s0 / S)(1 - t)(a - m), s0^2 t^2 / S^2 ), S^2 = (1 - t)^2 s0^2 + t^2, for the last action a."""
    t, last, rows = 0.6, 1.5, 100_000
    policy = exact_policy(chunking=Chunking(2, 1, 1, warm_start=t))
    chunk = policy.predict(
        {"state": torch.zeros(rows, 1, 1)},
        lambda step, shape: torch.randn(shape, generator=generator(5), dtype=torch.float64),
        torch.full((rows, 2, 1), last, dtype=torch.float64),
    )
    s = math.sqrt((1 - t) ** 2 * STD**2 + t**2)
    assert float(chunk.mean()) == pytest.approx(MEAN + STD / s * (1 - t) * (last - MEAN), abs=0.005)
    assert float(chunk.std()) == pytest.approx(STD * t / s, rel=0.01)


# ---- flow maps --------------------------------------------------------------------------------------------


class AverageVelocity(nn.Module):
    """The true average velocity for actions N(MEAN, STD^2), float64."""

    def __init__(self):
        super().__init__()
        self.anything = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x, t, cond, r=None):
        t, r = t[:, None, None], (t if r is None else r)[:, None, None]
        s_t, s_r = (((1 - a) ** 2 * STD**2 + a**2).sqrt() for a in (t, r))
        growth = ((t + r) - (2 - t - r) * STD**2) / (s_t + s_r)
        return -MEAN + growth / s_t * (x - (1 - t) * MEAN) + 0 * self.anything


def test_self_distillation_of_the_true_flow_map_leaves_no_error_but_that_of_flow_matching():
    policy = exact_policy(variant="flow_map")
    policy.net = AverageVelocity()
    _, metrics = policy.loss(gaussian_batch(50_000), generator(1))
    assert float(metrics["distillation_loss"]) < 1e-20
    t = torch.maximum(*(torch.sigmoid(-0.4 + torch.randn(2, 400_000, generator=generator(6), dtype=torch.float64))))
    expected = (STD**2 / ((1 - t) ** 2 * STD**2 + t**2)).mean()
    assert float(metrics["flow_loss"]) == pytest.approx(float(expected), rel=0.03)
    eps = torch.randn(50, 1, 1, generator=generator(), dtype=torch.float64)
    for steps in (1, 4):
        policy.steps = steps
        actions = policy.predict({"state": torch.zeros(50, 1, 1)}, lambda step, shape: eps)
        torch.testing.assert_close(actions, MEAN + STD * eps)


def test_guidance_trains_the_null_condition_of_a_flow_map():
    policy = build("flow_map", guidance=2.0, dropout=0.5)
    policy.loss(make_batch(policy, rows=12), generator())[0].backward()
    assert policy.null.grad.abs().max() > 0
    assert build("flow_map").null is None
    assert float(policy.net.time.frequencies.max()) == 5.0


# ---- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [*VARIANTS, "flow_map"])
def test_one_step_keeps_both_modes(variant):
    lower, upper = two_modes.shares(two_modes.sample(two_modes.train(ConsistencyPolicy, 250, 1, variant=variant)))
    assert lower > 0.25 and upper > 0.25 and lower + upper > 0.6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConsistencyPolicy(variant="lcm"), r"variant = 'lcm'; allowed are"),
        (lambda: ConsistencyPolicy(variant="flow_map", recipe=ConsistencyRecipe()), r"'flow_map' has no recipe"),
        (lambda: ConsistencyPolicy(guidance=2.0), r"guidance = 2.0 is for the variant 'flow_map'"),
        (lambda: ConsistencyPolicy(variant="flow_map", guidance=0.5), r"guidance = 0.5 must be at least 1"),
        (lambda: ConsistencyPolicy(variant="flow_map", dropout=1.0), r"dropout = 1.0"),
        (lambda: ConsistencyPolicy(steps=0), r"steps = 0; sampling needs at least 1"),
        (lambda: ConsistencyPolicy(last_level=100.0), r"last_level = 100.0 must lie between"),
        (lambda: ConsistencyPolicy(derivative="vjp"), r"derivative = 'vjp' is unknown"),
        (lambda: NoiseLevels(sigma_min=0.0), r"levels.sigma_min = 0.0"),
        (lambda: NoiseLevels(sigma_data=0.0), r"levels.sigma_data = 0.0 must be positive"),
        (lambda: ConsistencyRecipe("linear"), r"recipe.spacing = 'linear'"),
        (lambda: ConsistencyRecipe(density="normal"), r"recipe.density = 'normal'"),
        (lambda: ConsistencyRecipe(distance="lpips"), r"recipe.distance = 'lpips'"),
        (lambda: ConsistencyRecipe("easy", distance="cauchy"), r"has no grid of levels"),
        (lambda: ConsistencyRecipe(first=1), r"recipe.first = 1"),
        (lambda: ConsistencyRecipe(pretraining=1.0), r"recipe.pretraining = 1.0"),
        (lambda: ConsistencyRecipe(stages=0), r"recipe.stages = 0"),
        (lambda: ConsistencyRecipe(teacher_decay=1.0), r"recipe.teacher_decay = 1.0"),
        (lambda: ConsistencyRecipe(coupling=-0.1), r"recipe.coupling = -0.1"),
        (lambda: ConsistencyRecipe(references=0.0), r"recipe.references = 0.0"),
    ],
)
def test_unusable_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
