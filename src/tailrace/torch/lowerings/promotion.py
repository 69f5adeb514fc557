"""In which dtype PyTorch computes, and what it returns.

JAX promotes by rules of its own, or not at all. PyTorch's: the kinds of numbers are ordered (booleans,
whole numbers, floats, complex numbers); a tensor without dimensions, and after it a Python number,
decides only if it is of a higher kind than the others. Elementwise functions of 16-bit floats are
computed in 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.torch.calls.arrays import dtype_on_device

BOOL = np.dtype(bool)

_NARROW = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))


def default_float() -> np.dtype:
    """The dtype of numbers and of new tensors without one, as `torch.set_default_dtype` says."""
    return dtype_on_device(torch.get_default_dtype())


def default_int() -> np.dtype:
    """The dtype of indices and of sums of whole numbers: PyTorch's int64, as the device has it."""
    return dtype_on_device(torch.int64)


def wide(dtype: DTypeLike) -> np.dtype:
    """The dtype in which PyTorch computes functions of a dtype: 32 bits for 16."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype) in _NARROW else jnp.dtype(dtype)


def is_float(dtype: DTypeLike) -> bool:
    """Whether numbers of a dtype are real floats."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_complex(dtype: DTypeLike) -> bool:
    """Whether numbers of a dtype are complex."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def is_inexact(dtype: DTypeLike) -> bool:
    """Whether numbers of a dtype are floats or complex."""
    return jnp.issubdtype(dtype, jnp.inexact)


def real_of(dtype: DTypeLike) -> np.dtype:
    """The dtype of the parts of a complex number; of others the dtype itself."""
    return jnp.finfo(dtype).dtype if is_complex(dtype) else jnp.dtype(dtype)


def _kind(dtype: np.dtype) -> int:
    if dtype == BOOL:
        return 0
    return 3 if is_complex(dtype) else 2 if is_float(dtype) else 1


def _of_number(number: complex) -> np.dtype:
    if isinstance(number, bool):
        return np.dtype(bool)
    if isinstance(number, int):
        return default_int()
    if isinstance(number, float):
        return default_float()
    return jnp.promote_types(default_float(), jnp.complex64)


def _combined(higher: np.dtype | None, lower: np.dtype | None) -> np.dtype | None:
    """Of dtypes of two ranks: the lower rank adds its kind, not its width."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if _kind(higher) >= _kind(lower):
        return higher
    if _kind(higher) == 2:  # floats next to complex numbers
        return jnp.promote_types(higher, jnp.complex64)
    return lower if higher == BOOL or _kind(lower) >= 2 else jnp.promote_types(higher, lower)


def common_dtype(*values: TensorLike) -> np.dtype:
    """The dtype in which PyTorch computes a function of these arrays and numbers."""
    ranks: list[np.dtype | None] = [None, None, None]
    for value in values:
        if isinstance(value, bool | int | float | complex):
            rank, dtype = 2, _of_number(value)
        else:
            rank, dtype = int(value.ndim == 0), jnp.dtype(value.dtype)
        held = ranks[rank]
        ranks[rank] = dtype if held is None else jnp.promote_types(held, dtype)
    found = functools.reduce(_combined, ranks)
    assert found is not None
    return jnp.dtype(found)


def as_dtype(value: TensorLike, dtype: DTypeLike) -> Any:
    """An array or number in a dtype; whole numbers that do not fit wrap around, as in PyTorch."""
    dtype = jnp.dtype(dtype)
    if isinstance(value, bool | int | float | complex):
        if isinstance(value, float) and not is_inexact(dtype) and dtype != BOOL:
            value = int(value)
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and jnp.issubdtype(dtype, jnp.integer)
        ):
            bits, signed = jnp.iinfo(dtype).bits, jnp.issubdtype(dtype, jnp.signedinteger)
            value = value % 2**bits
            value = value - 2**bits if signed and value >= 2 ** (bits - 1) else value
        return np.asarray(value).astype(dtype)
    if value.dtype == dtype:
        return value
    if is_complex(value.dtype) and not is_complex(dtype):
        value = jnp.real(value)
    if is_inexact(value.dtype) and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4:
        # -1.0 becomes 255, where JAX takes the nearest number.
        value = value.astype(jnp.int32)
    return value.astype(dtype)


def in_common_dtype(*values: TensorLike, floats: bool = False) -> tuple[list[Any], np.dtype]:
    """The values in PyTorch's common dtype (as `floats`, if whole numbers are computed as floats), and
    that dtype, which is the result's. 16-bit values stay so."""
    dtype = common_dtype(*values)
    if floats and not is_inexact(dtype):
        dtype = default_float()
    return [as_dtype(value, dtype) for value in values], dtype


def in_wide_dtype(*values: TensorLike, floats: bool = False) -> tuple[list[Any], np.dtype]:
    """The values in the dtype in which PyTorch computes, and the dtype of the result."""
    dtype = common_dtype(*values)
    if floats and not is_inexact(dtype):
        dtype = default_float()
    return [as_dtype(value, wide(dtype)) for value in values], dtype


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one array of floats (and further arguments), computed in 32 bits for 16."""

    @functools.wraps(function)
    def run(x: TensorLike, *args: Any, **named: Any) -> Any:
        dtype = x.dtype
        found = function(as_dtype(x, wide(dtype)), *args, **named)
        return jax.tree.map(
            lambda part: part.astype(dtype) if is_inexact(part.dtype) else part, found
        )

    return run
