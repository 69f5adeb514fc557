"""Conversion between PyTorch tensors and arrays, for all dtypes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.data.dtypes import narrowed
from tailrace.devices import devices

ALIGNMENT = 128
"""The alignment of JAX arrays on a GPU; slices of tensors may start anywhere."""

_NARROWED = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}
"""The device's dtypes for 64-bit dtypes, as in JAX."""

_BITS = {torch.bfloat16: (torch.int16, jnp.bfloat16)}
"""Dtypes that NumPy does not support: their bits are viewed as integers."""


def dtype_on_device(dtype: torch.dtype) -> np.dtype:
    """The dtype of a tensor on the device.

    >>> dtype_on_device(torch.int64), dtype_on_device(torch.float16)
    (dtype('int32'), dtype('float16'))
    """
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return _numpy_dtype(dtype)
    return _numpy_dtype(_NARROWED.get(dtype, dtype))


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    if dtype in _BITS:
        return np.dtype(_BITS[dtype][1])
    if dtype == torch.complex32:
        raise NotImplementedError("torch.complex32 has no counterpart in JAX; use torch.complex64")
    return jnp.dtype(str(dtype).removeprefix("torch."))  # by name: also while a model is traced


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array of its device dtype; shares memory if possible.

    Copies are made by NumPy: PyTorch would wake its threads, which takes longer than most copies.
    """
    # NumPy takes no tensor that requires a gradient, as parameters do.
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    # A view in another dtype needs entries that are next to each other.
    tensor = tensor.contiguous()
    if tensor.dtype in _BITS:
        integer, dtype = _BITS[tensor.dtype]
        return tensor.view(integer).numpy().view(dtype)
    return narrowed(tensor.numpy(), dtype_on_device(tensor.dtype))


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the device that single-device programs run on."""
    if not tensor.is_cuda:
        return False
    device = devices.available()[0]
    return device.platform == "gpu" and device.local_hardware_id == tensor.device.index


def rows_of(tensor: torch.Tensor, shape: tuple[int, ...]) -> Any:
    """A tensor of a call as an array of another shape; on the device if it is there."""
    if not is_resident(tensor):
        return array_of(tensor).reshape(shape)
    tensor = tensor.detach()
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        tensor = tensor.to(_NARROWED.get(tensor.dtype, tensor.dtype))
    tensor = tensor.reshape(shape).contiguous()
    # JAX would refuse an unaligned pointer.
    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()
    # JAX waits for PyTorch's pending computations: the DLPack protocol synchronizes their streams.
    return jax.dlpack.from_dlpack(tensor)


def tensor_of(array: object) -> torch.Tensor:
    """A tensor with a copy of an array."""
    # A copy: an array of the device may be a buffer that the next call overwrites, and PyTorch's
    # tensors are writable.
    found = np.array(array)
    for torch_dtype, (integer, numpy_dtype) in _BITS.items():
        if found.dtype == numpy_dtype:
            return torch.from_numpy(found.view(np.int16)).view(integer).view(torch_dtype)
    return torch.from_numpy(found)
