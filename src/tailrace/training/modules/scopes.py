"""Scopes with the paths of modules, opened around their calls while a function is traced.

A library's own transformations take modules apart and put them together again, so a module carries its
path. Within the call of a module, a module inside it opens only the rest of its path: what JAX traced
once for one of several equal blocks then has the right name in each of them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_open: contextvars.ContextVar[str] = contextvars.ContextVar("tailrace_module_scope", default="")


class Path:
    """The path of a module, as a static part of it.

    All paths are equal: blocks that differ in nothing else can be stacked, or share a traced function.

    >>> Path("blocks/0") == Path("blocks/1"), str(Path("blocks/0"))
    (True, 'blocks/0')
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Path)

    def __hash__(self) -> int:
        return hash(Path)


@contextlib.contextmanager
def module_scope(path: Path) -> Iterator[None]:
    """The scope of a module that is called; that of the outermost has no name."""
    whole = str(path)
    rest = whole.removeprefix(f"{_open.get()}/") if whole != _open.get() else ""
    token = _open.set(whole)
    try:
        with jax.named_scope(rest) if rest else contextlib.nullcontext():
            yield
    finally:
        _open.reset(token)
