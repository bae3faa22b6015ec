"""The base class of all policies that predict chunks of actions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from genrl.diffusion.noise import INITIAL
from genrl.networks import Backbone, EncoderSettings, MLPBackbone, ObservationEncoder, ObsSpec
from genrl.policies import checkpoint
from genrl.policies.normalizer import Normalizer
from genrl.policies.settings import Chunking, Draw, Noise, Normalization
from genrl.policies.teacher import Teacher

if TYPE_CHECKING:
    from genrl.policies.robomimic import RobomimicRollout

__all__ = ["ChunkPolicy", "Chunking", "Draw", "EncoderSettings", "Noise", "Normalization", "Teacher"]

Batch = Mapping[str, Any]
Metrics = dict[str, Tensor]
Start = tuple[Tensor, float]
"""(x_t [B, H, A] normalised, t): where sampling starts instead of pure noise."""
Self = TypeVar("Self", bound="ChunkPolicy")


def same_time(t: float, x: Tensor) -> Tensor:
    """t for every row of x, [B]. Its stride is 0, from which networks see that one time embedding serves all rows."""
    return x.new_full((1,), t).expand(x.shape[0])


class ChunkPolicy(nn.Module):
    """A policy that predicts a chunk of actions from a history of observations.

    A subclass gives the loss (`_loss`) and the way from noise to a chunk (`_sample`) on normalised numbers; this class
    gives normalisation, encoding, execution and checkpoints. Times follow x_t = (1 - t) x0 + t eps.

    Life of a policy: construct with settings, `configure` with what the data look like, train on `loss`, `act`.

    Args:
        network: sizes of the network, see `genrl.networks.backbones`.
        encoder: how observations become a vector.
        chunking: horizon, history and executed steps.
        normalization: which statistics scale actions and observations.
        mask_padding: leave actions beyond an episode's end out of the loss. By default they count, as in Diffusion
            Policy: repeating the last action teaches the policy to stay there.

    Attributes:
        one_step: one network call makes a chunk. interval: the network takes an interval's end r.
        max_frequency: of the time embedding; low where the network is differentiated in t.
        supports_warm_start: whether sampling can start at a time below 1.
        uses_null: whether there is a learned null condition, see `null_cond`.
        specs, action_dim, task: as given to `configure`.

    Raises:
        ValueError: settings that this kind of policy cannot have.
    """

    one_step: ClassVar[bool] = True
    interval: ClassVar[bool] = False
    max_frequency: ClassVar[float] = 100.0
    supports_warm_start: ClassVar[bool] = False
    uses_null: bool = False

    _anchor: Tensor
    specs: dict[str, ObsSpec]
    action_dim: int
    task: dict[str, Any]

    def __init__(
        self,
        network: Backbone = MLPBackbone(),
        encoder: EncoderSettings = EncoderSettings(),
        chunking: Chunking = Chunking(),
        normalization: Normalization = Normalization(),
        mask_padding: bool = False,
    ):
        super().__init__()
        self.network, self.encoder, self.chunking = network, encoder, chunking
        self.normalization, self.mask_padding = normalization, mask_padding
        self.specs, self.action_dim, self.task = {}, 0, {}
        self._executed = slice(chunking.first, chunking.last)
        self.register_buffer("_anchor", torch.zeros(()), persistent=False)  # knows device and type at no cost
        if chunking.warm_start is not None and not self.supports_warm_start:
            raise ValueError(
                f"chunking.warm_start = {chunking.warm_start}: a {type(self).__name__} always starts from pure noise; "
                "set warm_start: null"
            )

    def configure(
        self,
        specs: Mapping[str, ObsSpec],
        action_dim: int,
        normalizer: Normalizer,
        seed: int = 0,
        task: dict[str, Any] | None = None,
    ) -> None:
        """Build the networks.

        Args:
            specs: the observations to use, by name; this order is kept in the checkpoint.
            action_dim: A.
            normalizer: fitted on the training data, with a key for every observation and ``"action"``.
            seed: of the initial weights; the global generator is left alone.
            task: plain values that travel with the weights: environment settings, action representation, source.

        Raises:
            ValueError: the normaliser lacks a key, or sizes do not fit.
        """
        missing = [name for name in [*specs, "action"] if name not in normalizer.features]
        if missing:
            raise ValueError(
                f"the normalizer has no statistics of {missing}; it has {sorted(normalizer.features)}. Fit it on all "
                "observations of the policy and on 'action'"
            )
        if action_dim < 1:
            raise ValueError(f"action_dim = {action_dim} must be at least 1")
        self.specs, self.action_dim, self.task = dict(specs), action_dim, dict(task or {})
        with torch.random.fork_rng(devices=[]):  # initialisers draw from the global generator
            torch.random.default_generator.manual_seed(seed)
            self.encoder_net = ObservationEncoder(self.specs, self.chunking.n_obs_steps, self.encoder)
            width = self.encoder_net.out_dim
            self.net = self.network.build(
                self.chunking.horizon, action_dim, width, interval=self.interval, max_frequency=self.max_frequency
            )
            self.null = nn.Parameter(0.02 * torch.randn(width)) if self.uses_null else None
            self.normalizer = normalizer
            self._configured()

    def _configured(self) -> None:
        """Hook of subclasses, called when the networks exist: the place to make a `Teacher` or further weights."""

    # ------------------------------------------------------------------------------ what a subclass implements

    def _loss(
        self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw, progress: float
    ) -> tuple[Tensor, Metrics]:
        """The loss of normalised chunks.

        Args:
            x0: [B, H, A]. cond: [B, C].
            weight: [B, H], 0 where an action is to be left out, or None; see `chunk_mean`.
            draw: all randomness. progress: of training, in [0, 1].

        Returns:
            Loss [B] or scalar, and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss; implement _loss")

    def _sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        """Normalised chunks [B, H, A] for conditions [B, C]; `start_of` unpacks noise and start."""
        raise NotImplementedError(f"{type(self).__name__} cannot sample; implement _sample")

    @property
    def nfe(self) -> int:
        """Network calls per chunk."""
        if not self.one_step:
            raise NotImplementedError(f"{type(self).__name__} has several steps; implement nfe")
        return 1

    def after_update(self, updates: int) -> None:
        """Called by the training loop after every optimizer update (teachers); `updates` counts from 1."""

    # ------------------------------------------------------------------------------ for subclasses

    def velocity(self, x: Tensor, t: Tensor, cond: Tensor, r: Tensor | None = None) -> Tensor:
        """The network's output for x [B, H, A] at t [B] (and r [B]), in the type of x also under autocast."""
        v = self.net(x, t, cond) if r is None else self.net(x, t, cond, r)
        return v if v.dtype == x.dtype else v.to(x.dtype)

    def null_cond(self, cond: Tensor, drop: Tensor | None = None) -> Tensor:
        """`cond` [B, C] with the learned null condition in the rows where drop (bool [B]) is set; None sets all."""
        if self.null is None:
            raise ValueError(f"{type(self).__name__} has no null condition; set uses_null before configure")
        null = self.null.to(cond.dtype)
        return null.expand_as(cond) if drop is None else torch.where(drop[:, None], null, cond)

    def chunk_mean(self, error: Tensor, weight: Tensor | None) -> Tensor:
        """Mean of `error` [B, H, A] over the actions that count, [B]."""
        error = error.mean(2)  # [B, H]
        return error.mean(1) if weight is None else (error * weight).sum(1) / weight.sum(1)

    def start_of(self, cond: Tensor, noise: Noise, start: Start | None) -> Start:
        """Where sampling starts: (x_t, t), by default pure noise at t = 1."""
        if start is not None:
            return start
        x = noise(INITIAL, (cond.shape[0], self.chunking.horizon, self.action_dim))
        return (x if x.dtype == cond.dtype and x.device == cond.device else x.to(cond)), 1.0

    def jump(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        """One step from the start to t = 0: x - t u(x, t, r = 0), the sampler of every one-step policy."""
        x, t = self.start_of(cond, noise, start)
        u = self.velocity(x, same_time(t, x), cond, same_time(0.0, x) if self.interval else None)
        return x - u if t == 1 else x - t * u

    # ------------------------------------------------------------------------------ training

    def loss(
        self,
        batch: Batch,
        generator: torch.Generator | None = None,
        progress: float = 0.0,
        share: tuple[int, int] = (0, 1),
    ) -> tuple[Tensor, Metrics]:
        """The training loss of a batch.

        Args:
            batch: {"obs": {name: [B, n_obs_steps, *shape]}, "actions": [B, H, A], "valid": bool [B, H]}, raw units.
            generator: source of all randomness.
            progress: share of training done, for schedules.
            share: (rank, processes) when the batch is this process's part of a larger one, see `Draw`.

        Returns:
            Scalar loss, and {name: detached scalar}.
        """
        self._check_configured()
        draw = Draw(generator, self.device, self.dtype, share)
        actions = batch["actions"]
        expected = (self.chunking.horizon, self.action_dim)
        if tuple(actions.shape[1:]) != expected:
            raise ValueError(
                f"actions have shape {list(actions.shape)}; expected [B, {expected[0]}, {expected[1]}] (batch, "
                "chunking.horizon, action_dim)"
            )
        x0 = self.normalizer.normalize("action", actions.to(device=self.device, dtype=self.dtype))
        cond = self.encode(batch["obs"], draw)
        weight = batch["valid"].to(x0) if self.mask_padding else None
        loss, metrics = self._loss(x0, cond, weight, draw, progress)
        loss = loss.mean()
        return loss, {"loss": loss.detach()} | {name: value.detach() for name, value in metrics.items()}

    def trained_parameters(self) -> list[nn.Parameter]:
        """What the optimizer gets: everything but teachers."""
        return [p for p in self.parameters() if p.requires_grad]

    def encode(self, obs: Mapping[str, Tensor], draw: Draw | None = None) -> Tensor:
        """Raw observations {name: [B, n_obs_steps, *shape]} -> condition [B, C].

        Args:
            obs: names in any order; those that the policy does not use are ignored. Arrays become tensors.
            draw: randomness of augmentations in training; without it they are off.

        Raises:
            ObservationError: a missing name or a wrong shape, with what was expected.
        """
        cond = self.encoder_net(obs, None if draw is None else draw.uniform, self._prepare)
        dtype = self._anchor.dtype
        return cond if cond.dtype == dtype else cond.to(dtype)  # no half precision beyond the encoder

    def _prepare(self, name: str, x: Tensor) -> Tensor:
        anchor = self._anchor
        x = x if isinstance(x, Tensor) else torch.as_tensor(x)
        x = self.normalizer.normalize(name, x if x.device == anchor.device else x.to(anchor.device))
        return x if x.dtype == anchor.dtype else x.to(anchor.dtype)

    # ------------------------------------------------------------------------------ acting

    def predict(self, obs: Mapping[str, Tensor], noise: Noise | None = None, previous: Tensor | None = None) -> Tensor:
        """A whole chunk.

        Args:
            obs: {name: [B, n_obs_steps, *shape]}, raw.
            noise: source of noise; None draws from torch's global generator.
            previous: the chunk [B, H, A] that `n_action_steps` earlier was predicted, for a warm start; ignored unless
                `chunking.warm_start` is set.

        Returns:
            [B, H, A] in the units of the data.
        """
        return self._run(obs, noise, previous, slice(None))

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator | None = None) -> Tensor:
        """The actions to execute: [B, n_action_steps, A] for raw observations {name: [B, n_obs_steps, *shape]}."""
        return self._run(obs, Draw(generator, self.device, self.dtype).noise, None, self._executed)

    def _run(self, obs: Mapping[str, Tensor], noise: Noise | None, previous: Tensor | None, part: slice) -> Tensor:
        if not self.specs:
            self._check_configured()
        with torch.inference_mode():
            cond = self.encode(obs)
            noise = Draw(None, self.device, self.dtype).noise if noise is None else noise
            start = None if previous is None else self._warm_start(previous, noise)
            chunk = self._sample(cond, noise, start)
        # Outside of the block, so that the result is a tensor that training may use.
        return self.normalizer.unnormalize("action", chunk[:, part])

    def _warm_start(self, previous: Tensor, noise: Noise) -> Start | None:
        """The unexecuted tail of the last chunk, moved to the front and re-noised (OFP, arXiv 2603.12480)."""
        t = self.chunking.warm_start
        if t is None:
            return None
        tail = previous[:, self.chunking.n_action_steps :]
        last = previous[:, -1:].expand(-1, self.chunking.n_action_steps, -1)
        warm = torch.cat([tail, last], 1).to(device=self.device, dtype=self.dtype)  # [B, H, A]
        warm = self.normalizer.normalize("action", warm)
        return (1 - t) * warm + t * noise(INITIAL, tuple(warm.shape)).to(warm), t

    def rollout_policy(self, seed: int = 0) -> RobomimicRollout:
        """The policy behind robomimic's rollout interface: `start_episode()` and `__call__(ob)`."""
        from genrl.policies.robomimic import RobomimicRollout

        return RobomimicRollout(self, seed)

    # ------------------------------------------------------------------------------ state

    @property
    def device(self) -> torch.device:
        return self._anchor.device

    @property
    def dtype(self) -> torch.dtype:
        return self._anchor.dtype

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json and model.safetensors: all that acting needs, the normaliser and `task` included."""
        self._check_configured()
        checkpoint.save(self, Path(folder))

    @classmethod
    def from_pretrained(cls: type[Self], folder: str | os.PathLike[str], device: str | torch.device = "cpu") -> Self:
        """The policy that `save_pretrained` wrote, in evaluation mode.

        Raises:
            FileNotFoundError: no checkpoint there.
            ValueError: it holds another class, or weights and configuration do not fit.
        """
        policy = checkpoint.load_policy(folder, device)
        if not isinstance(policy, cls):
            raise ValueError(f"{folder} holds a {type(policy).__name__}, not a {cls.__name__}; use load_policy")
        return policy

    def _check_configured(self) -> None:
        if not self.specs:
            raise ValueError(
                f"this {type(self).__name__} has no networks yet; call configure(specs, action_dim, normalizer) or "
                "load it with from_pretrained"
            )
