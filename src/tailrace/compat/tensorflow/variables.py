"""`tf.Variable`: a variable of Keras, which layers and optimizers take, with TensorFlow's arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from tailrace.base.array_like import DTypeLike, Index, TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import SessionLike
from tailrace.compat.ipu.graph.deferred import (
    Deferred,
    current_session,
    deferred_call,
    describing,
    value_now,
)
from tailrace.compat.ipu.graph.named_variables import enter_variable
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.state import current, value_of
from tailrace.compat.ipu.graph.variable_parts import add_methods, part
from tailrace.compat.nests import leaves
from tailrace.compat.tensorflow.dtypes import narrowed
from tailrace.compat.tensorflow.tensor_shape import TensorShape
from tailrace.errors import ProgramError


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """A variable or a tensor, compared by what it is and not by its elements.

    Attributes:
        _inner: the variable or tensor.

    >>> from tailrace.compat import tensorflow as tf
    >>> w = tf.Variable(2.0)
    >>> {w.ref(): "weights"}[w.ref()]
    'weights'
    """

    _inner: Any

    def deref(self) -> Any:
        """The variable or tensor."""
        return self._inner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._inner is self._inner

    def __hash__(self) -> int:
        return id(self._inner)


class Value:
    """`v.value`: called it is TensorFlow's method, else it computes as Keras' attribute, an array."""

    __slots__ = ("_array", "_variable")

    def __init__(self, array: Any, variable: Variable) -> None:
        self._array, self._variable = array, variable

    def __call__(self) -> Any:
        """The value; in a graph of TensorFlow 1, that which it has when a session runs."""
        return self._variable.read_value()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    def __jax_array__(self) -> Any:
        return self._array

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype, copy=copy)

    def __repr__(self) -> str:
        return repr(self._array)


def _of_array(name: str) -> Callable[..., Any]:
    def computed(self: Value, *others: Any) -> Any:
        return getattr(self._array, name)(*others)

    return computed


for _name in (
    *("abs", "add", "and", "bool", "eq", "float", "floordiv", "ge", "getitem", "gt", "index"),
    *("int", "invert", "iter", "le", "len", "lt", "matmul", "mod", "mul", "ne", "neg", "or", "pow"),
    *("radd", "rfloordiv", "rmatmul", "rmul", "rpow", "rsub", "rtruediv", "sub", "truediv", "xor"),
):
    setattr(Value, f"__{_name}__", _of_array(f"__{_name}__"))


class Variable(keras.Variable):
    """An array that programs read and change: a `keras.Variable` with TensorFlow's arguments.

    Its `value` is an attribute, as in Keras, and can be called, as in TensorFlow. 64-bit dtypes become
    32-bit.

    Args:
        initial_value: an array, a number, or a function that returns one.
        trainable: whether gradients and optimizers concern it.
        validate_shape: without effect.
        caching_device: without effect.
        name: what it is called.
        variable_def: without effect.
        dtype: None keeps that of the value; Python's floats become float32.
        **options: `synchronization`, `aggregation`...: without effect.

    Raises:
        ProgramError: it is created inside a program, which is traced more than once.

    >>> from tailrace.compat import tensorflow as tf
    >>> w = tf.Variable([1.0, 2.0], name="w")
    >>> w.assign_add([1.0, 1.0]).numpy().tolist()
    [2.0, 3.0]
    """

    def __init__(
        self,
        initial_value: TensorLike = None,
        trainable: bool | None = True,
        validate_shape: bool = True,
        caching_device: object = None,
        name: str | None = None,
        variable_def: object = None,
        dtype: DTypeLike = None,
        **options: Any,
    ) -> None:
        del validate_shape, caching_device, variable_def, options
        if current() is not None:
            raise ProgramError(
                f"tf.function-decorated functions and programs must not make variables: they are "
                f"traced more than once. tf.Variable(name={name!r}) is made inside. Make it before, or "
                f"use tf.compat.v1.get_variable(name, ...), which finds it again."
            )
        described = describing()

        def initial() -> Any:
            return value_now(initial_value() if callable(initial_value) else initial_value)

        value: Any = initial()
        # numpy's dtype decides for Python numbers, so that a list of ints becomes an int variable.
        value = np.asarray(value) if not hasattr(value, "dtype") else value
        kind = narrowed(value.dtype if dtype is None else dtype)
        super().__init__(
            jnp.asarray(value, kind),
            dtype=kind.name,
            trainable=trainable is not False,
            # Keras refuses a slash, which separates the parts of its paths.
            name=(name or "Variable").replace("/", "_"),
        )
        # Keeping an array would take its memory twice.
        self._initial = initial if described else None  # elsewhere it is never asked for again
        if described:
            enter_variable(self, name or "Variable")

    def read_value(self) -> Any:
        """The value; in a graph of TensorFlow 1, that which it has when a session runs."""
        return deferred_call(value_of, (self,), {}) if describing() else self.value

    def eval(self, session: SessionLike = None) -> Any:
        """The value.

        Args:
            session: the session; None: the enclosing one.
        """
        return (session or current_session()).run(self)

    def reset(self) -> None:
        """Give it the value that it was made with, if it was made in a graph of TensorFlow 1."""
        if self._initial is not None:
            super().assign(self._initial())

    def assign(self, value: TensorLike, *_: Any, **__: Any) -> Any:
        """Set another value.

        Args:
            value: the value.
            *_: without effect.
            **__: without effect.
        """
        return self._changed("assign", value)

    def assign_add(self, delta: TensorLike, *_: Any, **__: Any) -> Any:
        """Add to it.

        Args:
            delta: what to add.
            *_: without effect.
            **__: without effect.
        """
        return self._changed("assign_add", delta)

    def assign_sub(self, delta: TensorLike, *_: Any, **__: Any) -> Any:
        """Subtract from it.

        Args:
            delta: what to subtract.
            *_: without effect.
            **__: without effect.
        """
        return self._changed("assign_sub", delta)

    def _changed(self, method: str, value: TensorLike) -> Any:
        if describing() or isinstance(value, Deferred):
            return deferred_call(type(self)._changed, (self, method, value), {})
        # Keras' method, which inside a program writes to its scope.
        getattr(super(), method)(value)
        return self

    def initialized_value(self) -> Any:
        """The value, for the initial value of another: those are computed in the order of making."""
        return self.read_value()

    @property
    def initializer(self) -> Any:
        """An operation that gives it its first value; outside of graphs it has it when it is made."""
        return Operation("variable initializer", self.reset)

    def get_shape(self) -> TensorShape:
        """The shape."""
        return TensorShape(super().shape)

    def is_initialized(self) -> bool:
        """Always True: a variable has its value when it is made."""
        return True

    def ref(self) -> Reference:
        """What finds it again in sets and dicts; comparing variables compares their elements."""
        return Reference(self)

    def __getitem__(self, key: Index) -> Any:
        return part(self, key, keras.Variable.__getitem__)

    def __iter__(self) -> Iterator[Any]:
        # Python would ask for items until an IndexError, which JAX, that clamps indices, never raises.
        return iter([self[number] for number in range(len(self))])

    def __len__(self) -> int:
        return len(self.value)

    def __bool__(self) -> bool:
        return bool(self.read_value())  # in a graph it has no value to decide by

    def __int__(self) -> int:
        return int(self.value)


def _computed(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(self: Variable, *args: Any) -> Any:
        if describing() or any(isinstance(arg, Deferred) for arg in args):
            return deferred_call(plain, (self, *args), {})
        return plain(self, *args)

    return method


# Keras' operators read the value at once; in a graph an expression of variables is described.
_BOTH_WAYS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_ONE_WAY = ("neg", "abs", "lt", "le", "gt", "ge")
for _name in (*_BOTH_WAYS, *(f"r{name}" for name in _BOTH_WAYS), *_ONE_WAY):
    setattr(Variable, f"__{_name}__", _computed(getattr(keras.Variable, f"__{_name}__")))
add_methods(Variable)


class Module:
    """An object whose attributes hold variables, and other such objects.

    Args:
        name: what it is called; None: the name of its class.

    >>> from tailrace.compat import tensorflow as tf
    >>> class Scale(tf.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = tf.Variable(2.0)
    ...     def __call__(self, x):
    ...         return self.w * x
    >>> scale = Scale()
    >>> float(scale(3.0)), len(scale.trainable_variables)
    (6.0, 1)
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or type(self).__name__.lower()

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name

    @property
    def variables(self) -> tuple[Any, ...]:
        """The variables in it, each once."""
        return tuple({id(v): v for v in _variables_in(self, set())}.values())

    @property
    def trainable_variables(self) -> tuple[Any, ...]:
        """Those that are trained."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """The modules in it, to any depth."""
        found: dict[int, Module] = {}
        _modules_in(self, found)
        return tuple(module for module in found.values() if module is not self)


def _modules_in(value: Tree, found: dict[int, Module]) -> None:
    for leaf in leaves(value):
        if isinstance(leaf, Module) and id(leaf) not in found:
            found[id(leaf)] = leaf
            for name in sorted(vars(leaf)):
                _modules_in(vars(leaf)[name], found)


def _variables_in(value: Tree, seen: set[int]) -> Iterator[keras.Variable]:
    for leaf in leaves(value):
        if isinstance(leaf, keras.Variable):
            yield leaf
        elif isinstance(leaf, keras.layers.Layer):
            yield from leaf.variables
        elif isinstance(leaf, Module) and id(leaf) not in seen:
            seen.add(id(leaf))  # modules may hold each other
            for name in sorted(vars(leaf)):  # in TensorFlow's order
                yield from _variables_in(vars(leaf)[name], seen)
