"""What a program computed, so that two runs of it can be compared.

Programs print losses and accuracies in their own ways, and some print none. Numbers are therefore taken
where they leave the libraries: what `fit` reports last, what a device function returns, what is taken
from an outfeed, the loss of the last training call and the size of the last output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MARK = "originals:"
"""What the line with the numbers begins with."""

ORDER = ("loss", "accuracy", "evaluated", "dequeued", "returned", "predicted", "output")
"""The numbers that tell most come first; the table shows two."""

_numbers: dict[str, float] = {}


def report(name: str, value: Any) -> None:
    """Keep a number, or the mean of the absolute values of an array; the last one counts."""
    number = _number(value)
    if number is not None:
        _numbers[name] = number


def report_fit(history: Any) -> None:
    """Keep the numbers of the last epoch that Keras' `fit` reports."""
    for name, values in getattr(history, "history", {}).items():
        report(name, values[-1])


def loss_of(out: Any) -> Any:
    """The loss among what a training call returns: what has fewest elements, of several the last.

    >>> import numpy as np
    >>> loss_of((np.zeros(1), np.ones(8)))
    array([0.])
    """
    parts = list(out) if isinstance(out, tuple | list) else [out]
    return min(reversed(parts), key=lambda part: math.prod(part.shape))


def shown() -> str:
    """The line to print."""
    return f"{MARK} {json.dumps(_numbers)}"


def read(text: str) -> dict[str, float]:
    """The numbers in what a program printed.

    >>> read('Epoch 1/1\\noriginals: {"loss": 0.5}\\n')
    {'loss': 0.5}
    """
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1].removeprefix(MARK)) if lines else {}


def chosen(numbers: Mapping[str, float]) -> dict[str, float]:
    """The two numbers that tell most about a run.

    >>> chosen({"output": 2.0, "accuracy": 0.5, "loss": 0.1})
    {'loss': 0.1, 'accuracy': 0.5}
    """
    return dict([(name, numbers[name]) for name in ORDER if name in numbers][:2])


def agree(name: str, here: float, plain: float) -> bool:
    """Whether a number is that of the plain program.

    The data, their order and the initial values are the same; dropout draws other random numbers.
    Accuracies may differ by 0.05, everything else by 10 % or by 0.05.

    >>> agree("loss", 2.0, 2.1), agree("loss", 1.0, 2.0), agree("accuracy", 0.9, 0.8)
    (True, False, False)
    """
    if not math.isfinite(here) or not math.isfinite(plain):
        return False
    allowed = 0.05 if name == "accuracy" else max(0.05, 0.1 * abs(plain))
    return abs(here - plain) <= allowed


def _number(value: Any) -> float | None:
    import numpy as np

    if value is None:
        return None
    while isinstance(value, list | tuple | dict) and value:
        value = value[min(value)] if isinstance(value, dict) else value[-1]
    try:
        if hasattr(value, "detach"):
            value = value.detach().float()
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None
    if array.size == 0:
        return None
    return round(float(np.abs(array).mean()), 5)
