"""Weights of tokens in the policy gradient: what they may change, and what they must leave as it was."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import toy

from genrl.algorithms import ChunkWeights, PolicyGradient, RewardGradient, Rollout, VideoCredit
from genrl.algorithms.base import Batch
from genrl.algorithms.token_weights import checked_weights, latent_axes
from genrl.diffusion import CPS, SAGE, Consistency, DanceSDE, FlowSDE, RowNoise
from genrl.objectives import ConsistencyRegression, FlowDPPO, Guard, PPOClip, Reinforce
from genrl.objectives.credit import chunk_weights
from genrl.prompts import Prompt

STEPS = 4
KERNELS = {"flow": FlowSDE(), "dance": DanceSDE(), "sage": SAGE(), "cps": CPS(), "consistency": Consistency()}
SURROGATES = {
    "clip": PPOClip(), "guard": Guard(), "guard_inv_kappa": Guard(delta_form="inv_kappa"), "dppo": FlowDPPO(),
    "reinforce": Reinforce(), "consistency": ConsistencyRegression(),
}  # fmt: skip


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def started():
    generator = toy.ToyGenerator()
    with torch.no_grad():
        generator.module.second.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    generator.weights = toy.TrainableWeights(generator.module)
    return generator


class Given:
    """Fixed weights for every sample."""

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, rollout, media, prompts, generator):
        return self.weights.expand(len(rollout), *self.weights.shape).clone()


def losses(token_weights, generator=None, move=1e-4, **settings):
    """Loss [B] over all steps and the gradient of its sum, after the weights have moved a little."""
    generator = started() if generator is None else generator
    algorithm = PolicyGradient(steps=STEPS, minibatches=1, token_weights=token_weights, **settings)
    algorithm.configure(generator)
    rows = torch.arange(8)
    key = (0, "rollout", 0)
    cond = generator.encode([f"p{int(row)}" for row in rows])
    prompts = [Prompt(f"p{int(row)}") for row in rows]
    draws = RowNoise.of(key, rows), RowNoise.of((*key, "group"), rows // 4)
    batch = Batch(cond, rows, rows // 4, *draws, seed=0, iteration=0, prompts=prompts)
    rollout = algorithm.rollout(generator.velocity, generator, batch)
    rollout = algorithm.observe(rollout, generator.decode(rollout.x0).detach(), prompts)
    rollout = replace(rollout, advantage=torch.linspace(-1.5, 2.0, 8))
    rollout = algorithm.before_update(generator.velocity, generator, rollout, batch)
    with torch.no_grad():
        generator.module.second.add_(move * noise(toy.PIXELS, 16, seed=2))
    units = algorithm.units(rollout, batch)
    results = [algorithm.loss(generator.velocity, rollout, unit, units) for unit in units]
    total = sum(loss for loss, _ in results)
    gradient = torch.autograd.grad(total.sum(), generator.trainable(), retain_graph=True)
    return total.detach(), gradient, results


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_uniform_weights_are_plain_grpo_bit_for_bit(kernel, surrogate, reduction):
    settings = {"kernel": KERNELS[kernel], "surrogate": SURROGATES[surrogate], "kl_weight": 0.1, "reduction": reduction}
    plain, gradient, measured = losses(None, **settings)
    for weights in (torch.ones(1, 4, 4), torch.ones(1, 1, 1)):
        loss, weighted, others = losses(Given(weights), **settings)
        assert torch.equal(loss, plain)
        assert all(torch.equal(a, b) for a, b in zip(weighted, gradient, strict=True))
        for (_, before), (_, after) in zip(measured, others, strict=True):
            assert float(after.pop("token_weights/effective_share")) == 1
            assert before == after


@pytest.mark.parametrize("surrogate", [name for name in SURROGATES if name != "dppo"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_hot_weights_reach_the_prediction_of_their_token_alone(kernel, surrogate):
    class Leaf(toy.ToyGenerator):
        """Its velocity is that of the toy and a leaf for every pixel."""

        def __init__(self):
            super().__init__()
            self.leaf = torch.zeros(toy.SHAPE, requires_grad=True)

        def velocity(self, x, t, cond):
            return super().velocity(x, t, cond) + self.leaf

    one_hot = torch.zeros(1, 4, 4)
    one_hot[0, 2, 1] = 16
    generator = Leaf()
    _, _, results = losses(
        Given(one_hot), generator, move=0, kernel=KERNELS[kernel], surrogate=SURROGATES[surrogate], reduction="mean"
    )
    (gradient,) = torch.autograd.grad(sum(loss for loss, _ in results).sum(), generator.leaf)
    assert float(gradient[0, 2, 1].abs()) > 0
    assert torch.equal(gradient != 0, one_hot != 0)


@pytest.mark.parametrize("kernel", ["flow", "dance", "sage"])
def test_the_weighted_ratio_is_the_weighted_sum_over_tokens(kernel):
    """log rho = (1/K) sum_k c_k (l_k - l_k^old) with densities of torch.distributions, for the first step."""
    weights = torch.rand(1, 4, 4, generator=torch.Generator().manual_seed(3))
    weights = weights / weights.mean()
    generator = started()
    algorithm = PolicyGradient(
        KERNELS[kernel], STEPS, minibatches=1, surrogate=Reinforce(), token_weights=Given(weights)
    )
    algorithm.configure(generator)
    cond = generator.encode(["p1", "p2", "p3"])
    rows = torch.arange(3)
    draws = RowNoise.of((0,), rows), RowNoise.of((1,), rows)
    rollout = algorithm.rollout(generator.velocity, generator, Batch(cond, rows, rows, *draws, 0, 0))
    rollout = algorithm.observe(rollout, torch.zeros(3, 1, 4, 4), [])
    with torch.no_grad():
        generator.module.second.add_(0.05 * noise(toy.PIXELS, 16, seed=2))
    k = rollout.trajectory.steps[0]
    rollout = replace(rollout, advantage=torch.ones(3))
    loss, _ = algorithm.loss(generator.velocity, rollout, (k,), [(k,)])
    with torch.no_grad():
        mean = algorithm.sampler.replay(generator.velocity, rollout.trajectory, k, cond).mean
    std, drawn = algorithm.sampler.step(k, True).s, rollout.trajectory.states[k + 1]
    now, old = (
        torch.distributions.Normal(m.double(), std).log_prob(drawn.double())
        for m in (mean, rollout.trajectory.means[k])
    )
    expected = (weights * (now - old)).flatten(1).mean(1)
    torch.testing.assert_close(-loss.detach().double(), expected, rtol=1e-4, atol=1e-6)


def test_guard_centres_the_weighted_ratio():
    """RatioNorm with weights is s (l + bias), bias = sum_k c_k |dmu_k|^2 / (2 s^2 K), which is -(1/K) sum c dmu . z."""
    from genrl.diffusion import GaussianTransition
    from genrl.objectives import StepTerms

    weights = torch.rand(64, 32, generator=torch.Generator().manual_seed(3)) * 2
    weights = weights / weights.mean(1, keepdim=True)
    old, shift, z, std = noise(64, 32), 0.1 * noise(64, 32, seed=1), noise(64, 32, seed=2), 0.4
    mean = (old + shift).requires_grad_()
    now, behaviour = GaussianTransition(mean, std), GaussianTransition(old, std)
    ratio = now.log_ratio(behaviour, behaviour.at(z), "mean", weights)
    kl = now.kl(behaviour, "mean", weights)
    torch.testing.assert_close(kl, (weights * shift**2).sum(1) / (2 * std**2 * 32), rtol=1e-4, atol=1e-7)
    terms = StepTerms(ratio, kl, torch.ones(64), mean, behaviour.at(z), 0.5, std, 0.1, 0.1, 32, "mean", weights)
    loss, _ = Guard(clip_range=0.9, delta_form="none")(terms)
    torch.testing.assert_close((-loss).log(), (weights * shift * z).mean(1), rtol=1e-3, atol=1e-5)


def test_without_weights_observing_changes_nothing():
    rollout = Rollout(None, torch.zeros(2, 1, 4, 4), torch.arange(2))
    assert PolicyGradient().observe(rollout, torch.zeros(2, 1, 4, 4), []) is rollout


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(2, 4, 4), "weights of shape"),
        (torch.ones(2, 1, 3, 4), "weights of shape"),
        (torch.ones(2, 1, 4, 4) * 1.1, "weights of mean 1.1"),
        (torch.tensor([3.0, -1.0, 1, 1]).expand(2, 1, 4, 4), "not negative"),
        (torch.full((2, 1, 1, 1), torch.nan), "finite"),
    ],
)
def test_weights_that_are_none_are_refused(weights, message):
    with pytest.raises(ValueError, match=f"Mine gave .*{message}|{message}"):
        checked_weights(weights, torch.zeros(2, 1, 4, 4), "Mine")


# ---- chunks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axes", "shape"), [("FCHW", (6, 1, 4, 4)), ("CFHW", (2, 6, 4, 4))])
def test_chunk_weights_lie_over_the_frames_of_their_chunks(axes, shape):
    generator = SimpleNamespace(latent_shape=shape, latent_axes=axes)
    rollout = Rollout(None, torch.zeros(3, *shape), torch.arange(3))
    for chunks, lengths in [(None, [1] * 6), (3, [2, 2, 2]), ([1, 2, 3], [1, 2, 3])]:
        for given, own in [(chunks, None), (None, chunks)]:
            generator.chunks = own
            weights = ChunkWeights(chunks=given)(rollout, None, [], generator)
            checked_weights(weights, rollout.x0, "ChunkWeights")
            by_frame = weights.expand(3, *shape)[1].movedim(axes.index("F"), 0)[:, 0, 0, 0]
            assert torch.equal(by_frame, chunk_weights(lengths).repeat_interleave(torch.tensor(lengths)))


def test_chunks_that_do_not_make_up_the_video_are_refused():
    generator = SimpleNamespace(latent_shape=(6, 1, 4, 4), latent_axes="FCHW")
    for chunks in (4, [2, 2], [7, -1]):
        with pytest.raises(ValueError, match="do not divide 6 latent frames"):
            ChunkWeights(chunks=chunks).configure(generator)
    with pytest.raises(ValueError, match="latents CHW without frames"):
        ChunkWeights().configure(toy.ToyGenerator())


# ---- credit ----------------------------------------------------------------------------------------------


class Linear:
    """A critic R = <W, V> for each question, with W [Q, F, C, H, W]."""

    differentiable = True

    def __init__(self, filters):
        self.filters = filters.requires_grad_()  # as a critic that forgot to freeze its weights

    def questions(self, media, prompts, metadata):
        return [["?"] * len(self.filters)] * len(media)

    def gradient_magnitude(self, media, questions):
        leaf = media.detach().requires_grad_()
        with torch.enable_grad():
            values = torch.einsum("bfchw,qfchw->bq", leaf, self.filters)
            gradients = [torch.autograd.grad(v.sum(), leaf, retain_graph=True)[0] for v in values.unbind(1)]
        return values.detach(), torch.stack([g.norm(dim=2) for g in gradients], 1)


def region_critic(shape=(9, 3, 16, 16), questions=2):
    filters = torch.zeros(questions, *shape)
    filters[:, 1:5, :, 8:, :4] = noise(questions, 4, shape[1], shape[2] - 8, 4)
    return Linear(filters)


@pytest.mark.parametrize(("axes", "shape", "size"), [("FCHW", (9, 3, 8, 8), 8), ("CFHW", (4, 3, 4, 4), 4)])
def test_credit_lies_in_the_region_that_the_reward_depends_on(axes, shape, size):
    generator = SimpleNamespace(latent_shape=shape, latent_axes=axes)
    media = torch.rand(2, 9, 3, 16, 16)
    rollout = Rollout(None, torch.zeros(2, *shape), torch.arange(2))
    critic = region_critic()
    weights = VideoCredit(critic)(rollout, media, [Prompt("a")] * 2, generator)
    checked_weights(weights, rollout.x0, "VideoCredit")
    assert not weights.requires_grad and critic.filters.grad is None
    credit = weights.movedim(1 + axes.index("C"), 1)[:, 0]  # [B, f, h, w]
    frames = slice(1, 5) if axes == "FCHW" else slice(1, 2)  # frames 1 to 4 are latent frame 1
    inside = torch.zeros_like(credit, dtype=torch.bool)
    inside[:, frames, size // 2 :, : size // 4] = True
    assert float(credit[~inside].abs().max()) == 0
    assert bool((credit[inside] > 0).all())
    shown = VideoCredit(critic).shown(media, [Prompt("a")] * 2, generator)
    assert shown.shape == (2, 9, 16, 16)
    torch.testing.assert_close(shown.mean((1, 2, 3)), torch.ones(2), rtol=0.5, atol=0)


def test_images_are_videos_of_one_frame():
    class Still(Linear):
        def gradient_magnitude(self, media, questions):
            values, magnitude = super().gradient_magnitude(media[:, None], questions)
            return values, magnitude[:, :, 0]

    critic = Still(region_critic((9, 3, 16, 16)).filters.detach()[:, 1:2])
    generator = SimpleNamespace(latent_shape=(4, 8, 8))
    rollout = Rollout(None, torch.zeros(2, 4, 8, 8), torch.arange(2))
    weights = VideoCredit(critic)(rollout, torch.rand(2, 3, 16, 16), [Prompt("a")] * 2, generator)
    assert weights.shape == (2, 1, 8, 8) and not weights[..., :4, :].any()
    checked_weights(weights, rollout.x0, "VideoCredit")


def test_packed_latents_are_refused_by_the_generators_name():
    class PackedGenerator:
        latent_shape = (64, 16)

    with pytest.raises(ValueError, match=r"PackedGenerator has latents of shape \(64, 16\)"):
        VideoCredit(region_critic()).configure(PackedGenerator())
    assert latent_axes(SimpleNamespace(latent_shape=(16, 5, 8, 8))) == "CFHW"
    assert latent_axes(SimpleNamespace(latent_shape=(16, 8, 8))) == "CHW"


def test_critics_that_give_no_credit_are_refused():
    with pytest.raises(ValueError, match=r"HalfBrightness, which has no questions\(\)"):
        VideoCredit(toy.HalfBrightness())
    blind = region_critic()
    blind.differentiable = False
    with pytest.raises(ValueError, match="passes no gradients to the frames"):
        VideoCredit(blind).prepare()
    with pytest.raises(ValueError, match="lam = 2"):
        VideoCredit(region_critic(), lam=2)


class Corner:
    """One question about images: is the upper left corner bright? The reward of the toy, with credit."""

    differentiable = True
    range = (0.0, 1.0)
    name = "corner"

    def __call__(self, media, prompts, metadata):
        return media[:, 0, :2, :2].mean((1, 2))

    def questions(self, media, prompts, metadata):
        return [["bright?"]] * len(media)

    def gradient_magnitude(self, media, questions):
        leaf = media.detach().requires_grad_()
        with torch.enable_grad():
            value = self(leaf, [], [])
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach()[:, None], gradient.norm(dim=1)[:, None]


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_run_trains_with_credit_and_resumes_exactly(tmp_path, micro_batch):
    def loop(folder, iterations):
        algorithm = PolicyGradient(steps=STEPS, token_weights=VideoCredit(Corner()), micro_batch=micro_batch)
        return toy.make_loop(tmp_path / folder, algorithm, reward=Corner(), trainer={"iterations": iterations})

    whole = loop("whole", 3)
    whole.run(resume="never")
    assert toy.rows(tmp_path / "whole", "train")[0]["token_weights/effective_share"] == pytest.approx(0.25)  # 4 of 16
    loop("parts", 1).run(resume="never")
    second = loop("parts", 3)
    second.run(resume="require")
    assert torch.equal(toy.weights(whole), toy.weights(second))


def test_credit_is_shown_beside_the_samples_and_in_the_report(tmp_path):
    from PIL import Image

    from genrl.report.report import write_report

    algorithm = PolicyGradient(steps=STEPS, token_weights=VideoCredit(Corner()))
    loop = toy.make_loop(tmp_path, algorithm, reward=Corner(), evaluation={"every": 1})
    loop.run(resume="never")
    picture = tmp_path / "samples" / "credit-iteration-000003.png"
    with Image.open(picture) as image:
        pixels = torch.tensor(list(image.convert("RGB").getdata())).reshape(image.height, image.width, 3)
    yellow = (pixels[..., 0] > 200) & (pixels[..., 1] > 200) & (pixels[..., 2] < 50)
    # Four held-out prompts; tiles of 4 x 4 enlarged to 32 x 32, of which a quarter glows.
    assert int(yellow.sum()) == 4 * 16 * 16
    text = write_report(tmp_path).read_text()
    assert "Credit, before training" in text and "Credit, iteration 3" in text


def test_without_credit_there_is_no_such_picture(tmp_path):
    toy.make_loop(tmp_path, PolicyGradient(steps=STEPS), evaluation={"every": 1}).run(resume="never")
    assert not list((tmp_path / "samples").glob("credit*"))


@pytest.mark.parametrize("batch", [None, 3])
def test_any_differentiable_reward_is_a_critic(batch):
    class Halves:
        differentiable = True

        def __call__(self, media, prompts, metadata):
            left, right = media[..., :2].square().sum((1, 2, 3)), media[..., 2:].sum((1, 2, 3))
            return {"left": left, "right": torch.where(torch.arange(len(media)) == 0, torch.nan, right)}

    media = torch.rand(4, 2, 4, 4)
    critic = RewardGradient(Halves(), batch)
    values, magnitude = critic.gradient_magnitude(media, critic.questions(media, ["a"] * 4, [{}] * 4))
    torch.testing.assert_close(values[:, 0], media[..., :2].square().sum((1, 2, 3)))
    torch.testing.assert_close(magnitude[:, 0, :, :2], 2 * media[..., :2].norm(dim=1))
    assert not magnitude[:, 0, :, 2:].any() and not magnitude[:, 1, :, :2].any()
    torch.testing.assert_close(magnitude[1, 1, :, 2:], torch.full((4, 2), 2**0.5))
    assert bool(values[0, 1].isnan()) and not magnitude[0, 1].any()
    credit = VideoCredit(critic)(
        Rollout(None, torch.zeros(4, 1, 4, 4), torch.arange(4)), media, [Prompt("a")] * 4, toy.ToyGenerator()
    )
    assert not credit[0, ..., 2:].any() and bool(credit[1, ..., 2:].all())  # the missing value says nothing
    blind = Halves()
    blind.differentiable = False
    with pytest.raises(ValueError, match="RewardGradient passes no gradients"):
        VideoCredit(RewardGradient(blind)).prepare()
