"""What every test compares with: one tolerance table, and the plain JAX programs.

Nobody loosens the table alone: a test whose order of operations equals the oracle's uses
`assert_bits_equal`; every other one uses `assert_close` and the row of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from machine import PLATFORM

TOLERANCES = {
    "cpu": {
        "float64": (1e-12, 1e-12),
        "float32": (2e-5, 2e-6),
        "float16": (4e-3, 4e-4),
        "bfloat16": (3e-2, 3e-3),
    },
    # Sums of a matrix product are blocked otherwise for each shape, also at the highest precision.
    "gpu": {
        "float64": (1e-11, 1e-11),
        "float32": (1e-4, 1e-5),
        "float16": (4e-3, 4e-4),
        "bfloat16": (3e-2, 3e-3),
    },
}
"""platform: dtype: (relative, absolute)."""

TOLERANCE = TOLERANCES.get(PLATFORM, TOLERANCES["gpu"])
"""The rows of the platform on which both sides are computed."""


def assert_close(found: Any, expected: Any) -> None:
    """Two trees are equal to the tolerance of the narrower dtype of each pair of leaves."""
    for path, a, b in _pairs(found, expected):
        assert a.shape == b.shape, f"{path}: shape {a.shape}, expected {b.shape}"
        rows = [TOLERANCE[str(x.dtype)] for x in (a, b) if str(x.dtype) in TOLERANCE]
        relative, absolute = max(rows, default=(0.0, 0.0))
        wide_a, wide_b = (x.astype(np.complex128 if x.dtype.kind == "c" else float) for x in (a, b))
        np.testing.assert_allclose(wide_a, wide_b, relative, absolute, err_msg=f"leaf {path}")


def assert_bits_equal(found: Any, expected: Any) -> None:
    """Two trees have the same dtypes, shapes and bits."""
    for path, a, b in _pairs(found, expected):
        assert a.dtype == b.dtype, f"{path}: dtype {a.dtype}, expected {b.dtype}"
        assert a.shape == b.shape, f"{path}: shape {a.shape}, expected {b.shape}"
        same = np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
        if not same:
            np.testing.assert_array_equal(a, b, err_msg=f"leaf {path}")
            raise AssertionError(f"leaf {path}: equal values with other bits (signed zeros, NaNs)")


def _pairs(found: Any, expected: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    assert jax.tree.structure(found) == jax.tree.structure(expected), (
        f"structure {jax.tree.structure(found)}, expected {jax.tree.structure(expected)}"
    )
    with_paths = jax.tree_util.tree_flatten_with_path(found)[0]
    return [
        (jax.tree_util.keystr(path) or "(the whole)", np.asarray(a), np.asarray(b))
        for (path, a), b in zip(with_paths, jax.tree.leaves(expected), strict=True)
    ]


# -- data ---------------------------------------------------------------------------------------


def inc(n: int, shape: tuple[int, ...] = (), repeat: int = 100) -> list[tuple[np.ndarray]]:
    """0, 1, ..., n-1, 0, 1, ... of a shape, as 1-tuples: the dataset of the reference."""
    return [(np.full(shape, i % n, np.float32),) for i in range(n * repeat)]


def regression(elements: int, batch: int = 4, features: int = 3, seed: int = 0) -> list[Any]:
    """Elements (x, y) of a small regression problem."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(elements, batch, features)).astype(np.float32)
    y = np.sin(x.sum(-1)).astype(np.float32)
    return list(zip(x, y, strict=True))


def mlp(features: int = 3, hidden: int = 5, seed: int = 1, dtype: Any = np.float32) -> Any:
    """Parameters of a small network."""
    rng = np.random.default_rng(seed)
    return {
        "hidden": {
            "kernel": rng.normal(size=(features, hidden)).astype(dtype),
            "bias": np.zeros(hidden, dtype),
        },
        "out": rng.normal(size=(hidden,)).astype(dtype),
    }


def mlp_apply(params: Any, x: Any) -> Any:
    """The network."""
    h = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return h @ params["out"]


def mlp_loss(params: Any, x: Any, y: Any) -> Any:
    """Its loss, and one metric."""
    error = mlp_apply(params, x) - y
    return (error**2).mean(), {"mae": jnp.abs(error).mean()}


# -- plain programs -----------------------------------------------------------------------------


def plain_scan(body: Callable[..., Any], carry: Any, elements: Sequence[Any]) -> tuple[Any, Any]:
    """`lax.scan` of `body(carry, *element) -> (carry, out)` over stacked elements."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *elements)
    return jax.jit(lambda c, xs: jax.lax.scan(lambda c, x: body(c, *x), c, xs))(carry, stacked)


def plain_training(
    loss_fn: Callable[..., Any], optimizer: Any, params: Any, elements: Iterable[Any]
) -> tuple[Any, np.ndarray]:
    """One jitted call a step: parameters and losses at the end."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for batch in elements:
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return params, np.asarray(losses)


def plain_accumulated_training(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    params: Any,
    elements: Sequence[Any],
    *,
    microbatches: int = 1,
    replicas: int = 1,
    reduction: str = "mean",
    dtype: Callable[[Any], Any] = lambda p: p.dtype,
    weight: Callable[..., Any] | None = None,
    model_state: Any = None,
) -> tuple[Any, np.ndarray, Any]:
    """The same by the book, one Python loop: parameters, losses [steps, M, R] and model state.

    Element (t*M + m)*R + r is microbatch m of step t on replica r. Sums run over microbatches
    first, in the accumulator's dtype; replicas are averaged (or, with weights, summed) after that.
    """
    params = jax.tree.map(jnp.asarray, params)
    state, losses = optimizer.init(params), []
    per_step = microbatches * replicas
    has_state = model_state is not None
    grad_fn = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    for t in range(len(elements) // per_step):
        totals, states, weights = [], [], []
        for r in range(replicas):
            total = jax.tree.map(lambda p: np.zeros(p.shape, jnp.dtype(dtype(p))), params)
            own_state, own_weight = model_state, 0.0
            for m in range(microbatches):
                batch = elements[t * per_step + m * replicas + r]
                first = (params, own_state) if has_state else (params,)
                (loss, aux), grads = grad_fn(*first, *batch)
                own_state = aux[0] if has_state else None
                losses.append(((t, m, r), float(loss)))
                w = 1.0 if weight is None else float(weight(*batch))
                own_weight += w
                total = _add(total, grads, w, m, reduction if weight is None else "sum")
            if reduction == "mean" and weight is None:
                total = jax.tree.map(lambda g: (g / microbatches).astype(g.dtype), total)
            totals.append(total)
            states.append(own_state)
            weights.append(own_weight)
        divisor = replicas if weight is None else sum(weights)
        grads = _divided(totals, divisor)
        updates, after = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        state = jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), state, after)
        model_state = jax.tree.map(
            lambda *s: sum(s) / replicas if s[0].dtype.kind == "f" else s[0], *states
        )
    shaped = np.zeros((len(elements) // per_step, microbatches, replicas), np.float32)
    for where, loss in losses:
        shaped[where] = loss
    return params, shaped, model_state


def _divided(totals: list[Any], divisor: float) -> Any:
    return jax.tree.map(lambda *g: jnp.asarray((sum(g) / divisor).astype(g[0].dtype)), *totals)


def _add(total: Any, grads: Any, weight: float, number: int, reduction: str) -> Any:
    def one(acc: np.ndarray, grad: Any) -> np.ndarray:
        grad = np.asarray(grad).astype(acc.dtype)
        if reduction == "running_mean":
            n = acc.dtype.type(number)
            one = acc.dtype.type(1)
            return (acc * (n / (n + one)) + grad * (one / (n + one))).astype(acc.dtype)
        return (acc + grad * acc.dtype.type(weight)).astype(acc.dtype)

    return jax.tree.map(one, total, grads)
