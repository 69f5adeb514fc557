"""Hand-written training loops: a function of Keras objects as one program on the device.

    def training_loop(iterator, outfeed, model, optimizer, count):
        def step():
            x, y = next(iterator)
            loss, grads = tk.value_and_grad(lambda: loss_of(model(x, training=True), y),
                                            model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
            outfeed.enqueue(loss)

        tk.repeat(count, step)

    strategy.run(training_loop, args=[iterator, outfeed, model, optimizer, 10])

Keras keeps its state in variables. While the function is traced, a scope holds their values; a loop
carries them, and after an execution they are written back.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import keras

from tailrace.base.trees import Tree
from tailrace.errors import FeedError, ProgramError
from tailrace.feeds.infeed import InfeedQueue
from tailrace.jaxprs.marks import dequeue
from tailrace.keras.custom_loops.reachable_state import reached_by, variables_of
from tailrace.keras.optimizers.adapter import check_in_loop
from tailrace.program.compile import Program
from tailrace.program.compiling.build import Build
from tailrace.program.loops import repeat as repeat_on_device


@dataclasses.dataclass(eq=False)
class Running:
    """State of the trace of a device function."""

    variables: list[Any]
    looking: bool = False
    counter: Any = None

    def values(self) -> list[Any]:
        """The values of the variables at this point of the program."""
        return [jnp.asarray(v.value) for v in self.variables]


_running: contextvars.ContextVar[Running | None] = contextvars.ContextVar(
    "tailrace_keras_running", default=None
)


def _current(caller: str) -> Running:
    found = _running.get()
    if found is None:
        raise ProgramError(
            f"{caller} means something only in a device function. It was called outside one. "
            f"Call it in the function given to strategy.run(...)."
        )
    return found


class _Seen(Exception):
    """Raised to end the build trace of a function once its models are built."""


class DatasetIterator:
    """A dataset as an infeed for device functions: they call `next(iterator)`.

    Args:
        dataset: see `tr.InfeedQueue`.

    >>> import tailrace.keras as tk
    >>> iterator = tk.DatasetIterator([1.0, 2.0, 3.0])
    >>> iterator.infeed.spec().leaves[0].dtype
    dtype('float32')
    """

    def __init__(self, dataset: object) -> None:
        self.infeed = InfeedQueue(dataset)

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        """The next element, in a device function.

        Raises:
            FeedError: called outside of a device function.
            ProgramError: called outside of `tk.repeat`.
        """
        running = _running.get()
        if running is None:
            raise FeedError(
                "A tk.DatasetIterator feeds programs on the device; it has no elements outside of "
                "them. Call next(iterator) in the function given to strategy.run(...), or iterate over "
                "the dataset itself."
            )
        spec = self.infeed.spec().tree()
        if running.looking:
            # Only shapes matter while layers are built, and no element may be consumed for that.
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)
        if running.counter is None:
            raise ProgramError(
                "next(iterator) is in a loop on the device, so that one execution takes many "
                "elements. It was called outside one. Use tk.repeat(count, step) and call it in step."
            )
        return dequeue(running.counter, self.infeed, spec)

    def close(self) -> None:
        """Stop the prefetching thread."""
        self.infeed.close()


def repeat(count: int, body: Callable[[], Any]) -> None:
    """Run `body()` repeatedly on the device; everything it changes is carried.

    Args:
        count: the number of iterations, an integer.
        body: called without arguments; it may call `next(iterator)`, models, optimizers, metrics,
            `enqueue` and `tk.value_and_grad`.

    Raises:
        ProgramError: called outside of a device function.

    >>> import tailrace.keras as tk, keras
    >>> total, iterator = keras.metrics.Sum(), tk.DatasetIterator([1.0, 2.0, 3.0])
    >>> def sum_up(total):
    ...     tk.repeat(3, lambda: total.update_state(next(iterator)))
    >>> tk.Strategy().run(sum_up, args=[total])
    >>> float(total.result())
    6.0
    """
    running = _current("tk.repeat")
    # Once, outside of a loop: layers are built by a single call.
    if running.looking:
        body()
        return

    def one_pass(carried: Tree) -> Any:
        counter, values = carried
        # Loops may be nested: the counter that `next` uses is that of the innermost one.
        outer, running.counter = running.counter, counter
        try:
            after = _in_scope(running, values, body)[1]
        finally:
            running.counter = outer
        return counter + 1, after

    _, after = repeat_on_device(count, one_pass, (jnp.int32(0), running.values()))
    _assign(running.variables, after)


def value_and_grad(
    function: Callable[[], Any], variables: Sequence[Any], has_aux: bool = False
) -> tuple[Any, list[Any]]:
    """The value of `function()` and its gradient with respect to Keras variables, in a device function.

    Other changes by the function (the statistics of BatchNormalization, the state of Dropout) are kept.

    Args:
        function: called without arguments; returns a scalar, or `(scalar, aux)`.
        variables: the variables, for example `model.trainable_variables`.
        has_aux: whether the function returns `(scalar, aux)`.

    Returns:
        The function's result, and a list of gradients.

    Raises:
        ProgramError: called outside of a device function, or a variable is not known to it.

    >>> import tailrace.keras as tk, keras
    >>> dense, total = keras.layers.Dense(1, use_bias=False), keras.metrics.Sum()
    >>> dense.build((1, 2))
    >>> def step(dense, total):
    ...     x = keras.ops.ones((1, 2))
    ...     _, gradients = tk.value_and_grad(lambda: keras.ops.sum(dense(x)), dense.trainable_variables)
    ...     total.update_state(gradients[0])
    >>> tk.Strategy().run(step, args=[dense, total])
    >>> float(total.result())
    2.0
    """
    running = _current("tk.value_and_grad")
    if running.looking:
        # While models are built there is nothing to differentiate, and optimizers cannot be called yet.
        function()
        raise _Seen
    known = {id(variable): number for number, variable in enumerate(running.variables)}
    for variable in variables:
        if id(variable) not in known:
            raise _unknown(f"tk.value_and_grad is asked for the gradient in {variable.path!r}")
    # Others keep their values: JAX differentiates in its arguments only.
    wanted = [known[id(variable)] for variable in variables]
    values = running.values()

    def call(given: list[Any]) -> Any:
        inside = list(values)
        for number, value in zip(wanted, given, strict=True):
            inside[number] = value
        out, after = _in_scope(running, inside, function)
        value, aux = out if has_aux else (out, None)
        return jnp.asarray(value), (aux, after)

    (value, (aux, after)), grads = jax.value_and_grad(call, has_aux=True)(
        [values[number] for number in wanted]
    )
    _assign(running.variables, after)
    return ((value, aux) if has_aux else value), grads


def _in_scope(running: Running, values: Sequence[Any], call: Callable[[], Any]) -> Any:
    """Call a function with these values of the variables; returns its result and the new values."""
    mapping = list(zip(running.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping) as scope:
        out = call()
    # A scope records whatever is assigned in it: a variable beyond ours would be lost with the scope.
    if len(scope.state_mapping) > len(mapping):
        raise _unknown("The function changes a Keras variable")
    # A loop's carry keeps its dtypes.
    after = [jnp.asarray(scope.get_current_value(v), v.dtype) for v in running.variables]
    return out, after


def _unknown(what: str) -> ProgramError:
    return ProgramError(
        f"{what} of an object that the program does not know of: it knows what is among the arguments, "
        f"also in lists and dicts, in the closure of the function, or among the globals that it names. "
        f"Give the model, optimizer or metric to strategy.run(fn, args=[...])."
    )


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class DeviceFunctions:
    """The programs of a strategy's device functions."""

    def __init__(self, replicas: int, build: Build) -> None:
        self._replicas, self._build = replicas, build
        self._programs: dict[Hashable, tuple[Program, list[Any], Any]] = {}

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function in one program; returns its result."""
        given = [*args, *kwargs.values()]
        arrays = [value for value in given if _is_array(value)]
        # Arrays are inputs of the program; everything else is part of it, by identity.
        key = (fn, *(None if _is_array(v) else _identity(v) for v in given), *kwargs)
        if key not in self._programs:

            def call(changing: Sequence[Any]) -> Any:
                rest = iter(changing)
                values = [next(rest) if _is_array(value) else value for value in given]
                named = dict(zip(kwargs, values[len(args) :], strict=True))
                return fn(*values[: len(args)], **named)

            variables = _looked_through(call, arrays, reached_by(fn, given))
            program = Program(
                _program(call, variables), replicas=self._replicas, seed=0, build=self._build
            )
            # `given` is kept alive, so that the ids of its objects are not reused.
            self._programs[key] = (program, variables, given)
        program, variables, _ = self._programs[key]
        after, out = program([v.value for v in variables], arrays)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)
        return out


def _program(call: Callable[[Any], Any], variables: list[Any]) -> Callable[..., Any]:
    def device_function(values: Tree, arrays: Tree) -> Any:
        running = Running(variables)
        token = _running.set(running)
        try:
            out, after = _in_scope(running, values, lambda: call(arrays))
        finally:
            _running.reset(token)
        return after, out

    return device_function


def _looked_through(call: Callable[[Any], Any], arrays: list[Any], reached: list[Any]) -> list[Any]:
    """All variables that a function may use; builds its models and optimizers."""
    token = _running.set(Running([], looking=True))
    try:
        models = [one for one in reached if isinstance(one, keras.layers.Layer)]
        optimizers = [one for one in reached if isinstance(one, keras.optimizers.Optimizer)]
        # A model that is built is not traced for it: tracing a large one takes seconds.
        if not all(layer.built for layer in models):
            _build(call, arrays)
        trained = [v for model in models for v in model.trainable_variables]
        for optimizer in optimizers:
            check_in_loop(optimizer)
            if not optimizer.built:
                optimizer.build(trained)
    finally:
        _running.reset(token)
    found = {id(variable): variable for one in reached for variable in variables_of(one)}
    return list(found.values())


def _build(call: Callable[[Any], Any], arrays: list[Any]) -> None:
    """Trace a function on shapes only, so that layers create their variables.

    Keras initialises them when the scope is left, outside of the trace.
    """
    # Once gradients are requested, everything is built.
    with keras.StatelessScope(), suppress(_Seen):
        jax.eval_shape(lambda given: jax.tree.leaves(call(given)), arrays)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "assign")


def _identity(value: object) -> Hashable:
    # Numbers by value: an equal one needs no other program.
    return value if isinstance(value, int | float | str | bool | None) else id(value)
