"""Functions that are called before and after models compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Hook = Callable[[], Any]

_hooks: dict[str, list[Hook]] = {"before": [], "after": []}


class Handle:
    """What a registration returns; `remove` ends it.

    Args:
        hooks: the registered functions.
        hook: one of them.

    >>> from tailrace.compat import poptorch
    >>> handle = poptorch.registerPreCompileHook(lambda: None)
    >>> handle.remove()
    """

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Forget the hook."""
        # Removing twice is allowed, as with PyTorch's handles.
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


def registerPreCompileHook(hook: Hook) -> Handle:
    """Call a function before every compilation.

    Args:
        hook: a function without arguments.

    Returns:
        A handle; `handle.remove()` ends it.

    Raises:
        RuntimeError: it is not callable.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> handle = poptorch.registerPreCompileHook(lambda: print("compiling"))
    >>> model = poptorch.inferenceModel(torch.nn.ReLU())
    >>> model.compile(torch.ones(1))
    compiling
    >>> handle.remove()
    """
    return _register("before", hook)


def registerPostCompileHook(hook: Hook) -> Handle:
    """Call a function after every compilation.

    Args:
        hook: a function without arguments.

    Returns:
        A handle; `handle.remove()` ends it.

    Raises:
        RuntimeError: it is not callable.

    >>> from tailrace.compat import poptorch
    >>> handle = poptorch.registerPostCompileHook(lambda: print("compiled"))
    >>> handle.remove()
    """
    return _register("after", hook)


def call(when: str) -> None:
    """Call the hooks of before or after."""
    for hook in list(_hooks[when]):  # a copy: a hook may remove itself
        hook()


def _register(when: str, hook: Hook) -> Handle:
    if not callable(hook):
        raise RuntimeError(f"{hook!r} must be callable")
    _hooks[when].append(hook)
    return Handle(_hooks[when], hook)
