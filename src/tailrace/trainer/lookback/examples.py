"""The loss and gradient of each example of a step: the loss of single rows, many at a time.

Nothing of this exists while training. A batch is cut into its rows; a program runs over chunks of them
as `predict` runs over batches, and sends out three numbers for each row: no gradient is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.trees import Tree
from tailrace.errors import DataError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.infeed import InfeedQueue
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.program.in_program import tracing_training
from tailrace.program.running.loop_state import Numbers
from tailrace.program.running.placement import Placement
from tailrace.program.step.whole_step import evaluating_whole
from tailrace.trainer.engine import Engine

EXAMPLE = np.dtype(
    [
        ("element", np.int64),
        ("position", np.int64),
        ("loss", np.float32),
        ("gradient_norm", np.float32),
        ("alignment", np.float32),
        ("input_norm", np.float32),
    ]
)


CHUNK_BYTES = 2**28
"""The most memory that the gradients of a chunk take: each row has its own until its norm is known."""


def example_gradients(
    engine: Engine,
    read: tuple[Any, Any],
    gradients: Sequence[np.ndarray],
    elements: Sequence[np.ndarray],
    spec: ElementSpec,
) -> np.ndarray:
    """Loss, gradient norm and alignment of each example.

    Args:
        engine: the engine with the loss function.
        read: parameters and model state before the step.
        gradients: the gradients of the step, leaf by leaf.
        elements: the elements of the step, stacked leaf by leaf.
        spec: the form of an element.
    """
    params, place = read[0], Placement(1)
    if engine.placement.sharding is not None or engine.placement.chosen is not None:
        place = engine.placement
    direction = jax.tree.unflatten(jax.tree.structure(params), list(gradients))
    one = _measure_of(engine)
    rows, places = examples_of(elements, spec)

    def measured(chunk: int) -> dict[str, np.ndarray]:
        def compute(values: Tree, model_state: Tree, batch: Tree, _: object) -> Any:
            if chunk == 1:
                # Without `vmap`, which some operations have no rule for.
                return one(values, model_state, jax.tree.map(lambda leaf: leaf[0], batch))
            return jax.vmap(lambda row: one(values, model_state, row))(batch)

        chunks = [
            jax.tree.map(lambda *leaves: np.stack(leaves), *rows[first : first + chunk])
            for first in range(0, len(rows), chunk)
        ]
        out, infeed = OutfeedQueue(), InfeedQueue(chunks, prefetch=0)
        given = ((params, direction), read[1])
        try:
            runner = evaluating_whole(compute, out, infeed, given, place)
            state = runner.begin((), given)
            numbers = Numbers(engine.seed, engine.step)
            emitted, _ = runner.dispatch(state, len(chunks), numbers, 0)
        finally:
            infeed.close()
        return jax.tree.unflatten(runner.traced.outfeeds[out].structure, emitted[out].value)

    try:
        values = measured(chunk_of(len(rows), params))
    except NotImplementedError:  # an operation without a form for several rows, in a chunk of one
        values = measured(1)
    found = np.zeros(len(rows), EXAMPLE)
    found["element"], found["position"] = places.T
    for name, value in values.items():
        found[name] = np.asarray(value).reshape(-1)
    found["input_norm"] = [input_norm(row) for row in rows]
    return found


def _measure_of(engine: Engine) -> Callable[[Tree, Tree, Tree], dict[str, Any]]:
    """A function of (parameters, gradient of the step), model state and one example."""
    step = engine.step_function
    inputs = () if engine.pipeline is None else jax.tree.map(jnp.asarray, engine.pipeline.inputs)

    def one(values: Tree, model_state: Tree, batch: Tree) -> dict[str, Any]:
        params, direction = values

        def forward(params: Tree) -> Any:
            # The loss as it was trained: with dropout, which asks `tr.training()`.
            with tracing_training():
                return step.forward(params, model_state, batch, inputs)[0]

        loss, grads = jax.value_and_grad(forward)(params)
        pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
        # In 32 bits: sums of squares of 16-bit gradients overflow, or lose most of their digits.
        wide = [(g.astype(jnp.float32), d.astype(jnp.float32)) for g, d in pairs]
        own = sum((jnp.vdot(g, g) for g, _ in wide), jnp.float32(0))
        along = sum((jnp.vdot(g, d) for g, d in wide), jnp.float32(0))
        whole = sum((jnp.vdot(d, d) for _, d in wide), jnp.float32(0))
        norm = jnp.sqrt(own)
        # A row without gradient has no direction: 0, not NaN.
        size = jnp.maximum(norm * jnp.sqrt(whole), jnp.finfo(jnp.float32).tiny)
        return {"loss": loss, "gradient_norm": norm, "alignment": along / size}

    return one


def chunk_of(rows: int, params: Tree) -> int:
    """How many rows are computed at once: as many as have room, in chunks of one size.

    >>> chunk_of(12, np.zeros(2**24, np.float32)), chunk_of(12, np.zeros(4, np.float32))
    (4, 12)
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    most = min(rows, CHUNK_BYTES // max(1, size))
    # A divisor: a smaller last chunk would be another shape, and another compilation.
    return next((n for n in range(most, 0, -1) if rows % n == 0), 1)


def input_norm(row: Tree) -> float:
    """The norm of the floats in a row; 0 if there are none.

    >>> input_norm({"x": np.array([3.0, 4.0]), "label": np.array([7])})
    5.0
    """
    leaves = [leaf for leaf in jax.tree.leaves(row) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    squares = [np.square(np.abs(leaf).astype(np.float64)).sum() for leaf in leaves]
    return float(np.sqrt(sum(squares)))


def examples_of(elements: Sequence[np.ndarray], spec: ElementSpec) -> tuple[list[Any], np.ndarray]:
    """The rows of elements as elements of one row, and where each was: element, position."""
    sizes = {shape[0] if shape else 0 for shape in spec.shapes}
    if len(sizes) != 1 or not min(sizes):
        raise DataError(
            f"A step is explained row by row, so all arrays of an element have one leading size. "
            f"Received: {list(spec.shapes)}. Put what has no rows into the loss "
            f"function, or use trainer.replay."
        )
    (size,) = sizes
    places = [(e, p) for e in range(len(elements[0])) for p in range(size)]
    rows = [
        jax.tree.unflatten(spec.structure, [leaf[e][p : p + 1] for leaf in elements])
        for e, p in places
    ]
    return rows, np.array(places)
