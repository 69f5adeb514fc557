"""Random numbers of a program: each operation draws from a key of its own, in order.

Not PyTorch's numbers: those follow from the state of its generator. The same key gives the same
numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.errors import ProgramError
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.lowerings.promotion import as_dtype, default_float, default_int, wide
from tailrace.torch.lowerings.table import lowering

aten = torch.ops.aten


class _Keys:
    """A key, and how many were made of it."""

    def __init__(self, key: jax.Array) -> None:
        self.key, self.count = key, 0


_keys: contextvars.ContextVar[_Keys | None] = contextvars.ContextVar(
    "tailrace_torch_keys", default=None
)


@contextlib.contextmanager
def drawing(key: jax.Array) -> Iterator[None]:
    """While this lasts, random operations draw from `key`: from a different part of it each."""
    # A context variable: another thread may trace another program at the same time.
    token = _keys.set(_Keys(key))
    try:
        yield
    finally:
        _keys.reset(token)


def next_key() -> jax.Array:
    """A key that no other call gets."""
    keys = _keys.get()
    if keys is None:
        raise ProgramError(
            "A random operation needs a key to draw from. Received: none. Evaluate it inside of "
            "`drawing(key)`."
        )
    keys.count += 1
    return jax.random.fold_in(keys.key, keys.count)


def kept(rate: float, shape: Sequence[int]) -> jax.Array:
    """Which entries a dropout of this rate keeps, drawn from a key of their own."""
    return jax.random.bernoulli(next_key(), 1 - rate, shape)


def drop(x: TensorLike, rate: float, mask: TensorLike) -> Any:
    """What a dropout makes of an array: the kept entries, scaled."""
    if rate >= 1:
        return jnp.zeros_like(x)
    scale = as_dtype(1 / (1 - rate), wide(x.dtype))
    return jnp.where(
        mask, (as_dtype(x, wide(x.dtype)) * scale).astype(x.dtype), jnp.zeros((), x.dtype)
    )


@lowering(aten.native_dropout.default)
def native_dropout(x: TensorLike, p: float, train: bool | None) -> tuple[Any, Any]:
    """The array with entries dropped, and which ones were kept."""
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    mask = kept(p, x.shape)
    return drop(x, p, mask), mask


def _dtype(dtype: torch.dtype | None, otherwise: DTypeLike) -> np.dtype:
    return jnp.dtype(otherwise) if dtype is None else dtype_on_device(dtype)


def _uniform(shape: Sequence[int], dtype: DTypeLike, low: float = 0, high: float = 1) -> Any:
    found = jax.random.uniform(next_key(), tuple(shape), wide(dtype), low, high)
    # Rounding to 16 bits may reach the upper limit, which is excluded.
    below = jnp.nextafter(jnp.asarray(high, dtype), jnp.asarray(low, dtype))
    return jnp.minimum(found.astype(dtype), below) if wide(dtype) != dtype else found


def _normal(shape: Sequence[int], dtype: DTypeLike, mean: Any = 0.0, std: Any = 1.0) -> Any:
    found = jax.random.normal(next_key(), tuple(shape), wide(dtype))
    mean, std = (as_dtype(part, wide(dtype)) for part in (mean, std))
    return (mean + std * found).astype(dtype)


def _integers(shape: Sequence[int], dtype: DTypeLike, low: int, high: int) -> Any:
    high = min(high, 2**31 - 1)  # 32 bits are drawn
    return jax.random.randint(next_key(), tuple(shape), low, high).astype(dtype)


@lowering(aten.rand.default, aten.rand.generator)
def rand(size: Sequence[int], *, dtype: torch.dtype | None = None, generator: object = None) -> Any:
    """Uniform numbers in [0, 1)."""
    return _uniform(size, _dtype(dtype, default_float()))


@lowering(aten.rand_like.default)
def rand_like(x: TensorLike, *, dtype: torch.dtype | None = None) -> Any:
    """Uniform numbers in the shape of an array."""
    return _uniform(x.shape, _dtype(dtype, x.dtype))


@lowering(aten.randn.default, aten.randn.generator)
def randn(
    size: Sequence[int], *, dtype: torch.dtype | None = None, generator: object = None
) -> Any:
    """Normal numbers."""
    return _normal(size, _dtype(dtype, default_float()))


@lowering(aten.randn_like.default)
def randn_like(x: TensorLike, *, dtype: torch.dtype | None = None) -> Any:
    """Normal numbers in the shape of an array."""
    return _normal(x.shape, _dtype(dtype, x.dtype))


@lowering(aten.randint.default)
def randint(high: int, size: Sequence[int], *, dtype: torch.dtype | None = None) -> Any:
    """Whole numbers below a limit."""
    return _integers(size, _dtype(dtype, default_int()), 0, high)


@lowering(aten.randint.low)
def randint_between(
    low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None
) -> Any:
    """Whole numbers between two limits."""
    return _integers(size, _dtype(dtype, default_int()), low, high)


@lowering(aten.randint_like.default)
def randint_like(x: TensorLike, high: int, *, dtype: torch.dtype | None = None) -> Any:
    """Whole numbers in the shape of an array."""
    return _integers(x.shape, _dtype(dtype, x.dtype), 0, high)


@lowering(aten.randint_like.low_dtype)
def randint_like_between(
    x: TensorLike, low: int, high: int, *, dtype: torch.dtype | None = None
) -> Any:
    """Whole numbers between two limits, in the shape of an array."""
    return _integers(x.shape, _dtype(dtype, x.dtype), low, high)


@lowering(aten.randperm.default)
def randperm(n: int, *, dtype: torch.dtype | None = None) -> Any:
    """The numbers below n in a random order."""
    return jax.random.permutation(next_key(), n).astype(_dtype(dtype, default_int()))


@lowering(aten.bernoulli.default)
def bernoulli(x: TensorLike, *, generator: object = None) -> Any:
    """1 with the probability that the array has there, otherwise 0."""
    drawn = jax.random.uniform(next_key(), x.shape, wide(x.dtype))
    return (drawn < as_dtype(x, wide(x.dtype))).astype(x.dtype)


@lowering(aten.bernoulli.p)
def bernoulli_of(x: TensorLike, p: float, *, generator: object = None) -> Any:
    """1 with one probability, in the shape of an array."""
    return jax.random.bernoulli(next_key(), p, x.shape).astype(x.dtype)


@lowering(aten.bernoulli.Tensor)
def bernoulli_with(x: TensorLike, p: TensorLike, *, generator: object = None) -> Any:
    """1 with the probability of another array, in the shape and dtype of this one."""
    return (jax.random.uniform(next_key(), x.shape) < p.astype(jnp.float32)).astype(x.dtype)


@lowering(aten.normal_functional.default)
def normal_like(x: TensorLike, mean: float = 0, std: float = 1, *, generator: object = None) -> Any:
    """Normal numbers in the shape of an array."""
    return _normal(x.shape, x.dtype, mean, std)


@lowering(aten.normal.float_float)
def normal_of(
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    generator: object = None,
) -> Any:
    """Normal numbers of one mean and deviation."""
    return _normal(size, _dtype(dtype, default_float()), mean, std)


@lowering(aten.normal.Tensor_float, aten.normal.Tensor_Tensor, aten.normal.float_Tensor)
def normal_around(mean: Any, std: Any = 1.0, *, generator: object = None) -> Any:
    """Normal numbers, each of its own mean or deviation."""
    arrays = [part for part in (mean, std) if hasattr(part, "dtype")]
    shape: Any = jnp.broadcast_shapes(*(part.shape for part in arrays))
    return _normal(shape, arrays[0].dtype, mean, std)


@lowering(aten.uniform.default)
def uniform(x: TensorLike, low: float = 0, high: float = 1, *, generator: object = None) -> Any:
    """Uniform numbers between two limits, in the shape of an array."""
    return _uniform(x.shape, x.dtype, low, high)


@lowering(aten.exponential.default)
def exponential(x: TensorLike, lambd: float = 1, *, generator: object = None) -> Any:
    """Exponential numbers; above 0, because what follows is often a logarithm."""
    least = float(jnp.finfo(x.dtype).tiny)
    drawn = jax.random.uniform(next_key(), x.shape, minval=least)
    return (-jnp.log1p(-drawn) / lambd).astype(x.dtype)


@lowering(aten.cauchy.default)
def cauchy(x: TensorLike, median: float = 0, sigma: float = 1, *, generator: object = None) -> Any:
    """Numbers of a Cauchy distribution."""
    return (median + sigma * jax.random.cauchy(next_key(), x.shape)).astype(x.dtype)


@lowering(aten.log_normal.default)
def log_normal(x: TensorLike, mean: float = 1, std: float = 2, *, generator: object = None) -> Any:
    """Numbers that are normal in their logarithm."""
    return jnp.exp(mean + std * jax.random.normal(next_key(), x.shape)).astype(x.dtype)


@lowering(aten.geometric.default)
def geometric(x: TensorLike, p: float, *, generator: object = None) -> Any:
    """The number of trials up to the first success; 1 at least."""
    return jax.random.geometric(next_key(), p, x.shape).astype(x.dtype)


@lowering(aten.multinomial.default)
def multinomial(
    x: TensorLike, count: int, replacement: bool = False, *, generator: object = None
) -> Any:
    """Numbers of entries, drawn by the entries as weights."""
    logs = jnp.log(x.astype(jnp.float32))
    shape = (*x.shape[:-1], count)
    if replacement:
        drawn = jax.random.categorical(next_key(), logs[..., None, :], shape=shape)
    else:  # the largest of perturbed weights, in order, are a draw without putting back
        noise = jax.random.gumbel(next_key(), x.shape)
        _, drawn = jax.lax.top_k(logs + noise, count)
    return drawn.astype(default_int())


def is_random(operation: object) -> bool:
    """Whether an operation draws: it is never computed ahead, although it may depend on no input."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
