"""The checker finds what it says it looks for."""

import pytest
import torch
from policy_members import CHUNKING, MEMBERS, PICTURES, make_batch
from torch import nn

from genrl.policies import FlowPolicy, RegressionPolicy, check_policy


class NeedsSetting(FlowPolicy):
    def __init__(self, network=MEMBERS[0].build().network, strength: float = 1.0):
        super().__init__(network=network)
        self.power = strength  # not under its name


class Detached(RegressionPolicy):
    def _configured(self):
        self.extra = nn.Linear(2, 2)


class NaNLoss(RegressionPolicy):
    def _loss(self, x0, cond, weight, draw, progress):
        loss, metrics = super()._loss(x0, cond, weight, draw, progress)
        return loss * float("nan"), metrics


class HalfOverflow(RegressionPolicy):
    def _loss(self, x0, cond, weight, draw, progress):
        loss, metrics = super()._loss(x0, cond, weight, draw, progress)
        half = (cond @ torch.ones(cond.shape[1], 1)).dtype == torch.bfloat16
        return loss + (float("inf") if half else 0.0), metrics


class GlobalDraws(FlowPolicy):
    def _loss(self, x0, cond, weight, draw, progress):
        loss, metrics = super()._loss(x0, cond, weight, draw, progress)
        return loss + torch.rand(()), metrics | {"loss_rows": loss}


class GlobalActs(FlowPolicy):
    def _sample(self, cond, noise, start):
        return super()._sample(cond, noise, start) + torch.randn(3)


class NaNChunk(RegressionPolicy):
    def _sample(self, cond, noise, start):
        return super()._sample(cond, noise, start).log()


class WrongShape(RegressionPolicy):
    def _sample(self, cond, noise, start):
        return super()._sample(cond, noise, start)[:, 1:]


class Mixes(RegressionPolicy):
    def _sample(self, cond, noise, start):
        return super()._sample(cond - cond.mean(0), noise, start)


class ClaimsOneCall(FlowPolicy):
    nfe = 1


class ForgetsState(RegressionPolicy):
    def _configured(self):
        self.offset = torch.rand(1) + id(self) % 1000  # neither a parameter nor a buffer

    def _sample(self, cond, noise, start):
        return super()._sample(cond, noise, start) + self.offset


class KeyErrors(RegressionPolicy):
    def encode(self, obs, draw=None):
        return super().encode({name: obs[name] for name in self.specs}, draw)


class Fills(RegressionPolicy):
    def encode(self, obs, draw=None):
        zeros = {name: torch.zeros(4, 1, *spec.shape) for name, spec in self.specs.items()}
        return super().encode(zeros | dict(obs), draw)


class Raises(RegressionPolicy):
    def _loss(self, x0, cond, weight, draw, progress):
        raise RuntimeError("shapes do not match")


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (NeedsSetting, "settings cannot be written"),
        (Detached, r"no gradient reaches extra\.weight, extra\.bias \(2 of"),
        (NaNLoss, "loss is nan on finite data"),
        (HalfOverflow, "loss is inf in half precision"),
        (GlobalDraws, "loss draws from torch's global generator"),
        (GlobalDraws, "loss differs under the same generator"),
        (GlobalDraws, r"metrics \['loss_rows'\] are no detached scalars"),
        (GlobalActs, "acting draws from torch's global generator"),
        (NaNChunk, "NaN or infinite numbers on finite observations"),
        (WrongShape, r"chunks have shape \[4, 7, 3\]; expected \[4, 8, 3\]"),
        (Mixes, "depends on the other rows"),
        (ClaimsOneCall, "calls its network 10 times for a chunk, but nfe is 1"),
        (ForgetsState, "a loaded checkpoint acts differently"),
        (KeyErrors, "missing observation 'state' raises KeyError"),
        (Fills, "acts although the observation 'state' is missing"),
        (Raises, "its loss raises RuntimeError: shapes do not match"),
    ],
)
def test_a_fault_is_found(cls, finding):
    import re

    findings = check_policy(cls())
    assert any(re.search(finding, text) for text in findings), findings
    with pytest.raises(ValueError, match=f"{cls.__name__}: "):
        check_policy(cls(), strict=True)


@pytest.mark.parametrize("name", ["state", "points", "actions"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_named_with_their_rows(name, value):
    policy = MEMBERS[0].build(specs=PICTURES)
    batch = make_batch(policy)
    (batch if name == "actions" else batch["obs"])[name][3, 0, 0] = value
    findings = check_policy(policy, batch)
    assert len(findings) == 1
    assert name in findings[0] and "NaN or infinite" in findings[0] and "rows [3]" in findings[0]


def test_a_policy_is_checked_on_the_batch_that_is_given():
    policy = MEMBERS[0].build(specs=PICTURES, chunking=CHUNKING)
    assert check_policy(policy, make_batch(policy)) == []
    batch = make_batch(policy)
    batch["obs"]["points"] = batch["obs"]["points"][:, :, :5]
    assert any("'points' has shape" in finding for finding in check_policy(policy, batch))
