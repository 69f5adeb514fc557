"""Scopes with the paths of modules, opened around their calls while a function is traced.

A library's own transformations take modules apart and put them together again, so a module carries its
path. Within the call of a module, a module inside it opens only the rest of its path.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_open: contextvars.ContextVar[str] = contextvars.ContextVar("tailrace_module_scope", default="")


@contextlib.contextmanager
def module_scope(path: str) -> Iterator[None]:
    """The scope of a module that is called; that of the outermost has no name."""
    rest = path.removeprefix(f"{_open.get()}/") if path != _open.get() else ""
    token = _open.set(path)
    try:
        with jax.named_scope(rest) if rest else contextlib.nullcontext():
            yield
    finally:
        _open.reset(token)
