"""Moving averages and other weight sets."""

import pytest
import torch
from torch import nn

from genrl.training.ema import EMA, WeightSet, change_norm


def parameters():
    return [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.full((2, 2), 3.0))]


def test_average_equals_a_hand_computed_path_through_the_warm_up_and_beyond():
    live = parameters()
    ema = EMA(live, decay=0.6)
    expected, decays = [1.0, -2.0], []
    for n in range(1, 30):
        with torch.no_grad():
            live[0].copy_(torch.tensor([float(n), float(n * n)]))
        ema.step()
        decay = min(0.6, (1 + n) / (10 + n))
        decays.append(ema.current_decay)
        expected = [decay * e + (1 - decay) * x for e, x in zip(expected, [n, n * n], strict=True)]
        torch.testing.assert_close(ema.values[0], torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert decays[0] == pytest.approx(2 / 11)
    assert decays == sorted(decays) and decays[-1] == 0.6  # rises to the configured value and stays
    assert torch.equal(ema.values[1], torch.full((2, 2), 3.0))


def test_decay_zero_copies_exactly():
    live = parameters()
    copied = WeightSet(live)
    with torch.no_grad():
        live[0].copy_(torch.tensor([0.1, 0.2]))
    copied.update(0)
    assert torch.equal(copied.values[0], live[0].detach())


def test_the_average_is_a_copy_that_live_updates_do_not_reach():
    live = parameters()
    ema = EMA(live, 0.9)
    with torch.no_grad():
        live[0].add_(100)
    assert torch.equal(ema.values[0], torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize("fails", [False, True])
def test_live_weights_come_back_bit_for_bit_also_after_an_exception(fails):
    torch.manual_seed(0)
    live = [nn.Parameter(torch.randn(50)), nn.Parameter(torch.randn(3), requires_grad=False)]
    before = [p.detach().clone() for p in live]
    ema = EMA(live, 0.9)
    with torch.no_grad():
        live[0].mul_(1.1)
    moved = [p.detach().clone() for p in live]
    addresses = [p.data_ptr() for p in live]
    try:
        with ema.active():
            assert torch.equal(live[0], before[0])
            if fails:
                raise RuntimeError("inside")
    except RuntimeError:
        assert fails
    assert all(torch.equal(p, m) for p, m in zip(live, moved, strict=True))
    assert [p.requires_grad for p in live] == [True, False]
    assert [p.data_ptr() for p in live] == addresses  # written in place: sharded modules ignore new storage


def test_state_round_trip_keeps_values_and_counter():
    live = parameters()
    ema = EMA(live, 0.99)
    for _ in range(5):
        with torch.no_grad():
            live[0].add_(1)
        ema.step()
    state = {k: v for k, v in ema.state_dict().items()}
    other = EMA(parameters(), 0.99)
    other.load_state_dict(state)
    assert other.updates == 5 and torch.equal(other.values[0], ema.values[0])
    other.step()
    assert other.updates == 6


def test_a_state_of_another_model_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="2 averaged tensors, the model has 1"):
        EMA(parameters()[:1], 0.9).load_state_dict(EMA(parameters(), 0.9).state_dict())


def test_change_norm_is_the_euclidean_length_of_the_change():
    assert change_norm([torch.tensor([3.0]), torch.tensor([4.0])], [torch.zeros(1), torch.zeros(1)]) == 5.0
