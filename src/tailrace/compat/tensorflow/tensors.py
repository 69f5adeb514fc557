"""What TensorFlow's tensors have and JAX's arrays have not: `loss.numpy()`, `x.shape.as_list()`.

Tensors here are JAX's arrays and values of programs, and Keras' symbolic tensors. A wrapper would have
to be around every array, so their classes themselves get what is missing, when `compat.tensorflow` is
first imported, and for the rest of the process:

    numpy, get_shape, set_shape, ref   methods; none of these classes has one of these names
    assign, assign_add, assign_sub     of an array that is a part of a variable; others have none
    value                              of a variable, read by such a module: `v.value()` and `v.value`
    shape, dtype                       read by a module that imports `compat.tensorflow`: TensorFlow's
                                       classes, which are accepted where JAX's are. Read by any other
                                       code, JAX and Keras included: what they always were

This file alone does so. What it relies on is probed first (`SEAMS`).
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.base.seams import Package, Seam
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph import deferred, variable_parts
from tailrace.compat.ipu.graph.variables import Variable as GraphVariable
from tailrace.compat.tensorflow.dtypes import DTYPES
from tailrace.compat.tensorflow.tensor_shape import TensorShape
from tailrace.compat.tensorflow.variables import Reference, Value, Variable
from tailrace.errors import ProgramError
from tailrace.jaxprs.internals import PACKAGE as JAX
from tailrace.jaxprs.internals import Tracer

_NAME = "tailrace.compat.tensorflow"


@functools.cache
def add_methods() -> None:
    """Give arrays, values of programs and symbolic tensors what TensorFlow's tensors have; once.

    Raises:
        VersionError: JAX's classes are made in another way than is known.
    """
    JAX.check(SEAMS)
    for kind in kinds():
        _add(kind, "get_shape", lambda tensor: TensorShape(tensor.shape))
        _add(kind, "set_shape", _set_shape)
        _add(kind, "ref", Reference)
        _show(kind, "shape", TensorShape)
        _show(kind, "dtype", _dtype)
    _add(_array(), "numpy", np.asarray)
    _add(Tracer, "numpy", _no_value)
    for kind in (_array(), Tracer):
        for name in variable_parts.WRITES:
            setattr(kind, name, property(functools.partial(_writer, name)))
    # The variables of both kinds are ours, and show their shape and dtype in the same way.
    for kind in (Variable, GraphVariable):
        _show(kind, "shape", TensorShape)
        _show(kind, "dtype", _dtype)
    Variable.value = property(_value, doc=Variable.value.__doc__)  # type: ignore[assignment]
    deferred.later["dtype"] = _dtype


def _array() -> type:
    return type(jnp.zeros(()))


def kinds() -> tuple[type, ...]:
    """The classes of tensors that are not ours."""
    return _array(), Tracer, keras.KerasTensor


def _add(kind: type, name: str, method: Callable[..., Any]) -> None:
    if name not in vars(kind):

        def called(self: TensorLike, *args: Any) -> Any:
            return method(self, *args)

        called.__name__, called.__doc__ = name, f"TensorFlow's `{name}`."
        setattr(kind, name, called)


# -- what a module of a TensorFlow program sees ---------------------------------------------------


def _show(kind: type, name: str, shown: Callable[[Any], Any]) -> None:
    """Let a property give what `shown` makes of it, to modules that import `compat.tensorflow`."""
    plain: Any = next(vars(owner)[name] for owner in kind.__mro__ if name in vars(owner))
    # Bound to local names, and without a call of our own: JAX asks for shapes hundreds of times in a
    # trace, and almost always the answer is the plain one.
    get, caller, known = plain.fget, sys._getframe, _seen.get

    def read(self: TensorLike) -> Any:
        names = caller(1).f_globals
        found = known(id(names))
        if found is None or found[0] != len(names):
            found = _look_through(names)
        return shown(get(self)) if found[1] else get(self)

    setattr(kind, name, property(read, plain.fset, doc=plain.__doc__))


def _value(variable: Variable) -> Any:
    """Keras reads an attribute, TensorFlow's programs call a method."""
    # Looked up now: a tape replaces that of Keras by one that it hears.
    array = super(Variable, variable).value
    names = sys._getframe(1).f_globals
    found = _seen.get(id(names))
    if found is None or found[0] != len(names):
        found = _look_through(names)
    return Value(array, variable) if found[1] else array


_seen: dict[int, tuple[int, bool, dict[str, Any]]] = {}
"""Modules by the ids of their names: the number of names, whether one is TensorFlow, and the names."""


def _look_through(names: dict[str, Any]) -> tuple[int, bool, dict[str, Any]]:
    """Whether a module imports TensorFlow; asked again only when it has got more names."""
    name = str(names.get("__name__", ""))
    found = not name.startswith("tailrace.") and any(map(_is_tensorflow, list(names.values())))
    module = sys.modules.get(name)
    # With the names themselves, so that no others can have their id. Those of code that was made by
    # `exec` may be many and short-lived: they are looked through each time.
    if module is not None and vars(module) is names:
        _seen[id(names)] = len(names), found, names
    return len(names), found, names


def _is_tensorflow(value: object) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.startswith(_NAME)


def _dtype(dtype: DTypeLike) -> Any:
    # Keys and 4-bit numbers have dtypes that TensorFlow 2.6 has no name for.
    return DTYPES.get(str(dtype), dtype)


# -- methods ----------------------------------------------------------------------------------------


def _set_shape(tensor: TensorLike, shape: ShapeLike) -> None:
    """Nothing but a check: shapes are known."""
    if not TensorShape(tensor.shape).is_compatible_with(shape):
        raise IPUValueError(
            f"Tensor's shape {tuple(tensor.shape)} is not compatible with supplied shape {shape}."
        )


def _writer(name: str, tensor: TensorLike) -> Any:
    found = variable_parts.writer(tensor, name)
    if found is None:
        # `hasattr(x, "assign")` tells variables from tensors, in Keras and in programs.
        raise AttributeError(
            f"{name} is for variables, and for parts of them where they are taken: "
            f"v[1].{name}(x). Received: a tensor of shape {tuple(tensor.shape)}."
        )
    return found


def _no_value(tensor: TensorLike) -> None:
    raise ProgramError(
        f"numpy() of a value of a program ({tensor.dtype}{list(tensor.shape)}): it is known only when "
        f"the program runs. Return it from the function, send it to an outfeed, or print it with "
        f"tf.print."
    )


# -- what this relies on --------------------------------------------------------------------------


def _are_properties() -> bool:
    return all(isinstance(vars(kind)[n], property) for kind in kinds() for n in ("shape", "dtype"))


def _takes_shapes() -> bool:
    shape, dtype = TensorShape([2, 3]), DTYPES["float16"]
    made = jax.eval_shape(lambda: jnp.zeros(shape, dtype).astype(dtype).reshape(shape))
    return made.shape == (2, 3) and jnp.issubdtype(dtype, jnp.floating)


SEAMS = (
    Seam("shape and dtype of arrays", "x.shape.as_list() in TensorFlow programs", _are_properties),
    Seam("the shapes and dtypes that it takes", "shapes of TensorFlow programs", _takes_shapes),
)


def probed() -> tuple[tuple[Package, tuple[Seam, ...]], ...]:
    """What is relied on, for `tailrace doctor`."""
    return ((JAX, SEAMS),)
