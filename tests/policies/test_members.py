"""What holds for every policy."""

import copy

import numpy as np
import policy_members as members
import pytest
import torch
from policy_members import CHUNKING, MEMBERS, PICTURES, awaken, fixed_noise, generator, make_batch

from genrl.networks import MLPBackbone
from genrl.parts import to_plain
from genrl.policies import ChunkExecutor, Chunking, check_policy, load_policy

each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
each_network = pytest.mark.parametrize("network", members.NETWORKS)


@each_member
def test_a_saved_policy_acts_bit_for_bit_like_the_original(member, tmp_path):
    policy = awaken(member.build(specs=PICTURES)).eval()
    policy.task = {"env": {"id": "some/Task-v0"}, "action_representation": "delta"}
    policy.save_pretrained(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    obs = make_batch(policy)["obs"]
    assert type(loaded) is member.cls and not loaded.training
    assert torch.equal(policy.act(obs, generator()), loaded.act(obs, generator()))
    assert torch.equal(policy.predict(obs, fixed_noise()), loaded.predict(obs, fixed_noise()))
    assert (loaded.task, list(loaded.specs)) == (policy.task, list(policy.specs))
    assert to_plain(loaded) == to_plain(policy)
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["config.json", "model.safetensors"]


@each_network
@each_member
def test_the_loss_is_finite_and_its_gradient_reaches_every_trained_weight(member, network):
    policy = awaken(member.build(network, specs=PICTURES, mask_padding=True))
    batch = make_batch(policy)
    for progress in (0.0, 0.5, 1.0):
        loss, metrics = policy.loss(batch, generator(), progress)
        assert loss.shape == () and torch.isfinite(loss)
        assert all(torch.isfinite(value) and not value.requires_grad for value in metrics.values())
        loss.backward()
    trained = {id(p) for p in policy.trained_parameters()}
    named = [(name, p) for name, p in policy.named_parameters() if id(p) in trained]
    without = [name for name, p in named if p.grad is None or not p.grad.any()]
    if member.unused_input:
        inputs = {"mlp": [], "unet": ["net.down.0.0.first.0.weight", "net.down.0.0.short.weight"]}
        assert without == inputs.get(network, ["net.dit.input.weight"])
    else:
        assert not without
    assert all(not p.requires_grad for _, p in policy.named_parameters() if id(p) not in trained)


@each_member
def test_the_loss_is_a_function_of_data_weights_and_generator(member):
    policy = awaken(member.build())
    batch = make_batch(policy)
    state = torch.get_rng_state()
    losses = [policy.loss(batch, generator(seed), 0.3)[0] for seed in (1, 1)]
    assert torch.equal(*losses)
    assert torch.equal(torch.get_rng_state(), state)


@each_network
@each_member
def test_acting_executes_the_slice_from_the_newest_observation(member, network):
    policy = awaken(member.build(network, specs=PICTURES)).eval()
    obs = make_batch(policy)["obs"]
    # The noise of `act` is what the generator yields in the order of the steps.
    source = generator(3)
    chunk = policy.predict(obs, lambda step, shape: torch.randn(shape, generator=source))
    actions = policy.act(obs, generator(3))
    assert chunk.shape == (5, 8, 3) and actions.shape == (5, 3, 3) and actions.dtype == torch.float32
    assert torch.equal(actions, chunk[:, 1:4])
    assert not actions.requires_grad and not actions.is_inference()


@pytest.mark.parametrize("horizon", [1, 4])
@each_member
def test_one_observation_step_and_one_action_work_everywhere(member, horizon, tmp_path):
    policy = awaken(member.build(chunking=Chunking(horizon, 1, 1), specs=PICTURES))
    batch = make_batch(policy)
    policy.loss(batch, generator())[0].backward()
    policy.eval()
    actions = policy.act(batch["obs"], generator())
    assert actions.shape == (5, 1, 3)
    policy.save_pretrained(tmp_path)
    assert torch.equal(load_policy(tmp_path).act(batch["obs"], generator()), actions)
    executor = ChunkExecutor(policy, rows=2)
    newest = {name: value[:2, 0].numpy() for name, value in batch["obs"].items()}
    for row in range(2):
        executor.start(row, row, {name: value[row] for name, value in newest.items()})
    for _ in range(3):
        assert executor.act(newest).shape == (2, 3)


@each_member
def test_one_sample_is_learned_by_heart_in_the_units_of_the_data(member):
    policy = member.build(MLPBackbone(width=64, depth=2), Chunking(4, 1, 2))
    one = make_batch(policy, rows=1, seed=5)
    one["valid"][:] = True
    batch = {
        "obs": {name: value.expand(64, *value.shape[1:]) for name, value in one["obs"].items()},
        "actions": one["actions"].expand(64, -1, -1),
        "valid": one["valid"].expand(64, -1),
    }
    optimizer = torch.optim.Adam(policy.trained_parameters(), member.learning_rate)
    source = generator()
    for update in range(member.updates):
        for group in optimizer.param_groups:
            group["lr"] = member.learning_rate * (1 - update / member.updates)
        optimizer.zero_grad()
        policy.loss(batch, source, update / member.updates)[0].backward()
        optimizer.step()
        policy.after_update(update + 1)
    policy.eval()
    actions = policy.act({name: value[:16] for name, value in batch["obs"].items()}, generator(1))
    error = (actions - one["actions"][:, :2]) / 3  # the normalised range [-1, 1] is 6 units wide
    assert error.square().mean().sqrt() < member.tolerance


@pytest.mark.parametrize("network", ["mlp", "unet"])
@each_member
def test_an_episode_runs_alike_bit_for_bit_whatever_runs_beside_it(member, network):
    policy = awaken(member.build(network)).eval()
    steps = 7 if policy.nfe < 6 else 4  # at least one more prediction after the first
    runs = [run_episodes(policy, episodes=17, rows=rows, steps=steps) for rows in (1, 4, 16)]
    assert np.isfinite(runs[0]).all() and np.ptp(runs[0], axis=0).min() > 0
    for run in runs[1:]:
        assert np.array_equal(run, runs[0])


def run_episodes(policy, episodes, rows, steps, batch=16):
    """Actions [episodes, steps, A] of a linear system under a policy; rows refill as soon as they are free.

    Episode i lasts steps - i % 3, so that rows are at different phases.
    """
    executor = ChunkExecutor(policy, rows, seed=11, batch=batch)
    actions = np.zeros((episodes, steps, policy.action_dim), np.float32)
    waiting = list(range(episodes))
    running: dict[int, list] = {}
    obs = {name: np.zeros((rows, *spec.shape), np.float32) for name, spec in policy.specs.items()}
    while waiting or running:
        for row in range(rows):
            if row not in running and waiting:
                episode = waiting.pop(0)
                running[row] = [episode, 0]
                for value in obs.values():
                    value[row] = 0.1 * episode - 5
                executor.start(row, episode, {name: value[row] for name, value in obs.items()})
        active = np.isin(np.arange(rows), list(running))
        chosen = executor.act(obs, active)
        assert not chosen[~active].any()
        for row, (episode, step) in list(running.items()):
            actions[episode, step] = chosen[row]
            for value in obs.values():
                value[row] = 0.9 * value[row] + 0.1 * chosen[row].mean()
            running[row][1] += 1
            if running[row][1] == steps - episode % 3:
                del running[row]
    return actions


@each_member
def test_the_checker_finds_nothing(member):
    policy = member.build(specs=PICTURES)
    before = copy.deepcopy(policy.state_dict())
    assert check_policy(policy) == []
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert check_policy(member.cls(network=MLPBackbone(16, 1), **member.settings), strict=True) == []


@each_member
def test_training_goes_on_from_a_state_dict_as_if_nothing_had_happened(member):
    policy = awaken(member.build())
    batch = make_batch(policy)

    def train(policy, optimizer, updates):
        losses = []
        for update in updates:
            optimizer.zero_grad()
            loss, _ = policy.loss(batch, generator(update), update / 8)
            loss.backward()
            optimizer.step()
            policy.after_update(update + 1)
            losses.append(float(loss.detach()))
        return losses

    def optimizer_of(policy):
        return torch.optim.SGD(policy.trained_parameters(), lr=1e-2)

    train(policy, optimizer_of(policy), range(4))
    other = member.build(seed=1)
    other.load_state_dict(copy.deepcopy(policy.state_dict()))
    before = [p.detach().clone() for p in policy.trained_parameters()]
    straight, resumed = (train(p, optimizer_of(p), range(4, 8)) for p in (policy, other))
    assert straight == resumed
    assert any(not torch.equal(p, start) for p, start in zip(policy.trained_parameters(), before, strict=True))
    assert torch.equal(policy.act(batch["obs"], generator()), other.act(batch["obs"], generator()))


@each_network
@each_member
def test_half_precision_keeps_the_loss_finite_and_in_float32(member, network):
    policy = awaken(member.build(network, specs=PICTURES))
    batch = make_batch(policy)
    full = policy.loss(batch, generator(), 0.5)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss = policy.loss(batch, generator(), 0.5)[0]
        actions = policy.act(batch["obs"], generator())
    assert loss.dtype == torch.float32 and actions.dtype == torch.float32
    assert torch.isfinite(loss) and torch.isfinite(actions).all()
    assert (loss - full).abs() < 0.2 * full.abs() + 0.05
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.trained_parameters() if p.grad is not None)


@each_member
def test_double_precision_trains_and_acts(member):
    policy = awaken(member.build()).double()
    batch = make_batch(policy)
    loss = policy.loss(batch, generator())[0]
    assert loss.dtype == torch.float64
    loss.backward()
    assert policy.act(batch["obs"], generator()).dtype == torch.float64


@each_member
def test_padded_actions_count_unless_masked(member):
    for masked in (False, True):
        policy = awaken(member.build(mask_padding=masked))
        batch = make_batch(policy)
        outputs = []

        def keep(module, inputs, output, outputs=outputs):
            if output.requires_grad:
                output.retain_grad()
                outputs.append(output)

        policy.net.register_forward_hook(keep)
        policy.loss(batch, generator(), 0.5)[0].backward()
        gradients = [output.grad[0, 4:] for output in outputs if output.grad is not None and output.shape[1] == 8]
        assert gradients
        if masked:
            assert not any(gradient.any() for gradient in gradients)
        else:
            assert any(gradient.any() for gradient in gradients)


@each_member
def test_the_number_of_network_calls_is_as_declared(member):
    policy = awaken(member.build()).eval()
    calls = []
    policy.net.register_forward_hook(lambda *_: calls.append(1))
    policy.act(make_batch(policy)["obs"])
    assert len(calls) == policy.nfe


@each_member
def test_training_mode_does_not_change_actions(member):
    policy = awaken(member.build(specs=PICTURES, encoder=members.EncoderSettings(crop=12)))
    obs = make_batch(policy)["obs"]
    assert torch.equal(policy.train().act(obs, generator()), policy.eval().act(obs, generator()))


@each_member
def test_warm_starts_work_or_are_refused_at_construction(member):
    chunking = Chunking(8, 2, 3, warm_start=0.5)
    if not member.cls.supports_warm_start:
        with pytest.raises(ValueError, match="warm_start"):
            member.build(chunking=chunking)
        return
    policy = awaken(member.build(chunking=chunking)).eval()
    obs = make_batch(policy)["obs"]
    cold = policy.predict(obs, fixed_noise())
    assert torch.equal(cold, awaken(member.build(chunking=CHUNKING)).eval().predict(obs, fixed_noise()))
    warm, other = (policy.predict(obs, fixed_noise(), previous=cold + shift) for shift in (0, 1))
    assert (warm - cold).abs().max() > 1e-4 and (warm - other).abs().max() > 1e-4
    executor = ChunkExecutor(policy, rows=3)
    newest = {name: value[:3, 0] for name, value in obs.items()}
    for row in range(3):
        executor.start(row, row, {name: value[row] for name, value in newest.items()})
    assert all(torch.isfinite(executor.act(newest)).all() for _ in range(7))
