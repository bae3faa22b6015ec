"""A checker for policies, also of users' own."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genrl.networks import ObsSpec
from genrl.parts import UNWRITABLE, to_plain
from genrl.policies.base import ChunkPolicy
from genrl.policies.checkpoint import load_policy
from genrl.policies.export import example_observations
from genrl.policies.normalizer import Normalizer
from genrl.policies.settings import Draw

ROWS = 4


def check_policy(policy: ChunkPolicy, batch: Mapping[str, Any] | None = None, strict: bool = False) -> list[str]:
    """Run a policy on a small batch and list what training, evaluation or deployment would stumble over.

    Checked: the batch holds numbers only; settings can be written to a checkpoint; the loss is a finite scalar, also in
    half precision, and reproducible from its generator without touching the global one; every trained weight gets a
    gradient; chunks have the right shape, are finite and do not depend on the rest of the batch; `act` returns the
    executed slice; `nfe` is the number of network calls; a missing observation is an error that names it; the state
    dict and a saved checkpoint give the same actions.

    Args:
        policy: works on a copy. A policy that is not configured yet gets a 5-d state and 3-d actions.
        batch: see `ChunkPolicy.loss`; by default random numbers in the range of the training data.
        strict: raise ValueError with all findings instead of returning them.

    Returns:
        One sentence a finding; empty if nothing was found.
    """
    findings: list[str] = []
    policy = copy.deepcopy(policy)
    if to_plain(policy) is UNWRITABLE:
        findings.append(
            "its settings cannot be written to a checkpoint; store every argument of __init__ under its name, as a "
            "plain value, a settings dataclass or a part."
        )
    if not policy.specs:
        specs = {"state": ObsSpec((5,), "state")}
        data = {"state": np.random.default_rng(0).normal(size=(50, 5)), "action": np.linspace([-1] * 3, [1] * 3, 50)}
        normalizer = Normalizer.fit(data, policy.normalization.modes(specs))
        policy.configure(specs, 3, normalizer)
    batch = _example_batch(policy) if batch is None else batch
    bad = _bad_numbers(batch)
    if bad:  # nothing that follows would say more than that
        return _report(policy, [*findings, *bad], strict)
    _awaken(policy)
    for check in (_loss, _gradients, _chunks, _errors, _state):
        with _caught(findings, check.__name__.strip("_")):
            findings += check(policy, batch)
    if not any("checkpoint" in finding for finding in findings):
        with _caught(findings, "save_pretrained"):
            findings += _checkpoint(policy, batch)
    return _report(policy, findings, strict)


def _report(policy: ChunkPolicy, findings: list[str], strict: bool) -> list[str]:
    if strict and findings:
        raise ValueError(f"{type(policy).__name__}: " + " ".join(findings))
    return findings


@contextmanager
def _caught(findings: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        findings.append(f"its {what} raises {type(error).__name__}: {error}")


def _example_batch(policy: ChunkPolicy) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, policy.chunking.horizon, policy.action_dim)
    actions = torch.rand(shape, generator=generator).to(policy.device) * 2 - 1
    valid = torch.ones(shape[:2], dtype=torch.bool, device=policy.device)
    valid[0, policy.chunking.last :] = False
    obs = example_observations(policy, ROWS, generator)
    return {"obs": obs, "actions": policy.normalizer.unnormalize("action", actions), "valid": valid}


def _bad_numbers(batch: Mapping[str, Any]) -> list[str]:
    values = {f"observation {name!r}": value for name, value in batch["obs"].items()} | {"actions": batch["actions"]}
    found = []
    for name, value in values.items():
        wrong = ~torch.isfinite(value.float())
        if bool(wrong.any()):
            rows = wrong.flatten(1).any(1).nonzero().flatten().tolist()
            found.append(
                f"{name} of the batch has {int(wrong.sum())} NaN or infinite numbers, in rows {rows[:5]}; remove those "
                "samples from the data."
            )
    return found


def _awaken(policy: ChunkPolicy) -> None:
    """Give weights that start at zero small values: a zero output would hide everything before it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if not bool(parameter.any()):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def _loss(policy: ChunkPolicy, batch: Mapping[str, Any]) -> list[str]:
    findings = []
    before = torch.get_rng_state()
    loss, metrics = policy.loss(batch, _generator())
    if not torch.equal(torch.get_rng_state(), before):
        findings.append("its loss draws from torch's global generator; draw from `draw`.")
    if loss.ndim or not loss.requires_grad:
        findings.append(
            f"its loss has shape {list(loss.shape)}, requires_grad = {loss.requires_grad}; expected [], True."
        )
    if not bool(torch.isfinite(loss)):
        findings.append(f"its loss is {loss.item()} on finite data.")
    attached = [name for name, value in metrics.items() if value.requires_grad or value.ndim]
    if attached:
        findings.append(f"its metrics {attached} are no detached scalars.")
    again, _ = policy.loss(batch, _generator())
    if bool(torch.isfinite(loss)) and not torch.equal(loss, again):
        findings.append(f"its loss differs under the same generator: {loss.item()} and {again.item()}.")
    with torch.autocast(policy.device.type, torch.bfloat16):
        half, _ = policy.loss(batch, _generator())
    if bool(torch.isfinite(loss)) and not bool(torch.isfinite(half)):
        findings.append(f"its loss is {half.item()} in half precision; compute errors and targets in float32.")
    return findings


def _gradients(policy: ChunkPolicy, batch: Mapping[str, Any]) -> list[str]:
    policy.zero_grad()
    for index, progress in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
        policy.loss(batch, _generator(index), progress)[0].backward()
    trained = {id(parameter) for parameter in policy.trained_parameters()}
    named = [(name, p) for name, p in policy.named_parameters() if id(p) in trained]
    missing = [name for name, p in named if p.grad is None]
    infinite = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    policy.zero_grad()
    findings = []
    if missing:
        findings.append(f"no gradient reaches {', '.join(missing[:5])} ({len(missing)} of {len(named)} weights).")
    if infinite:
        findings.append(f"gradients of {', '.join(infinite[:5])} are not finite.")
    return findings


def _chunks(policy: ChunkPolicy, batch: Mapping[str, Any]) -> list[str]:
    policy.eval()
    findings = []
    obs, chunking = batch["obs"], policy.chunking
    rows = len(batch["actions"])
    expected = (rows, chunking.horizon, policy.action_dim)
    with _counted(policy) as calls:
        chunk = policy.predict(obs, _row_noise(policy, range(rows)))
    if tuple(chunk.shape) != expected:
        return [f"its chunks have shape {list(chunk.shape)}; expected {list(expected)}."]
    if not bool(torch.isfinite(chunk).all()):
        return [
            f"its chunks have {int((~torch.isfinite(chunk)).sum())} NaN or infinite numbers on finite observations."
        ]
    if calls[0] != policy.nfe:
        findings.append(f"it calls its network {calls[0]} times for a chunk, but nfe is {policy.nfe}.")
    alone = torch.cat(
        [policy.predict({k: v[i : i + 1] for k, v in obs.items()}, _row_noise(policy, [i])) for i in range(rows)]
    )
    scale = max(1.0, float(chunk.abs().max()))
    if float((alone - chunk).abs().max()) > 1e-3 * scale:
        findings.append("its chunk for one row depends on the other rows of the batch.")
    before = torch.get_rng_state()
    actions = policy.act(obs, _generator())
    if not torch.equal(torch.get_rng_state(), before):
        findings.append("acting draws from torch's global generator although it was given one.")
    executed = (rows, chunking.n_action_steps, policy.action_dim)
    if tuple(actions.shape) != executed:
        findings.append(f"act returns shape {list(actions.shape)}; expected {list(executed)}.")
    elif not torch.equal(actions, policy.act(obs, _generator())):
        findings.append("act differs under the same generator.")
    return findings


def _errors(policy: ChunkPolicy, batch: Mapping[str, Any]) -> list[str]:
    name = next(iter(policy.specs))
    obs = {key: value for key, value in batch["obs"].items() if key != name}
    try:
        policy.act(obs)
    except ValueError as error:
        return [] if name in str(error) else [f"the error for a missing observation does not name it: {error}"]
    except Exception as error:  # any other type is a finding
        return [
            f"a missing observation {name!r} raises {type(error).__name__}: {error}; expected a ValueError naming it."
        ]
    return [f"it acts although the observation {name!r} is missing."]


def _state(policy: ChunkPolicy, batch: Mapping[str, Any]) -> list[str]:
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.add_(1)
    other.load_state_dict(policy.state_dict())
    different = [k for k, v in policy.state_dict().items() if not torch.equal(v, other.state_dict()[k])]
    same = torch.equal(policy.act(batch["obs"], _generator()), other.act(batch["obs"], _generator()))
    return [] if same and not different else [f"a loaded state dict acts differently (different: {different[:5]})."]


def _checkpoint(policy: ChunkPolicy, batch: Mapping[str, Any]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        loaded = load_policy(folder, policy.device)
    if torch.equal(policy.act(batch["obs"], _generator()), loaded.act(batch["obs"], _generator())):
        return []
    return ["a loaded checkpoint acts differently; what acting needs must be a parameter, a buffer or a setting."]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _row_noise(policy: ChunkPolicy, rows: Any) -> Callable[[int, tuple[int, ...]], Tensor]:
    """Noise that belongs to a row whatever batch it is in."""
    draws = [Draw(_generator(row), policy.device, policy.dtype) for row in rows]
    return lambda step, shape: torch.cat([draw.normal((1, *shape[1:])) for draw in draws])


@contextmanager
def _counted(policy: ChunkPolicy) -> Iterator[list[int]]:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handle = policy.net.register_forward_hook(count)
    try:
        yield calls
    finally:
        handle.remove()
