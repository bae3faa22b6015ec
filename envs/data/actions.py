"""What the numbers of an action mean, and whether an environment accepts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from genrl.envs.data.episodes import DataError, Episode

Frame = Literal["delta", "absolute", "unspecified"]
Rotation = Literal["axis_angle", "rotation_6d", "quaternion", "none", "unspecified"]
OutOfBounds = Literal["stop", "clip", "rescale"]
SIZES = {"axis_angle": 3, "rotation_6d": 6, "quaternion": 4}
TOLERANCE = 1e-6  # of the width of a bound; rounding to float32 must not count as a violation


@dataclass(frozen=True)
class ActionRepresentation:
    """Whether actions are differences or targets, and how they write rotations.

    Args:
        frame: ``"delta"`` (relative to the present pose), ``"absolute"`` (a target pose), ``"unspecified"``.
        rotation: ``"axis_angle"`` (3 numbers), ``"rotation_6d"`` (the first two rows of the rotation matrix, 6 numbers,
            as in Diffusion Policy), ``"quaternion"`` (x, y, z, w), ``"none"`` (no rotation), ``"unspecified"``.
    """

    frame: Frame = "unspecified"
    rotation: Rotation = "unspecified"

    def __post_init__(self) -> None:
        for name, allowed in (("frame", get_args(Frame)), ("rotation", get_args(Rotation))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"action {name} {getattr(self, name)!r} is unknown; allowed are {', '.join(allowed)}")

    def to_dict(self) -> dict[str, str]:
        return {"frame": self.frame, "rotation": self.rotation}

    @staticmethod
    def from_dict(values: Mapping[str, Any] | None) -> ActionRepresentation:
        return ActionRepresentation(**dict(values or {}))

    def require(self, other: ActionRepresentation, what: str = "the environment") -> None:
        """Raises ValueError if `other` contradicts this; ``"unspecified"`` contradicts nothing."""
        for name in ("frame", "rotation"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if "unspecified" not in (mine, theirs) and mine != theirs:
                raise ValueError(
                    f"actions of the data have {name} {mine!r}, {what} expects {theirs!r}: executing them would be "
                    "wrong. Use the controller of the data, or data with the actions of the controller"
                )


def representation_of_robomimic(env_args: Mapping[str, Any], action_key: str) -> ActionRepresentation:
    """What the controller settings in a robomimic file (robosuite 1.2 to 1.5) say about its actions."""
    configs = env_args.get("env_kwargs", {}).get("controller_configs") or {}
    if isinstance(configs, list):
        configs = configs[0] if configs else {}
    parts = configs.get("body_parts", {})
    arm = next(iter(parts.get("arms", parts).values()), configs) if parts else configs
    kind = str(arm.get("type", ""))
    frame: Frame = "unspecified"
    if "control_delta" in arm:
        frame = "delta" if arm["control_delta"] else "absolute"
    elif arm.get("input_type") in ("delta", "absolute"):
        frame = arm["input_type"]
    if "abs" in action_key:  # robomimic's conversion adds `actions_abs` beside the actions of the controller
        frame = "absolute"
    rotations: dict[str, Rotation] = {"OSC_POSE": "axis_angle", "IK_POSE": "axis_angle", "OSC_POSITION": "none"}
    rotation = rotations.get(kind, "none" if kind.startswith("JOINT") else "unspecified")
    return ActionRepresentation(frame, "unspecified" if "6d" in action_key else rotation)


def convert_rotation(values: np.ndarray, source: Rotation, target: Rotation) -> np.ndarray:
    """Rotations in another form; there and back gives the same rotation.

    Args:
        values: [..., 3], [..., 6] or [..., 4] numbers of the form `source`.
        source, target: ``"axis_angle"``, ``"rotation_6d"`` or ``"quaternion"``.

    Returns:
        [..., k] numbers of the form `target`; axis-angles of at most pi, quaternions with w >= 0.

    Raises:
        ValueError: another form, or a last axis of the wrong size.
    """
    for form in (source, target):
        if form not in SIZES:
            raise ValueError(f"rotations cannot be converted from or to {form!r}; choose one of {', '.join(SIZES)}")
    values = np.asarray(values, dtype=np.float64)
    if values.shape[-1] != SIZES[source]:
        raise ValueError(f"{source} has {SIZES[source]} numbers; the array has shape {values.shape}")
    if source == target:
        return values
    quaternion = {"axis_angle": _from_axis_angle, "rotation_6d": _from_6d, "quaternion": _unit}[source](values)
    quaternion = np.where(quaternion[..., 3:] < 0, -quaternion, quaternion)
    return {"axis_angle": _to_axis_angle, "rotation_6d": _to_6d, "quaternion": lambda q: q}[target](quaternion)


def convert_actions(actions: np.ndarray, source: Rotation, target: Rotation, arms: int = 1) -> np.ndarray:
    """Actions [..., arms * (3 + k + g)] of position, rotation and gripper with the rotations in another form.

    Raises:
        ValueError: an action size that is no multiple of `arms`, or too small for a position and a rotation.
    """
    each, rest = divmod(actions.shape[-1], arms)
    if rest or each < 3 + SIZES.get(source, 0):
        raise ValueError(
            f"actions of {actions.shape[-1]} numbers for {arms} arm(s) hold no position and rotation as {source}"
        )
    per_arm = actions.reshape(*actions.shape[:-1], arms, each)
    end = 3 + SIZES[source]
    turned = convert_rotation(per_arm[..., 3:end], source, target)
    joined = np.concatenate([per_arm[..., :3], turned, per_arm[..., end:]], axis=-1)
    return joined.reshape(*actions.shape[:-1], -1).astype(actions.dtype)


@dataclass(frozen=True)
class Violation:
    """A dimension of the actions that leaves what the environment accepts.

    Attributes:
        dim: its number. least, greatest: of the data. low, high: the bounds. share: of the steps outside.
    """

    dim: int
    least: float
    greatest: float
    low: float
    high: float
    share: float

    def __str__(self) -> str:
        return (
            f"dimension {self.dim}: {self.least:g} to {self.greatest:g}, accepted {self.low:g} to {self.high:g}, "
            f"{100 * self.share:.3g} % of the steps outside"
        )


def find_violations(episodes: Sequence[Episode], low: np.ndarray, high: np.ndarray) -> list[Violation]:
    """Dimensions of the actions with values outside [low, high], each [A]."""
    actions = np.concatenate([episode.actions for episode in episodes])
    width = np.where(np.isfinite(high - low), high - low, 1.0)
    outside = (actions < low - TOLERANCE * width) | (actions > high + TOLERANCE * width)
    least, greatest, share = actions.min(0), actions.max(0), outside.mean(0)
    return [
        Violation(i, float(least[i]), float(greatest[i]), float(low[i]), float(high[i]), float(share[i]))
        for i in map(int, np.flatnonzero(share))
    ]


def apply_bounds(
    episodes: Sequence[Episode], low: np.ndarray, high: np.ndarray, how: OutOfBounds
) -> tuple[list[Episode], dict[str, Any]]:
    """Episodes whose actions an environment accepts.

    Args:
        episodes: demonstrations. low, high: [A], infinite where there is no bound.
        how: ``"stop"`` refuses actions outside; ``"clip"`` cuts them off at the bound; ``"rescale"`` multiplies each
            dimension that leaves its bounds by one factor, so that its largest action just fits and 0 stays 0.

    Returns:
        The episodes, and {"violations": [...], "action_factor": [A] or absent} for the data set's meta.

    Raises:
        DataError: with ``"stop"`` for any action outside, naming dimension, range and share; with ``"rescale"`` where 0
            is not inside the bounds.
    """
    violations = find_violations(episodes, low, high)
    if not violations:
        return list(episodes), {}
    listed = "; ".join(map(str, violations))
    if how == "stop":
        raise DataError(
            f"actions leave what the environment accepts: {listed}. Choose out_of_bounds: clip (cut off at the bound), "
            "rescale (divide a dimension by its largest action) or other data",
            key="actions",
        )
    report: dict[str, Any] = {"violations": [str(violation) for violation in violations]}
    if how == "clip":
        return [replace(e, actions=np.clip(e.actions, low, high).astype(np.float32)) for e in episodes], report
    factor = np.ones(len(low))
    for violation in violations:
        if not violation.low <= 0 <= violation.high:
            raise DataError(f"out_of_bounds: rescale keeps 0 where it is, but {violation}", key="actions")
        above = violation.high / violation.greatest if violation.greatest > violation.high else 1.0
        below = violation.low / violation.least if violation.least < violation.low else 1.0
        factor[violation.dim] = min(above, below)
    scaled = [replace(e, actions=np.clip(e.actions * factor, low, high).astype(np.float32)) for e in episodes]
    return scaled, {**report, "action_factor": factor.tolist()}


def _unit(q: np.ndarray) -> np.ndarray:
    return q / np.linalg.norm(q, axis=-1, keepdims=True)


def _from_axis_angle(vector: np.ndarray) -> np.ndarray:
    angle = np.linalg.norm(vector, axis=-1, keepdims=True)
    # sin(angle / 2) / angle, by its series where the angle vanishes
    factor = np.where(angle < 1e-6, 0.5 - angle**2 / 48, np.sin(angle / 2) / np.maximum(angle, 1e-12))
    return np.concatenate([factor * vector, np.cos(angle / 2)], axis=-1)


def _to_axis_angle(q: np.ndarray) -> np.ndarray:
    sine = np.linalg.norm(q[..., :3], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(sine, q[..., 3:])
    return q[..., :3] * np.where(sine < 1e-9, 2.0, angle / np.maximum(sine, 1e-12))


def _to_6d(q: np.ndarray) -> np.ndarray:
    x, y, z, w = np.moveaxis(q, -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
    ]
    return np.stack([entry for row in rows for entry in row], axis=-1)


def _from_6d(values: np.ndarray) -> np.ndarray:
    first = _unit(values[..., :3])
    second = values[..., 3:]
    second = _unit(second - (first * second).sum(-1, keepdims=True) * first)
    m = np.stack([first, second, np.cross(first, second)], axis=-2)  # [..., 3, 3]
    # The quaternion is the leading eigenvector of this symmetric matrix: no case distinction, no loss near pi.
    xx, yy, zz = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
    k = np.zeros((*m.shape[:-2], 4, 4))
    k[..., 0, 0], k[..., 1, 1], k[..., 2, 2], k[..., 3, 3] = xx - yy - zz, yy - xx - zz, zz - xx - yy, xx + yy + zz
    for (row, column), entry in {
        (1, 0): m[..., 1, 0] + m[..., 0, 1],
        (2, 0): m[..., 2, 0] + m[..., 0, 2],
        (2, 1): m[..., 2, 1] + m[..., 1, 2],
        (3, 0): m[..., 2, 1] - m[..., 1, 2],
        (3, 1): m[..., 0, 2] - m[..., 2, 0],
        (3, 2): m[..., 1, 0] - m[..., 0, 1],
    }.items():
        k[..., row, column] = entry
    return np.linalg.eigh(k)[1][..., -1]
