"""Arrays as other tools store them, in the one form that genrl uses."""

from __future__ import annotations

from typing import Literal

import numpy as np

from genrl.envs.data.episodes import DataError

Layout = Literal["auto", "HWC", "CHW"]
CHANNELS = (1, 3, 4)
MATRIX = 256  # numbers a step; a larger matrix is a map of something and no state
NUMBERS = "fiub"  # numpy's kinds of real numbers and truth values


def to_actions(array: np.ndarray) -> np.ndarray:
    """Actions as float32 [T, A]; one number a step becomes [T, 1].

    Raises:
        DataError: text or objects, whole numbers without a dimension (discrete actions), more than two dimensions.
    """
    array = np.asarray(array)
    if array.dtype.kind not in NUMBERS:
        raise DataError(f"actions have dtype {array.dtype}; expected real numbers [T, A]", key="actions")
    if array.ndim == 1 and array.dtype.kind != "f":
        raise DataError(
            f"actions are whole numbers ({array.dtype} [T]), that is discrete; policies here act in continuous spaces",
            key="actions",
        )
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise DataError(f"actions have shape {array.shape}; expected [T, A]", key="actions")
    return to_float32(array, "actions")


def to_observation(array: np.ndarray, key: str, layout: Layout = "auto") -> np.ndarray:
    """An observation [T, ...] in genrl's form, told apart by its shape and type.

    | stored | becomes |
    |---|---|
    | [T] or [T, D] numbers | state float32 [T, D] |
    | float [T, N, 3] or [T, N, 6] | point cloud float32 |
    | other float [T, K, L] of at most 256 numbers | state float32 [T, K L] |
    | uint8 [T, H, W] | image uint8 [T, 1, H, W] |
    | [T, H, W, C] or [T, C, H, W] | image uint8 [T, C, H, W], see `to_images` |

    Raises:
        DataError: text or objects, more than four dimensions, and what `to_images` refuses.
    """
    array = np.asarray(array)
    if array.dtype.kind not in NUMBERS:
        raise DataError(f"dtype {array.dtype} is no observation; leave the key out with obs=[...]", key=key)
    if array.ndim == 4 or (array.ndim == 3 and array.dtype == np.uint8):
        return to_images(array, key, layout)
    if array.ndim == 0 or array.ndim > 4:
        raise DataError(f"shape {array.shape}; an observation has 1 to 4 dimensions, time first", key=key)
    if array.ndim == 3 and array.shape[2] in (3, 6):
        return to_float32(array, key)
    size = int(np.prod(array.shape[1:]))
    if array.ndim == 3 and size > MATRIX:
        raise DataError(
            f"{array.dtype} {array.shape} is neither a state nor a point cloud (a depth map?); leave the key out with "
            "obs=[...]",
            key=key,
        )
    return to_float32(array.reshape(len(array), size), key)


def to_images(array: np.ndarray, key: str, layout: Layout = "auto") -> np.ndarray:
    """Images as uint8 [T, C, H, W].

    The channel axis is the one of size 1, 3 or 4. Where both ends qualify, as in (3, 3, 3), the layout must be said.
    Bytes are kept. Floats in [0, 1] are multiplied by 255 and rounded; whole numbers in [0, 255] of any type are cast.

    Raises:
        DataError: an ambiguous or impossible layout, and values that are neither.
    """
    if array.ndim == 3:
        array = array[:, None]
        layout = "CHW"
    shape = array.shape[1:]
    if layout == "auto":
        first, last = shape[0] in CHANNELS, shape[2] in CHANNELS
        if first and last:
            raise DataError(
                f"images of shape {shape} may be height x width x channels or channels first; say which with "
                "image_layout: HWC or CHW",
                key=key,
            )
        if not (first or last):
            raise DataError(
                f"images of shape {shape} have no axis of 1, 3 or 4 channels at either end; say where the channels are "
                "with image_layout: HWC or CHW, or leave the key out with obs=[...]",
                key=key,
            )
        layout = "CHW" if first else "HWC"
    if layout == "HWC":
        array = np.moveaxis(array, -1, 1)
    if array.dtype != np.uint8:
        array = _bytes(array, key)
    return np.ascontiguousarray(array)


def to_float32(array: np.ndarray, key: str) -> np.ndarray:
    """The same numbers in float32.

    Raises:
        DataError: finite numbers that float32 does not have.
    """
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(array, dtype=np.float32)
    if array.dtype.itemsize > 4 and not np.isfinite(converted.sum(dtype=np.float64)):
        lost = np.isfinite(array) & ~np.isfinite(converted)
        if lost.any():
            raise DataError(f"the value {array[lost][0]:g} does not fit into float32", key=key)
    return converted


def _bytes(array: np.ndarray, key: str) -> np.ndarray:
    if array.dtype.kind == "b":
        return array.astype(np.uint8) * np.uint8(255)
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if array.dtype.kind == "f" and low >= 0 and high <= 1:
        return np.rint(array * np.asarray(255, array.dtype)).astype(np.uint8)
    if low >= 0 and high <= 255 and (array.dtype.kind in "iu" or bool((array == np.rint(array)).all())):
        return array.astype(np.uint8)
    raise DataError(
        f"{array.dtype} images with values from {low:g} to {high:g}; expected uint8, floats in [0, 1] or whole numbers "
        "in [0, 255]. Leave the key out with obs=[...] if it is no image (a depth map, for instance)",
        key=key,
    )
