"""The rules by which `evaluate` combines the values of many batches.

| the function returns | `evaluate` returns |
|---|---|
| a scalar | the mean over all rows: each batch is weighted by its number of rows, or by `weight=` |
| an array of integers (a confusion matrix) | the sum, element by element |
| an array of floats | the mean over all rows, element by element |

`combine=` selects another rule: "mean", "sum", "max", "min", "last", a metric (an object with `init()`,
`update(state, value)` and `result(state)`), or a function of all values, stacked by batch. A dict as
result is several values, `name/key`. A single rule applies to everything; a dict has rules by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError


class Metric(Protocol):
    """Collects values batch by batch."""

    def init(self) -> Any:
        """The state before the first batch."""
        ...

    def update(self, state: Tree, value: object, /) -> Any:
        """The state after one more batch."""
        ...

    def result(self, state: Tree, /) -> Any:
        """The value of a state."""
        ...


RULES = ("mean", "sum", "max", "min", "last")

Rule = str | Metric | Callable[[np.ndarray], Any]
Combine = Rule | Mapping[str, Rule] | None
"""What `combine=` of evaluations is: one rule, rules by name, or None for the defaults."""


class Combined:
    """Combines the values of batches as they arrive.

    Args:
        combine: one rule, rules by name, or None for those of the table above.
    """

    def __init__(self, combine: Combine) -> None:
        self._combine = combine
        self._collectors: dict[str, _Collector] = {}
        for rule in combine.values() if isinstance(combine, Mapping) else (combine,):
            _check_rule(rule)

    def add(
        self, values: Mapping[str, np.ndarray], rows: int, weights: np.ndarray | None = None
    ) -> None:
        """Add some batches of `rows` rows each: [batches, ...] by name.

        In a mean a batch counts by its rows, or by its weight, if there are `weights`: [batches].
        """
        if not self._collectors:
            self._check_names(values)
            # At the first batch: only then is it known which values there are, and of which dtype.
            self._collectors = {
                name: _collector(self._rule(name, value)) for name, value in values.items()
            }
        for name, value in values.items():
            self._collectors[name].add(name, value, rows, weights)

    def results(self) -> dict[str, Any]:
        """One value by name; real scalars are floats."""
        found: dict[str, Any] = {}
        for name, one in self._collectors.items():
            result = one.result()
            # A metric may have several results: precision and recall.
            named = {f"{name}/{key}": v for key, v in result.items()} if _is_dict(result) else None
            found.update({name: result} if named is None else named)
        return {name: _plain(value) for name, value in found.items()}

    def _rule(self, name: str, value: np.ndarray) -> Rule:
        by_name = self._combine if isinstance(self._combine, Mapping) else {name: self._combine}
        chosen = by_name.get(name)
        if chosen is not None:
            return chosen
        # [batches, ...]: arrays of integers are counts, such as a confusion matrix. Scalars are
        # averaged, whole ones too.
        counts = value.ndim > 1 and value.dtype.kind in "iu"
        return "sum" if counts else "mean"

    def _check_names(self, values: Mapping[str, Any]) -> None:
        if isinstance(self._combine, Mapping):
            unknown = [name for name in self._combine if name not in values]
            if unknown:
                raise OptionError(
                    f"combine= has rules by the names of what the function returns: "
                    f"{', '.join(map(repr, values))}. Received: {unknown[0]!r}."
                )


class _Collector:
    """Collects stacked values of batches, with the number of rows of each batch, or their weights."""

    def add(self, name: str, values: np.ndarray, rows: int, weights: np.ndarray | None) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        raise NotImplementedError


class _Total(_Collector):
    """Sums, and means over rows; in double precision, whatever the dtype."""

    def __init__(self, mean: bool) -> None:
        self._mean, self._rows = mean, 0.0
        self._total: Any = None

    def add(self, name: str, values: np.ndarray, rows: int, weights: np.ndarray | None) -> None:
        # Counts are added as integers: float64 is exact only up to 2**53.
        counts = values.dtype.kind in "iub" and not self._mean
        wide = np.int64 if counts else np.result_type(values.dtype, np.float64)
        # The last batch may be smaller: by batches, its rows would count more than others.
        if weights is not None and self._mean:
            with np.errstate(invalid="ignore"):  # a weight that is infinite is reported at the end
                part = np.tensordot(weights, values.astype(wide), axes=1)
            self._rows += float(weights.sum())
        else:
            part = values.astype(wide).sum(axis=0) * (rows if self._mean else 1)
            self._rows += rows * len(values)
        if self._total is not None:
            _check_shape(name, np.shape(self._total), np.shape(part), rows)
        self._total = part if self._total is None else self._total + part

    def result(self) -> Any:
        return self._total / (self._rows or 1) if self._mean else self._total


def _check_shape(name: str, before: tuple[int, ...], now: tuple[int, ...], rows: int) -> None:
    if before != now:
        raise ProgramError(
            f"evaluate combines {name!r} batch by batch, so it has one shape. Received: "
            f"{list(before)}, then {list(now)} of a batch with {rows} rows. Reduce over the batch in "
            f"the function, or use predict."
        )


class _Extreme(_Collector):
    """The largest, the smallest, or the last."""

    def __init__(self, choose: Callable[[np.ndarray], Any]) -> None:
        self._choose, self._value = choose, None

    def add(self, name: str, values: np.ndarray, rows: int, weights: np.ndarray | None) -> None:
        del weights
        if self._value is not None:
            _check_shape(name, np.shape(self._value), values.shape[1:], rows)
        # One value is kept, however many batches there are.
        found = values if self._value is None else np.concatenate([self._value[None], values])
        self._value = np.asarray(self._choose(found))

    def result(self) -> Any:
        return self._value


class _OfMetric(_Collector):
    """A metric of the user's."""

    def __init__(self, metric: Metric) -> None:
        self._metric, self._state = metric, metric.init()

    def add(self, name: str, values: np.ndarray, rows: int, weights: np.ndarray | None) -> None:
        del name, rows, weights
        # One call for each batch, as documented: `values` are those of a whole execution, stacked.
        for value in values:
            self._state = self._metric.update(self._state, value)

    def result(self) -> Any:
        return _arrays(self._metric.result(self._state))


class _OfAll(_Collector):
    """A function of all values."""

    def __init__(self, function: Callable[[np.ndarray], Any]) -> None:
        self._function, self._parts = function, []

    def add(self, name: str, values: np.ndarray, rows: int, weights: np.ndarray | None) -> None:
        del name, rows, weights
        self._parts.append(values)

    def result(self) -> Any:
        shapes = {part.shape[1:] for part in self._parts}
        # A smaller last batch may give another shape, which cannot be stacked: the function then
        # gets a list.
        joined: Any = [row for part in self._parts for row in part]
        return _arrays(self._function(np.stack(joined) if len(shapes) == 1 else joined))


def _plain(value: object) -> Any:
    """A real scalar as a float; complex numbers, texts and objects of a metric as they are."""
    scalar = np.asarray(value)
    if scalar.ndim:
        return value
    return scalar[()] if scalar.dtype.kind in "cSUO" else float(scalar)


def _is_dict(value: object) -> bool:
    return isinstance(value, Mapping)


def _arrays(result: object) -> Any:
    if isinstance(result, Mapping):
        return {str(key): np.asarray(value) for key, value in result.items()}
    return np.asarray(result)


def _collector(rule: Rule) -> _Collector:
    if isinstance(rule, str):
        if rule in ("mean", "sum"):
            return _Total(rule == "mean")
        choices = {"max": lambda v: v.max(0), "min": lambda v: v.min(0), "last": lambda v: v[-1]}
        return _Extreme(choices[rule])
    return _OfMetric(rule) if _is_metric(rule) else _OfAll(rule)  # type: ignore[arg-type]


def _is_metric(rule: object) -> bool:
    return all(callable(getattr(rule, name, None)) for name in ("init", "update", "result"))


def _check_rule(rule: object) -> None:
    if callable(getattr(rule, "update_state", None)):
        raise OptionError(
            f"combine= has metrics without a state of their own: objects with init(), update(state, "
            f"value) and result(state). Received: {type(rule).__name__}, which keeps its state in "
            f"itself, as Keras' metrics do, and would carry it into the next evaluation. Return what "
            f"it counts from the function (a sum and a count, say), or write the three methods."
        )
    known = rule is None or (isinstance(rule, str) and rule in RULES)
    if not (known or _is_metric(rule) or (callable(rule) and not isinstance(rule, str | type))):
        raise OptionError(
            f"combine= has rules: {', '.join(map(repr, RULES))}, an object with init, update and "
            f"result, or a function of all values. Received: {rule!r}."
        )
