"""Open scopes of the current thread, or of the current asynchronous task.

A hook in a library calls `innermost`, so nothing has to be restored when a scope is closed. Scopes may
be nested, may overlap, may be left by an exception, or be closed in another context than they were
opened in; a task that outlives the scope it was started in is no longer inside it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(eq=False)
class _Scope:
    value: Any
    closed: bool = False


class Scopes:
    """Scopes of one kind, each with a value.

    Args:
        name: their name, for debugging.

    Example:
        >>> scopes = Scopes("an_example")
        >>> with scopes.opened("outer"), scopes.opened("inner"):
        ...     scopes.innermost()
        'inner'
        >>> scopes.innermost() is None
        True
    """

    def __init__(self, name: str) -> None:
        self._stack: contextvars.ContextVar[tuple[_Scope, ...]] = contextvars.ContextVar(
            name, default=()
        )

    @contextlib.contextmanager
    def opened(self, value: object) -> Iterator[None]:
        """A scope that is open while the block runs."""
        scope = _Scope(value)
        # A new tuple: contexts that were copied from this one keep theirs.
        self._stack.set((*self._stack.get(), scope))
        try:
            yield
        finally:
            scope.closed = True  # also visible in contexts copied from this one
            self._stack.set(tuple(one for one in self._stack.get() if not one.closed))

    def innermost(self) -> Any:
        """The value of the innermost open scope; None if none is open."""
        return next((one.value for one in reversed(self._stack.get()) if not one.closed), None)
