"""Training loops written by hand: a function of Keras' objects as one program on the device.

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

from tailrace.errors import FeedError, ProgramError
from tailrace.feeds.infeed import InfeedQueue
from tailrace.jaxprs.marks import dequeue
from tailrace.keras.custom_loops.reachable_state import reached_by, variables_of
from tailrace.keras.optimizers.adapter import check_in_loop
from tailrace.program.compile import Program
from tailrace.program.compile import compile as compile_program
from tailrace.program.loops import repeat as repeat_on_device


@dataclasses.dataclass(eq=False)
class Running:
    """What is known while a device function is traced."""

    variables: list[Any]
    looking: bool = False
    counter: Any = None

    def values(self) -> list[Any]:
        """The values that the variables have at this place of the program."""
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
    """A function was followed as far as its models go."""


class DatasetIterator:
    """A dataset as an infeed for device functions: they call `next(iterator)`.

    Args:
        dataset: see `tr.InfeedQueue`.
    """

    def __init__(self, dataset: Any) -> None:
        self.infeed = InfeedQueue(dataset)

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        """The next element, in a device function."""
        running = _running.get()
        if running is None:
            raise FeedError(
                "A tk.DatasetIterator feeds programs on the device; it has no elements outside of "
                "them. Call next(iterator) in the function given to strategy.run(...), or iterate over "
                "the dataset itself."
            )
        spec = self.infeed.spec().tree()
        if running.looking:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)
        if running.counter is None:
            raise ProgramError(
                "next(iterator) stands in a loop on the device, so that one execution takes many "
                "elements. It was called outside one. Use tk.repeat(count, step) and call it in step."
            )
        return dequeue(running.counter, self.infeed, spec)

    def close(self) -> None:
        """End the thread that reads ahead."""
        self.infeed.close()


def repeat(count: int, body: Callable[[], Any]) -> None:
    """Run `body()` so many times on the device; all that it changes is carried along.

    Args:
        count: how often, an integer.
        body: called without arguments; it may call `next(iterator)`, models, optimizers, metrics,
            `enqueue` and `tk.value_and_grad`.
    """
    running = _current("tk.repeat")
    if running.looking:
        body()
        return

    def one_pass(carried: Any) -> Any:
        counter, values = carried
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
    """The value of `function()` and its gradient in Keras variables, in a device function.

    What the function changes besides (the statistics of BatchNormalization, the state of Dropout)
    stays changed.

    Args:
        function: called without arguments; returns a scalar, or `(scalar, aux)`.
        variables: the variables, for example `model.trainable_variables`.
        has_aux: whether the function returns `(scalar, aux)`.

    Returns:
        What the function returned, and a list of gradients.
    """
    running = _current("tk.value_and_grad")
    if running.looking:
        function()
        raise _Seen
    known = {id(variable): number for number, variable in enumerate(running.variables)}
    for variable in variables:
        if id(variable) not in known:
            raise _unknown(f"tk.value_and_grad is asked for the gradient in {variable.path!r}")
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
    """What a function returns when the variables have these values, and what they have then."""
    mapping = list(zip(running.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping) as scope:
        out = call()
    if len(scope.state_mapping) > len(mapping):
        raise _unknown("The function changes a Keras variable")
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
    """The programs that a strategy has made of functions."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._programs: dict[Hashable, tuple[Program, list[Any], Any]] = {}

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function in one program; returns what it returns."""
        given = [*args, *kwargs.values()]
        arrays = [value for value in given if _is_array(value)]
        key = (fn, *(None if _is_array(v) else _identity(v) for v in given), *kwargs)
        if key not in self._programs:

            def call(changing: Sequence[Any]) -> Any:
                rest = iter(changing)
                values = [next(rest) if _is_array(value) else value for value in given]
                named = dict(zip(kwargs, values[len(args) :], strict=True))
                return fn(*values[: len(args)], **named)

            variables = _looked_through(call, arrays, reached_by(fn, given))
            program = compile_program(_program(call, variables), replicas=self._replicas)
            # `given` is kept, so that nothing else takes the identity of one of them.
            self._programs[key] = (program, variables, given)
        program, variables, _ = self._programs[key]
        after, out = program([v.value for v in variables], arrays)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)
        return out


def _program(call: Callable[[Any], Any], variables: list[Any]) -> Callable[..., Any]:
    def device_function(values: Any, arrays: Any) -> Any:
        running = Running(variables)
        token = _running.set(running)
        try:
            out, after = _in_scope(running, values, lambda: call(arrays))
        finally:
            _running.reset(token)
        return after, out

    return device_function


def _looked_through(call: Callable[[Any], Any], arrays: list[Any], reached: list[Any]) -> list[Any]:
    """All variables that a function may use; models and optimizers in it are built on the way."""
    token = _running.set(Running([], looking=True))
    try:
        models = [one for one in reached if isinstance(one, keras.layers.Layer)]
        optimizers = [one for one in reached if isinstance(one, keras.optimizers.Optimizer)]
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
    """Follow a function on shapes only, so that layers make their variables.

    Keras initialises them when the scope is left, outside of what is followed.
    """
    # Once gradients are asked for, nothing more is built.
    with keras.StatelessScope(), suppress(_Seen):
        jax.eval_shape(lambda given: jax.tree.leaves(call(given)), arrays)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "assign")


def _identity(value: Any) -> Hashable:
    return value if isinstance(value, int | float | str | bool | None) else id(value)
