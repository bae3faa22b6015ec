"""Particle systems, against exact expectations of a discrete chain and against loops."""

import itertools
import math

import pytest
import torch

from genrl.objectives.particles import (
    MODES,
    Particles,
    Potential,
    RecentAdvantage,
    ancestors_of,
    effective_sample_size,
    flat_index,
    follow,
    keep_extreme,
    normalised_weights,
    resample,
)

SCHEMES = ("multinomial", "systematic", "stratified", "residual")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_product_along_every_surviving_lineage_is_that_of_the_final_reward(mode, legacy):
    """With the potentials of each particle recorded by hand and carried along by the ancestors."""
    strength, systems, size = 1.7, 3, 5
    rewards = torch.randn(4, systems, size, generator=generator(), dtype=torch.float64)
    potential, particles = Potential(mode, strength, legacy), Particles.start(systems, size)
    product = torch.zeros(systems, size, dtype=torch.float64)
    for step, r in enumerate(rewards[:-1]):
        before = particles.log_weight
        particles = potential.weigh(particles, r)
        product = product + particles.log_weight - before
        ancestors, done = ancestors_of(particles, 2.0, "multinomial", generator(step))
        particles, product = particles.resampled(ancestors, done), product.gather(1, ancestors)
        assert bool(done.any())
    before = particles.log_weight
    particles = potential.finish(particles, rewards[-1])
    product = product + particles.log_weight - before
    torch.testing.assert_close(product, strength * rewards[-1])
    torch.testing.assert_close(particles.log_product, product)


@pytest.mark.parametrize("mode", MODES)
def test_potentials_are_those_of_the_table(mode):
    first, second, lam = 0.3, -0.2, 2.0
    particles = Potential(mode, lam).weigh(Particles.start(1, 1), torch.tensor([[first]]))
    after = Potential(mode, lam).weigh(particles, torch.tensor([[second]]))
    expected = {
        "diff": (first, second - first),
        "max": (first, max(second, first)),
        "add": (first, second + first),
        "rt": (first, second),
    }[mode]
    assert float(particles.log_weight) == pytest.approx(lam * expected[0])
    assert float(after.log_weight - particles.log_weight) == pytest.approx(lam * expected[1])


def test_differences_telescope_so_that_their_last_potential_needs_no_correction():
    r = torch.randn(3, 2, 4, generator=generator(), dtype=torch.float64)
    potential = Potential("diff", 1.3)
    particles = potential.weigh(potential.weigh(Particles.start(2, 4), r[0]), r[1])
    finished = potential.finish(particles, r[2])
    torch.testing.assert_close(finished.log_weight - particles.log_weight, 1.3 * (r[2] - r[1]))


def test_the_released_reset_makes_the_modes_act_as_rt():
    r = torch.rand(2, 1, 3, generator=generator(), dtype=torch.float64)  # positive, for max
    plain = Potential("rt", 2.0)
    expected = plain.weigh(plain.weigh(Particles.start(1, 3), r[0]), r[1]).log_weight
    for mode in MODES:
        legacy = Potential(mode, 2.0, legacy_reset=True)
        torch.testing.assert_close(legacy.weigh(legacy.weigh(Particles.start(1, 3), r[0]), r[1]).log_weight, expected)


FIRST = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)  # p(a)
THEN = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)  # p(b | a)
GUESS = torch.tensor([0.2, 0.9, -0.4], dtype=torch.float64)  # reward seen at a
FINAL = torch.tensor([-0.5, 0.4, 1.2], dtype=torch.float64)  # reward of b
VALUE = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)  # what is averaged


def exact(lam):
    total = sum(
        FIRST[a] * THEN[a, b] * math.exp(lam * FINAL[b]) * torch.tensor([1.0, VALUE[b]])
        for a, b in itertools.product(range(3), range(3))
    )
    return float(total[1] / total[0])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", MODES)
def test_a_two_step_chain_converges_to_its_tilted_expectation(mode, scheme):
    lam, systems, size, draw = 1.5, 40, 2000, generator(3)
    a = torch.multinomial(FIRST, systems * size, True, generator=draw).reshape(systems, size)
    potential = Potential(mode, lam)
    particles = potential.weigh(Particles.start(systems, size), GUESS[a])
    ancestors, done = ancestors_of(particles, 0.9, scheme, draw)
    particles, a = particles.resampled(ancestors, done), a.gather(1, ancestors)
    b = torch.multinomial(THEN[a.flatten()], 1, generator=draw).reshape(systems, size)
    particles = potential.finish(particles, FINAL[b])
    weighted = (normalised_weights(particles.log_weight) * VALUE[b]).sum(1)  # [S]
    last, _ = ancestors_of(particles, 2.0, scheme, draw)
    survivors = VALUE[b.gather(1, last)].mean(1)
    for estimate in (weighted, survivors):
        assert abs(float(estimate.mean()) - exact(lam)) < 4 * float(estimate.std()) / math.sqrt(systems) + 2e-3
    assert abs(float(VALUE[b].mean()) - exact(lam)) > 0.1  # the potentials have something to do


def test_no_strength_leaves_everything_as_it_is():
    particles = Potential("add", 0.0).weigh(Particles.start(2, 4), torch.randn(2, 4, generator=generator()))
    particles = Potential("add", 0.0).finish(particles, torch.randn(2, 4, generator=generator(1)))
    torch.testing.assert_close(effective_sample_size(particles.log_weight), torch.full((2,), 4.0, dtype=torch.float64))
    ancestors, done = ancestors_of(particles, 2.0, "multinomial", generator())
    assert not done.any() and ancestors.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_expected_copies_are_the_weights(scheme):
    weight = torch.tensor([[0.05, 0.4, 0.0, 0.3, 0.25]], dtype=torch.float64)
    repeated = weight.log().expand(40_000, -1)
    ancestors = resample(repeated, scheme, generator())
    copies = torch.nn.functional.one_hot(ancestors, 5).sum(1).double()  # [S, K]
    torch.testing.assert_close(copies.mean(0), 5 * weight[0], atol=0.02, rtol=0)
    assert float(copies[:, 2].sum()) == 0  # a dead particle has no children
    spread = (copies - 5 * weight).abs().amax()
    if scheme == "systematic":
        assert float(spread) < 1  # floor or ceiling
    if scheme == "residual":
        assert bool((copies >= (5 * weight).floor()).all())
    if scheme == "stratified":
        assert float(spread) < 2


@pytest.mark.parametrize("scheme", ["systematic", "stratified", "residual"])
def test_equal_weights_keep_every_particle(scheme):
    assert resample(torch.zeros(3, 7), scheme, generator()).tolist() == [list(range(7))] * 3


def test_weights_of_any_size_do_not_overflow():
    log_weight = torch.tensor([[1e4, 1e4 - 1, -1e5], [-1e4, -1e4, -math.inf]])
    weight = normalised_weights(log_weight)
    torch.testing.assert_close(
        weight[0, :2], torch.tensor([1.0, -1.0 + 1.0]).double().new_tensor([0.731058579, 0.268941421])
    )
    assert weight[1].tolist() == [0.5, 0.5, 0.0]
    assert normalised_weights(torch.full((1, 4), -math.inf)).tolist() == [[0.25] * 4]


def test_systems_do_not_depend_on_each_other():
    log_weight = torch.randn(6, 4, generator=generator())
    u = torch.rand(6, 4, generator=generator(1))
    for scheme in SCHEMES:
        together = resample(log_weight, scheme, u)
        alone = [resample(log_weight[i : i + 1], scheme, u[i : i + 1]) for i in range(6)]
        assert torch.equal(together, torch.cat(alone))


def test_resampled_systems_start_with_equal_weights_and_others_keep_theirs():
    particles = Particles.start(2, 2)
    particles = Potential("rt", 5.0).weigh(particles, torch.tensor([[1.0, 0.0], [0.1, 0.0]]))
    # With u = 0.99 the points .495 and .995 fall into .993 and .007: an identity that is a resampling all the same.
    ancestors, done = ancestors_of(particles, 0.7, "systematic", torch.full((2, 2), 0.99))
    assert done.tolist() == [True, False] and ancestors.tolist() == [[0, 1], [0, 1]]
    after = particles.resampled(ancestors, done)
    assert after.log_weight.flatten().tolist() == pytest.approx([0, 0, 0.5, 0])


def test_unscored_particles_die_and_are_counted():
    nan = math.nan
    particles = Potential("diff", 1.0).weigh(Particles.start(2, 3), torch.tensor([[nan, 1.0, 2.0], [nan, nan, nan]]))
    assert particles.unscored == 4
    weight = normalised_weights(particles.log_weight)
    assert float(weight[0, 0]) == 0 and weight[1].tolist() == pytest.approx([1 / 3] * 3)
    ancestors, _ = ancestors_of(particles, 2.0, "multinomial", generator())
    assert 0 not in ancestors[0].tolist() and ancestors[1].tolist() == [0, 1, 2]
    assert Potential("diff", 1.0).finish(particles, torch.full((2, 3), nan)).unscored == 10


def test_stored_tensors_follow_their_ancestors():
    ancestors = torch.tensor([[1, 1, 0], [2, 0, 2]])
    stored = {4: torch.arange(6.0)[:, None], 5: torch.arange(6)[:, None] * 10}
    assert flat_index(ancestors).tolist() == [1, 1, 0, 5, 3, 5]
    found = follow(stored, ancestors)
    assert found[4][:, 0].tolist() == [1, 1, 0, 5, 3, 5] and found[5][:, 0].tolist() == [10, 10, 0, 50, 30, 50]


@pytest.mark.parametrize("worst_systems", [False, True])
def test_extreme_particles_are_those_of_a_loop(worst_systems):
    values = torch.randn(5, 12, generator=generator())
    values[0, :4] = math.nan
    kept = keep_extreme(values, 3, 0.5, -0.5, worst_systems)
    expected = torch.zeros_like(kept)
    for p, s in itertools.product(range(5), range(4)):
        system = values[p, 3 * s : 3 * s + 3]
        if system.isnan().all():
            continue
        best, worst = system.nan_to_num(-9).argmax(), system.nan_to_num(9).argmin()
        if system[best] >= 0.5 and not (worst_systems and s % 2):
            expected[p, 3 * s + best] = True
        if system[worst] < -0.5 and (not worst_systems or s % 2):
            expected[p, 3 * s + worst] = True
    assert torch.equal(kept, expected) and bool(kept.any())


def test_groups_that_are_no_whole_systems_are_refused():
    with pytest.raises(ValueError, match="multiple of 5"):
        keep_extreme(torch.zeros(2, 12), 5)
    with pytest.raises(ValueError, match="multiple of 8"):
        keep_extreme(torch.zeros(2, 12), 4, worst_systems=True)


def test_scores_are_among_the_last_iterations_of_a_prompt():
    advantage = RecentAdvantage(iterations=2, clip=None)
    table = torch.randn(3, 1, 4, generator=generator(), dtype=torch.float64)
    for i, r in enumerate(table):
        found = advantage(r, None, torch.tensor([7])).values
        seen = table[max(0, i - 1) : i + 1].flatten()
        expected = (r - seen.mean()) / (seen.std(correction=0) + 1e-4)
        torch.testing.assert_close(found, expected.float())
    again = RecentAdvantage(iterations=2, clip=None)
    again.load_state_dict(advantage.state_dict())
    assert again.state_dict() == advantage.state_dict()  # also before it is used
    extra = torch.ones(1, 4, dtype=torch.float64)
    assert torch.equal(again(extra, None, torch.tensor([7])).values, advantage(extra, None, torch.tensor([7])).values)
    assert float(RecentAdvantage()(extra, None, torch.tensor([7])).values.abs().max()) == 0  # all equal


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="'best' is unknown"):
        Potential("best")
    with pytest.raises(ValueError, match="finite"):
        Potential("rt", math.inf)
    with pytest.raises(ValueError, match="scheme 'x' is unknown"):
        resample(torch.zeros(1, 2), "x")
    with pytest.raises(ValueError, match="infinite"):
        Potential().weigh(Particles.start(1, 2), torch.tensor([[0.0, math.inf]]))
