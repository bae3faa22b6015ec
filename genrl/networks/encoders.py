"""Observations of a robot, with history, as one vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from genrl.networks.images import ImageEncoder
from genrl.networks.pointnet import PointEncoder

Kind = Literal["state", "points", "image"]
Uniform = Callable[[tuple[int, ...]], Tensor]
"""shape -> numbers in [0, 1); the randomness of an encoder's augmentation."""
Prepare = Callable[[str, Tensor], Tensor]
"""(name, observation) -> observation."""


class ObservationError(ValueError):
    """An observation that does not fit the specification; the message names key, expected and found shape."""


@dataclass(frozen=True)
class ObsSpec:
    """One observation of one time step.

    Args:
        shape: (D,) for a state, (N, 3) or (N, 6) for a point cloud (xyz, or xyz and rgb), (C, H, W) for a uint8 image.
        kind: ``"state"``, ``"points"`` or ``"image"``.

    Raises:
        ValueError: for another kind, or a shape that the kind does not have.
    """

    shape: tuple[int, ...]
    kind: Kind

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        allowed = {"state": "(D,)", "points": "(N, 3) or (N, 6)", "image": "(C, H, W)"}
        if self.kind not in allowed:
            raise ValueError(f"an observation of kind {self.kind!r} is unknown; allowed are {list(get_args(Kind))}")
        fits = {
            "state": len(self.shape) == 1,
            "points": len(self.shape) == 2 and self.shape[1] in (3, 6),
            "image": len(self.shape) == 3,
        }
        if not fits[self.kind] or min(self.shape) < 1:
            raise ValueError(f"a {self.kind} observation has shape {allowed[self.kind]}, not {self.shape}")

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "kind": self.kind}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ObsSpec:
        return ObsSpec(tuple(values["shape"]), values["kind"])


@dataclass(frozen=True)
class EncoderSettings:
    """How observations are encoded. Every encoder is shared over the time steps of the history.

    Args:
        state: ``"identity"`` passes (normalised) states on, as Diffusion Policy does; ``"mlp"`` encodes each, as DP3.
        state_hidden: hidden units of the state MLP.
        state_features: outputs of the state MLP.
        points_widths: layers of the MLP that all points share (DP3: 64, 128, 256).
        points_features: outputs of the point encoder (DP3: 64).
        image: ``"cnn"`` (four strided convolutions) or ``"resnet18"`` (with GroupNorm; needs ``genrl[vision]``).
        image_features: outputs of the image encoder.
        image_weights: file with a state dict for ResNet-18 (torchvision's names; statistics of BatchNorm and the
            classifier in it are left out), or null for random weights. Nothing is ever downloaded.
        crop: side in pixels of the crop of images, random in training and central in evaluation; null for none.
    """

    state: Literal["identity", "mlp"] = "identity"
    state_hidden: int = 128
    state_features: int = 64
    points_widths: tuple[int, ...] = (64, 128, 256)
    points_features: int = 64
    image: Literal["cnn", "resnet18"] = "cnn"
    image_features: int = 64
    image_weights: str | None = None
    crop: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "points_widths", tuple(self.points_widths))
        for name, allowed in (("state", ("identity", "mlp")), ("image", ("cnn", "resnet18"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"encoder.{name} = {getattr(self, name)!r}; allowed are {list(allowed)}")
        for name in ("state_hidden", "state_features", "points_features", "image_features"):
            if getattr(self, name) < 1:
                raise ValueError(f"encoder.{name} = {getattr(self, name)} must be at least 1")
        if not self.points_widths or min(self.points_widths) < 1:
            raise ValueError(f"encoder.points_widths = {list(self.points_widths)} needs at least one positive width")
        if self.crop is not None and self.crop < 1:
            raise ValueError(f"encoder.crop = {self.crop} must be at least 1 pixel; null switches cropping off")
        if self.image_weights is not None and self.image != "resnet18":
            raise ValueError(
                f"encoder.image_weights = {self.image_weights!r} has no effect with image = {self.image!r}; "
                "set image: resnet18 or remove it"
            )


class ObservationEncoder(nn.Module):
    """Dict of observations with history -> one vector.

    Names are taken in the order of `specs`, whatever the order of the dict; names that `specs` does not have are
    ignored.

    Args:
        specs: what each observation looks like in one time step.
        n_obs_steps: T, length of the history, at least 1.
        settings: see `EncoderSettings`.

    Attributes:
        out_dim: size of the vector.

    Raises:
        ValueError: without observations, or for a crop that is larger than an image.

    Example:
        >>> encoder = ObservationEncoder({"state": ObsSpec((3,), "state")}, n_obs_steps=2)
        >>> encoder({"state": torch.zeros(5, 2, 3)}).shape
        torch.Size([5, 6])
    """

    def __init__(self, specs: Mapping[str, ObsSpec], n_obs_steps: int, settings: EncoderSettings = EncoderSettings()):
        super().__init__()
        if not specs:
            raise ValueError("an encoder needs at least one observation; name them in the data's `obs`")
        if n_obs_steps < 1:
            raise ValueError(f"n_obs_steps = {n_obs_steps}; the history has at least one step")
        self.specs, self.n_obs_steps = dict(specs), n_obs_steps
        # Not a ModuleDict: names of observations may hold dots, which parameters' names may not.
        self.encoders = nn.ModuleList(_encoder(name, spec, settings) for name, spec in self.specs.items())
        self._plan = [
            (name, (n_obs_steps, *spec.shape), None if isinstance(encoder, nn.Identity) else encoder)
            for (name, spec), encoder in zip(self.specs.items(), self.encoders, strict=True)
        ]
        sizes = [getattr(e, "out_dim", s.shape[0]) for e, s in zip(self.encoders, self.specs.values(), strict=True)]
        self.out_dim = n_obs_steps * sum(sizes)

    def forward(
        self, obs: Mapping[str, Tensor], uniform: Uniform | None = None, prepare: Prepare | None = None
    ) -> Tensor:
        """The condition of a policy.

        Args:
            obs: {name: [B, T, *shape]}, normalised, floating point; or raw where `prepare` normalises.
            uniform: source of random crops; without it, and in evaluation, crops are central.
            prepare: applied to every observation once its shape is known to be right.

        Returns:
            [B, out_dim].

        Raises:
            ObservationError: a name is missing, or a shape differs.
        """
        vectors = []
        for name, shape, encoder in self._plan:
            if name not in obs:
                raise ObservationError(
                    f"observation {name!r} is missing; expected are {list(self.specs)}, found {list(obs)}"
                )
            x = obs[name]
            if x.shape[1:] != shape:
                raise ObservationError(_shape_message(name, shape, tuple(x.shape)))
            x = x if prepare is None else prepare(name, x)
            if encoder is not None:
                if isinstance(encoder, ImageEncoder):
                    x = encoder(x, uniform if self.training else None)
                else:
                    x = encoder(x.flatten(0, 1)).reshape(x.shape[0], -1)
            vectors.append(x.flatten(1))  # [B, T F]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, 1)


def _encoder(name: str, spec: ObsSpec, settings: EncoderSettings) -> nn.Module:
    if spec.kind == "state":
        return nn.Identity() if settings.state == "identity" else StateEncoder(spec.shape[0], settings)
    if spec.kind == "points":
        return PointEncoder(spec.shape[1], settings.points_widths, settings.points_features)
    try:
        return ImageEncoder(spec.shape, settings.image, settings.image_features, settings.crop, settings.image_weights)
    except ValueError as error:
        raise ValueError(f"observation {name!r}: {error}") from error


def _shape_message(name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    """What is wrong with the shape of an observation, and the setting that changes it."""
    hint = "record the data and the environment with the same settings"
    if len(found) == len(expected) and found[1:] == expected[1:]:
        hint = "the batch dimension is missing"
    elif len(found) == len(expected) + 1 and found[2:] == expected[1:]:
        hint = f"the history has {found[1]} steps; chunking.n_obs_steps is {expected[0]}"
    elif len(expected) == 3 and expected[-1] in (3, 6) and len(found) == 4 and found[-1] in (3, 6):
        hint = "the number of points or of channels (3: xyz, 6: xyz and rgb) differs; set env.points or record again"
    batch = ", ".join(map(str, expected))
    return f"observation {name!r} has shape {list(found)}; expected [B, {batch}] (batch, history, ...): {hint}"


class StateEncoder(nn.Sequential):
    """Two-layer MLP of a state [B, D] -> [B, features]."""

    def __init__(self, size: int, settings: EncoderSettings):
        super().__init__(
            nn.Linear(size, settings.state_hidden), nn.ReLU(), nn.Linear(settings.state_hidden, settings.state_features)
        )
        self.out_dim = settings.state_features
