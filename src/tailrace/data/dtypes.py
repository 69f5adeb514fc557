"""The dtypes that can be transferred to a device, and 64-bit values that must fit 32 bits there."""

from typing import Any

import numpy as np

from tailrace.base.trees import leaf_called
from tailrace.errors import DataError

# Booleans, integers, floats, complex numbers. The dtypes of ml_dtypes (bfloat16, float8, int4) are
# of kind "V" to NumPy, as are structured arrays and raw bytes; `is_numeric` distinguishes them.
_NUMERIC_KINDS = frozenset("biufc")

_WHAT_THE_KIND_IS = {
    "O": "Python objects",
    "S": "byte strings",
    "U": "strings",
    "T": "strings",
    "M": "dates",
    "m": "time differences",
    "V": "structured or raw data",
}


def is_numeric(dtype: np.dtype) -> bool:
    """Whether arrays of `dtype` hold numbers or booleans, including bfloat16 and float8.

    >>> is_numeric(np.dtype("uint8")), is_numeric(np.dtype("U3"))
    (True, False)
    """
    if dtype.kind in _NUMERIC_KINDS:
        return True
    return dtype.kind == "V" and dtype.names is None and dtype.type is not np.void


def check_numeric(path: str, array: np.ndarray) -> np.ndarray:
    """`array` itself if a device can hold its numbers, otherwise a DataError that names the leaf."""
    if not is_numeric(array.dtype):
        holds = _WHAT_THE_KIND_IS.get(array.dtype.kind, "something else")
        raise DataError(
            f"A dataset holds numbers and booleans only, but {leaf_called(path)} holds {holds} "
            f"(dtype {array.dtype}). Encode it as numbers, or leave it out of the dataset."
        )
    if not array.dtype.isnative:
        raise DataError(
            f"A dataset holds numbers in the byte order of this machine, but {leaf_called(path)} has "
            f"the other one (dtype {array.dtype}). Convert it: x.astype(x.dtype.newbyteorder('='))."
        )
    return array


FEW = 256
"""Values that are compared at once; of more, it is faster to look at the extremes first."""


def narrowed(values: np.ndarray, dtype: np.dtype, path: str = "") -> np.ndarray:
    """Values in another dtype, which must hold each of them; not copied if it is theirs.

    Args:
        values: the values.
        dtype: their dtype on the device.
        path: the leaf that they are of, for the message.

    Raises:
        DataError: a value does not fit.

    >>> narrowed(np.array([1, 2**31 - 1]), np.dtype("int32")).tolist()
    [1, 2147483647]
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
