"""An object for names that have no effect in a plain program: options of a chip, devices, stages."""

from __future__ import annotations

from typing import Any


class Anything:
    """Has every attribute, can be called, opened and set; all of it gives the same object.

    >>> options = Anything()
    >>> options.Precision.enableStochasticRounding(True) is options
    True
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        return None

    def __int__(self) -> int:
        return 0


def __getattr__(name: str) -> Any:
    """As a module, it has every name as well."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()
