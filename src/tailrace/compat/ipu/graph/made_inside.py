"""Keras optimizers that a program makes itself, as optimizer functions of pipelines do.

Keras makes the variables of an optimizer when the optimizer is made, which it cannot do while a program
is traced; and a program is traced more than once, but has one optimizer. So what Keras makes is made
outside of the trace, once for each place in the program, and the optimizers of all traces share it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tailrace.compat.arguments import OptimizerLike
from tailrace.compat.ipu.graph.state import current, is_variable, kept, prepared, value_of
from tailrace.compat.ipu.graph.variables import Variable
from tailrace.jaxprs.internals import Tracer


@functools.cache
def optimizers_made_inside() -> None:
    """Let Keras' optimizers be made inside of programs; asked for once."""
    import keras

    from tailrace.keras.keras_internals import hook

    hook(keras.optimizers.Optimizer, "__init__", _make)


class _Rate:
    """A learning rate that is a value of the program: another one in each trace of it."""

    def __init__(self) -> None:
        self.now: Any = None

    def __call__(self) -> Any:
        return value_of(self.now) if is_variable(self.now) else self.now


def _make(plain: Callable[..., Any], optimizer: OptimizerLike, *args: Any, **kwargs: Any) -> None:
    if current() is None:
        plain(optimizer, *args, **kwargs)
        return
    given = args[0] if args else kwargs.get("learning_rate")
    # Keras would keep its value in a variable; one that the program is fed, or changes, has none here.
    is_fed = isinstance(given, Tracer | Variable)

    def make() -> Any:
        twin, rate = object.__new__(type(optimizer)), _Rate()
        if is_fed:
            plain(twin, **{**kwargs, "learning_rate": rate})
        else:
            plain(twin, *args, **kwargs)
        return twin, rate

    twin, rate = prepared(kept(), "keras optimizer", make)
    rate.now = given
    # The same dict, not a copy: the variables and the counter of steps are one for all traces. Past
    # Keras' own `__setattr__`, which tracks attributes.
    object.__setattr__(optimizer, "__dict__", vars(twin))
