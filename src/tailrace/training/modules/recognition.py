"""Which library a model comes from, found without importing any.

A module can only be one of a library's if that library was loaded by whoever made it, so an entry of the
table is asked only when its module is in `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tailrace.training.modules.binding import Binding, Plain


def bind(params: Any, model_state: Any) -> Binding:
    """The binding for what stands in the place of parameters.

    >>> bind({"w": 1.0}, None).params
    {'w': 1.0}
    """
    for name, binding in _LIBRARIES:
        if name in sys.modules and (found := binding(params, model_state)) is not None:
            return found
    return Plain(params, model_state)


def _nnx(params: Any, model_state: Any) -> Binding | None:
    from tailrace.training.modules.nnx_modules import NnxBinding, recognised

    return NnxBinding(params, model_state) if recognised(params) else None


def _equinox(params: Any, model_state: Any) -> Binding | None:
    from tailrace.training.modules.equinox_modules import EquinoxBinding, recognised

    return EquinoxBinding(params, model_state) if recognised(params) else None


_LIBRARIES: tuple[tuple[str, Callable[[Any, Any], Binding | None]], ...] = (
    ("flax.nnx", _nnx),
    ("equinox", _equinox),
)
"""(module, binding): the binding is None where the model is not one of that library."""
