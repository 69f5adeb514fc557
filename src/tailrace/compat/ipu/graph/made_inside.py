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
from tailrace.compat.ipu.graph.state import current, kept, prepared


@functools.cache
def optimizers_made_inside() -> None:
    """Let Keras' optimizers be made inside of programs; asked for once."""
    import keras

    from tailrace.keras.keras_internals import hook

    hook(keras.optimizers.Optimizer, "__init__", _make)


def _make(plain: Callable[..., Any], optimizer: OptimizerLike, *args: Any, **kwargs: Any) -> None:
    if current() is None:
        plain(optimizer, *args, **kwargs)
        return

    def make() -> Any:
        twin = object.__new__(type(optimizer))
        plain(twin, *args, **kwargs)
        return twin

    twin = prepared(kept(), "keras optimizer", make)
    object.__setattr__(optimizer, "__dict__", vars(twin))
