"""Properties that every built-in generator has."""

import json

import pytest
import torch
from generator_members import change, sample
from torch import nn

from genrl.diffusion import index_batch


def test_shapes_types_and_ranges(make, prompts):
    generator = make()
    cond = generator.encode(prompts * 2)
    x = generator.initial_latents(cond, torch.Generator().manual_seed(0))
    assert x.shape == (4, *generator.latent_shape) and x.dtype == torch.float32
    t = torch.tensor([1.0, 0.9, 0.5, 0.1])
    velocity = generator.velocity(x, t, cond)
    assert velocity.shape == x.shape and velocity.dtype == torch.float32
    media = generator.decode(3 * x)
    assert media.shape == x.shape and media.min() == 0 and media.max() == 1
    rows = torch.tensor([3, 1])
    torch.testing.assert_close(
        generator.velocity(x[rows], t[rows], index_batch(cond, rows)), velocity[rows], atol=1e-5, rtol=1e-4
    )


def test_noise_may_be_a_generator_a_function_or_absent(make, prompts):
    generator = make()
    cond = generator.encode(prompts)
    first, second = (generator.initial_latents(cond, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(generator.initial_latents(cond, torch.ones), torch.ones(2, *generator.latent_shape))
    assert generator.initial_latents(cond, None).shape == first.shape


def test_gradients_reach_the_trainable_parameters_and_only_them(make, prompts):
    generator = make()
    change(generator)
    cond = generator.encode(prompts)
    x = generator.initial_latents(cond, torch.Generator().manual_seed(0))
    generator.velocity(x, torch.full((2,), 0.5), cond).square().sum().backward()
    trainable = {id(p) for p in generator.trainable()}
    assert all(p.grad is not None and p.grad.any() for p in generator.trainable())
    assert all(p.grad is None for p in generator.module.parameters() if id(p) not in trainable)
    assert {id(p) for p in generator.module.parameters() if p.requires_grad} == trainable


def test_everything_is_in_eval_mode_and_nothing_drops_out(make):
    for module in make().module.modules():
        assert not module.training
        assert not isinstance(module, nn.Dropout) or module.p == 0


def test_reference_is_the_start_and_leaves_no_trace(make, prompts):
    generator = make()
    start = sample(generator, prompts)
    change(generator)
    changed = sample(generator, prompts)
    weights = {name: p.clone() for name, p in generator.state_dict().items()}
    flags = {name: p.requires_grad for name, p in generator.module.named_parameters()}
    identities = [id(p) for p in generator.trainable()]
    with generator.reference():
        assert torch.equal(sample(generator, prompts), start)
        with generator.reference():
            pass
        assert torch.equal(sample(generator, prompts), start)
    assert not torch.allclose(changed, start)
    assert torch.equal(sample(generator, prompts), changed)
    assert all(torch.equal(p, weights[name]) for name, p in generator.state_dict().items())
    assert {name: p.requires_grad for name, p in generator.module.named_parameters()} == flags
    assert [id(p) for p in generator.trainable()] == identities


def test_reference_restores_after_an_exception(make, prompts):
    generator = make()
    change(generator)
    changed = sample(generator, prompts)
    with pytest.raises(KeyError), generator.reference():
        raise KeyError
    assert torch.equal(sample(generator, prompts), changed)


def test_reference_between_forward_and_backward_changes_no_gradient(make, prompts):
    generator = make()
    change(generator)
    cond = generator.encode(prompts)
    x, t = generator.initial_latents(cond, torch.Generator().manual_seed(0)), torch.full((2,), 0.5)

    def gradients(with_reference: bool) -> list[torch.Tensor]:
        loss = generator.velocity(x, t, cond).square().sum()
        if with_reference:
            with generator.reference():
                assert not generator.velocity(x, t, cond).requires_grad
        return torch.autograd.grad(loss, generator.trainable())

    for plain, interrupted in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, interrupted)


def test_what_is_saved_and_loaded_samples_the_same_bits(make, prompts, tmp_path):
    generator = make()
    start = sample(generator, prompts)
    change(generator)
    generator.save_pretrained(tmp_path / "model")
    loaded = type(generator).from_pretrained(tmp_path / "model")
    loaded.prepare("cpu")
    assert torch.equal(sample(loaded, prompts), sample(generator, prompts))
    assert loaded.state_dict().keys() == generator.state_dict().keys()
    with loaded.reference():
        reference = sample(loaded, prompts)
    assert torch.equal(reference, start if generator.lora else sample(generator, prompts))


def test_state_dict_moves_training_between_generators_but_not_the_reference(make, prompts):
    generator, other = make(), make()
    start = sample(generator, prompts)
    change(generator)
    other.load_state_dict({name: p.clone() for name, p in generator.state_dict().items()})
    assert torch.equal(sample(other, prompts), sample(generator, prompts))
    with other.reference():
        assert torch.equal(sample(other, prompts), start)


def test_state_that_does_not_fit_is_refused_and_changes_nothing(make, prompts):
    generator = make()
    before = sample(generator, prompts)
    state = {name: p + 1 for name, p in generator.state_dict().items()}
    first = next(iter(state))
    with pytest.raises(ValueError, match="1 missing"):
        generator.load_state_dict({name: p for name, p in state.items() if name != first})
    with pytest.raises(ValueError, match="shape"):
        generator.load_state_dict({**state, list(state)[-1]: torch.zeros(1, 2, 3)})
    assert torch.equal(sample(generator, prompts), before)


def test_velocity_calls_the_wrapper_that_replaced_the_module(make, prompts):
    generator = make()
    plain = sample(generator, prompts)

    class Wrapper(nn.Module):
        calls = 0

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            self.calls += 1
            return self.module(*args, **kwargs)

    generator.module = Wrapper(generator.module)
    assert torch.equal(sample(generator, prompts), plain)
    assert generator.module.calls == 3


def test_use_before_prepare_is_an_error(variant, prompts):
    from generator_members import TINY, VARIANTS

    kind, arguments = VARIANTS[variant]
    generator = kind(**{**TINY, **arguments})
    with pytest.raises(RuntimeError, match="prepare"):
        generator.trainable()
    with pytest.raises(RuntimeError, match="prepare"):
        sample(generator, prompts)


def test_guidance_extrapolates_from_the_null_condition(make, prompts):
    generator = make()
    change(generator)
    cond = generator.encode(prompts)
    x, t = generator.initial_latents(cond, torch.Generator().manual_seed(0)), torch.full((2,), 0.5)
    with torch.no_grad():
        velocities = {}
        for scale in (None, 0.0, 1.0, 3.0):
            generator.guidance_scale = scale
            velocities[scale] = generator.velocity(x, t, cond)
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(velocities[1.0], velocities[None], **close)
    expected = velocities[0.0] + 3 * (velocities[1.0] - velocities[0.0])
    torch.testing.assert_close(velocities[3.0], expected, **close)


def test_a_folder_of_another_class_or_of_nothing_is_refused(make, tmp_path):
    generator = make()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        type(generator).from_pretrained(tmp_path)
    generator.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "generator": "Other"}))
    with pytest.raises(ValueError, match="Other"):
        type(generator).from_pretrained(tmp_path)
