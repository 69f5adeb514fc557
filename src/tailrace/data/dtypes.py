"""The dtypes that can be transferred to a device."""

import numpy as np

from tailrace.data.trees import leaf_called
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
