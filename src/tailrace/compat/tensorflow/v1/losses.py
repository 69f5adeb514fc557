"""Losses of TensorFlow 1: `tf.losses.*`, which are put into the graph's collection of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.graph.deferred import describing
from tailrace.compat.tensorflow.namespaces import Namespace
from tailrace.compat.tensorflow.operations import neural
from tailrace.compat.tensorflow.operations.elementwise import add_n, tensor
from tailrace.compat.tensorflow.operations.table import operation
from tailrace.compat.tensorflow.v1.collections_of_graphs import add_to_collection, get_collection
from tailrace.errors import OptionError

LOSSES = "losses"

REDUCTIONS = {
    "NONE": "none",
    "SUM": "weighted_sum",
    "SUM_OVER_BATCH_SIZE": "weighted_sum_over_batch_size",
    "MEAN": "weighted_mean",
    "SUM_BY_NONZERO_WEIGHTS": "weighted_sum_by_nonzero_weights",
    "SUM_OVER_NONZERO_WEIGHTS": "weighted_sum_by_nonzero_weights",
}
"""`tf.losses.Reduction`."""

_USUAL = REDUCTIONS["SUM_BY_NONZERO_WEIGHTS"]


def _reduced(losses: TensorLike, weights: TensorLike, reduction: str) -> Any:
    """The losses of all elements as one; by default the mean over those whose weight is not 0."""
    weights = ops.broadcast_to(ops.cast(tensor(weights), losses.dtype), losses.shape)
    weighted = ops.multiply(losses, weights)
    if reduction == "none":
        return weighted
    counts = {
        "weighted_sum": lambda: 1,
        "weighted_mean": lambda: ops.sum(weights),
        "weighted_sum_over_batch_size": lambda: ops.cast(ops.size(losses), losses.dtype),
        _USUAL: lambda: ops.sum(ops.cast(ops.not_equal(weights, 0), losses.dtype)),
    }
    if reduction not in counts:
        raise OptionError(
            f"reduction is one of tf.losses.Reduction: {', '.join(REDUCTIONS)}. "
            f"Received: {reduction!r}."
        )
    # If no weight counts, the loss is 0, as in TensorFlow.
    return ops.divide_no_nan(ops.sum(weighted), counts[reduction]())


def _described_as(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    def described(other: Callable[..., Any]) -> Callable[..., Any]:
        other.__name__, other.__doc__ = function.__name__, function.__doc__
        return other

    return described


def _loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Put a loss into the table: the losses of elements, which are reduced and collected."""

    @operation(f"compat.v1.losses.{function.__name__}")
    @_described_as(function)
    def reduced(
        *args: Any, weights: TensorLike = 1.0, reduction: str = _USUAL, **kwargs: Any
    ) -> Any:
        # In all of them the third argument is the weights.
        if len(args) > 2:
            weights, args = args[2], args[:2]
        return _reduced(function(*args, **kwargs), weights, reduction)

    @_described_as(function)
    def collected(
        *args: Any, scope: str | None = None, loss_collection: str | None = LOSSES, **kwargs: Any
    ) -> Any:
        del scope
        found = reduced(*args, **kwargs)
        # Programs add up what is in the collection. The values of a program that is being traced are
        # not put there: they belong to one trace of it.
        if loss_collection is not None and describing():
            add_to_collection(loss_collection, found)
        return found

    return collected


def sparse_softmax_cross_entropy(labels: TensorLike, logits: TensorLike) -> Any:
    """The cross entropy of classes."""
    return neural.sparse_softmax_cross_entropy_with_logits(labels, logits)


def softmax_cross_entropy(
    onehot_labels: TensorLike, logits: TensorLike, label_smoothing: float = 0.0
) -> Any:
    """The cross entropy of distributions."""
    wanted = tensor(onehot_labels)
    if label_smoothing:
        classes = wanted.shape[-1]
        wanted = ops.add(ops.multiply(wanted, 1 - label_smoothing), label_smoothing / classes)
    return neural.softmax_cross_entropy_with_logits(wanted, logits)


def sigmoid_cross_entropy(
    multi_class_labels: TensorLike, logits: TensorLike, label_smoothing: float = 0.0
) -> Any:
    """The cross entropy of independent probabilities."""
    wanted = tensor(multi_class_labels)
    if label_smoothing:
        # Towards one half: each probability is by itself, so there are no classes to share with.
        wanted = ops.add(ops.multiply(wanted, 1 - label_smoothing), 0.5 * label_smoothing)
    return neural.sigmoid_cross_entropy_with_logits(wanted, logits)


def mean_squared_error(labels: TensorLike, predictions: TensorLike) -> Any:
    """Squared differences."""
    return ops.square(ops.subtract(predictions, labels))


def absolute_difference(labels: TensorLike, predictions: TensorLike) -> Any:
    """Absolute differences."""
    return ops.absolute(ops.subtract(predictions, labels))


def huber_loss(labels: TensorLike, predictions: TensorLike, delta: float = 1.0) -> Any:
    """Squares of differences up to `delta`, and beyond it their absolute values."""
    error = ops.absolute(ops.subtract(predictions, labels))
    within = ops.minimum(error, delta)
    return ops.add(
        ops.multiply(0.5, ops.square(within)), ops.multiply(delta, ops.subtract(error, within))
    )


def log_loss(labels: TensorLike, predictions: TensorLike, epsilon: float = 1e-7) -> Any:
    """The cross entropy of probabilities."""
    labels, given = tensor(labels), tensor(predictions)
    hit = ops.multiply(labels, ops.log(ops.add(given, epsilon)))
    missed = ops.multiply(
        ops.subtract(1, labels), ops.log(ops.add(ops.subtract(1, given), epsilon))
    )
    return ops.negative(ops.add(hit, missed))


def add_loss(loss: TensorLike, loss_collection: str | None = LOSSES) -> None:
    """Put a loss into the collection of the graph around."""
    if loss_collection is not None:
        add_to_collection(loss_collection, loss)


def get_losses(scope: str | None = None, loss_collection: str = LOSSES) -> list[Any]:
    """The losses in the collection of the graph around."""
    return get_collection(loss_collection, scope)


def get_total_loss(add_regularization_losses: bool = True, name: str | None = None) -> Any:
    """The sum of the losses of the graph around.

    Raises:
        OptionError: there are none.
    """
    del name
    found = get_losses()
    if add_regularization_losses:
        found = [*found, *get_collection("regularization_losses")]
    if not found:
        raise OptionError(
            "tf.losses.get_total_loss adds the losses of a graph, and there are none. Functions of "
            "tf.losses collect theirs where a graph is described; in a compiled program, add the "
            "losses that they return."
        )
    return add_n(found)


LOSS_NAMES: dict[str, Any] = {
    **{
        function.__name__: _loss(function)
        for function in (
            absolute_difference,
            huber_loss,
            log_loss,
            mean_squared_error,
            sigmoid_cross_entropy,
            softmax_cross_entropy,
            sparse_softmax_cross_entropy,
        )
    },
    "Reduction": Namespace("compat.v1.losses.Reduction", REDUCTIONS),
    "add_loss": add_loss,
    "get_losses": get_losses,
    "get_total_loss": get_total_loss,
}
"""The names of `tf.losses`."""
