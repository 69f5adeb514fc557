"""Losses and metrics of TensorFlow 1: `tf.losses.*`, means of a batch."""

from __future__ import annotations

from typing import Any

from keras import ops

from tailrace.compat.tensorflow.operations import neural
from tailrace.compat.tensorflow.operations.elementwise import tensor
from tailrace.compat.tensorflow.operations.table import operation
from tailrace.data.array_like import TensorLike


def _mean(losses: TensorLike, weights: TensorLike) -> Any:
    """The mean over the elements whose weight is not 0, as TensorFlow 1 has it."""
    weights = tensor(weights)
    present = ops.cast(ops.not_equal(ops.broadcast_to(weights, losses.shape), 0), losses.dtype)
    return ops.divide_no_nan(ops.sum(ops.multiply(losses, weights)), ops.sum(present))


@operation("compat.v1.losses.sparse_softmax_cross_entropy")
def sparse_softmax_cross_entropy(
    labels: TensorLike, logits: TensorLike, weights: TensorLike = 1.0, **_: Any
) -> Any:
    """The mean cross entropy of classes."""
    return _mean(neural.sparse_softmax_cross_entropy_with_logits(labels, logits), weights)


@operation("compat.v1.losses.softmax_cross_entropy")
def softmax_cross_entropy(
    onehot_labels: TensorLike, logits: TensorLike, weights: TensorLike = 1.0, **_: Any
) -> Any:
    """The mean cross entropy of distributions."""
    return _mean(neural.softmax_cross_entropy_with_logits(onehot_labels, logits), weights)


@operation("compat.v1.losses.sigmoid_cross_entropy")
def sigmoid_cross_entropy(
    multi_class_labels: TensorLike, logits: TensorLike, weights: TensorLike = 1.0, **_: Any
) -> Any:
    """The mean cross entropy of independent probabilities."""
    return _mean(neural.sigmoid_cross_entropy_with_logits(multi_class_labels, logits), weights)


@operation("compat.v1.losses.mean_squared_error")
def mean_squared_error(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike = 1.0, **_: Any
) -> Any:
    """The mean of squared differences."""
    return _mean(ops.square(ops.subtract(predictions, labels)), weights)


@operation("compat.v1.losses.absolute_difference")
def absolute_difference(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike = 1.0, **_: Any
) -> Any:
    """The mean of absolute differences."""
    return _mean(ops.absolute(ops.subtract(predictions, labels)), weights)
