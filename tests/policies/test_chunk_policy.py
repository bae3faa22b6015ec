"""What the base class gives: names, units, conditions, errors, teachers."""

import copy

import numpy as np
import pytest
import torch
from policy_members import CHUNKING, MEMBERS, PICTURES, SPECS, awaken, configure, fixed_noise, generator, make_batch
from safetensors.torch import load_file
from torch import nn

from genrl.networks import EncoderSettings, ObsSpec
from genrl.policies import Chunking, ChunkPolicy, FlowPolicy, Normalizer, RegressionPolicy, Teacher

FLOW = MEMBERS[0]


def test_observations_are_matched_by_name():
    policy = awaken(FLOW.build(specs=PICTURES)).eval()
    obs = make_batch(policy)["obs"]
    shuffled = {name: obs[name] for name in reversed(obs)} | {"unused": torch.zeros(5, 2, 99)}
    assert torch.equal(policy.predict(obs, fixed_noise()), policy.predict(shuffled, fixed_noise()))
    arrays = {name: value.numpy() for name, value in obs.items()}
    assert torch.equal(policy.act(obs, generator()), policy.act(arrays, generator()))


def test_a_missing_or_misshapen_observation_is_answered_by_name():
    policy = FLOW.build(specs=PICTURES)
    batch = make_batch(policy)
    without = {name: value for name, value in batch["obs"].items() if name != "robot0.eef_pos"}
    for call in (lambda obs: policy.act(obs), lambda obs: policy.loss({**batch, "obs": obs})):
        with pytest.raises(ValueError, match=r"'robot0\.eef_pos' is missing"):
            call(without)
        with pytest.raises(ValueError, match=r"'points' has shape \[5, 2, 8, 6\]; expected \[B, 2, 8, 3\]"):
            call(batch["obs"] | {"points": torch.zeros(5, 2, 8, 6)})
    with pytest.raises(ValueError, match="images are uint8"):
        policy.act(batch["obs"] | {"cam": batch["obs"]["cam"].float() / 255})
    with pytest.raises(ValueError, match=r"actions have shape \[5, 7, 3\]; expected \[B, 8, 3\]"):
        policy.loss({**batch, "actions": batch["actions"][:, 1:]})


def test_rescaled_data_with_a_rescaled_normalizer_give_the_same_policy():
    # A policy works on normalised numbers only: other units change neither its loss nor, in those units, its actions.
    rng = np.random.default_rng(0)
    data = {"state": rng.normal(size=(50, 4)), "action": rng.uniform(-1, 1, size=(50, 3))}
    specs = {"state": ObsSpec((4,), "state")}
    results = []
    for scale, shift in ((1.0, 0.0), (8.0, 3.0)):
        policy = FlowPolicy(chunking=CHUNKING, steps=2)
        normalizer = Normalizer.fit({k: v * scale + shift for k, v in data.items()}, policy.normalization.modes(specs))
        policy.configure(specs, 3, normalizer)
        awaken(policy).eval()
        state = torch.from_numpy(data["state"][:10].reshape(5, 2, 4) * scale + shift).float()
        actions = torch.from_numpy(data["action"][:40].reshape(5, 8, 3) * scale + shift).float()
        batch = {"obs": {"state": state}, "actions": actions, "valid": torch.ones(5, 8, dtype=torch.bool)}
        loss = policy.loss(batch, generator())[0]
        results.append((loss, (policy.predict(batch["obs"], fixed_noise()) - shift) / scale))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_weights_depend_on_the_seed_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    weights = [FLOW.build(seed=seed).state_dict()["net.input.weight"] for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_policy_without_networks_says_what_to_do():
    policy = FlowPolicy()
    for call in (
        lambda: policy.act({"state": torch.zeros(1, 1, 4)}),
        lambda: policy.loss({}),
        lambda: policy.save_pretrained("nowhere"),
    ):
        with pytest.raises(ValueError, match="call configure"):
            call()


def test_statistics_of_every_key_are_demanded_when_networks_are_built():
    data = {"state": np.zeros((3, 4)), "action": np.zeros((3, 3))}
    with pytest.raises(ValueError, match=r"no statistics of \['robot0.eef_pos'\]"):
        FlowPolicy().configure(SPECS, 3, Normalizer.fit(data))
    with pytest.raises(ValueError, match="action_dim = 0"):
        FlowPolicy().configure({"state": SPECS["state"]}, 0, Normalizer.fit(data))


def test_random_crops_come_from_the_generator_of_the_loss():
    policy = awaken(RegressionPolicy(encoder=EncoderSettings(crop=10, image_features=8)))
    configure(policy, {"cam": PICTURES["cam"]})
    awaken(policy)
    batch = make_batch(policy)
    losses = [policy.loss(batch, generator(seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    policy.eval()
    assert torch.equal(policy.loss(batch, generator(0))[0], policy.loss(batch, generator(1))[0])


class WithNull(FlowPolicy):
    uses_null = True


def test_the_null_condition_replaces_the_chosen_rows_and_is_learned():
    policy = WithNull()
    configure(policy)
    cond = torch.randn(4, policy.encoder_net.out_dim)
    drop = torch.tensor([True, False, True, False])
    mixed = policy.null_cond(cond, drop)
    assert torch.equal(mixed[drop], policy.null.expand(2, -1)) and torch.equal(mixed[~drop], cond[~drop])
    assert torch.equal(policy.null_cond(cond), policy.null.expand_as(cond))
    assert any(p is policy.null for p in policy.trained_parameters())
    mixed.sum().backward()
    assert (policy.null.grad == 2).all()
    plain = FLOW.build()
    assert "null" not in plain.state_dict()
    with pytest.raises(ValueError, match="uses_null"):
        plain.null_cond(cond)


class OneStep(ChunkPolicy):
    """u(x, t, r) = the network; only `jump` is of interest."""

    interval = True

    def _sample(self, cond, noise, start):
        return self.jump(cond, noise, start)


def test_a_jump_is_one_step_with_the_average_velocity():
    policy = OneStep(chunking=CHUNKING)
    configure(policy)
    awaken(policy).eval()
    obs = make_batch(policy)["obs"]
    with torch.no_grad():
        cond = policy.encode(obs)
        eps = fixed_noise()(-1, (5, 8, 3))
        one, zero = torch.ones(5), torch.zeros(5)
        expected = eps - policy.net(eps, one, cond, zero)
        torch.testing.assert_close(policy.jump(cond, fixed_noise(), None), expected)
        x = torch.randn(5, 8, 3)
        late = x - 0.4 * policy.net(x, 0.4 * one, cond, zero)
        torch.testing.assert_close(policy.jump(cond, fixed_noise(), (x, 0.4)), late)
    torch.testing.assert_close(policy.predict(obs, fixed_noise()), policy.normalizer.unnormalize("action", expected))


def test_unfinished_policies_say_what_to_implement():
    policy = ChunkPolicy()
    configure(policy)
    batch = make_batch(policy)
    with pytest.raises(NotImplementedError, match="_loss"):
        policy.loss(batch)
    with pytest.raises(NotImplementedError, match="_sample"):
        policy.act(batch["obs"])


def test_a_teacher_follows_its_source_by_the_closed_form():
    torch.manual_seed(0)
    live = nn.Linear(2, 2)
    start = live.weight.detach().clone()
    teacher = Teacher(live)
    with torch.no_grad():
        live.weight.add_(1)
    for _ in range(3):
        teacher.update(decay=0.9)
    torch.testing.assert_close(teacher.module.weight, start + 1 - 0.9**3)
    teacher.update(decay=0)
    assert torch.equal(teacher.module.weight, live.weight)
    assert not teacher(torch.ones(1, 2)).requires_grad
    assert not any(p.requires_grad for p in teacher.parameters())


class Taught(FlowPolicy):
    """A policy with a teacher."""

    def _configured(self):
        self.teacher = Teacher(self.net)

    def after_update(self, updates):
        self.teacher.update(0.5)


def test_teachers_are_in_the_state_dict_but_neither_trained_nor_saved_nor_shared(tmp_path):
    policy = Taught(chunking=Chunking(4, 1, 2))
    configure(policy)
    awaken(policy)
    policy.after_update(1)
    names = [name for name in policy.state_dict() if name.startswith("teacher.")]
    assert len(names) == len(list(policy.net.parameters()))
    assert len(policy.trained_parameters()) == len(names)
    policy.save_pretrained(tmp_path)
    assert not any("teacher" in name for name in load_file(tmp_path / "model.safetensors"))
    loaded = Taught.from_pretrained(tmp_path)
    for name, value in policy.net.state_dict().items():  # a fresh start for the teacher: the loaded weights
        assert torch.equal(loaded.teacher.module.state_dict()[name], value)
    policy.teacher.update(0)
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        for p in twin.net.parameters():
            p.add_(1)
    twin.after_update(1)
    assert not torch.equal(twin.teacher.module.input.weight, policy.teacher.module.input.weight)
    before = policy.teacher.module.input.weight.clone()
    policy.after_update(2)
    torch.testing.assert_close(policy.teacher.module.input.weight, before)  # it follows its own network, unchanged
