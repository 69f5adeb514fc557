"""`tf.Variable`: a variable of Keras, which layers and optimizers take, with TensorFlow's arguments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from tailrace.compat.ipu.graph.state import current
from tailrace.compat.tensorflow.dtypes import narrowed
from tailrace.data.array_like import DTypeLike, TensorLike
from tailrace.errors import ProgramError


class Variable(keras.Variable):
    """An array that programs read and change: a `keras.Variable` with TensorFlow's arguments.

    Its `value` is an attribute, as in Keras. 64-bit dtypes become 32-bit.

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
        caching_device: Any = None,
        name: str | None = None,
        variable_def: Any = None,
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
        value: Any = initial_value() if callable(initial_value) else initial_value
        value = np.asarray(value) if not hasattr(value, "dtype") else value
        kind = narrowed(value.dtype if dtype is None else dtype)
        super().__init__(
            jnp.asarray(value, kind),
            dtype=kind.name,
            trainable=trainable is not False,
            name=(name or "Variable").replace("/", "_"),
        )

    def read_value(self) -> Any:
        """The value."""
        return self.value

    def assign(self, value: TensorLike, *_: Any, **__: Any) -> Any:
        """Set another value.

        Args:
            value: the value.
            *_: without effect.
            **__: without effect.
        """
        super().assign(value)
        return self

    def assign_add(self, delta: TensorLike, *_: Any, **__: Any) -> Any:
        """Add to it.

        Args:
            delta: what to add.
            *_: without effect.
            **__: without effect.
        """
        super().assign_add(delta)
        return self

    def assign_sub(self, delta: TensorLike, *_: Any, **__: Any) -> Any:
        """Subtract from it.

        Args:
            delta: what to subtract.
            *_: without effect.
            **__: without effect.
        """
        super().assign_sub(delta)
        return self

    def initialized_value(self) -> Any:
        """The value."""
        return self.value

    @property
    def initializer(self) -> Any:
        """An operation that does nothing, because a variable has its value when it is created."""
        from tailrace.compat.ipu.graph.operations import Operation

        return Operation("variable initializer")

    def get_shape(self) -> Any:
        """The shape."""
        return self.shape

    def __int__(self) -> int:
        return int(self.value)


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


def _variables_in(value: TensorLike, seen: set[int]) -> Any:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, keras.Variable):
        yield value
    elif isinstance(value, keras.layers.Layer):
        yield from value.variables
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _variables_in(inner, seen)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _variables_in(inner, seen)
    elif isinstance(value, Module):
        for name in sorted(vars(value)):  # in TensorFlow's order
            yield from _variables_in(vars(value)[name], seen)
