"""The one file that knows `diastatic-malt`, AutoGraph without TensorFlow.

It rewrites the source of a function: each `for`, `while`, `if`, `and`, `or`, `not` and each call
becomes a call of an operator that is given to it. Ours look at the values: those of Python are handled
as Python does, those of the device become loops and branches of the program.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.ipu.graph.user_lines import WRITTEN
from tailrace.compat.tensorflow.control import loops
from tailrace.compat.tensorflow.control.branches import branch, either
from tailrace.compat.tensorflow.control.symbols import Symbols, is_device_value
from tailrace.jaxprs.internals import is_library

_STANDARD = sysconfig.get_paths()["stdlib"]
_PLAIN = "tailrace_plain"  # the mark of functions that are left as they are

Read = Callable[[], tuple[Any, ...]]
"""How rewritten code lets an operator read the names that a statement changes."""

Write = Callable[[Sequence[Any]], None]
"""The same for writing them."""


def available() -> bool:
    """Whether functions can be rewritten here."""
    return _malt() is not None


def advice() -> str:
    """What to do where a function cannot be rewritten."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"Loops and branches over values of the device are rewritten by diastatic-malt, which is not "
        f"installed or does not know Python {version}: pip install 'tailrace[tensorflow]', on a Python "
        f"that it knows (3.11 to 3.13). Or write ipu.loops.repeat, ipu.loops.while_loop and tf.cond."
    )


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with its loops and branches rewritten; the function itself where that cannot be."""
    malt = _malt()
    if malt is None or not is_user_code(function):
        return function
    try:
        return malt.rewritten(function)
    except (
        Exception
    ) as error:  # what it cannot read (no source, a lambda on a line of many) it says in any way
        note_once(
            f"The loops and branches of {_name(function)} stay Python's, because its source cannot be "
            f"rewritten: {error}",
            key=f"autograph {_name(function)}",
        )
        return function


def do_not_convert(func: Callable[..., Any] | None = None) -> Any:
    """Leave the loops and branches of a function to Python; a decorator.

    Args:
        func: the function; None in a decorator with parentheses.

    >>> from tailrace.compat import tensorflow as tf
    >>> @tf.autograph.experimental.do_not_convert
    ... def double(x):
    ...     return x * 2
    >>> double(2)
    4
    """
    if func is None:
        return do_not_convert
    setattr(func, _PLAIN, True)
    return func


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def is_user_code(function: Callable[..., Any]) -> bool:
    """Whether a function is a program's own: not a library's, and not excluded by the program."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(plain, "__code__", None)
    if code is None or hasattr(plain, _PLAIN):
        return False
    # `<stdin>` and `<string>`: there is no source to read.
    path = code.co_filename
    return not (
        is_library(path)
        or "site-packages" in path
        or path.startswith(_STANDARD)
        or path.startswith("<")
    )


@functools.cache
def _malt() -> Any:
    try:
        from malt.core import converter
        from malt.impl import api
        from malt.operators import variables
    except Exception:  # not installed, or it fails on this Python
        return None

    class Rewriter(api.PyToPy):
        def get_extra_locals(self) -> Any:
            if self._extra_locals is None:
                found = super().get_extra_locals()
                ours = found["ag__"]
                # Replaced in the module that rewritten code sees as `ag__`, after the library has
                # made its own.
                for name, operator in _Operators(variables).by_name().items():
                    setattr(ours, name, operator)
            return self._extra_locals

        def rewritten(self, function: Callable[..., Any]) -> Any:
            features: Any = None  # the library's own default, which it does not type
            options: Any = converter.ConversionOptions(
                recursive=True, user_requested=True, optional_features=features
            )
            context = converter.ProgramContext(options=options)
            method = inspect.ismethod(function)
            found: Any = self.transform(function.__func__ if method else function, context)
            # The library's map of lines: errors then name the user's line, not that of generated
            # code.
            for place, origin in found[2].items():
                if place.filename != origin.loc.filename:
                    WRITTEN[tuple(place)] = (origin.loc.filename, origin.loc.lineno)
            return types.MethodType(found[0], function.__self__) if method else found[0]

    return Rewriter()


class _Operators:
    """What rewritten code calls for statements that the device may decide.

    Args:
        variables: the library's module of variables without a value.
    """

    def __init__(self, variables: types.ModuleType) -> None:
        self._missing = (variables.Undefined, variables.UndefinedReturnValue)

    def by_name(self) -> dict[str, Any]:
        """The functions, by the names that rewritten code calls."""
        return {
            "for_stmt": self.for_stmt,
            "while_stmt": self.while_stmt,
            "if_stmt": self.if_stmt,
            "if_exp": self.if_exp,
            "and_": _both(jnp.logical_and, bool),
            "or_": _both(jnp.logical_or, lambda value: not value),
            "not_": lambda value: jnp.logical_not(value) if is_device_value(value) else not value,
            "converted_call": converted_call,
        }

    def _is_missing(self, value: TensorLike) -> bool:
        return isinstance(value, self._missing)

    def _symbols(
        self,
        names: Sequence[str],
        get_state: Read,
        set_state: Write,
        count: int | None = None,
    ) -> Symbols:
        if count is None or count == len(names):
            return Symbols(names, get_state, set_state, self._is_missing)
        rest = get_state()[count:]  # used before it only, so not carried
        return Symbols(
            names[:count],
            lambda: get_state()[:count],
            lambda values: set_state((*values, *rest)),
            self._is_missing,
        )

    def for_stmt(
        self,
        iter_: Iterable[Any],
        extra_test: Callable[..., Any],
        body: Callable[..., Any],
        get_state: Read,
        set_state: Write,
        names: Sequence[str],
        _: object,
    ) -> None:
        # Outside of a program an array is iterated by Python, row by row.
        if current() is not None and isinstance(iter_, jax.Array | loops.Range):
            loops.for_loop(iter_, body, self._symbols(names, get_state, set_state), extra_test)
            return
        if extra_test is not None and not extra_test():
            return
        for item in iter_:
            body(item)
            if extra_test is not None and not extra_test():
                break

    def while_stmt(
        self,
        test: Callable[..., Any],
        body: Callable[..., Any],
        get_state: Read,
        set_state: Write,
        names: Sequence[str],
        _: object,
    ) -> None:
        # Asked again in each pass: a condition may be Python's at first, and the device's once the
        # body has changed what it reads.
        while True:
            wanted = test()
            if is_device_value(wanted):
                loops.while_loop(test, body, self._symbols(names, get_state, set_state))
                return
            if not wanted:
                return
            body()

    def if_stmt(
        self,
        cond: TensorLike,
        body: Callable[..., Any],
        orelse: Callable[..., Any],
        get_state: Read,
        set_state: Write,
        names: Sequence[str],
        nouts: int,
    ) -> None:
        if is_device_value(cond):
            branch(cond, body, orelse, self._symbols(names, get_state, set_state, nouts))
        elif cond:
            body()
        else:
            orelse()

    def if_exp(
        self, cond: TensorLike, if_true: Callable[..., Any], if_false: Callable[..., Any], _: object
    ) -> Any:
        if is_device_value(cond):
            return either(cond, lambda: [if_true()], lambda: [if_false()])[0]
        return if_true() if cond else if_false()


def _both(function: Callable[..., Any], continues: Callable[[Any], bool]) -> Callable[..., Any]:
    """`and` and `or`: of the device, both sides are computed."""

    def operator(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        first = a()
        if is_device_value(first):
            return function(first, b())
        return b() if continues(first) else first

    return operator


def _range(*args: Any) -> Any:
    start, limit, delta = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    return loops.Range(jnp.asarray(start), jnp.asarray(limit), jnp.asarray(delta))


_BUILTINS: dict[Any, Callable[..., Any]] = {
    range: _range,
    int: lambda value: jnp.asarray(value).astype(jnp.int32),
    float: lambda value: jnp.asarray(value).astype(jnp.float32),
    max: lambda *values: functools.reduce(jnp.maximum, values) if values[1:] else jnp.max(*values),
    min: lambda *values: functools.reduce(jnp.minimum, values) if values[1:] else jnp.min(*values),
}
"""Functions of Python that ask for values, and what they are for those of the device."""


def converted_call(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *_: Any, **__: Any
) -> Any:
    """A call in rewritten code: of the user's functions, which are rewritten too, or of others."""
    kwargs = kwargs or {}
    # They look at the frame of their caller, which after rewriting is another one.
    if f is super or f is locals or f is globals or f is eval:
        malt: Any = sys.modules["malt.impl.api"]
        return malt.converted_call(f, args, kwargs, *_, **__)
    if isinstance(f, type | types.BuiltinFunctionType) and f in _BUILTINS and not kwargs:
        return _BUILTINS[f](*args) if any(map(is_device_value, args)) else f(*args)
    # Taken apart, so that the function inside is rewritten too.
    if isinstance(f, functools.partial):
        return converted_call(f.func, (*f.args, *args), {**f.keywords, **kwargs})
    # AutoGraph has no generators: they stay as they are.
    if (inspect.isfunction(f) or inspect.ismethod(f)) and not inspect.isgeneratorfunction(f):
        return _once(f)(*args, **kwargs)
    return f(*args, **kwargs)


def _once(f: Callable[..., Any]) -> Any:
    # The mark of a function that was rewritten already.
    if not is_user_code(f) or hasattr(f, "autograph_info__"):
        return f
    return converted(f)
