"""`x[key] = value`, by PyTorch's rules: `x` keeps its dtype, and a mask may be anywhere in the key.

torchax's own promotes instead (an integer tensor becomes one of floats), takes the nearest number where
PyTorch wraps around, and knows masks only as a whole key.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import Index, TensorLike
from tailrace.torch.calls.containers import rebuild
from tailrace.torch.torchax.refused_dtypes import check_key, check_value
from tailrace.torch.torchax.results import as_dtype, number_as
from tailrace.torch.tracing.watch import current_watch

_Basic: TypeAlias = "int | slice | EllipsisType | None"
"""The parts of a key that select without looking at values."""


def set_item(x: TensorLike, key: Index, value: TensorLike) -> None:
    """`__setitem__` of torchax's tensors and slices, which no mode intercepts."""
    if (watch := current_watch()) is not None:
        # Before anything is read: earlier writes may have gone through another view.
        watch.aliases.settle()
        key, value = rebuild((key, value), watch.constant)
    check_key(key)
    check_value(x, key, value)
    held = x.jax()
    if isinstance(value, bool | int | float | complex):
        value = number_as(value, x.dtype)
    elif hasattr(value, "jax"):
        value = as_dtype(value.jax(), held.dtype)
    new = _written(held, _index_of(key), value)
    if hasattr(x, "_elem"):
        x._elem = new
    else:
        x.update(new)


def _index_of(key: Index) -> Any:
    """A key of arrays; JAX refuses lists, as in `x[[0, 2], 1]`."""
    if isinstance(key, tuple):
        return tuple(_index_of(part) for part in key)
    if isinstance(key, list):
        return np.asarray(key)
    return key.jax() if hasattr(key, "jax") else key


def _written(x: jax.Array, key: Index, value: TensorLike) -> jax.Array:
    """The array with `value` at `key`."""
    from torchax.ops.jaten import _shape_static_boolean_index_put as put_by_mask

    # `x[mask,]` is `x[mask]`.
    if isinstance(key, tuple) and len(key) == 1:
        key = key[0]
    # Also with a value for each True entry: torchax finds its place by counting along the mask.
    if _is_mask(key):
        return put_by_mask(x, jnp.asarray(key), value).astype(x.dtype)
    if isinstance(key, tuple):
        places = [number for number, part in enumerate(key) if _is_mask(part)]
        alone = len(places) == 1 and all(_is_basic(part) for part in key if not _is_mask(part))
        if alone and (found := _chosen(x, key, places[0], value)) is not None:
            return found
    return x.at[key].set(value)


def _chosen(x: jax.Array, key: tuple[Any, ...], place: int, value: TensorLike) -> jax.Array | None:
    """With a mask among slices: a choice between old and new entries, whose shape is known.

    None where the value has an entry for each True of the mask.
    """
    mask = jnp.asarray(key[place])
    # The same key with all of the masked dims, whose shape is known while tracing.
    whole = (*key[:place], *(slice(None),) * mask.ndim, *key[place + 1 :])
    part = x[whole]
    after = _dims(key[place + 1 :], x.ndim, whole)
    before = part.ndim - mask.ndim - after
    new = jnp.asarray(value)
    if new.ndim > after and new.size > 1:
        # The dim of the value that goes along the True entries must be broadcast: only the device
        # knows how many there are.
        if new.shape[new.ndim - after - 1] != 1:
            return None
        shape = new.shape
        cut = new.ndim - after
        new = new.reshape(*shape[: cut - 1], *(1,) * mask.ndim, *shape[cut:])
    mask = mask.reshape((1,) * before + mask.shape + (1,) * after)
    return x.at[whole].set(jnp.where(mask, new, part).astype(x.dtype))


def _dims(parts: tuple[_Basic, ...], ndim: int, whole: tuple[_Basic, ...]) -> int:
    """How many dims of `x[whole]` come from `parts`, the end of the key, and what it leaves out."""
    left_out = ndim - sum(part is not None and part is not ... for part in whole)
    kept = sum(part is None or isinstance(part, slice) for part in parts)
    # What a key leaves out is where its ellipsis is, or at the end.
    at_end = not any(part is ... for part in whole) or any(part is ... for part in parts)
    return kept + (left_out if at_end else 0)


def _is_mask(part: object) -> bool:
    return isinstance(part, jax.Array | np.ndarray) and part.dtype == bool and part.ndim > 0


def _is_basic(part: object) -> bool:
    return part is None or part is ... or isinstance(part, int | slice)
