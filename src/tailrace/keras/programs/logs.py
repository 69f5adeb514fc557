"""Results of an execution that are awaited only when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.spans.span import span

INSIDE = "\0"
"""Between the names of nested logs."""


class Values(ABC):
    """A value of an execution: on the device until it is read."""

    @abstractmethod
    def host(self) -> np.ndarray:
        """All that there is of it."""

    @abstractmethod
    def at(self, step: int) -> Any:
        """The value of one step, one for all replicas."""


class Series(Values):
    """A value of each step of an execution: on the device until it is read.

    Args:
        leaves: the values of its dispatches, in order.
        replicas: the number of replicas; with several, their dim comes first.
        reduce: combines the values of all replicas.
    """

    def __init__(
        self, leaves: Sequence[Any], replicas: int, reduce: Callable[[np.ndarray], Any]
    ) -> None:
        self._leaves, self._replicas, self._reduce = leaves, replicas, reduce
        self._host: np.ndarray | None = None

    def host(self) -> np.ndarray:
        """The values as [steps] or, with several replicas, [replicas, steps]."""
        if self._host is None:
            lead = (self._replicas,) if self._replicas > 1 else ()
            with span("outfeed copy"):
                parts = [np.asarray(leaf).reshape(*lead, -1) for leaf in self._leaves]
            self._host = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
            # Released: the device buffers of a whole epoch would otherwise live as long as Keras'
            # logs.
            self._leaves = ()
        return self._host

    def at(self, step: int, replica: int | None = None) -> Any:
        """The value of one step: that of a replica, or one for all of them."""
        # The first read fetches the steps of all dispatches: one copy instead of one for each
        # value.
        values = self.host()[..., step]
        if self._replicas == 1:
            return values
        return self._reduce(values) if replica is None else values[replica]


class Final(Values):
    """A value that is known only after the last step of a dispatch."""

    def __init__(self, leaf: object) -> None:
        self._leaf = leaf

    def host(self) -> np.ndarray:
        """The value, in an array of one."""
        with span("outfeed copy"):
            return np.asarray(self._leaf).reshape(-1)

    def at(self, step: int, replica: int | None = None) -> Any:
        """The value, for any step: only the last one is ever requested."""
        del step, replica
        return self.host()[-1]


class Number:
    """One entry of the logs; reading it waits for the device."""

    def __init__(self, series: Values, step: int = -1) -> None:
        self._series, self._step = series, step

    def __float__(self) -> float:
        return float(self._series.at(self._step))

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._series.at(self._step), dtype)

    def __repr__(self) -> str:
        return repr(np.asarray(self))


class Later:
    """A placeholder in the logs of a batch for a metric that is not a scalar; epochs have its value."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __repr__(self) -> str:
        return f"<metric of shape {self.shape}, known at the end of the epoch>"


class Unheard(dict[str, Any]):
    """Logs of a batch that no callback listens to: Keras would read them all the same.

    They have names, by which Keras recognises its metrics, and no values.
    """

    def items(self) -> Any:
        """Nothing: reading a value waits for the device."""
        return ()


def flat(logs: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested logs, each with a name of its own.

    >>> [name.split(INSIDE) for name, _ in flat({"loss": 1.0, "metrics": {"mae": 2.0}})]
    [['loss'], ['metrics', 'mae']]
    """
    for name, value in logs.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{inside}{name}{INSIDE}")
        else:
            yield f"{inside}{name}", value


def nested(logs: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`: logs as the step has returned them, which Keras compares with metrics."""
    if not any(INSIDE in name for name in logs):
        return logs
    found: dict[str, Any] = {}
    for name in logs:
        *around, last = name.split(INSIDE)
        place = found
        for one in around:
            place = place.setdefault(one, {})
        place[last] = logs[name]
    return type(logs)(found)
