"""From physical units to the unit range that networks work in, and back; the statistics travel with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn

Mode = Literal["minmax", "meanstd", "quantile", "identity", "image"]
MODES: tuple[str, ...] = get_args(Mode)
QUANTILES = (0.01, 0.99)
SAMPLED = 2_000_000  # rows that quantiles are computed on at most, evenly spaced over the data
HALF_BYTE = 127.5


class Normalizer(nn.Module):
    """Invertible scaling of observations and actions with statistics fitted once, on the training data.

    For every key, with centre m and spread h per dimension,

        normalize: y = (x - m) / h          unnormalize: x = y h + m

    | mode | m | h | fitted data end up in |
    |---|---|---|---|
    | ``"minmax"`` | (max + min) / 2 | (max - min) / 2 | [-1, 1] |
    | ``"quantile"`` | (q99 + q01) / 2 | (q99 - q01) / 2 | 98 % of them in [-1, 1] |
    | ``"meanstd"`` | mean | standard deviation | mean 0, variance 1 |
    | ``"identity"`` | 0 | 1 | as they are |
    | ``"image"`` | 127.5 | 127.5 | [-1, 1], from uint8 |

    - **Values outside the fitted range** are extrapolated by the same line, never clipped, so that the inverse is
      exact everywhere; a policy may see observations beyond [-1, 1] and may produce actions beyond those of its data.
    - **Constant dimensions** (range or standard deviation below `min_range`) get h = 1 and m = the constant: they
      become 0, they come back exactly, and a later deviation passes through in physical units instead of being blown
      up. A dimension that is flat between its quantiles but not beyond them is scaled by its minimum and maximum.
    - **Point clouds** ([N, points, 3 or 6] in `fit`) have one centre per axis and one spread for the three axes
      together, over all points of all clouds, so that shapes are not distorted; colours (channels 3 to 5) likewise.
    - **Images** are uint8 and need no statistics.

    Statistics are float32 buffers. They stay float32 when the module is cast to half precision.

    Args:
        features: {key: (mode, shape)}; use `fit` or `from_spec` rather than this.
        min_range: see above; 1e-4 as in Diffusion Policy, for data in metres, radians or [-1, 1].

    Example:
        >>> data = {"action": np.array([[0.0, 5.0], [2.0, 5.0]])}
        >>> normalizer = Normalizer.fit(data, {"action": "minmax"})
        >>> normalizer.normalize("action", torch.tensor([[0.0, 5.0], [3.0, 5.0]])).tolist()
        [[-1.0, 0.0], [2.0, 0.0]]
    """

    def __init__(self, features: Mapping[str, tuple[str, tuple[int, ...]]], min_range: float = 1e-4):
        super().__init__()
        if not min_range > 0:
            raise ValueError(f"min_range = {min_range} must be positive; it says which dimensions count as constant")
        self.features: dict[str, tuple[str, tuple[int, ...]]] = {}
        # {key: (mode, shape that is compared, buffer of m, buffer of h)}: looked up at every action
        self._table: dict[str, tuple[str, tuple[int, ...], str, str]] = {}
        self.min_range = float(min_range)
        for name, (mode, shape) in features.items():
            if mode not in MODES:
                raise ValueError(f"normalization of {name!r} is {mode!r}; choose one of {', '.join(MODES)}")
            self.features[name] = (mode, tuple(int(n) for n in shape))
            # The number of points may differ between training and use; their channels may not.
            compared = self.features[name][1][-1:] if _is_cloud(shape) else self.features[name][1]
            self._table[name] = (mode, compared, _buffer("center", name), _buffer("spread", name))
            if mode != "image":
                size = shape[-1:] if _is_cloud(shape) else shape
                # NaN until statistics are there: a forgotten load is an error, not a silent identity.
                self.register_buffer(_buffer("center", name), torch.full(tuple(size), float("nan")))
                self.register_buffer(_buffer("spread", name), torch.full(tuple(size), float("nan")))
        self.register_load_state_dict_post_hook(lambda module, _: module.check_fitted())

    @classmethod
    def fit(
        cls,
        arrays: Mapping[str, np.ndarray],
        modes: Mapping[str, str] | str = "minmax",
        min_range: float = 1e-4,
    ) -> Normalizer:
        """Statistics of training data.

        Args:
            arrays: {key: [N, *shape]}, keys are observation names and ``"action"``; uint8 [N, C, H, W] is an image,
                [N, points, 3 or 6] a point cloud, anything else is scaled dimension by dimension.
            modes: one mode for every key that is no image, or {key: mode}; images have ``"image"``.
            min_range: see the class.

        Raises:
            ValueError: no rows, NaN or infinite values, a key without a mode or a mode without data, an unknown mode,
                an image that is not uint8.
        """
        if not isinstance(modes, str) and (unknown := sorted(set(modes) - set(arrays))):
            raise ValueError(f"normalization names {unknown}, which the data lack; there are {sorted(arrays)}")
        features: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, array in arrays.items():
            image = array.dtype == np.uint8 and array.ndim == 4
            mode = "image" if image else modes if isinstance(modes, str) else modes.get(name)
            if mode is None:
                raise ValueError(f"no normalization is given for {name!r}; choose one of {', '.join(MODES)}")
            if array.ndim >= 4 and not image:
                raise ValueError(
                    f"{name!r} looks like images but is {array.dtype} {array.shape}; images are uint8 NCHW"
                )
            if mode == "image" and not image:
                raise ValueError(f"{name!r} is {array.dtype} {array.shape}; mode 'image' is for uint8 [N, C, H, W]")
            if array.ndim < 2 or not len(array):
                raise ValueError(f"{name!r} has shape {array.shape}; statistics need [N, *shape] with N >= 1")
            features[name] = (mode, array.shape[1:])
        normalizer = cls(features, min_range)
        for name, (mode, shape) in normalizer.features.items():
            if mode != "image":
                center, spread = _statistics(name, arrays[name], mode, _is_cloud(shape), normalizer.min_range)
                normalizer._set(name, center, spread)
        return normalizer

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Normalizer:
        """An empty normaliser for `load_state_dict`, from what `spec` returned."""
        features = {name: (entry["mode"], tuple(entry["shape"])) for name, entry in spec["features"].items()}
        return cls(features, spec.get("min_range", 1e-4))

    def spec(self) -> dict[str, Any]:
        """Keys with their modes and shapes in plain JSON types; statistics are in the state dict."""
        features = {name: {"mode": mode, "shape": list(shape)} for name, (mode, shape) in self.features.items()}
        return {"features": features, "min_range": self.min_range}

    def normalize(self, name: str, x: Tensor) -> Tensor:
        """y = (x - m) / h for x [..., *shape]; images uint8 [..., C, H, W] -> float32 in [-1, 1].

        Raises:
            ValueError: an unknown key, a wrong shape, an image that is not uint8.
        """
        mode, center, spread = self._check(name, x)
        if mode == "identity":
            return x
        if mode == "image":
            if x.dtype != torch.uint8:
                raise ValueError(f"observation {name!r} is {x.dtype}; images are uint8 with values 0 to 255")
            return x / HALF_BYTE - 1.0
        return (x - getattr(self, center)) / getattr(self, spread)

    def unnormalize(self, name: str, y: Tensor) -> Tensor:
        """x = y h + m, the inverse of `normalize`; images come back as uint8."""
        mode, center, spread = self._check(name, y)
        if mode == "identity":
            return y
        if mode == "image":
            return ((y + 1.0) * HALF_BYTE).round().clamp(0, 255).to(torch.uint8)
        return torch.addcmul(getattr(self, center), y, getattr(self, spread))

    def statistics(self, name: str) -> tuple[Tensor, Tensor]:
        """(m, h) of one key that is no image, shapes as stored: [*shape], or [channels] of a point cloud."""
        if name not in self.features or self.features[name][0] == "image":
            raise ValueError(f"no statistics are kept for {name!r}; the keys are {self._names()}")
        return self._get("center", name), self._get("spread", name)

    def check_fitted(self) -> None:
        """Raises ValueError naming the features whose statistics are missing."""
        missing = [
            name
            for name, (mode, _) in self.features.items()
            if mode != "image"
            and not all(bool(self._get(kind, name).isfinite().all()) for kind in ("center", "spread"))
        ]
        if missing:
            raise ValueError(
                f"normalization statistics of {', '.join(missing)} are missing from these weights; they are saved with "
                "the policy (save_pretrained, or its full state_dict), so load the whole of it"
            )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {mode} {list(shape)}" for name, (mode, shape) in self.features.items())

    def _apply(self, fn: Any, recurse: bool = True) -> Normalizer:
        # Follow the network to another device, but not to half precision: statistics of 1e-3 on 1e3 would be lost.
        return super()._apply(lambda buffer: buffer.to(fn(buffer).device), recurse)

    def _names(self) -> str:
        return ", ".join(self.features) or "none"

    def _get(self, kind: str, name: str) -> Tensor:
        return getattr(self, _buffer(kind, name))

    def _set(self, name: str, center: np.ndarray, spread: np.ndarray) -> None:
        self._get("center", name).copy_(torch.from_numpy(center))
        self._get("spread", name).copy_(torch.from_numpy(spread))

    def _check(self, name: str, x: Tensor) -> tuple[str, str, str]:
        """Mode and the names of the buffers of m and h, once x is known to fit."""
        if name not in self._table:
            raise ValueError(f"{name!r} is not in the data of this policy; its keys are {self._names()}")
        mode, shape, center, spread = self._table[name]
        if x.shape[-len(shape) :] != shape:
            raise ValueError(
                f"{name!r} has shape {tuple(x.shape)}; this policy was built for {['...', *self.features[name][1]]}. "
                "Give the same observation settings to the environment and the data"
            )
        return mode, center, spread


def _buffer(kind: str, name: str) -> str:
    """A buffer name for any key; module attributes must not contain dots."""
    return f"{kind}_{quote(name, safe='').replace('.', '%2E')}"


def _is_cloud(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[-1] in (3, 6)


def _statistics(
    name: str, array: np.ndarray, mode: str, cloud: bool, min_range: float
) -> tuple[np.ndarray, np.ndarray]:
    """(centre, spread) in float32, each of the shape of one row, or of one point's channels."""
    rows = array.reshape(-1, array.shape[-1]) if cloud else array
    low, high = rows.min(axis=0).astype(np.float64), rows.max(axis=0).astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        bad = np.argwhere(~(np.isfinite(low) & np.isfinite(high))).tolist()
        raise ValueError(f"{name!r} has NaN or infinite values in dimensions {bad}; remove them from the data")
    if mode == "identity":
        return np.zeros(low.shape, np.float32), np.ones(low.shape, np.float32)
    extent = high - low
    if mode == "meanstd":
        center, spread = rows.mean(axis=0, dtype=np.float64), rows.std(axis=0, dtype=np.float64)
        pooled = np.sqrt
    else:
        center, spread, pooled = (low + high) / 2, extent / 2, None
        if mode == "quantile":
            q_low, q_high = np.quantile(rows[:: len(rows) // SAMPLED + 1], QUANTILES, axis=0)
            flat = q_high - q_low < min_range
            center = np.where(flat, center, (q_low + q_high) / 2)
            spread = np.where(flat, spread, (q_high - q_low) / 2)
    if cloud:
        for axes in (slice(0, 3), slice(3, 6)):
            if spread[axes].size:
                spread[axes] = pooled(np.mean(spread[axes] ** 2)) if pooled else spread[axes].max()
    constant = (spread if mode == "meanstd" else 2 * spread) < min_range
    # The mean of equal numbers may be off by a bit; the number itself is not.
    center = np.where(extent == 0, low, center)
    return center.astype(np.float32), np.where(constant, 1.0, spread).astype(np.float32)
