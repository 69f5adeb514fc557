"""Functions and methods of tensors whose arguments torchax does not support."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as functional

from tailrace.base.array_like import Index, TensorLike
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.calls.containers import flatten
from tailrace.torch.torchax.env import Env
from tailrace.torch.torchax.results import as_dtype, plainly
from tailrace.torch.tracing.watch import Watch


def _cast_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function along one dimension, such as a softmax, with a `dtype` argument."""

    def run(
        watch: Watch,
        input: TensorLike,
        dim: int | None = None,
        _stacklevel: int | torch.dtype = 3,
        dtype: torch.dtype | None = None,
    ) -> Any:
        if isinstance(_stacklevel, torch.dtype):  # where methods have their dtype
            dtype = _stacklevel
        if dtype is None or dim is None:
            return NotImplemented
        return function(input.to(dtype), dim)

    return run


def _take_along_dim(
    watch: Watch, input: TensorLike, indices: TensorLike, dim: int | None = None
) -> Any:
    """With indices of any integer dtype; those that operations return here have 32 bits."""
    x, index = input.jax(), indices.jax()
    if not jnp.issubdtype(index.dtype, jnp.integer):
        return NotImplemented  # refused there, in PyTorch's words
    if dim is None:
        return watch.tensor(x.ravel()[index.ravel()])
    axis = dim % x.ndim
    # Broadcast by hand, except along the dim: JAX's function wants equal shapes there.
    common = jnp.broadcast_shapes(
        (*x.shape[:axis], 1, *x.shape[axis + 1 :]),
        (*index.shape[:axis], 1, *index.shape[axis + 1 :]),
    )
    x, index = (
        jnp.broadcast_to(part, (*common[:axis], part.shape[axis], *common[axis + 1 :]))
        for part in (x, index)
    )
    return watch.tensor(jnp.take_along_axis(x, index, axis))


def _fill_diagonal(watch: Watch, input: TensorLike, fill_value: float, wrap: bool = False) -> Any:
    """In place; PyTorch's own writes through a view of the storage, which there is none of here."""
    x = input.jax()
    # The distance in memory of two neighbours on the diagonal: one step along every axis.
    step = sum(math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim))
    end = None if wrap and x.ndim == 2 else (min(x.shape) - 1) * step + 1
    filled = x.ravel().at[slice(0, end, step)].set(fill_value).reshape(x.shape)
    return input.copy_(watch.tensor(filled))


def _contiguous(
    watch: Watch, input: TensorLike, memory_format: torch.memory_format = torch.contiguous_format
) -> Any:
    """Itself, or a copy where PyTorch makes one; formats of memory mean nothing else here."""
    if memory_format == torch.contiguous_format and watch.aliases.contiguous(input):
        return input
    return watch.tensor(input.jax())


def _type_as(watch: Watch, input: TensorLike, other: TensorLike) -> Any:
    """In the dtype of another tensor; torchax's own casts in place."""
    return input.to(other.dtype)


def _requires_grad(watch: Watch, input: TensorLike, requires_grad: bool = True) -> Any:
    """A no-op flag: JAX decides what has a gradient here."""
    input.requires_grad = requires_grad
    return input


def _new_tensor(
    watch: Watch, input: TensorLike, data: TensorLike, *, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    """Data in the dtype of another tensor; torchax's would have no values."""
    wanted = dtype_on_device(input.dtype if dtype is None else dtype)
    return watch.tensor(as_dtype(data.jax() if hasattr(data, "jax") else jnp.asarray(data), wanted))


MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that make a tensor of numbers, lists, arrays or tensors."""


def tensor_from(make: Callable[..., Any]) -> Callable[..., Any]:
    """One of them. PyTorch decides on the dtype of numbers in lists, where torchax takes that of the
    first, and lets no gradient through a copy."""

    def run(
        data: TensorLike,
        dtype: torch.dtype | None = None,
        *_: Any,
        env: Env,
        requires_grad: bool = False,
        **__: Any,
    ) -> Any:
        # `as_tensor` shares what it is given; only `torch.tensor` makes a copy without history.
        if make is not torch.tensor and hasattr(data, "jax"):
            return data if dtype is None else data.to(dtype)
        leaves = [leaf for _, leaf in flatten(data)]
        # Without modes: PyTorch promotes numbers in lists by rules of its own.
        with plainly():
            if any(hasattr(leaf, "jax") for leaf in leaves):
                wanted = functools.reduce(torch.promote_types, map(_kind, leaves))
                array = _stacked(data, dtype_on_device(dtype or wanted), hasattr(data, "jax"))
            else:
                array = env.t2j_copy(make(data, dtype=dtype, device="cpu").detach())
        # As PyTorch's: a new leaf, whatever it was made of.
        made = env.j2t_iso(jax.lax.stop_gradient(array))
        made.requires_grad = requires_grad
        return made

    return run


def _kind(leaf: TensorLike) -> torch.dtype:
    return leaf.dtype if hasattr(leaf, "jax") else torch.tensor(leaf, device="cpu").dtype


def _stacked(data: TensorLike, dtype: np.dtype, whole: bool) -> Any:
    """Nested lists of numbers and of tensors of one entry as an array, or a `whole` tensor."""
    if isinstance(data, list | tuple):
        return jnp.stack([_stacked(part, dtype, whole) for part in data])
    array = data.jax() if hasattr(data, "jax") else jnp.asarray(data)
    return as_dtype(array if whole else array.reshape(()), dtype)


def _set_item(watch: Watch, input: TensorLike, key: Index, value: TensorLike) -> None:
    """`x[key] = value` for a tensor of the host that has become one of the program."""
    input[key] = value


def _deep_copy(watch: Watch, input: TensorLike, memo: dict[int, Any]) -> Any:
    """Of a tensor of the host that has become one of the program."""
    return copy.deepcopy(input, memo)


def _detach(watch: Watch, input: TensorLike) -> Any:
    """As the method; torchax's lets the gradient through."""
    return input.detach()


def _detach_in_place(watch: Watch, input: TensorLike) -> Any:
    if not hasattr(input, "_elem"):
        raise NotImplementedError("detach_ of a slice (use detach)")
    input._elem = jax.lax.stop_gradient(input._elem)
    return input


def _is_meta(watch: Watch, input: TensorLike) -> bool:
    """False, although torchax's tensors are inside: callers want to know whether there are values."""
    return False


TENSORS: dict[Any, Callable[..., Any]] = {
    **{
        function: _cast_first(function)
        for function in (
            functional.log_softmax,
            functional.softmax,
            functional.softmin,
            torch.log_softmax,
            torch.softmax,
            torch.Tensor.log_softmax,
            torch.Tensor.softmax,
        )
    },
    getattr(torch.Tensor.is_meta, "__get__"): _is_meta,  # noqa: B009
    torch.Tensor.__deepcopy__: _deep_copy,
    torch.Tensor.__setitem__: _set_item,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.detach_: _detach_in_place,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.requires_grad_: _requires_grad,
    torch.Tensor.type_as: _type_as,
    torch.detach: _detach,
    torch.detach_: _detach_in_place,
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
}
"""The replaced functions of PyTorch, and their replacements."""
