"""Random distributions that torchax draws wrongly, or always the same.

They are drawn from the key of the step, as all others: new in every step, and equal when a step is
repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.torch.calls.arrays import dtype_on_device
from tailrace.torch.torchax.env import Env


def exponential(key: jax.Array, shape: ShapeLike, dtype: DTypeLike, lambd: float = 1) -> Any:
    """Above 0: what follows is often a logarithm."""
    # Of the tensor's dtype: a smaller one would be rounded to 0 there.
    least = float(jnp.finfo(dtype).tiny)
    return -jnp.log1p(-jax.random.uniform(key, shape, minval=least)) / lambd


def cauchy(
    key: jax.Array, shape: ShapeLike, dtype: DTypeLike, median: float = 0, sigma: float = 1
) -> Any:
    """A Cauchy distribution."""
    return median + sigma * jax.random.cauchy(key, shape)


def geometric(key: jax.Array, shape: ShapeLike, dtype: DTypeLike, p: float) -> Any:
    """The number of trials up to the first success; 1 at least."""
    return jax.random.geometric(key, p, shape)


def normal(
    key: jax.Array, shape: ShapeLike, dtype: DTypeLike, mean: TensorLike = 0, std: TensorLike = 1
) -> Any:
    """A normal distribution."""
    return mean + std * jax.random.normal(key, shape)


def log_normal(
    key: jax.Array, shape: ShapeLike, dtype: DTypeLike, mean: float = 1, std: float = 2
) -> Any:
    """What is normal in its logarithm."""
    return jnp.exp(normal(key, shape, dtype, mean, std))


def chance(key: jax.Array, shape: ShapeLike, dtype: DTypeLike, p: TensorLike = 0.5) -> Any:
    """1 with a probability, which may be a tensor; 0 otherwise."""
    return jax.random.uniform(key, shape) < (p.jax() if hasattr(p, "jax") else p)


def integers(key: jax.Array, shape: ShapeLike, dtype: DTypeLike, *limits: Any) -> Any:
    """`random_()`, `random_(to)`, `random_(from, to)`; without a limit, all that the dtype counts."""
    start, stop = {0: (0, None), 1: (0, *limits)}.get(len(limits), limits)
    if stop is None:
        floating = jnp.issubdtype(dtype, jnp.floating)
        # Up to where a float still counts every integer.
        stop = 2 ** (jnp.finfo(dtype).nmant + 1) if floating else jnp.iinfo(dtype).max
    stop = min(stop, jnp.iinfo(jnp.int32).max)  # JAX draws 32 bits
    return jax.random.randint(key, shape, start, stop)


def in_place(draw: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's method that fills a tensor from a distribution."""

    def fill(x: TensorLike, *given: Any, generator: torch.Generator | None = None, env: Env) -> Any:
        held = x.jax()
        key = env.get_and_rotate_prng_key(generator)
        return x.copy_(env.j2t_iso(draw(key, held.shape, held.dtype, *given).astype(held.dtype)))

    return fill


def normal_of(mean: TensorLike, std: TensorLike = 1, size: ShapeLike = None, **named: Any) -> Any:
    """`torch.normal`, of tensors or of numbers and a size."""
    env, dtype = named["env"], named.get("dtype")
    key = env.get_and_rotate_prng_key(named.get("generator"))
    arrays = [part for part in (mean, std) if isinstance(part, jax.Array)]
    shape = jnp.broadcast_shapes(*(part.shape for part in arrays)) if arrays else tuple(size)
    wanted = arrays[0].dtype if arrays else dtype_on_device(dtype or torch.get_default_dtype())
    return normal(key, shape, wanted, mean, std).astype(wanted)


def normal_like(
    x: TensorLike,
    mean: float = 0,
    std: float = 1,
    *,
    generator: torch.Generator | None = None,
    env: Env,
) -> Any:
    """Normal numbers in the shape of a tensor."""
    return normal(env.get_and_rotate_prng_key(generator), x.shape, x.dtype, mean, std).astype(
        x.dtype
    )


def rrelu(
    x: TensorLike,
    noise: TensorLike,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
    *,
    env: Env,
) -> Any:
    """A line above 0, and below a flatter one: by a slope of chance in training, else by the mean."""
    if not training:
        return jnp.where(x > 0, x, x * ((lower + upper) / 2))
    key = env.get_and_rotate_prng_key(generator)
    slopes = jax.random.uniform(key, x.shape, minval=lower, maxval=upper).astype(x.dtype)
    return jnp.where(x > 0, x, x * slopes)
