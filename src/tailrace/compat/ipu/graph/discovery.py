"""The first look through a program: which variables it reads and writes, Keras' among them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from tailrace.compat.arguments import VariableLike
from tailrace.compat.ipu.graph.made_inside import optimizers_made_inside
from tailrace.compat.ipu.graph.state import Found, Keep, Prepare, Scope, inside, scope_of
from tailrace.errors import ProgramError
from tailrace.jaxprs.marks import ProgramTrace, tracing


def discover(function: Callable[..., Any], args: Sequence[Any], keep: Keep | None = None) -> Found:
    """Look through `function(*args)`: which variables it reads, and which it changes."""
    keep = keep or Keep()
    # Each round makes one missing thing outside the trace and starts over, until none is missing.
    for _ in range(_MOST_PREPARED):
        found = Found(keep=keep)
        keep.begin()
        try:
            # Keras makes the variables of layers built inside when its scope ends: outside the trace.
            looking = Scope(found, looking=True)
            with keras_scope(), scope_of(looking), tracing(ProgramTrace()):
                jax.eval_shape(function, *args)
        except Prepare as missing:
            missing.action()
            continue
        return found
    raise ProgramError(
        "A program makes other variables each time it is traced. Make variables and optimizers outside "
        "of it, or let it always make them in the same order."
    )


_MOST_PREPARED = 1000
"""How often a program is looked through at most, until everything it needs is there."""


@contextlib.contextmanager
def keras_scope() -> Iterator[None]:
    """Reads and writes of Keras' variables go to the current scope inside, if Keras is loaded."""
    keras = sys.modules.get("keras")
    if keras is None:
        yield
        return
    optimizers_made_inside()

    # Defined here, because Keras may be imported after this file.
    class ToScope(keras.StatelessScope):  # type: ignore[misc, name-defined]
        def get_current_value(self, variable: VariableLike) -> Any:
            # Keras takes None for "no value here", and then returns the variable's own.
            return inside("a Keras variable").read(variable)

        def add_update(self, update: tuple[VariableLike, Any]) -> None:
            inside("a Keras variable").write(*update)

    with ToScope():
        yield
