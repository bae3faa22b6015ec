"""Several rewards as one: names, weights, caps, gates, and which of them are kept for evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, stack

from .base import UNBOUNDED, Reward, nearest_name, reward_name, score_one
from .gates import Gate


class Compose:
    """Named rewards with weights, caps and gates; a call returns the raw value of every one of them.

    Raw values are what is logged. The advantage step asks `for_advantage(raw)` for the gated and capped values and the
    weights of those that count. Most estimators add them up as they are, so that the reward with the largest variance
    decides; `genrl.objectives.GDPO` normalises each one first.

    Args:
        rewards: name -> reward. A reward that returns a dict gives the names `outer/inner`.
        weights: name -> weight, 1 where not given. 0 means: computed and logged, never part of the advantage.
            `outer/inner` sets one entry, `outer` all of them.
        caps: name -> level above which more reward is no gain, r -> min(r, cap). Slows over-optimisation of a proxy.
        gates: name -> condition on another reward under which it counts, see `Gate`. `outer` gates all its entries.
        held_out: names of rewards of weight 0 that are computed in evaluations only, which saves their time in every
            iteration. A reward may also declare `held_out = True`.
        allow_log_only: accept a weight for rewards that declare `log_only` (a judge that is meant to stay unseen).

    Raises:
        ValueError: an unknown name in a table (with the nearest known one), a weight that is not finite, no reward at
            all, a weight on a `log_only` or held-out reward, a gate that a held-out reward decides, or one that
            lacks the value of a sample that fails.
    """

    def __init__(
        self,
        rewards: dict[str, Reward],
        weights: dict[str, float] | None = None,
        caps: dict[str, float] | None = None,
        gates: dict[str, Gate] | None = None,
        held_out: Sequence[str] = (),
        allow_log_only: bool = False,
    ) -> None:
        if not rewards:
            raise ValueError("Compose got no rewards; give at least one, as name -> reward.")
        for name in rewards:
            if not name or "/" in name:
                raise ValueError(f"reward name {name!r} is empty or has a '/', which joins outer and inner names.")
        self.rewards = dict(rewards)
        self.held_out = [
            n for n, reward in rewards.items() if n in held_out or getattr(reward, "held_out", False) is True
        ]
        unseen = [n for n, reward in rewards.items() if n in self.held_out or getattr(reward, "log_only", False)]
        self.weights = {name: 0.0 if name in unseen else 1.0 for name in rewards}
        self.weights |= {name: float(weight) for name, weight in (weights or {}).items()}
        self.caps = {name: float(cap) for name, cap in (caps or {}).items()}
        self.gates = {name: _as_gate(gate) for name, gate in (gates or {}).items()}
        for kind, names in self._tables(held_out):
            for name in names:
                if name.split("/")[0] not in rewards:
                    raise ValueError(f"{kind} names {name!r}, which is not a reward; {nearest_name(name, rewards)}")
        for kind, table in (("weights", self.weights), ("caps", self.caps)):
            for name, value in table.items():
                if not math.isfinite(value):
                    raise ValueError(f"{kind}[{name!r}] is {value}; give a finite number, or leave the entry out.")
        self._check_unseen(allow_log_only)
        self._check_gates()

    def _tables(self, held_out: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
        deciding = [gate.reward for gate in self.gates.values()]
        tables = [("weights", list(self.weights)), ("caps", list(self.caps)), ("gates", list(self.gates))]
        return [*tables, ("a gate", deciding), ("held_out", list(held_out))]

    def _check_unseen(self, allow_log_only: bool) -> None:
        for name, weight in self.weights.items():
            outer = name.split("/")[0]
            if weight != 0 and outer in self.held_out:
                raise ValueError(
                    f"{name!r} is held out, but has weight {weight:g}; what is only computed in evaluations cannot be "
                    "trained on. Set its weight to 0, or take it out of held_out."
                )
            if weight != 0 and getattr(self.rewards[outer], "log_only", False) and not allow_log_only:
                raise ValueError(
                    f"{name!r} is a judge that is only logged (log_only), but has weight {weight:g}; optimising it "
                    "leaves no independent measure. Set its weight to 0, or allow_log_only=True."
                )

    def _check_gates(self) -> None:
        for name, gate in self.gates.items():
            if gate.reward == name or name == gate.reward.split("/")[0]:
                raise ValueError(f"gates[{name!r}] is decided by {gate.reward!r} itself; name another reward")
            if gate.reward.split("/")[0] in self.held_out:
                raise ValueError(
                    f"gates[{name!r}] is decided by {gate.reward!r}, which is held out and so unknown in training; "
                    "take it out of held_out and give it weight 0"
                )
            if gate.otherwise is None and self.range_of(name)[0] < 0:
                raise ValueError(
                    f"gates[{name!r}] needs `otherwise`, what a sample that fails counts as: 0 is not the worst of "
                    f"{name!r}, whose range is {self.range_of(name)}. Give about the worst value that samples get."
                )

    @property
    def differentiable(self) -> bool:
        """True if every reward that counts is differentiable."""
        return all(
            getattr(reward, "differentiable", False)
            for name, reward in self.rewards.items()
            if any(weight != 0 for key, weight in self.weights.items() if key.split("/")[0] == name)
        )

    @property
    def range(self) -> tuple[float, float]:
        """The smallest interval that holds the ranges of all members."""
        ranges = [getattr(reward, "range", UNBOUNDED) for reward in self.rewards.values()]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    def range_of(self, name: str) -> tuple[float, float]:
        """(lowest, highest) value that the reward behind one returned name declares."""
        outer, _, inner = name.partition("/")
        reward = self.rewards[outer]
        if inner and hasattr(reward, "range_of"):
            return reward.range_of(inner)
        low, high = getattr(reward, "range", UNBOUNDED)
        return float(low), float(high)

    def prepare(self, device: Any, progress: bool = True) -> None:
        """Prepare every member that can be prepared."""
        for reward in self.rewards.values():
            if hasattr(reward, "prepare"):
                reward.prepare(device, progress=progress)

    def for_training(self) -> Compose:
        """The same without the held-out rewards: what roll-outs are scored with."""
        kept: dict[str, Any] = {
            name: reward.for_training() if isinstance(reward, Compose) else reward
            for name, reward in self.rewards.items()
            if name not in self.held_out
        }
        weights = {name: value for name, value in self.weights.items() if not self._is_held_out(name)}
        caps = {name: value for name, value in self.caps.items() if not self._is_held_out(name)}
        gates = {name: value for name, value in self.gates.items() if not self._is_held_out(name)}
        return Compose(kept, weights, caps, gates, allow_log_only=True)

    def _is_held_out(self, name: str) -> bool:
        outer, _, inner = name.partition("/")
        nested = self.rewards[outer]
        return outer in self.held_out or (bool(inner) and isinstance(nested, Compose) and nested._is_held_out(inner))

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        """name -> [B] raw values: neither weighted, nor capped, nor gated."""
        raw: dict[str, Tensor] = {}
        for name, reward in self.rewards.items():
            raw |= score_one(reward, name, media, prompts, metadata)
        self._check_inner_names(raw)
        return raw

    def weight(self, name: str) -> float:
        """The weight of one returned name; an inner name without its own entry has its outer reward's."""
        if name in self.weights:
            return self.weights[name]
        outer, _, inner = name.partition("/")
        nested: Any = self.rewards[outer]
        if isinstance(nested, Compose):
            return self.weights[outer] * nested.weight(inner)
        # A reward that returns several numbers may say which of them it is about.
        return self.weights[outer] * (nested.entry_weight(inner) if hasattr(nested, "entry_weight") else 1.0)

    def cap(self, name: str) -> float | None:
        """The cap of one returned name, or None."""
        if name in self.caps:
            return self.caps[name]
        outer, _, inner = name.partition("/")
        nested = self.rewards[outer]
        return (
            nested.cap(inner)
            if inner and isinstance(nested, Compose) and outer not in self.caps
            else self.caps.get(outer)
        )

    def gates_of(self, name: str) -> list[Gate]:
        """The conditions under which one returned name counts; failing values are filled in."""
        outer, _, inner = name.partition("/")
        nested = self.rewards[outer]
        own = [self.gates[key] for key in dict.fromkeys((name, outer)) if key in self.gates]
        found = [replace(gate, otherwise=0.0) if gate.otherwise is None else gate for gate in own]
        if inner and isinstance(nested, Compose):
            found += [replace(gate, reward=f"{outer}/{gate.reward}") for gate in nested.gates_of(inner)]
        return found

    def gated(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """Raw values with the gates applied; values keep their shape."""
        result = dict(raw)
        for name in raw:
            for gate in self.gates_of(name):
                assert gate.otherwise is not None
                result[name] = gate.apply(result[name], raw[gate.reward], gate.otherwise)
        return result

    def gate_shares(self, raw: dict[str, Tensor]) -> dict[str, float]:
        """For every gated name, the share of its samples that count."""
        shares = {}
        for name in raw:
            if gates := self.gates_of(name):
                passed = [gate.passed(raw[gate.reward]).float() for gate in gates]
                shares[name] = float(stack(passed).amin(0).mean())
        return shares

    def for_advantage(self, raw: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """What enters the advantage: (name -> gated and capped values, name -> weight), only weights other than 0.

        Values keep their shape ([B], [P, G], ...). NaN stays NaN; the gradient above a cap or behind a gate is 0.
        """
        weights = {name: weight for name in raw if (weight := self.weight(name)) != 0}
        if not weights:
            raise ValueError(f"every reward has weight 0 ({', '.join(raw)}); give one of them a weight to optimise it.")
        caps, values = {name: self.cap(name) for name in weights}, self.gated(raw)
        return {n: values[n] if cap is None else values[n].clamp(max=cap) for n, cap in caps.items()}, weights

    def _check_inner_names(self, raw: dict[str, Tensor]) -> None:
        """Inner names are known only after the first call."""
        for kind, names in self._tables():
            for name in names:
                # The outer name stands for all its entries, but a gate is decided by a single number.
                if ("/" in name or kind == "a gate") and name not in raw:
                    raise ValueError(f"{kind} names {name!r}, which was not returned; {nearest_name(name, raw)}")


def _as_gate(gate: Any) -> Gate:
    """A gate from its arguments, as a configuration gives them."""
    return gate if isinstance(gate, Gate) else Gate(**(gate if isinstance(gate, Mapping) else vars(gate)))


def as_compose(reward: Any, name: str | None = None) -> Compose:
    """A `Compose` of this one reward (under `name`, its own name, or its class name), or the `Compose` itself."""
    return reward if isinstance(reward, Compose) else Compose({name or reward_name(reward): reward})
