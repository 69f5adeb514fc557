"""Checks: `tf.debugging.assert_equal` and its relatives, `tf.Assert`.

What is known when a program is made is checked then, by TensorFlow itself. Values of the device are not
checked, as XLA does not check them; that is noted once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.compat.nests import leaves, map_leaves
from tailrace.compat.tensorflow import host
from tailrace.compat.tensorflow.control.symbols import is_device_value
from tailrace.compat.tensorflow.operations.table import operation

VALUES = [
    "equal",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "near",
    "negative",
    "non_negative",
    "non_positive",
    "none_equal",
    "positive",
]
"""Those about values."""

FORMS = [
    "integer",
    "rank",
    "rank_at_least",
    "rank_in",
    "same_float_dtype",
    "scalar",
    "shapes",
    "type",
]
"""Those about shapes and dtypes, which are known of values of the device too."""


def _check(path: str, *others: str, about_form: bool = False, returns: bool = False) -> None:
    @operation(path, *others)
    def checked(*args: Any, **kwargs: Any) -> Any:
        """TensorFlow's check, of what is known when the program is made."""
        # TensorFlow itself checks and words the error; it must not be given a value of the program.
        known = not any(map(is_device_value, leaves((args, kwargs))))
        if known or about_form:
            host.named(path)(*map_leaves(_on_host, args), **map_leaves(_on_host, kwargs))
        else:
            note_once(
                f"tf.{path} does not check values of the device: programs do not stop for one, as "
                f"with XLA. Check what the program returns, or observe it."
            )
        # `check_numerics` is an identity: programs go on with what it returns.
        return next(iter((*args, *kwargs.values()))) if returns else None


def _on_host(leaf: TensorLike) -> Any:
    if is_device_value(leaf):  # its form is what is checked
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return np.asarray(leaf) if type(leaf).__module__.startswith("jax") else leaf


for _name in VALUES:
    _check(f"debugging.assert_{_name}")
for _name in FORMS:
    _check(f"debugging.assert_{_name}", about_form=True)
_check("debugging.assert_all_finite", returns=True)
_check("debugging.check_numerics", returns=True)
_check("debugging.Assert", "Assert")
