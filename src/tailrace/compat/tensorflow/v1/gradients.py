"""`tf.gradients`: gradients of what is described, or of values of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.errors import IPURuntimeError
from tailrace.compat.ipu.graph.deferred import Deferred, Feed, Step, evaluated, running
from tailrace.compat.ipu.graph.gradients import gradients as gradients_of
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.tensorflow.operations.table import OPERATIONS


def gradients(
    ys: TensorLike, xs: TensorLike, grad_ys: TensorLike = None, name: str | None = None, **_: Any
) -> Any:
    """The gradient of the sum of `ys` in each of `xs`.

    Args:
        ys: a tensor, or a list of them.
        xs: variables and tensors: one, or a list of them.
        grad_ys: weights of the elements of `ys`.
        name: without effect, as are other options.

    Raises:
        IPURuntimeError: operations are computed as they are written, so that there is no graph.
    """
    targets, sources = _listed(ys), _listed(xs)
    weights = [None] * len(targets) if grad_ys is None else _listed(grad_ys)
    feed = running()
    if current() is not None:
        return _computed(targets, sources, weights, feed or Feed())
    if not any(isinstance(each, Deferred) for each in (*targets, *sources)):
        raise IPURuntimeError(
            "tf.gradients is for graphs, and operations are computed as they are written here. Use "
            "tf.GradientTape; or call tf.compat.v1.disable_v2_behavior() first, as programs of "
            "TensorFlow 1 do, or describe the graph in `with tf.Graph().as_default():`."
        )
    # One step for all sources, which are its parts: the targets are differentiated once in a run.
    whole = Step(lambda fed: _computed(targets, sources, weights, fed), name or "gradients", False)
    return [whole[number] for number in range(len(sources))]


def _computed(
    targets: Sequence[Any], sources: Sequence[Any], weights: Sequence[Any], feed: Feed
) -> list[Any]:
    # Sources first: what the targets are then computed from are these very values.
    places = [evaluated(source, feed) for source in sources]
    pairs = zip(evaluated(list(targets), feed), evaluated(list(weights), feed), strict=True)
    total: Any = sum(jnp.sum(y if weight is None else y * weight) for y, weight in pairs)
    return gradients_of(total, places)


def _listed(value: TensorLike) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


OPERATIONS["gradients"] = gradients
