"""Plain behaviour cloning."""

import pytest
import torch
from policy_members import SPECS, awaken, configure, fixed_noise, generator, make_batch

from genrl.policies import RegressionPolicy


def policy_of(**settings):
    policy = RegressionPolicy(**settings)
    configure(policy, SPECS)
    return awaken(policy)


@pytest.mark.parametrize(("distance", "error"), [("mse", torch.square), ("l1", torch.abs)])
def test_the_loss_is_the_distance_of_the_chunk(distance, error):
    policy = policy_of(distance=distance)
    batch = make_batch(policy)
    predicted = policy.normalizer.normalize("action", policy.predict(batch["obs"]))
    expected = error(predicted - policy.normalizer.normalize("action", batch["actions"])).mean()
    torch.testing.assert_close(policy.loss(batch)[0], expected)


def test_noise_does_not_matter_and_the_network_sees_none():
    policy = policy_of()
    obs = make_batch(policy)["obs"]
    seen = []
    policy.net.register_forward_hook(lambda _, inputs, __: seen.append(inputs))
    assert torch.equal(policy.predict(obs, fixed_noise(1)), policy.predict(obs, fixed_noise(2)))
    x, t, _ = seen[0]
    assert len(seen) == 2 and not x.any() and t.tolist() == [1.0] * 5


def test_masked_padding_contributes_exactly_nothing():
    policy = policy_of(mask_padding=True)
    batch = make_batch(policy)
    other = {**batch, "actions": torch.where(batch["valid"][..., None], batch["actions"], 1e6)}
    assert not torch.equal(other["actions"], batch["actions"])
    assert torch.equal(policy.loss(batch)[0], policy.loss(other)[0])
    # Of a row with padding, the mean over the actions that are left.
    row = {
        "obs": {k: v[:1] for k, v in batch["obs"].items()},
        "actions": batch["actions"][:1],
        "valid": batch["valid"][:1],
    }
    difference = policy.predict(row["obs"]) - row["actions"]
    expected = (difference[:, :4] / 3).square().mean()  # actions of the members are scaled by about 3
    torch.testing.assert_close(policy.loss(row)[0], expected, rtol=0.05, atol=0)
    unmasked = policy_of()
    assert not torch.equal(unmasked.loss(batch)[0], unmasked.loss(other)[0])


def test_two_ways_are_averaged_by_mse_and_the_likelier_one_is_taken_by_l1():
    for distance, expected in (("mse", 0.2), ("l1", -1.0)):
        policy = policy_of(distance=distance)
        one = make_batch(policy, rows=1)
        ways = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0]) if distance == "mse" else torch.tensor([-1.0, -1, -1, 1, -1])
        x0 = ways[:, None, None].expand(-1, 8, 3)
        batch = {
            "obs": {name: value.expand(5, *value.shape[1:]) for name, value in one["obs"].items()},
            "actions": policy.normalizer.unnormalize("action", x0),
            "valid": torch.ones(5, 8, dtype=torch.bool),
        }
        optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
        for update in range(300):
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / 300)
            optimizer.zero_grad()
            policy.loss(batch, generator(update))[0].backward()
            optimizer.step()
        chunk = policy.normalizer.normalize("action", policy.predict(one["obs"]))
        assert (chunk - expected).abs().max() < 0.05


def test_an_unknown_distance_is_refused():
    with pytest.raises(ValueError, match="distance = 'l2'"):
        RegressionPolicy(distance="l2")
