import pytest
import torch

from genrl.diffusion import Consistency, Euler, FlowSDE, RowNoise, Sampler, Schedule
from genrl.diffusion.chunks import ChunkSampler

ROWS = range(3)


class Chunkwise:
    """v of a chunk = 0.3 x + t + the sum of the finished chunks before it; its cache is that sum."""

    frames_per_chunk = 2

    def chunk(self, x, t, cond, cache):
        return 0.3 * x + t.reshape(-1, 1, 1) + cond["shift"][:, None, None] + (0 if cache is None else cache)

    def extend(self, cache, chunk, cond):
        return chunk.sum((1, 2), keepdim=True) + (0 if cache is None else cache)

    def whole(self, x, t, cond):
        """The same for all chunks at once, with the finished ones as history."""
        past = cond["history"].unflatten(1, (-1, 2)).sum((2, 3)).cumsum(1)  # [B, J]
        past = torch.cat([torch.zeros_like(past[:, :1]), past[:, :-1]], 1).repeat_interleave(2, 1)[..., None]
        return 0.3 * x + t.reshape(-1, 1, 1) + cond["shift"][:, None, None] + past


def sampler(kernel, steps=4):
    return ChunkSampler(kernel, Schedule.uniform(steps, 2.0), "all", None, Chunkwise)


def start(rows=ROWS):
    noise = RowNoise.of((0, "test"), list(rows), "cpu")
    cond = {"shift": torch.tensor([0.1, -0.2, 0.3])[list(rows)]}
    return noise.initial((len(rows), 6, 4)), cond, noise


@pytest.mark.parametrize("kernel", [Consistency(), FlowSDE(0.7)])
def test_replay_of_all_chunks_at_once_gives_the_means_of_the_roll_out(kernel):
    x1, cond, noise = start()
    chunked = sampler(kernel)
    trajectory = chunked.rollout(None, x1, cond, noise)
    assert trajectory.steps == (0, 1, 2) and trajectory.x0.shape == x1.shape
    assert torch.equal(trajectory.states[0], x1)
    velocity = Chunkwise().whole
    for k in trajectory.steps:
        mean = chunked.replay(velocity, trajectory, k, cond).mean
        torch.testing.assert_close(mean, trajectory.means[k], atol=1e-5, rtol=1e-5)
    together = chunked.replay(velocity, trajectory, (0, 2), cond).mean
    torch.testing.assert_close(together, torch.cat([trajectory.means[0], trajectory.means[2]]), atol=1e-5, rtol=1e-5)
    own = chunked.replay(velocity, trajectory, torch.tensor([2, 0, 1]), cond).mean
    expected = torch.stack([trajectory.means[k][i] for i, k in enumerate((2, 0, 1))])
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def test_noise_is_that_of_the_step_whatever_the_chunk_and_the_batch():
    x1, cond, noise = start()
    trajectory = sampler(Consistency()).rollout(None, x1, cond, noise)
    times = trajectory.t
    for k in trajectory.steps:  # z = mean + s eps
        eps = (trajectory.states[k + 1] - trajectory.means[k]) / times[k + 1]
        torch.testing.assert_close(eps, noise(k, tuple(x1.shape)), atol=1e-4, rtol=1e-4)
    x1, cond, noise = start([1])
    alone = sampler(Consistency()).rollout(None, x1, cond, noise)
    torch.testing.assert_close(alone.x0, trajectory.x0[1:2])


def test_a_single_chunk_is_the_ordinary_sampler():
    class Whole(Chunkwise):
        frames_per_chunk = 6

    x1, cond, noise = start()
    chunked = ChunkSampler(FlowSDE(0.7), Schedule.uniform(4), "all", None, Whole).rollout(None, x1, cond, noise)
    ordinary = Sampler(FlowSDE(0.7), Schedule.uniform(4)).rollout(
        lambda x, t, cond: Whole().chunk(x, t, cond, None), x1, cond, noise
    )
    assert torch.equal(chunked.x0, ordinary.x0) and chunked.steps == ordinary.steps
    assert all(torch.equal(chunked.states[k], ordinary.states[k]) for k in ordinary.states)


def test_without_noise_there_are_no_steps_to_train_and_windows_choose_some():
    x1, cond, noise = start()
    assert sampler(Euler()).rollout(None, x1, cond, noise).steps == ()
    some = sampler(Consistency()).rollout(None, x1, cond, noise, keep=(1,))
    assert some.steps == (1,) and sorted(some.states) == [1, 2] and some.evaluations == round(3 * (4 + 2 / 3))
    with pytest.raises(ValueError, match="no density"):
        sampler(Consistency()).rollout(None, x1, cond, noise, steps=(3,))
    with pytest.raises(ValueError, match="share_prefix"):
        sampler(Consistency()).rollout(None, x1, cond, noise, expand=torch.tensor([0]))
