"""The summary table that is printed once per epoch: one line of statistics per tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import numpy as np

_STATISTICS = ("Mean", "Std", "Minimum", "Maximum")
_FLAGS = ("NaNs", "infs")


def summary_table(named_arrays: Mapping[str, Any]) -> str:
    """Statistics of whole arrays, one line each; every column is left-aligned.

    The index has 5 places, the name 5 more than the longest name, numbers have 12 with 6 decimals,
    and the flags (is there a NaN, is there an Inf) have 7. A NaN anywhere makes the mean NaN: this
    table shows arrays as they are, unlike the statistics of a tap, which are over finite values.

    Args:
        named_arrays: the arrays by name, in the order of the lines.

    >>> table = summary_table({"bias": [1.0, 3.0]})
    >>> print("|".join(table.splitlines()[1].split()))
    0|bias|2.000000|1.000000|1.000000|3.000000|False|False
    """
    width = max((len(name) for name in named_arrays), default=0) + 5
    lines = [_line("Index", "Name", width, _STATISTICS, _FLAGS)]
    for index, (name, array) in enumerate(named_arrays.items()):
        numbers, flags = _summarised(array)
        shown = [f"{number:.6f}" for number in numbers]
        lines.append(_line(str(index), name, width, shown, [str(flag) for flag in flags]))
    return "\n".join(lines)


def print_summary(
    name: str, data: Mapping[str, Any] | None, epoch: int, file: TextIO | None = None
) -> None:
    """Print the observed arrays of one epoch: shapes, then the table.

    Args:
        name: a heading, such as "Gradients callback".
        data: the arrays by name; None if nothing was sent.
        epoch: the index of the epoch, from 0 as in callbacks; printed from 1.
        file: where to print; None for standard output.

    >>> print_summary("Gradients", None, epoch=0)
    <BLANKLINE>
    Gradients
    No data enqueued
    """
    out = sys.stdout if file is None else file
    print(f"\n{name}", file=out)
    if data is None:
        print("No data enqueued", file=out)
        return
    for key, array in data.items():
        print(f"key: {key} shape: {np.shape(array)}", file=out)
    print(f"Epoch {epoch + 1} - Summary Stats", file=out)
    print(summary_table(data), file=out)


def _line(index: str, name: str, width: int, numbers: Iterable[str], flags: Iterable[str]) -> str:
    cells = [f"{index:<5}", f"{name:<{width}}"]
    cells += [f"{number:<12}" for number in numbers]
    cells += [f"{flag:<7}" for flag in flags]
    return " ".join(cells)


def _summarised(array: object) -> tuple[list[float], list[bool]]:
    values = np.asarray(array)
    if not values.size:
        return [float("nan")] * len(_STATISTICS), [False] * len(_FLAGS)
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = [wide.mean(), wide.std(), wide.min(), wide.max()]
    flags = [bool(np.isnan(wide).any()), bool(np.isinf(wide).any())]
    return [float(number) for number in numbers], flags
