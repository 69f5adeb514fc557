"""Operations that TensorFlow 1 computes otherwise than TensorFlow 2, or with other arguments.

A program that imports `tensorflow.compat.v1` gets these; the others are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from tailrace.base.array_like import ShapeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import Axes, SeedLike, VariableLike
from tailrace.compat.ipu.graph.variable_parts import METHODS, put
from tailrace.compat.tensorflow.operations import control_flow, neural, reductions, shapes
from tailrace.compat.tensorflow.operations.elementwise import tensor
from tailrace.compat.tensorflow.operations.table import OPERATIONS, operation
from tailrace.errors import OptionError


@operation("compat.v1.nn.dropout")
def dropout(
    x: TensorLike,
    keep_prob: TensorLike = None,
    noise_shape: ShapeLike = None,
    seed: SeedLike = None,
    name: str | None = None,
    rate: TensorLike = None,
) -> Any:
    """Elements set to 0 by chance: the second argument is the share that stays, not the one that goes.

    Raises:
        OptionError: neither `keep_prob` nor `rate` is given, or both.
    """
    del name
    if (keep_prob is None) == (rate is None):
        raise OptionError(
            f"tf.nn.dropout of TensorFlow 1 takes keep_prob or rate. Received: keep_prob={keep_prob}, "
            f"rate={rate}."
        )
    return neural.dropout(x, 1 - keep_prob if rate is None else rate, noise_shape, seed)


@operation("compat.v1.where")
def where(condition: TensorLike, x: TensorLike = None, y: TensorLike = None) -> Any:
    """The one where a condition holds and the other elsewhere; a vector of conditions chooses rows."""
    if x is None or y is None:
        return shapes.where(condition, x, y)
    chosen, one = tensor(condition), tensor(x)
    # TensorFlow 2 broadcasts along the last axis instead, which for a square matrix differs silently.
    if len(chosen.shape) == 1 and len(one.shape) > 1:
        chosen = ops.reshape(chosen, (-1, *[1] * (len(one.shape) - 1)))
    return shapes.where(chosen, x, y)


@operation("compat.v1.while_loop")
def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Tree,
    *older: Any,
    return_same_structure: bool = False,
    **options: Any,
) -> Any:
    """Run a body for as long as a condition holds; a single value is returned by itself."""
    del older  # shape invariants, and how TensorFlow ran it
    found = control_flow.while_loop(cond, body, loop_vars, **options)
    alone = not return_same_structure and isinstance(found, list | tuple) and len(found) == 1
    return found[0] if alone else found


@operation("compat.v1.expand_dims")
def expand_dims(input: TensorLike, axis: int | None = None, *, dim: int | None = None) -> Any:
    """One more axis, of length 1."""
    return shapes.expand_dims(input, dim if axis is None else axis)


@operation("compat.v1.nn.softmax")
def softmax(logits: TensorLike, axis: int | None = None, *, dim: int | None = None) -> Any:
    """Shares along an axis, which add up to 1."""
    return neural.softmax(logits, dim if axis is None else axis)


@operation("compat.v1.nn.log_softmax")
def log_softmax(logits: TensorLike, axis: int | None = None, *, dim: int | None = None) -> Any:
    """Logarithms of shares along an axis."""
    return neural.log_softmax(logits, dim if axis is None else axis)


@operation("compat.v1.nn.moments")
def moments(
    x: TensorLike, axes: Axes, *, keep_dims: bool = False, keepdims: bool = False, **shift: Any
) -> Any:
    """Mean and variance over axes."""
    del shift
    return neural.moments(x, axes, keepdims=keep_dims or keepdims)


@operation("compat.v1.nn.in_top_k", "compat.v1.math.in_top_k")
def in_top_k(predictions: TensorLike, targets: TensorLike, k: int) -> Any:
    """Whether the target of each row is among its k largest elements."""
    # TensorFlow 2 has swapped the first two.
    return reductions.in_top_k(targets, predictions, k)


@operation("compat.v1.nn.softmax_cross_entropy_with_logits")
def softmax_cross_entropy_with_logits(
    _sentinel: object = None,
    labels: TensorLike = None,
    logits: TensorLike = None,
    dim: int = -1,
    *,
    axis: int | None = None,
) -> Any:
    """The cross entropy of distributions, for each row; without a gradient of the labels.

    Raises:
        OptionError: labels and logits are not given by name.
    """
    if _sentinel is not None or labels is None or logits is None:
        raise OptionError(
            "tf.nn.softmax_cross_entropy_with_logits of TensorFlow 1 takes named arguments: "
            "labels=..., logits=..."
        )
    # That of `..._v2`, and of TensorFlow 2, goes to the labels too.
    labels = ops.stop_gradient(tensor(labels))
    return neural.softmax_cross_entropy_with_logits(labels, logits, dim if axis is None else axis)


@operation("compat.v1.nn.embedding_lookup")
def embedding_lookup(
    params: Tree,
    ids: TensorLike,
    partition_strategy: str = "mod",
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: TensorLike = None,
) -> Any:
    """Rows of a table."""
    del partition_strategy, name, validate_indices  # of a table in one part they say nothing
    return neural.embedding_lookup(params, ids, max_norm)


def _of_value(path: str) -> None:
    """An operation whose first argument TensorFlow 1 calls `value`."""
    plain = OPERATIONS[path]

    @operation(f"compat.v1.{path}")
    def renamed(*args: Any, value: TensorLike = None, **kwargs: Any) -> Any:
        """The operation of TensorFlow 2."""
        return plain(*args, **kwargs) if value is None else plain(value, *args, **kwargs)


for _path in ("nn.max_pool", "nn.avg_pool", "nn.conv1d", "nn.bias_add"):
    _of_value(_path)


# -- variables --------------------------------------------------------------------------------------


def _scatter(name: str, how: str) -> Callable[..., Any]:
    def scattered(
        ref: VariableLike, indices: TensorLike, updates: TensorLike, *_: Any, **__: Any
    ) -> Any:
        """Change the rows with these numbers; returns the variable."""
        return put(ref, how, tensor(indices), updates)

    scattered.__name__ = name
    return scattered


def _scatter_nd(name: str) -> Callable[..., Any]:
    def scattered(
        ref: VariableLike, indices: TensorLike, updates: TensorLike, *_: Any, **__: Any
    ) -> Any:
        """Change the places that rows of `indices` name; returns the variable."""
        return METHODS[name](ref, indices, updates)

    scattered.__name__ = name
    return scattered


SCATTERS: dict[str, Callable[..., Any]] = {
    **{
        f"scatter_{name}": _scatter(f"scatter_{name}", how)
        for name, how in {
            "add": "add",
            "div": "divide",
            "max": "max",
            "min": "min",
            "mul": "mul",
            "sub": "subtract",
            "update": "set",
        }.items()
    },
    **{name: _scatter_nd(name) for name in METHODS if name.startswith("scatter_nd_")},
}
"""Functions that change parts of a variable, by their names in TensorFlow 1."""
