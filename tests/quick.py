"""The tiers: quick (`make test-quick`), usual (`make test`), long (`make test-long`).

The quick tier is the first case of every test function, except those of `slow.txt` and `long.txt`; the
long tier is the functions of `long.txt`. Rules and exceptions: a new test is in the quick tier by
itself, a renamed room changes nothing, and `test_quick.py` checks that every file has a quick case.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def long_functions() -> set[str]:
    """`test_fit.py::test_epochs`: those that `make test` leaves to `make test-long`."""
    return _listed("long.txt")


def slow_functions() -> set[str]:
    """Those that are too slow for the quick tier."""
    return _listed("slow.txt") | long_functions()


def _listed(name: str) -> set[str]:
    lines = (HERE / name).read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def function_of(item: pytest.Item) -> str:
    """The name by which `slow.txt` knows a test: file and function, without its case."""
    name, _, rest = item.nodeid.partition("::")
    return f"{Path(name).name}::{rest.split('[')[0]}"


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of long functions, and the first case of each function of the quick tier."""
    seen, long = slow_functions(), long_functions()
    for item in items:
        name = function_of(item)
        if name in long:
            item.add_marker(pytest.mark.long)
        if name not in seen and not any(map(item.get_closest_marker, ("exhaustive", "stress"))):
            seen.add(name)
            item.add_marker(pytest.mark.quick)


def repeat(metafunc: pytest.Metafunc) -> None:
    """Each case as often as `make test-stress` asks for (TAILRACE_TEST_REPEAT)."""
    times = int(os.environ.get("TAILRACE_TEST_REPEAT") or 1)
    if times > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(times))
