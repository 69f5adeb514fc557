"""A variable: an array with a name that programs read and write."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import DTypeLike, Index, TensorLike
from tailrace.compat.arguments import SessionLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.deferred import (
    Deferred,
    Operation,
    current_session,
    deferred_call,
    describing,
    later,
    value_now,
)
from tailrace.compat.ipu.graph.state import current, is_variable, value_of
from tailrace.compat.ipu.graph.variable_parts import add_methods, part
from tailrace.errors import ProgramError

reads: list[Callable[[Any, Any], Any]] = []
"""Called with a variable and its array when one is read outside of programs."""


class Variable:
    """An array that programs read and change; it replaces `tf.Variable`.

    Arithmetic takes it as it is; to functions of `jax.numpy`, give `variable.value()`.

    Args:
        initial_value: an array, a number, or a function that returns one.
        trainable: whether optimizers without a list of variables change it.
        name: what it is called in messages and records.
        dtype: None keeps that of the value; Python's floats become float32.

    Raises:
        ProgramError: it is created inside a program, which is traced more than once.

    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(2.0, name="w")
    >>> w.assign_add(0.5)
    <Variable w, float32[], 2.5>
    >>> print(w * 2)
    5.0
    """

    def __init__(
        self,
        initial_value: TensorLike,
        trainable: bool = True,
        name: str | None = None,
        dtype: DTypeLike = None,
    ) -> None:
        if current() is not None:
            raise ProgramError(
                f"A program is traced more than once, so variables are made outside of it. "
                f"Variable({name!r}) is made inside. Make it before, or use get_variable(name, ...), "
                f"which finds it again."
            )
        self.trainable, self.name = bool(trainable), name or "Variable"
        # A function can be asked again; keeping an array would take its memory twice.
        self._initial = initial_value if callable(initial_value) else None
        value = initial_value() if callable(initial_value) else initial_value
        self._value = _array(value_now(value), dtype)

    # -- reading --------------------------------------------------------------------------------

    def value(self) -> jax.Array:
        """The current value; inside a program, the one at this place of it."""
        scope = current()
        found = None if scope is None else scope.read(self)
        # In a program the trace itself is the record of reads; outside, tapes must hear of them.
        if scope is None:
            for noted in reads:
                noted(self, self._value)
        return self._value if found is None else found

    def read_value(self) -> Any:
        """The value; in a graph of TensorFlow 1, that which it has when a session runs."""
        return deferred_call(Variable.value, (self,), {}) if describing() else self.value()

    def eval(self, session: SessionLike = None) -> Any:
        """The value.

        Args:
            session: the session; None: the enclosing one.
        """
        return (session or current_session()).run(self)

    def numpy(self) -> np.ndarray:
        """The value as a numpy array."""
        return np.asarray(self.value())

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.value(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # Without this numpy would compute `np.float32(2) * variable` itself, from its current value.
        if method != "__call__" or kwargs:
            return getattr(ufunc, method)(*map(np.asarray, inputs), **kwargs)
        return _computed(getattr(jnp, ufunc.__name__), *inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        return self._value.shape

    def get_shape(self) -> Any:
        """The same, as the original's class of shapes."""
        # A tuple if `compat.tensorflow`, which has that class, is not imported.
        return later.get("shape", tuple)(self.shape)

    def load(self, value: TensorLike, session: object = None) -> None:
        """Set another value at once, also in a graph of TensorFlow 1.

        Args:
            value: the value; it is broadcast to the shape.
            session: without effect.
        """
        del session
        # Past `assign`, which a graph only describes.
        self.settle(jnp.broadcast_to(jnp.asarray(value, self.dtype), self.shape))

    @property
    def op(self) -> Any:
        """What has its name, as the original's operations have."""
        return self

    @property
    def dtype(self) -> Any:
        """The dtype, which never changes."""
        return self._value.dtype

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return self._value.ndim

    # -- writing --------------------------------------------------------------------------------

    def assign(self, value: TensorLike) -> Variable:
        """Set another value, of the same shape; the dtype stays.

        Args:
            value: the value.

        Raises:
            IPUValueError: the value has another shape.
        """
        if describing():
            return self._when_run("assign", value)
        value = jnp.asarray(value).astype(self.dtype)
        # Not broadcast, as the original does not: a scalar given to a matrix is most often a mistake.
        if value.shape != self.shape:
            raise IPUValueError(
                f"A variable keeps its shape: {self.name} has {self.shape}. "
                f"Received: {value.shape}."
            )
        scope = current()
        if scope is None:
            self._value = value
        else:
            scope.write(self, value)
        return self

    def assign_add(self, delta: TensorLike) -> Variable:
        """Add to it.

        Args:
            delta: what to add.
        """
        if describing():
            return self._when_run("assign_add", delta)
        return self.assign(self.value() + jnp.asarray(delta).astype(self.dtype))

    def assign_sub(self, delta: TensorLike) -> Variable:
        """Subtract from it.

        Args:
            delta: what to subtract.
        """
        if describing():
            return self._when_run("assign_sub", delta)
        return self.assign(self.value() - jnp.asarray(delta).astype(self.dtype))

    def _when_run(self, method: str, value: TensorLike) -> Any:
        return deferred_call(getattr(Variable, method), (self, value), {})

    def reset(self) -> None:
        """Give it the value that it was made with, if it was made with a function."""
        if self._initial is not None:
            self._value = _array(value_now(self._initial()), self.dtype)

    @property
    def initializer(self) -> Any:
        """An operation that does the same."""
        return Operation(f"initializer of {self.name}", self.reset)

    def initialized_value(self) -> Any:
        """The value, for the initial value of another: those are computed in the order of making."""
        return self.read_value()

    def settle(self, value: TensorLike) -> None:
        """Set the value that a program left it with (called when the program has run).

        Args:
            value: the value.
        """
        self._value = value

    # -- as an array ----------------------------------------------------------------------------

    def __getitem__(self, key: Index) -> Any:
        return part(self, key, lambda variable, at: variable.value()[at])

    def __iter__(self) -> Iterator[Any]:
        # Python would ask for items until an IndexError, which JAX, that clamps indices, never raises.
        return iter([self[number] for number in range(len(self))])

    def __len__(self) -> int:
        return len(self._value)

    def __bool__(self) -> bool:
        # Not by its length, which Python would take. In a graph it has no value to decide by.
        return bool(self.read_value())

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __repr__(self) -> str:
        shown = "" if self._value.size > 8 else f", {np.asarray(self._value)}"
        return f"<Variable {self.name}, {self.dtype}{list(self.shape)}{shown}>"


def _computed(function: Callable[..., Any], *args: Any) -> Any:
    if describing() or any(isinstance(arg, Deferred) for arg in args):
        return deferred_call(_computed, (function, *args), {})
    return function(*map(_plain, args))


def _methods(name: str, both_ways: bool) -> None:
    function = getattr(operator, name)
    setattr(Variable, f"__{name}__", lambda *args: _computed(function, *args))
    if both_ways:
        setattr(Variable, f"__r{name}__", lambda self, other: _computed(function, other, self))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _methods(_name, both_ways=True)
# Without `==`: variables are keys of dicts, and compared by identity in lists.
for _name in ("neg", "abs", "lt", "le", "gt", "ge"):
    _methods(_name, both_ways=False)
add_methods(Variable)


def _plain(value: object) -> Any:
    return value.value() if isinstance(value, Variable) else value


def _array(value: object, dtype: DTypeLike) -> jax.Array:
    value = value_of(value) if is_variable(value) else value  # also one of Keras
    if dtype is not None:
        return jnp.asarray(value, dtype)
    # A Python number has a weak dtype in JAX; a variable's is what it says.
    return jnp.asarray(value, jnp.result_type(value) if hasattr(value, "dtype") else _dtype(value))


def _dtype(value: object) -> Any:
    # Python's numbers are 64 bits wide for numpy, and 32 here unless JAX has x64 enabled.
    return jax.dtypes.canonicalize_dtype(np.asarray(value).dtype)


def as_array(value: object) -> jax.Array:
    """A variable, array or number as an array with a strong dtype."""
    return _array(value, None)
