"""Values that every policy has: chunk geometry, normalisation, sources of randomness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from genrl.networks import ObsSpec
from genrl.policies.normalizer import MODES

Noise = Callable[[int, tuple[int, ...]], Tensor]
"""(step, shape) -> standard normal noise; step -1 (`genrl.diffusion.noise.INITIAL`) is the noise that sampling starts
from. `genrl.diffusion.RowNoise` is one."""


@dataclass(frozen=True)
class Chunking:
    """How actions are predicted in chunks and executed.

    Index 0 of a chunk belongs to the time step of the first observation of the history (Chi et al. 2023, Diffusion
    Policy). The executed slice is [n_obs_steps - 1 : n_obs_steps - 1 + n_action_steps], which starts at the newest
    observation.

    Args:
        horizon: H, predicted actions.
        n_obs_steps: observations that a prediction sees; at an episode's start the first one is repeated.
        n_action_steps: actions executed before the next prediction.
        ensembling: m of ACT's temporal ensembling (Zhao et al. 2023; 0.01 there): a prediction at every step, the
            action is the mean of all that were predicted for it with weights exp(-m i), i = 0 the oldest. It can cost
            success (LeRobot measured 72.6 against 87.6 %), so it is off (null) by default.
        warm_start: t_w in (0, 1): sampling starts from the part of the last chunk that was not executed, re-noised to
            t_w (OFP; 0.85 is its best value). Null starts from pure noise.

    Raises:
        ValueError: a horizon shorter than history and execution need, or settings that exclude each other.
    """

    horizon: int = 8
    n_obs_steps: int = 1
    n_action_steps: int = 4
    ensembling: float | None = None
    warm_start: float | None = None

    def __post_init__(self) -> None:
        for name in ("horizon", "n_obs_steps", "n_action_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"chunking.{name} = {getattr(self, name)} must be at least 1")
        if self.horizon < self.last:
            room = self.horizon - self.first
            other = f"n_action_steps <= {room}" if room >= 1 else f"n_obs_steps <= {self.horizon}"
            raise ValueError(
                f"chunking.horizon = {self.horizon} is too short: n_obs_steps - 1 + n_action_steps = "
                f"{self.n_obs_steps} - 1 + {self.n_action_steps} = {self.last} actions are needed to execute "
                f"{self.n_action_steps}; set horizon >= {self.last}, or {other}"
            )
        if self.ensembling is not None:
            if not self.ensembling >= 0:
                raise ValueError(f"chunking.ensembling = {self.ensembling} must not be negative; ACT uses 0.01")
            if self.n_action_steps != 1:
                raise ValueError(
                    f"chunking.ensembling needs a prediction at every step: set n_action_steps = 1 "
                    f"(now {self.n_action_steps}), or ensembling: null"
                )
        if self.warm_start is not None and not 0 < self.warm_start < 1:
            raise ValueError(
                f"chunking.warm_start = {self.warm_start} must lie in (0, 1); OFP's best value is 0.85, null is off"
            )

    @property
    def first(self) -> int:
        """Index in a chunk of the first executed action."""
        return self.n_obs_steps - 1

    @property
    def last(self) -> int:
        """Index in a chunk after the last executed action."""
        return self.n_obs_steps - 1 + self.n_action_steps


@dataclass(frozen=True)
class Normalization:
    """Which statistics scale what; see `genrl.policies.normalizer.Normalizer` for the modes.

    Args:
        action, state, points: modes by kind: ``"minmax"``, ``"meanstd"``, ``"quantile"`` or ``"identity"``.
        keys: modes of single observations by name, before those by kind.
    """

    action: str = "minmax"
    state: str = "minmax"
    points: str = "minmax"
    keys: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {"action": self.action, "state": self.state, "points": self.points}
        given |= {f"keys.{name}": mode for name, mode in self.keys.items()}
        for name, mode in given.items():
            if mode not in MODES or mode == "image":
                allowed = [known for known in MODES if known != "image"]
                raise ValueError(f"normalization.{name} = {mode!r}; allowed are {allowed}")

    def modes(self, specs: Mapping[str, ObsSpec]) -> dict[str, str]:
        """The mode of every observation and of ``"action"``, as `Normalizer.fit` wants them.

        Raises:
            ValueError: `keys` names an observation that there is not.
        """
        unknown = sorted(set(self.keys) - set(specs))
        if unknown:
            raise ValueError(f"normalization.keys names {unknown}; the observations are {sorted(specs)}")
        kinds = {"state": self.state, "points": self.points, "image": "image"}
        return {name: self.keys.get(name, kinds[spec.kind]) for name, spec in specs.items()} | {"action": self.action}


class Draw:
    """Random numbers on a device, from a generator that may live on another.

    Args:
        generator: None uses torch's global generator of `device`.
        device: where the numbers are wanted.
        dtype: their type.
        share: (rank, processes): each process draws the numbers of the whole batch and takes its own rows, so that
            several processes train on the noise that one would.
    """

    def __init__(
        self,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        share: tuple[int, int] = (0, 1),
    ):
        self.generator, self.device, self.dtype, self.share = generator, torch.device(device), dtype, share
        self._source = self.device if generator is None else generator.device

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers."""
        drawn = torch.randn(self._whole(shape), generator=self.generator, device=self._source, dtype=self.dtype)
        return self._own(drawn)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Numbers in [0, 1)."""
        drawn = torch.rand(self._whole(shape), generator=self.generator, device=self._source, dtype=self.dtype)
        return self._own(drawn)

    def rows(self, batch: int, share: float) -> Tensor:
        """Indices of a random share of the rows, sorted; over all processes round(share B) of the B rows together."""
        from genrl.objectives.matching.times import random_rows

        rank, processes = self.share
        drawn = torch.rand(batch * processes, generator=self.generator, device=self._source, dtype=self.dtype)
        chosen = random_rows(drawn, share) - rank * batch
        return chosen[(chosen >= 0) & (chosen < batch)].to(self.device)

    def noise(self, step: int, shape: tuple[int, ...]) -> Tensor:
        """`normal` as a `Noise`: the step is ignored, the generator moves on."""
        return self.normal(shape)

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * self.share[1], *shape[1:]) if shape else shape

    def _own(self, drawn: Tensor) -> Tensor:
        rank, processes = self.share
        if processes > 1 and drawn.dim():
            drawn = drawn.chunk(processes)[rank]
        return drawn if self._source == self.device else drawn.to(self.device)
