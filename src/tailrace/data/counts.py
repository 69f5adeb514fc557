"""Whole numbers with a lower limit, checked with one sentence throughout this room."""

from typing import Any

import numpy as np

from tailrace.errors import DataError


def check_count(name: str, value: Any, *, at_least: int) -> None:
    """Raise a DataError unless `value` is a whole number, Python's or numpy's, >= `at_least`."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < at_least:
        raise DataError(f"{name} must be a whole number >= {at_least}. Received: {name}={value!r}.")
