"""64-bit values in arrays of 32 bits: those that fit, or an error with the value."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailrace.data.trees import leaf_called
from tailrace.errors import DataError

FEW = 256
"""Values that are compared at once; of more, it is faster to look at the extremes first."""


def narrowed(values: np.ndarray, dtype: np.dtype, path: str = "") -> np.ndarray:
    """Values in another dtype, which must hold each of them; not copied if it is theirs.

    Args:
        values: the values.
        dtype: their dtype on the device.
        path: the leaf that they are of, for the message.

    >>> narrowed(np.array([1, 2**40 + 5]), np.dtype("int32"), "['y']")
    Traceback (most recent call last):
    tailrace.errors.DataError: ...on the device, int32, ... Received: 1099511627781 in leaf ['y'] ...
    """
    if values.dtype == dtype:
        return values
    found = np.empty(values.shape, dtype)
    store_narrowed(found, ..., values, path)
    return found


def store_narrowed(target: np.ndarray, at: Any, values: object, path: str = "") -> None:
    """Write values into `target[at]`, whose dtype must hold each of them."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" and target.dtype.kind in "iu":
        # A whole number that does not fit wraps around without a word.
        range_ = np.iinfo(target.dtype)
        target[at] = array
        if array.size > FEW and range_.min <= array.min() and array.max() <= range_.max:
            return
        lost = target[at] != array
        if lost.any():
            raise _does_not_fit(array[lost], target.dtype, path)
        return
    try:
        # A float that becomes infinite raises; one that was infinite, or rounds, does not.
        with np.errstate(over="raise"):
            target[at] = array
    except FloatingPointError:
        with np.errstate(over="ignore"):
            lost = np.isinf(array.astype(target.dtype)) & np.isfinite(array)
        raise _does_not_fit(array[lost], target.dtype, path) from None


def _does_not_fit(values: np.ndarray, dtype: np.dtype, path: str) -> DataError:
    where = f" in {leaf_called(path)}" if path else ""
    return DataError(
        f"64-bit values are narrowed to the dtype on the device, {dtype}, which must hold them. "
        f"Received: {values.flat[0]!s}{where} ({values.dtype}). Scale or map the values, split them "
        f"into two arrays, or set jax_enable_x64 before JAX is used."
    )
