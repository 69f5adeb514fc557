"""`keras.backend` as older versions had it: functions on tensors, and values of variables.

Keras 3 keeps a few names there. The others are TensorFlow's operations under Keras' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.compat.arguments import Axes, VariableLike
from tailrace.compat.tensorflow.namespaces import Namespace
from tailrace.compat.tensorflow.operations.table import OPERATIONS

_SAME = (
    "abs cast constant cos cumsum equal exp eye gather greater greater_equal less less_equal "
    "maximum minimum not_equal one_hot ones ones_like pow reshape round shape sigmoid sign sin "
    "sqrt square squeeze stack stop_gradient tanh tile transpose zeros zeros_like"
)
_RENAMED = {
    **{name: f"reduce_{name}" for name in ("all", "any", "max", "mean", "min", "prod", "sum")},
    **{name: f"nn.{name}" for name in ("bias_add", "elu", "l2_normalize", "relu", "softmax")},
    **{name: f"nn.{name}" for name in ("softplus", "softsign")},
    "arange": "range",
    "clip": "clip_by_value",
    "log": "math.log",
    "permute_dimensions": "transpose",
    "random_normal": "random.normal",
    "random_uniform": "random.uniform",
    "std": "math.reduce_std",
    "switch": "where",
    "truncated_normal": "random.truncated_normal",
    "var": "math.reduce_variance",
}
"""Names of Keras' backend that are operations of TensorFlow under another name."""


def argmax(x: TensorLike, axis: int = -1) -> Any:
    """Where the largest element along an axis is: by default the last axis, not TensorFlow's first."""
    return OPERATIONS["argmax"](x, axis)


def argmin(x: TensorLike, axis: int = -1) -> Any:
    """Where the smallest element along an axis is."""
    return OPERATIONS["argmin"](x, axis)


def dot(x: TensorLike, y: TensorLike) -> Any:
    """The product over the last axis of x and the last but one of y: not by batch, as `matmul` is."""
    # Keras' `dot` of two batches multiplies every pair of them, which `matmul` does not.
    if len(y.shape) < 3:
        return OPERATIONS["matmul"](x, y)
    return OPERATIONS["tensordot"](x, y, [[len(x.shape) - 1], [len(y.shape) - 2]])


def concatenate(tensors: Iterable[TensorLike], axis: int = -1) -> Any:
    """Tensors one after the other along an axis."""
    return OPERATIONS["concat"](list(tensors), axis)


def expand_dims(x: TensorLike, axis: int = -1) -> Any:
    """One more axis, of length 1."""
    return OPERATIONS["expand_dims"](x, axis)


def flatten(x: TensorLike) -> Any:
    """All elements along one axis."""
    return OPERATIONS["reshape"](x, [-1])


def batch_flatten(x: TensorLike) -> Any:
    """The elements of each row along one axis."""
    # The batch of a symbolic tensor has no length.
    return OPERATIONS["reshape"](x, [x.shape[0] or -1, int(np.prod(x.shape[1:]))])


def reverse(x: TensorLike, axes: Axes) -> Any:
    """Backwards along these axes."""
    return OPERATIONS["reverse"](x, [axes] if isinstance(axes, int) else axes)


def int_shape(x: TensorLike) -> tuple[int | None, ...]:
    """The shape, as a tuple."""
    return tuple(x.shape)


def ndim(x: TensorLike) -> int:
    """How many axes there are."""
    return len(x.shape)


def get_value(x: TensorLike) -> np.ndarray:
    """The value of a variable or a tensor, as a numpy array."""
    return np.asarray(x)


def set_value(x: VariableLike, value: TensorLike) -> None:
    """Give a variable another value."""
    x.assign(value)


def batch_get_value(tensors: Iterable[TensorLike]) -> list[np.ndarray]:
    """The values of several variables."""
    return [np.asarray(x) for x in tensors]


def batch_set_value(tuples: Iterable[tuple[VariableLike, TensorLike]]) -> None:
    """Give several variables other values."""
    for variable, value in tuples:
        variable.assign(value)


def variable(value: TensorLike, dtype: DTypeLike = None, name: str | None = None, **_: Any) -> Any:
    """A variable."""
    from tailrace.compat.tensorflow.variables import Variable

    return Variable(value, dtype=dtype, name=name)


def placeholder(shape: ShapeLike = None, dtype: DTypeLike = None, **_: Any) -> Any:
    """An input of a model."""
    return keras.Input(batch_shape=tuple(shape), dtype=dtype)


_WRITTEN: tuple[Callable[..., Any], ...] = (
    argmax,
    argmin,
    batch_flatten,
    batch_get_value,
    batch_set_value,
    concatenate,
    dot,
    expand_dims,
    flatten,
    get_value,
    int_shape,
    ndim,
    placeholder,
    reverse,
    set_value,
    variable,
)


def backend() -> Namespace:
    """The module."""
    losses = ("binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy")
    names: dict[str, Any] = {name: OPERATIONS[name] for name in _SAME.split()}
    names |= {name: OPERATIONS[path] for name, path in _RENAMED.items()}
    names |= {name: getattr(keras.ops, name) for name in losses}
    names |= {function.__name__: function for function in _WRITTEN}
    names["eval"] = get_value
    # Last, so that what Keras 3 still has is Keras' own.
    own = {name: getattr(keras.backend, name) for name in dir(keras.backend) if name[0] != "_"}
    return Namespace("keras.backend", {**names, **own})
