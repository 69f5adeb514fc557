"""The quick tier: the first case of every test function, except those of `slow.txt`.

A rule and its exceptions: a new test is in the tier by itself, a renamed room changes nothing, and
`test_quick.py` sees that every file has a case in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

SLOW = Path(__file__).with_name("slow.txt")


def slow_functions() -> set[str]:
    """`test_fit.py::test_epochs`: those that are too slow for the tier."""
    lines = SLOW.read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def function_of(item: pytest.Item) -> str:
    """The name by which `slow.txt` knows a test: file and function, without its case."""
    name, _, rest = item.nodeid.partition("::")
    return f"{Path(name).name}::{rest.split('[')[0]}"


def mark_quick(items: Iterable[pytest.Item]) -> None:
    """Mark the first case of each function that is neither slow nor of the full cross product."""
    seen = slow_functions()
    for item in items:
        name = function_of(item)
        if name not in seen and item.get_closest_marker("exhaustive") is None:
            seen.add(name)
            item.add_marker(pytest.mark.quick)
