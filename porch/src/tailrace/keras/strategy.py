"""`tk.Strategy`: models made in its scope train on the engine, device functions run in one program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tailrace.devices.devices import resolve_replicas
from tailrace.errors import OptionError
from tailrace.keras.adopt import scopes, take_over
from tailrace.keras.custom_loops.device_functions import DeviceFunctions
from tailrace.keras.pipelines.stage_scope import in_scope


class Strategy:
    """Models that are made in `scope()` get Tailrace's trainer.

    Args:
        replicas: how many copies of a model train side by side. None: as many as there are devices.

    Example:
        >>> import keras, tailrace.keras as tk
        >>> with tk.Strategy().scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        >>> hasattr(model, "set_pipelining_options")
        True
    """

    def __init__(self, replicas: int | None = 1) -> None:
        self.replicas = resolve_replicas(replicas)
        self._functions = DeviceFunctions(self.replicas)

    @property
    def num_replicas_in_sync(self) -> int:
        """1, whatever the replicas: they are averaged inside the program, not by the caller."""
        return 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """While it is open, models that are made here get Tailrace's trainer.

        Here is: in this thread, or in this task of asynchronous code and what it starts.
        """
        with scopes.opened(self.adopt), in_scope():
            yield self

    def adopt(self, model: Any) -> None:
        """Give a model that was made in the scope Tailrace's trainer."""
        take_over(model, self.replicas)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run a device function in one program.

        The function is traced once for its arguments; models, optimizers and metrics among them
        are changed by it as they would be outside.

        Args:
            fn: the function; see `tk.repeat`, `tk.value_and_grad`, and `next(iterator)`.
            args: its arguments: arrays, numbers, models, optimizers, metrics, iterators, queues.
            kwargs: the same by name.

        Returns:
            What the function returns: a tree of arrays, or None.
        """
        if not callable(fn):
            raise OptionError(f"strategy.run takes a function. Received: {type(fn).__name__}.")
        return self._functions.run(fn, list(args), dict(kwargs or {}))
