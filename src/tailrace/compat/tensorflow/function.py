"""`tf.function`: a Python function that becomes a program when it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from tailrace.base.array_like import TensorLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.deferred import deferred_call, describing
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.ipu.graph.user_lines import user_line
from tailrace.compat.ipu.pipelining.pipelines import is_running
from tailrace.compat.ipu.strategy.calls import Calls
from tailrace.compat.tensorflow.control import autograph
from tailrace.compat.tensorflow.dtypes import narrowed
from tailrace.compat.tensorflow.tape import recording
from tailrace.errors import ProgramError


class Function:
    """What `tf.function` returns.

    Inside a program (given to `strategy.run`, called by another) it is a part of that program.
    Called on the host it is a separate program, compiled for each form of its arguments. While a tape
    records it runs operation by operation.

    Args:
        function: the function inside.
        input_signature: the dtypes of its arguments, as `tf.TensorSpec` objects.
        autograph: whether its loops and branches over values of the device become the program's.

    Attributes:
        python_function: the function inside.

    >>> from tailrace.compat import tensorflow as tf
    >>> double = tf.function(lambda x: x * 2)
    >>> float(double(tf.constant(2.0))), double.experimental_get_tracing_count()
    (4.0, 1)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        input_signature: Iterable[Any] | None = None,
        autograph: bool = True,
    ) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        functools.update_wrapper(self, function)
        self.python_function = function
        self.input_signature = input_signature
        self._rewrites = autograph
        # An ordinary function: replicas belong to programs that `strategy.run` is given.
        self._calls = Calls(one_device=True)

    @functools.cached_property
    def _inner(self) -> Callable[..., Any]:
        return autograph.converted(self.python_function) if self._rewrites else self.python_function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Args:
            *args: arguments of the function.
            **kwargs: the same by name.

        Raises:
            ProgramError: a loop or branch over device values could not be rewritten, or there are more
                arguments than the signature has.
        """
        # In a graph of TensorFlow 1 a call is an operation like any other, and has no value yet.
        if describing():
            return deferred_call(self, args, kwargs)
        args = self._checked(args)
        try:
            # Part of the program around; and a tape must see each operation, not one program.
            if current() is not None or recording() is not None or is_running():
                return self._inner(*args, **kwargs)
            return self._calls(self._inner, args, kwargs)
        except jax.errors.TracerBoolConversionError as error:
            if not autograph.available() or not self._rewrites:
                raise ProgramError(f"{self.__name__}: {autograph.advice()}") from error
            raise ProgramError(
                f"{self.__name__} has a condition over a value of the device that is not rewritten"
                f"{user_line(error)}: one in a comprehension, in a function whose source cannot be "
                f"read, or in a library. Use tf.where or tf.cond, or write it as a statement."
            ) from error
        except (IPUValueError, ProgramError) as error:
            # A loop that stays Python's is unrolled, and then does twice what a program does once.
            advice = autograph.advice()
            if autograph.available() or not self._rewrites or advice in str(error):
                raise
            raise type(error)(f"{error} {self.__name__}: {advice}") from error

    def _checked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with the dtypes that a signature gives them."""
        if self.input_signature is None:
            return args
        specs = list(self.input_signature)
        # One more: the object of a method.
        if len(args) > len(specs) + 1:
            raise ProgramError(
                f"{self.__name__} has an input_signature of {len(specs)} arguments. "
                f"Received: {len(args)}."
            )
        first = args[: len(args) - len(specs)]  # the object of a method has no spec
        rest = args[len(first) :]
        return *first, *(_as_spec(value, spec) for value, spec in zip(rest, specs, strict=False))

    def __get__(self, obj: object, owner: type | None = None) -> Any:
        # As a method: one `Function` for all objects, with the object as its first argument.
        return self if obj is None else functools.partial(self, obj)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself: it is compiled for each form of its arguments when it is called.

        Args:
            *args: without effect.
            **kwargs: without effect.
        """
        del args, kwargs
        return self

    def experimental_get_tracing_count(self) -> int:
        """For how many kinds of arguments there is a program."""
        return len(self._calls)

    def __repr__(self) -> str:
        return f"<tf.function {self.__name__}>"


def _as_spec(value: TensorLike, spec: object) -> Any:
    dtype = getattr(spec, "dtype", None)
    # Shapes of a signature are not checked: programs are compiled for the shapes that they get.
    if dtype is None or isinstance(value, list | tuple | dict):
        return value
    return jax.numpy.asarray(value, narrowed(dtype))


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Iterable[Any] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    **options: Any,
) -> Any:
    """Compile a function; a decorator, with arguments or without.

    Loops and branches over values of the device become loops and branches of the program, if the extra
    `tensorflow` is installed; a `return` inside such a loop is allowed.

    Args:
        func: the function; None in a decorator with arguments.
        input_signature: the dtypes of its arguments, as `tf.TensorSpec` objects.
        autograph: whether its loops and branches over values of the device become the program's.
        jit_compile: without effect: it is always compiled.
        **options: `reduce_retracing`, `experimental_...`: without effect.

    >>> from tailrace.compat import tensorflow as tf
    >>> @tf.function
    ... def double(x):
    ...     return x * 2
    >>> float(double(tf.constant(2.0)))
    4.0
    """
    del jit_compile, options
    if func is None:
        return lambda inner: Function(inner, input_signature, autograph)
    return Function(func, input_signature, autograph)
