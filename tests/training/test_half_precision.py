"""A gradient scaler in the loop; it works on a CPU too, so its bookkeeping can be tested here."""

import pytest
import torch
import toy

from genrl.algorithms import PolicyGradient
from genrl.diffusion import NonFiniteError
from genrl.training import optimization


def scaled_loop(run_dir, algorithm, **changes):
    loop = toy.make_loop(run_dir, algorithm, **changes)
    setup = loop.setup

    def with_scaler():
        setup()
        scaler = loop.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        # What accelerate does before clipping when mixed_precision is fp16, which needs a GPU.
        loop.accelerator.unscale_gradients = lambda: scaler.unscale_(loop.updater.optimizer.optimizer)

    loop.setup = with_scaler
    return loop


def constant(media, prompts, metadata):
    return torch.ones(len(media))


def test_iterations_without_a_gradient_leave_the_scaler_usable(tmp_path):
    loop = scaled_loop(tmp_path, PolicyGradient(steps=3), reward=constant, trainer={"iterations": 3})
    assert loop.run().status == "finished"
    assert loop.updater.updates == 0 and torch.equal(toy.weights(loop), toy.weights_of(toy.ToyGenerator()))


def test_a_scaled_run_learns_what_an_unscaled_one_learns(tmp_path):
    plain = toy.make_loop(tmp_path / "plain", PolicyGradient(steps=3), trainer={"iterations": 2})
    plain.run()
    scaled = scaled_loop(tmp_path / "scaled", PolicyGradient(steps=3), trainer={"iterations": 2})
    scaled.run()
    torch.testing.assert_close(toy.weights(scaled), toy.weights(plain), rtol=0, atol=1e-6)


def test_gradients_that_are_never_finite_end_the_run_and_count_as_no_update(tmp_path, monkeypatch):
    monkeypatch.setattr(optimization, "MAX_SKIPPED", 3)
    algorithm = PolicyGradient(steps=3)
    original = algorithm.loss
    algorithm.loss = lambda *arguments: (original(*arguments)[0] * torch.nan, original(*arguments)[1])
    loop = scaled_loop(tmp_path, algorithm, trainer={"iterations": 9})
    with pytest.raises(NonFiniteError, match="skipped 3 updates in a row"):
        loop.run()
    assert loop.updater.updates == 0 and torch.isfinite(toy.weights(loop)).all()
