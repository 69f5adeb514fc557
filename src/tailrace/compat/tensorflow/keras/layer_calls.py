"""AutoGraph in the `call` of layers that a program defines.

In the original the `call` of a layer is rewritten like a `tf.function`. Here a `call` runs as it is
written, and is rewritten where that meets a value of the device in a condition: most layers have none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import keras

from tailrace.compat.ipu.graph.deferred import Deferred, deferred_call
from tailrace.compat.ipu.graph.discovery import keras_scope
from tailrace.compat.ipu.graph.state import Found, Scope, current, scope_of
from tailrace.compat.nests import leaves
from tailrace.compat.tensorflow.control import autograph
from tailrace.errors import ProgramError
from tailrace.jaxprs.marks import ProgramTrace, is_tracing, tracing
from tailrace.keras.keras_internals import hook


def rewrite_calls() -> None:
    """Let layers made from now on have loops and branches over values of the device."""
    hook(keras.layers.Layer, "__init__", _init)
    hook(keras.layers.Layer, "__call__", _of_a_graph)


def _of_a_graph(
    plain: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any
) -> Any:
    """In a graph of TensorFlow 1 a layer is called when a session runs."""
    if any(isinstance(leaf, Deferred) for leaf in leaves((args, kwargs))):
        return deferred_call(layer, args, kwargs)
    return plain(layer, *args, **kwargs)


def _init(plain: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
    for kind in type(layer).__mro__:
        call = vars(kind).get("call")
        is_own = kind.__module__.split(".")[0] not in ("keras", "tailrace")
        if is_own and inspect.isfunction(call) and not hasattr(call, "tailrace_rewritten"):
            # On the class that defines it, once: a subclass may call it through `super()`.
            kind.call = _called(call)
    plain(layer, *args, **kwargs)


def _called(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        # Rewriting costs tracebacks and time; a condition over device values is what needs it.
        try:
            return call(layer, *args, **kwargs)
        except jax.errors.TracerBoolConversionError as error:
            if not autograph.available():
                raise ProgramError(f"{call.__qualname__}: {autograph.advice()}") from error
        rewritten = functools.partial(autograph.converted(call), layer, *args, **kwargs)
        try:
            return rewritten() if current() is not None else _in_scope(layer, rewritten)
        except jax.errors.TracerBoolConversionError as error:
            raise ProgramError(
                f"{call.__qualname__} has a condition over a value of the device, and is not "
                f"rewritten: it is excluded from it, or its source cannot be read. Use tf.where or "
                f"tf.cond."
            ) from error

    called.tailrace_rewritten = True  # type: ignore[attr-defined]
    return called


def _in_scope(layer: keras.layers.Layer, call: Callable[[], Any]) -> Any:
    """Run a call that Keras traces, as a program: branches and loops carry what the layer changes."""
    if not is_tracing():  # Keras asks for the shape of the result
        with tracing(ProgramTrace()):
            return _in_scope(layer, call)
    found = Found()
    known = [(variable, variable.value) for variable in layer.variables]
    with keras.StatelessScope(known), scope_of(Scope(found, looking=True)):
        call()  # builds layers inside, and shows the forms of names that a loop gives a value
    # Traced a second time with what the first has shown: names that loops give a value have forms now.
    found.keep.begin()
    # A forward pass may change statistics; weights are the optimizer's.
    changing = list(layer.non_trainable_variables)
    found.written = {id(variable): variable for variable in changing}
    before = {id(variable): variable.value for variable in layer.variables}
    scope = Scope(found, looking=False, values=dict(before))
    with keras_scope(), scope_of(scope):
        out = call()
    for variable in changing:
        # Only those: Keras would count any assignment as an update.
        if scope.values[id(variable)] is not before[id(variable)]:
            variable.assign(scope.values[id(variable)])
    return out
