"""Properties of single operations, from the name and the parameters of a primitive."""

# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import Any

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Atom, JaxprEqn, Primitive, primitives
from tailrace.jaxprs.marks import mark_p

# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "population_count",
    "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
"""Operations whose result at an index depends only on the operands at that index."""

_COMPARISONS = frozenset(("eq", "ge", "gt", "is_finite", "le", "lt", "ne"))

_SAME_VALUE = frozenset(("copy", "copy_p", "convert_element_type", "reshape", "squeeze"))
"""Operations that do not change the numbers."""


_REARRANGEMENTS = _SAME_VALUE | {
    *("bitcast_convert_type", "broadcast_in_dim", "concatenate", "iota", "name", "pad", "rev"),
    *("slice", "split", "stack", "stop_gradient", "tile", "transpose", "unstack"),
}
"""Operations without arithmetic, which XLA fuses into their consumers."""

_ARITHMETIC = _ELEMENTWISE - _REARRANGEMENTS
_CHEAP = _ELEMENTWISE | _REARRANGEMENTS


def name_of(eqn: JaxprEqn) -> str:
    """JAX's name of an operation."""
    return eqn.primitive.name


def only_places(eqn: JaxprEqn) -> bool:
    """Whether an operation only says where on a mesh a value is."""
    return eqn.primitive.name == "sharding_constraint"


def is_widening(eqn: JaxprEqn) -> bool:
    """Whether an operation only stores floats in a wider dtype: float32 from bfloat16 or float16."""
    if eqn.primitive.name != "convert_element_type":
        return False
    (before,), (after,) = eqn.invars, eqn.outvars
    narrow = str(getattr(before.aval, "dtype", "")) in ("bfloat16", "float16")
    return narrow and str(getattr(after.aval, "dtype", "")) == "float32"


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether an operation with one result can be computed on a flat piece of its operands."""
    if len(eqn.outvars) != 1:
        return False
    shape = _shape(eqn.outvars[0])
    shapes = {_shape(var) for var in eqn.invars}
    # A broadcast of a scalar is the same on every piece; one of a vector is not, as which element a
    # place gets depends on where it is.
    if is_fill(eqn):
        return shapes == {()} and shape != ()
    if is_reshape(eqn):  # elementwise only if it keeps the order of the elements
        return eqn.params.get("dimensions") is None and shapes != {()}
    return eqn.primitive.name in _ELEMENTWISE and shape != () and shapes <= {shape, ()}


def is_arithmetic(eqn: JaxprEqn) -> bool:
    """Whether an operation does arithmetic element by element."""
    return eqn.primitive.name in _ARITHMETIC


def is_rearrangement(eqn: JaxprEqn) -> bool:
    """Whether an operation does no arithmetic: casts, broadcasts, slices, reshapes, constants."""
    return internals.operation(eqn) in _REARRANGEMENTS


def keeps_expensive(primitive: Primitive, *_: Any, **__: Any) -> bool:
    """A policy for `jax.checkpoint`: save expensive results, and masks, which are small."""
    # A mask takes one byte an element and saves recomputing what it was compared from. A mark is the
    # value that it names, which must not be kept because a tap looks at it.
    cheap = primitive is mark_p or primitive.name in _CHEAP
    return primitive.name in _COMPARISONS or not cheap


def is_reshape(eqn: JaxprEqn) -> bool:
    """Whether an operation is a reshape."""
    return eqn.primitive.name == "reshape"


def is_fill(eqn: JaxprEqn) -> bool:
    """Whether an operation broadcasts its operand."""
    return eqn.primitive.name == "broadcast_in_dim"


def is_select(eqn: JaxprEqn) -> bool:
    """Whether an operation selects between its operands element by element (`jnp.where`)."""
    return eqn.primitive.name == "select_n"


def stops_gradient(eqn: JaxprEqn) -> bool:
    """Whether an operation is an explicit `stop_gradient`."""
    return eqn.primitive.name == "stop_gradient"


def keeps_value(eqn: JaxprEqn) -> bool:
    """Whether an operation leaves its numbers unchanged: a copy, a cast, a reshape."""
    return eqn.primitive.name in _SAME_VALUE


def checkpoint_of(eqn: JaxprEqn) -> str | None:
    """The name that `checkpoint_name` gives a value; None for any other operation."""
    return internals.parameters(eqn)["name"] if internals.operation(eqn) == "name" else None


def call_name(eqn: JaxprEqn) -> str:
    """The name of the function that an equation calls; empty if it has no name or is no call."""
    name = eqn.params.get("name") if eqn.primitive is primitives.jit_p else None
    if internals.is_custom(eqn):
        name = internals.function_name(eqn)
    # "<lambda>" says nothing; JAX's own functions (`_where`, `_var`) begin with an underscore.
    return "" if not name or "<" in str(name) else str(name).strip("_")


def multiplications(eqn: JaxprEqn) -> float:
    """Multiplications and additions of a matrix product or convolution; 0 for other operations."""
    if eqn.primitive is primitives.dot_general_p:
        ((contracted, _), _) = eqn.params["dimension_numbers"]
        left = _shape(eqn.invars[0])
        return 2.0 * _size(eqn) * math.prod(left[dim] for dim in contracted)
    if eqn.primitive is primitives.conv_general_dilated_p:
        kernel = _shape(eqn.invars[1])
        # A result is a sum over the kernel's space and its input features: all its dims but the
        # outputs.
        return 2.0 * _size(eqn) * math.prod(kernel) / kernel[_out_dim(eqn)]
    return 0.0


def _out_dim(convolution: JaxprEqn) -> int:
    return convolution.params["dimension_numbers"].rhs_spec[0]


def _size(eqn: JaxprEqn) -> int:
    return sum(math.prod(_shape(var)) for var in eqn.outvars)


def _shape(var: Atom) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())
