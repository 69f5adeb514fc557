"""`tk.Strategy`: models created in its scope train on the engine; it runs device functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tailrace.devices.devices import resolve_replicas
from tailrace.errors import OptionError
from tailrace.keras.adopt import scopes, take_over
from tailrace.keras.custom_loops.device_functions import DeviceFunctions
from tailrace.keras.pipelines.stage_scope import in_scope
from tailrace.program.compiling.build import Build, Option


class Strategy:
    """Models created in `scope()` get Tailrace's trainer.

    Args:
        replicas: the number of copies of a model that train in parallel. None: one per device.
        rewrites: rewrites of the programs to switch off, such as `{"boundaries": False}`.
        compiler_options: options of XLA's compiler for the programs of its models and functions, by
            their names in `XLA_FLAGS`.

    Raises:
        OptionError: there is no such rewrite or option, or fewer devices than replicas.

    Example:
        >>> import tailrace.keras as tk, keras
        >>> with tk.Strategy().scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        >>> hasattr(model, "set_pipelining_options")
        True
    """

    def __init__(
        self,
        replicas: int | None = 1,
        *,
        rewrites: Mapping[str, bool] | None = None,
        compiler_options: Mapping[str, Option] | None = None,
    ) -> None:
        self.replicas = resolve_replicas(replicas)
        self._build = Build.of(rewrites, compiler_options)
        self._functions = DeviceFunctions(self.replicas, self._build)

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1, because replicas are averaged inside the program, not by the caller."""
        return 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """A context in which created models get Tailrace's trainer.

        It applies to this thread, or to this asynchronous task and the tasks it starts.
        """
        # Two things begin: models made inside are adopted, and layers may have stages.
        with scopes.opened(self.adopt), in_scope():
            yield self

    def adopt(self, model: keras.Model) -> None:
        """Give a model created in the scope Tailrace's trainer."""
        take_over(model, self.replicas, build=self._build)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a device function in one program.

        The function is traced once for its arguments; it changes models, optimizers and metrics among
        them as it would outside.

        Args:
            fn: the function; see `tk.repeat`, `tk.value_and_grad`, and `next(iterator)`.
            args: its arguments: arrays, numbers, models, optimizers, metrics, iterators, queues.
            kwargs: the same by name.

        Returns:
            The function's result: a tree of arrays, or None.

        Raises:
            OptionError: `fn` is not a function.
            ProgramError: it changes a variable that its arguments do not lead to.
        """
        if not callable(fn):
            raise OptionError(f"strategy.run takes a function. Received: {type(fn).__name__}.")
        return self._functions.run(fn, list(args), dict(kwargs or {}))
