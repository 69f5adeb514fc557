"""`tk.Strategy`: models made in its scope train on the engine, device functions run in one program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tailrace.devices.devices import resolve_replicas
from tailrace.errors import OptionError
from tailrace.keras.adopt import functional_class, take_over
from tailrace.keras.custom_loops.device_functions import DeviceFunctions, datasets_are_infeeds
from tailrace.keras.model import TailraceModel
from tailrace.keras.pipelines.assignment import stages_of
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
        """While it is open, models that are made get Tailrace's trainer.

        And `iter(dataset)` of a `tf.data.Dataset`, a PyTorch `DataLoader` or `tr.batches(...)`,
        written there, gives an infeed for `run`.
        """
        plain = keras.Model.__init__

        def adopting(model: Any, *args: Any, **kwargs: Any) -> None:
            plain(model, *args, **kwargs)
            if not isinstance(model, TailraceModel):
                self.adopt(model)

        functional: Any = functional_class()
        make = functional.__init__

        def checking(model: Any, *args: Any, **kwargs: Any) -> None:
            make(model, *args, **kwargs)
            if isinstance(model, TailraceModel):
                stages_of(model)  # all of its layers have a stage, or none

        keras.Model.__init__ = adopting  # type: ignore[method-assign]
        functional.__init__ = checking
        try:
            with self.iterating(), in_scope():
                yield self
        finally:
            keras.Model.__init__ = plain  # type: ignore[method-assign]
            functional.__init__ = make

    def adopt(self, model: Any) -> None:
        """Give a model that was made in the scope Tailrace's trainer."""
        take_over(model, self.replicas)

    def iterating(self) -> contextlib.AbstractContextManager[None]:
        """While the scope is open: what `iter(dataset)` gives."""
        return datasets_are_infeeds()

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
