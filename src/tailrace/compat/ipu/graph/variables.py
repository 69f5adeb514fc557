"""A variable: an array with a name that programs read and write."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.state import current
from tailrace.data.array_like import DTypeLike, TensorLike
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
        value = initial_value() if callable(initial_value) else initial_value
        self.trainable, self.name = bool(trainable), name or "Variable"
        self._value = _array(value, dtype)

    # -- reading --------------------------------------------------------------------------------

    def value(self) -> jax.Array:
        """The current value; inside a program, the one at this place of it."""
        scope = current()
        found = None if scope is None else scope.read(self)
        if scope is None:
            for noted in reads:
                noted(self, self._value)
        return self._value if found is None else found

    read_value = value
    """The same, as the original also calls it."""

    def numpy(self) -> np.ndarray:
        """The value as a numpy array."""
        return np.asarray(self.value())

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.value(), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        return self._value.shape

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
        value = jnp.asarray(value).astype(self.dtype)
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
        return self.assign(self.value() + jnp.asarray(delta).astype(self.dtype))

    def assign_sub(self, delta: TensorLike) -> Variable:
        """Subtract from it.

        Args:
            delta: what to subtract.
        """
        return self.assign(self.value() - jnp.asarray(delta).astype(self.dtype))

    def settle(self, value: TensorLike) -> None:
        """Set the value that a program left it with (called when the program has run).

        Args:
            value: the value.
        """
        self._value = value

    # -- as an array ----------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> jax.Array:
        return self.value()[key]

    def __neg__(self) -> jax.Array:
        return -self.value()

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __repr__(self) -> str:
        shown = "" if self._value.size > 8 else f", {np.asarray(self._value)}"
        return f"<Variable {self.name}, {self.dtype}{list(self.shape)}{shown}>"


def _both_ways(name: str) -> None:
    function = getattr(operator, name)

    def forward(self: Variable, other: object) -> Any:
        return function(self.value(), _plain(other))

    def backward(self: Variable, other: object) -> Any:
        return function(_plain(other), self.value())

    setattr(Variable, f"__{name}__", forward)
    setattr(Variable, f"__r{name}__", backward)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _both_ways(_name)


def _plain(value: object) -> Any:
    return value.value() if isinstance(value, Variable) else value


def _array(value: object, dtype: DTypeLike) -> jax.Array:
    if dtype is not None:
        return jnp.asarray(value, dtype)
    if isinstance(value, Variable):
        return value.value()
    # A Python number has a weak dtype in JAX; a variable's is what it says.
    return jnp.asarray(value, jnp.result_type(value) if hasattr(value, "dtype") else _dtype(value))


def _dtype(value: object) -> Any:
    return jax.dtypes.canonicalize_dtype(np.asarray(value).dtype)


def as_array(value: object) -> jax.Array:
    """A variable, array or number as an array with a strong dtype."""
    return _array(value, None)
