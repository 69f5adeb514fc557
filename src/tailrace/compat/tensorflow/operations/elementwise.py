"""Operations on each element: `tf.exp`, `tf.add`, `tf.math.*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras import ops

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import Axes
from tailrace.compat.tensorflow.operations.table import operation

UNARY: dict[str, Any] = {
    "abs": ops.absolute,
    "acos": ops.arccos,
    "acosh": ops.arccosh,
    "angle": ops.angle,
    "asin": ops.arcsin,
    "asinh": ops.arcsinh,
    "atan": ops.arctan,
    "atanh": ops.arctanh,
    "ceil": ops.ceil,
    "conj": ops.conjugate,
    "cos": ops.cos,
    "cosh": ops.cosh,
    # JAX's where Keras has none: those do not take Keras' symbolic tensors.
    "digamma": jax.scipy.special.digamma,
    "erf": ops.erf,
    "erfc": ops.erfc,
    "erfinv": ops.erfinv,
    "exp": ops.exp,
    "expm1": ops.expm1,
    "floor": ops.floor,
    "imag": ops.imag,
    "is_finite": ops.isfinite,
    "is_inf": ops.isinf,
    "is_nan": ops.isnan,
    "lgamma": jax.scipy.special.gammaln,
    "log": ops.log,
    "log1p": ops.log1p,
    "log_sigmoid": ops.log_sigmoid,
    "logical_not": ops.logical_not,
    "ndtri": jax.scipy.special.ndtri,
    "negative": ops.negative,
    "real": ops.real,
    "reciprocal": ops.reciprocal,
    "rint": ops.round,
    "round": ops.round,
    "rsqrt": ops.rsqrt,
    "sigmoid": ops.sigmoid,
    "sign": ops.sign,
    "sin": ops.sin,
    "sinh": ops.sinh,
    "softplus": ops.softplus,
    "softsign": ops.softsign,
    "sqrt": ops.sqrt,
    "square": ops.square,
    "tan": ops.tan,
    "tanh": ops.tanh,
}
"""Functions of one tensor, by their name in `tf.math`."""

BINARY: dict[str, Any] = {
    "add": ops.add,
    "divide": ops.divide,
    "divide_no_nan": ops.divide_no_nan,
    "equal": ops.equal,
    "floordiv": ops.floor_divide,
    "floormod": ops.mod,
    "greater": ops.greater,
    "greater_equal": ops.greater_equal,
    "less": ops.less,
    "less_equal": ops.less_equal,
    "logical_and": ops.logical_and,
    "logical_or": ops.logical_or,
    "logical_xor": ops.logical_xor,
    "maximum": ops.maximum,
    "minimum": ops.minimum,
    "mod": ops.mod,
    "multiply": ops.multiply,
    "not_equal": ops.not_equal,
    "pow": ops.power,
    "subtract": ops.subtract,
    "truediv": ops.true_divide,
}
"""Functions of two tensors, by their name in `tf.math`."""

AT_TOP = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "divide",
        "equal",
        "exp",
        "floor",
        "greater",
        "greater_equal",
        "less",
        "less_equal",
        "logical_and",
        "logical_not",
        "logical_or",
        "maximum",
        "minimum",
        "multiply",
        "negative",
        "not_equal",
        "pow",
        "round",
        "sigmoid",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "subtract",
        "tan",
        "tanh",
        "truediv",
    ]
)
"""Those that TensorFlow has at the top as well."""


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(x: TensorLike) -> Any:
        """Element by element, as in TensorFlow."""
        return function(tensor(x))

    return computed


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(x: TensorLike, y: TensorLike) -> Any:
        """Element by element, as in TensorFlow; shapes are broadcast."""
        return function(x, y)

    return computed


def tensor(value: TensorLike) -> Any:
    """A value as a tensor; Keras' symbolic ones as they are."""
    return value if isinstance(value, keras.KerasTensor) else ops.convert_to_tensor(value)


for _name, _function in UNARY.items():
    operation(f"math.{_name}", *[_name] * (_name in AT_TOP))(_unary(_function))
for _name, _function in BINARY.items():
    operation(f"math.{_name}", *[_name] * (_name in AT_TOP))(_binary(_function))


@operation("compat.v1.div")
def div(x: TensorLike, y: TensorLike) -> Any:
    """x / y as in TensorFlow 1: rounded down for integers, exact for floats."""
    x, y = tensor(x), tensor(y)
    # As in Python 2, whose rule TensorFlow 1 kept for `tf.div`.
    whole = all(jnp.issubdtype(jnp.asarray(each).dtype, jnp.integer) for each in (x, y))
    return ops.floor_divide(x, y) if whole else ops.divide(x, y)


@operation("truncatediv")
def truncatediv(x: TensorLike, y: TensorLike) -> Any:
    """x / y, rounded towards zero."""
    dtype = jnp.result_type(x, y)
    # `lax.div` rounds towards zero, where `jnp.floor_divide` rounds down.
    return jax.lax.div(*jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype)))


@operation("truncatemod")
def truncatemod(x: TensorLike, y: TensorLike) -> Any:
    """What is left of x after `truncatediv`."""
    return jnp.fmod(jnp.asarray(x), jnp.asarray(y))


@operation("math.squared_difference", "squared_difference")
def squared_difference(x: TensorLike, y: TensorLike) -> Any:
    """(x - y)²."""
    return ops.square(ops.subtract(x, y))


@operation("math.multiply_no_nan")
def multiply_no_nan(x: TensorLike, y: TensorLike) -> Any:
    """x · y, and 0 where y is 0, even if x is not finite."""
    x, y = tensor(x), tensor(y)
    return ops.where(ops.equal(y, 0), ops.zeros_like(x), ops.multiply(x, y))


@operation("math.xlogy")
def xlogy(x: TensorLike, y: TensorLike) -> Any:
    """x · log y, and 0 where x is 0."""
    return jax.scipy.special.xlogy(jnp.asarray(x), jnp.asarray(y))


@operation("math.xdivy")
def xdivy(x: TensorLike, y: TensorLike) -> Any:
    """x / y, and 0 where x is 0."""
    x, y = tensor(x), tensor(y)
    zero = ops.equal(x, 0)
    # Divided by 1 where the result is not used: the gradient of 0 / 0 would be NaN in both branches.
    return ops.where(zero, ops.zeros_like(x), ops.divide(x, ops.where(zero, ops.ones_like(y), y)))


@operation("math.add_n", "add_n")
def add_n(inputs: TensorLike) -> Any:
    """The sum of a list of tensors."""
    total, *rest = inputs
    for each in rest:
        total = ops.add(total, each)
    return tensor(total)


@operation("clip_by_value")
def clip_by_value(t: TensorLike, clip_value_min: TensorLike, clip_value_max: TensorLike) -> Any:
    """Each element, at least the one and at most the other."""
    return ops.minimum(ops.maximum(t, clip_value_min), clip_value_max)


@operation("clip_by_norm")
def clip_by_norm(t: TensorLike, clip_norm: TensorLike, axes: Axes = None) -> Any:
    """A tensor scaled down so that its norm is at most `clip_norm`."""
    t = tensor(t)
    norm = ops.sqrt(ops.sum(ops.square(t), axis=axes, keepdims=True))
    return ops.divide(ops.multiply(t, clip_norm), ops.maximum(norm, clip_norm))


@operation("linalg.global_norm")
def global_norm(t_list: Tree) -> Any:
    """The norm of all tensors of a list together; None counts nothing."""
    squares = [ops.sum(ops.square(tensor(t))) for t in t_list if t is not None]
    return ops.sqrt(ops.sum(ops.stack(squares)))


@operation("clip_by_global_norm")
def clip_by_global_norm(t_list: Tree, clip_norm: TensorLike, use_norm: TensorLike = None) -> Any:
    """Tensors scaled down together so that their norm is at most `clip_norm`, and that norm."""
    norm = global_norm(t_list) if use_norm is None else use_norm
    # No branch for small norms: they divide by `clip_norm` itself, and the scale is 1.
    scale = ops.divide(clip_norm, ops.maximum(norm, clip_norm))
    return [None if t is None else ops.multiply(t, scale) for t in t_list], norm


@operation("identity")
def identity(input: TensorLike) -> Any:
    """The same values."""
    return tensor(input)


@operation("math.atan2", "atan2")
def atan2(y: TensorLike, x: TensorLike) -> Any:
    """The angle of points; the height comes first."""
    return ops.arctan2(tensor(y), tensor(x))


@operation("stop_gradient")
def stop_gradient(input: TensorLike) -> Any:
    """The same values, through which no gradient flows back."""
    return ops.stop_gradient(tensor(input))


for _name, _function in {
    "bitwise_and": ops.bitwise_and,
    "bitwise_or": ops.bitwise_or,
    "bitwise_xor": ops.bitwise_xor,
    "left_shift": ops.left_shift,
    "right_shift": ops.right_shift,
}.items():
    operation(f"bitwise.{_name}")(_binary(_function))
operation("bitwise.invert")(_unary(ops.bitwise_not))
