"""robomimic's rollout loop around our policies."""

from inspect import signature

import numpy as np
import pytest
from policy_members import MEMBERS, PICTURES, awaken, make_batch

from genrl.policies import ChunkExecutor, Chunking


def rollout_of(chunking=Chunking(4, 2, 2)):
    policy = awaken(MEMBERS[0].build(chunking=chunking, specs=PICTURES)).train()
    return policy, policy.rollout_policy(seed=5)


def observation(policy, step):
    obs = make_batch(policy, rows=1, seed=step)["obs"]
    return {name: value[0, 0].numpy() for name, value in obs.items()}


def test_an_episode_is_that_of_the_executor():
    policy, rollout = rollout_of()
    executor = ChunkExecutor(policy, rows=1, seed=5, batch=None)
    for episode in range(2):
        rollout.start_episode()
        assert not policy.training
        executor.start(0, episode, observation(policy, 10 * episode))
        for step in range(5):
            ob = observation(policy, 10 * episode + step)
            action = rollout(ob)
            assert isinstance(action, np.ndarray) and action.shape == (3,)
            assert np.array_equal(action, executor.act({name: value[None] for name, value in ob.items()})[0])


def test_images_may_have_robomimics_forms():
    policy, _ = rollout_of()
    actions = []
    for form in (
        lambda image: image,
        lambda image: image.transpose(1, 2, 0),  # raw: uint8 [H, W, C]
        lambda image: (image / 255).astype(np.float32),  # processed: float [C, H, W] in [0, 1]
    ):
        rollout = policy.rollout_policy(seed=5)
        rollout.start_episode()
        ob = observation(policy, 0)
        actions.append(rollout(ob | {"cam": form(ob["cam"])}))
    assert np.array_equal(actions[0], actions[1]) and np.array_equal(actions[0], actions[2])


def test_misuse_is_answered():
    policy, rollout = rollout_of()
    ob = observation(policy, 0)
    with pytest.raises(ValueError, match="start_episode"):
        rollout(ob)
    rollout.start_episode()
    with pytest.raises(ValueError, match="goal"):
        rollout(ob, goal=ob)
    with pytest.raises(ValueError, match=r"'cam' is float32; images are uint8"):
        rollout(ob | {"cam": ob["cam"].astype(np.float32)})
    with pytest.raises(ValueError, match="'state' is missing"):
        rollout({name: value for name, value in ob.items() if name != "state"})


def test_the_interface_is_that_of_robomimics_rollout_policy():
    # robomimic 0.3: RolloutPolicy.start_episode(self), RolloutPolicy.__call__(self, ob, goal=None)
    _, rollout = rollout_of()
    assert list(signature(rollout.start_episode).parameters) == []
    parameters = signature(rollout).parameters
    assert list(parameters) == ["ob", "goal"] and parameters["goal"].default is None
