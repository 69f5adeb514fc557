"""A pipeline and the plain program that it must equal, side by side, for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr
from oracles import assert_bits_equal, assert_close

SCHEDULES = ("grouped", "interleaved", "sequential")


def dense_stages(widths: Sequence[int]) -> tuple[list[Any], list[Any], Any]:
    """Stages of unequal widths, each threading the labels; their parameters; the loss."""
    rng = np.random.default_rng(0)
    params = [
        {
            "kernel": (rng.normal(size=(n, m)) / np.sqrt(n)).astype(np.float32),
            "bias": np.full(m, 0.1, np.float32),
        }
        for n, m in itertools.pairwise(widths)
    ]

    def stage(p: Any, h: Any, y: Any) -> Any:
        return jnp.tanh(h @ p["kernel"] + p["bias"]), y

    def loss(h: Any, y: Any) -> Any:
        error = h.sum(-1) - y
        return (error**2).mean(), {"mae": jnp.abs(error).mean()}

    return [stage] * (len(widths) - 1), params, loss


def elements(count: int, features: int, batch: int = 4, seed: int = 0) -> list[Any]:
    """Elements (x, y) of a small regression problem."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, batch, features)).astype(np.float32)
    return list(zip(x, np.sin(x.sum(-1)).astype(np.float32), strict=True))


def composed(stages: Sequence[Any], loss_fn: Callable[..., Any] | None = None) -> Any:
    """The stages as one plain loss function: what a user without pipelines writes."""

    def plain(params: Any, *batch: Any) -> Any:
        values = batch
        for number, stage in enumerate(stages):
            if isinstance(stage, tuple | list):
                outputs: list[Any] = []
                for each, own in zip(stage, params[number], strict=True):
                    outputs.extend(_tuple(each(own, *values)))
                values = tuple(outputs)
            else:
                values = _tuple(stage(params[number], *values))
        if loss_fn is not None:
            return loss_fn(*values)
        return values[0] if len(values) == 1 else values

    return plain


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def trained(loss_fn: Any, optimizer: Any, params: Any, data: Any, steps: int, **kwargs: Any) -> Any:
    """A trainer after a fit in one execution."""
    trainer = tr.Trainer(loss_fn, optimizer, params, **{"steps_per_execution": steps, **kwargs})
    trainer.fit(data, steps=steps)
    return trainer


def assert_same_training(found: tr.Trainer, expected: tr.Trainer) -> float:
    """Everything that training makes is the same, to 1e-6 of each tensor; the largest difference.

    The order of operations is that of the plain program; only what XLA fuses may differ.
    """
    assert_close(found.params, expected.params)
    assert_close(_numbers(found.state.optimizer_state), _numbers(expected.state.optimizer_state))
    assert_close(found.model_state, expected.model_state)
    assert found.history.names == expected.history.names
    losses = [{n: t.history.each(n) for n in t.history.names} for t in (found, expected)]
    assert_close(*losses)
    pairs = [(found.params, expected.params), (found.model_state, expected.model_state), losses]
    worst = max(largest_difference(a, b) for a, b in pairs)
    assert worst <= 1e-6
    return worst


def _numbers(tree: Any) -> Any:
    """A tree with the numbers of its random keys in their place."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )


def assert_same_bits(found: tr.Trainer, expected: tr.Trainer) -> None:
    """Everything that training makes has the same bits."""
    assert_bits_equal(found.state, expected.state)
    for name in expected.history.names:
        assert_bits_equal(found.history.each(name), expected.history.each(name))


def largest_difference(found: Any, expected: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of each tensor."""
    differences = []
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(float(np.abs(b).max(initial=0.0)), 1e-30)
        differences.append(float(np.abs(a - b).max(initial=0.0)) / scale)
    return max(differences, default=0.0)


def check_pipeline(
    stages: Any,
    loss_fn: Any,
    params: Any,
    data: Sequence[Any],
    plain: Any = None,
    optimizer: Any = None,
    count: int = 4,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[tr.Trainer, tr.Trainer]:
    """Train a pipeline and the plain program on the same data; see that they agree."""
    given = trainer or {}
    optimizer = optax.sgd(0.05) if optimizer is None else optimizer
    accumulation = options.pop("accumulation", count)
    per_step = count * given.get("replicas", 1)
    steps = len(data) // per_step
    pipeline = tr.Pipeline(stages, loss_fn, accumulation=accumulation, **options)
    found = trained(pipeline, optimizer, params, data, steps, **given)
    if plain is None:
        plain = stages if callable(stages) else composed(stages, loss_fn)
    expected = trained(plain, optimizer, params, data, steps, accumulation=accumulation, **given)
    assert_same_training(found, expected)
    return found, expected
